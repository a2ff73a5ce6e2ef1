"""`deltastore diff STORE A B`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes, table

if TYPE_CHECKING:
    from deltastore.diff import Difference

__all__ = ["command"]


@click.command("diff")
@store_options
@trusted_keys_option
@click.argument("start", metavar="A")
@click.argument("end", metavar="B")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    start: str,
    end: str,
    as_json: bool,
) -> None:
    """Show what changed from version A to version B, tensor by tensor."""
    from deltastore.diff import diff  # noqa: PLC0415 - heavy, and --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    first, last = opened.resolve(start).version, opened.resolve(end).version
    with progress_bar() as progress:
        record = _record(diff(opened, first, last, progress=progress))
    if as_json:
        emit(record)
        return
    rows = [
        (
            "-" if row["changed_elements"] is None else str(row["changed_elements"]),
            f"{row['differing_chunks']}/{row['chunks']}",
            human_bytes(row["stored_bytes"]),
            f"{row['dtype']}{row['shape']}",
            row["name"],
        )
        for row in record["tensors"]
    ]
    if rows:
        click.echo(table(("changed", "chunks", "stored", "dtype", "tensor"), rows))
    click.echo(
        f"{record['differing_tensors']} of {record['total_tensors']} tensors differ; "
        f"{human_bytes(record['stored_bytes'])} from {record['from']} to {record['to']}"
    )


def _record(found: Difference) -> dict[str, Any]:
    rows = [
        {
            "name": tensor.spec.name,
            "dtype": tensor.spec.dtype,
            "shape": list(tensor.spec.shape),
            "elements": tensor.spec.elements,
            "chunks": tensor.spec.chunks,
            "differs": tensor.differing_chunks > 0,
            "differing_chunks": tensor.differing_chunks,
            "touched_chunks": tensor.touched_chunks,
            "changed_elements": tensor.changed_elements,
            "stored_bytes": tensor.stored_bytes,
        }
        for tensor in found.tensors
    ]
    return {
        "from": found.plan.start,
        "to": found.plan.end,
        "stored_bytes": found.plan.stored_bytes,
        "total_tensors": found.total_tensors,
        "differing_tensors": sum(row["differs"] for row in rows),
        "tensors": rows,
    }
