"""`deltastore anchor STORE VERSION`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes, route_record

__all__ = ["command"]


@click.command("anchor")
@store_options
@trusted_keys_option
@click.argument("version")
@click.option("--base", help="A local checkpoint of the stream to start from (default: the store's anchor).")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    version: str,
    base: str | None,
    as_json: bool,
) -> None:
    """Store a version whole, so that a new receiver need not replay from the base."""
    from deltastore.compact import anchor  # noqa: PLC0415 - heavy, and --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    wanted = opened.resolve(version).version
    with progress_bar() as progress:
        route = anchor(opened, wanted, base=base, progress=progress)
    if as_json:
        emit({"version": wanted, "made": route is not None, "route": route_record(route) if route else None})
    elif route is None:
        click.echo(f"version {wanted} has an anchor")
    else:
        click.echo(f"version {wanted}  anchor  {human_bytes(route.stored_bytes)} stored")
