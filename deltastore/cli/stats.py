"""`deltastore stats STORE`."""

from __future__ import annotations

from dataclasses import asdict

import click

from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes

__all__ = ["command"]


@click.command("stats")
@store_options
@trusted_keys_option
@json_option
def command(store: str, storage_options: dict[str, str], trusted_keys: tuple[str, ...] | None, as_json: bool) -> None:
    """Show what the store holds, and what it saves."""
    from deltastore.stats import stats  # noqa: PLC0415 - --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    with progress_bar() as progress:
        found = stats(opened, progress=progress)
    record = {**asdict(found), "saved_ratio": found.saved_ratio}
    if as_json:
        emit(record)
        return
    for name, value in record.items():
        shown = human_bytes(value) if "bytes" in name else f"{value:.2%}" if name == "saved_ratio" else str(value)
        click.echo(f"{name:22} {shown}")
