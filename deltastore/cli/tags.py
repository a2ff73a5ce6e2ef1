"""`deltastore tags STORE`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import emit, json_option, store_options, trusted_keys_option
from .records import table, tag_record

__all__ = ["command"]


@click.command("tags")
@store_options
@trusted_keys_option
@json_option
def command(store: str, storage_options: dict[str, str], trusted_keys: tuple[str, ...] | None, as_json: bool) -> None:
    """List the tags by name."""
    from deltastore.tags import read_tags  # noqa: PLC0415 - --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    records = [tag_record(tag) for tag in read_tags(opened)]
    if as_json:
        emit({"stream_id": opened.stream_id, "tags": records})
        return
    rows = [(str(record["version"]), record["created_at"][:19] + "Z", record["name"]) for record in records]
    click.echo(table(("version", "created", "tag"), rows))
