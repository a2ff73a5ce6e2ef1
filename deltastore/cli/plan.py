"""`deltastore plan STORE --from A --to B`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import emit, json_option, store_options, trusted_keys_option
from .records import human_bytes, plan_record, table

__all__ = ["command"]


@click.command("plan")
@store_options
@trusted_keys_option
@click.option("--from", "start", required=True, metavar="VERSION|none", help="What the receiver has.")
@click.option("--to", "end", default="latest", metavar="VERSION", show_default=True, help="What it wants.")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    start: str,
    end: str,
    as_json: bool,
) -> None:
    """Show the cheapest route from one version to another."""
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    first = None if start == "none" else opened.resolve(start).version
    record = plan_record(opened.plan(first, opened.resolve(end).version))
    if as_json:
        emit(record)
        return
    rows = [
        (
            "none" if step["from"] is None else str(step["from"]),
            str(step["to"]),
            human_bytes(step["stored_bytes"]),
            step["kind"],
        )
        for step in record["steps"]
    ]
    click.echo(table(("from", "to", "stored", "kind"), rows))
    click.echo(f"{human_bytes(record['stored_bytes'])} to fetch")
