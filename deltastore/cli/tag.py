"""`deltastore tag STORE NAME VERSION` and `deltastore tag STORE NAME --delete`."""

from __future__ import annotations

import click

from deltastore.errors import UsageError
from deltastore.reader import open_store

from .app import emit, json_option, sign_key_option, store_options, trusted_keys_option
from .records import tag_record

__all__ = ["command"]


@click.command("tag")
@store_options
@trusted_keys_option
@sign_key_option
@click.argument("name")
@click.argument("version", required=False)
@click.option("--delete", is_flag=True, help="Delete the tag.")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    sign_key: str | None,
    name: str,
    version: str | None,
    delete: bool,
    as_json: bool,
) -> None:
    """Give a version a name that keeps it, move the name to another version, or delete it."""
    from deltastore.signing import Signer  # noqa: PLC0415 - --help does without
    from deltastore.tags import delete_tag, set_tag  # noqa: PLC0415

    if delete == (version is not None):
        raise UsageError("A tag is set to a version, or deleted.", hint="Give a VERSION, or --delete.")
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    if version is None:
        delete_tag(opened, name)
        record: dict[str, object] = {"name": name, "deleted": True}
    else:
        record = tag_record(set_tag(opened, name, version, signer=Signer.load(sign_key) if sign_key else None))
    if as_json:
        emit(record)
    else:
        click.echo(f"{name}  {'deleted' if version is None else record['version']}")
