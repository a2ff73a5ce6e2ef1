"""`deltastore compact STORE`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes, route_record, table

__all__ = ["command"]


@click.command("compact")
@store_options
@trusted_keys_option
@click.option("--base", help="A local checkpoint of the stream to start from (default: the store's anchor).")
@click.option("--level", type=click.Choice(["fast", "max"]), default="fast", show_default=True)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    base: str | None,
    level: str,
    as_json: bool,
) -> None:
    """Add the skip deltas, the anchors of the stream's policy, and the log segments that are missing."""
    from deltastore.compact import compact  # noqa: PLC0415 - heavy, and --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    with progress_bar() as progress:
        added = compact(opened, base=base, level=level, progress=progress)
    routes = [route_record(route) for route in added.routes]
    if as_json:
        emit({"routes": routes, "segments": list(added.segments)})
        return
    rows = [
        (
            "none" if route["from"] is None else str(route["from"]),
            str(route["to"]),
            human_bytes(route["stored_bytes"]),
            route["kind"],
        )
        for route in routes
    ]
    if rows:
        click.echo(table(("from", "to", "stored", "kind"), rows))
    click.echo(f"{len(routes)} routes and {len(added.segments)} log segments added")
