"""`deltastore log STORE`."""

from __future__ import annotations

from typing import Any

import click

from deltastore.reader import open_store
from deltastore.tags import read_standing

from .app import emit, json_option, store_options, trusted_keys_option
from .records import human_bytes, table, version_record

__all__ = ["command"]


@click.command("log")
@store_options
@trusted_keys_option
@click.option("-n", "last", type=click.IntRange(min=1), help="Only the newest N versions.")
@json_option
@click.option("--jsonl", "as_lines", is_flag=True, help="Print a JSON object a line.")
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    last: int | None,
    as_json: bool,
    as_lines: bool,
) -> None:
    """List the versions, oldest first."""
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    standing, tags = read_standing(opened)
    history = opened.log(last=last)
    anchored = opened.anchored(range(history[0].version, history[-1].version + 1), standing)
    records = [version_record(manifest, standing, tags, anchored) for manifest in history]
    if as_lines:
        import msgspec  # noqa: PLC0415 - only where JSON is asked for

        for record in records:
            click.echo(msgspec.json.encode(record))
    elif as_json:
        emit({"stream_id": opened.stream_id, "versions": records})
    else:
        rows = [
            (
                str(record["version"]),
                "-" if record["step"] is None else str(record["step"]),
                f"{record['changed_fraction']:.2%}",
                human_bytes(record["stored_bytes"]),
                f"{record['ratio']:.2%}",
                record["created_at"][:19] + "Z",
                record["snapshot_id"].split(":")[1][:16],
                _notes(record),
            )
            for record in records
        ]
        click.echo(table(("version", "step", "changed", "stored", "ratio", "created", "snapshot", "kind"), rows))


def _notes(record: dict[str, Any]) -> str:
    """Say what kind of version it is, what became of it, and what it is called."""
    notes = [record["kind"]]
    notes += ["anchor"] * record["anchored"] + ["forgotten"] * record["forgotten"]
    return ", ".join([*notes, *(f"tag:{name}" for name in record["tags"])])
