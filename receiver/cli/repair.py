"""`receiver repair`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltastore.cli.app import (
    bandwidth_option,
    cache_options,
    debug_option,
    emit,
    json_option,
    local_path,
    progress_bar,
    size_option,
    storage_options,
    trusted_keys_option,
)

from .options import place_options

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command"]


@click.command("repair")
@click.option("--checkpoint", required=True, metavar="DIR", type=local_path, help="The receiver's checkpoint.")
@click.option("--store", required=True, metavar="URL", help="The store that it follows.")
@click.option(
    "--base", metavar="DIR", type=local_path, help="A checkpoint of the stream, where the store has no anchor."
)
@click.option("--workers", type=click.IntRange(1, 256), help="Threads (default: one a core).")
@bandwidth_option
@size_option("--memory-budget", help="Take at most so much memory, all included (default: no bound).")
@place_options
@cache_options
@trusted_keys_option
@storage_options
@json_option
@debug_option
def command(
    checkpoint: Path,
    store: str,
    base: Path | None,
    workers: int | None,
    max_bandwidth: int | None,
    memory_budget: int | None,
    durability: str,
    unsafe_file_system: bool,
    cache: str | None,
    cache_bytes: int | None,
    trusted_keys: tuple[str, ...] | None,
    storage_options: dict[str, str],
    as_json: bool,
) -> None:
    """Mend the live slot's damaged chunks, from the other slot or from the store; no receiver may be running on it."""
    from deltastore.limits import chosen_limits  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.patch import default_workers  # noqa: PLC0415
    from deltastore.reader import open_store  # noqa: PLC0415
    from receiver.repair import repair  # noqa: PLC0415
    from receiver.slots import Slots  # noqa: PLC0415

    limits = chosen_limits(
        workers=workers,
        cores=default_workers(),
        max_bandwidth=max_bandwidth,
        memory_budget=memory_budget,
        whole_parts=False,
    )
    opened = open_store(
        store, storage_options=storage_options, cache=cache, cache_bytes=cache_bytes, trusted_keys=trusted_keys
    )
    slots = Slots(checkpoint, durable=durability == "version", any_place=unsafe_file_system)
    slots.lock()
    try:
        with progress_bar() as progress:
            repaired = repair(
                opened,
                slots,
                base=base,
                workers=limits.workers or default_workers(),
                limits=limits,
                progress=progress,
            )
    finally:
        slots.unlock()
    if as_json:
        emit({"ok": True, "mended": repaired.mended, **asdict(repaired)})
        return
    if not repaired.mended:
        click.echo(f"version {repaired.version}: whole, {repaired.chunks} chunks")
        return
    click.echo(
        f"version {repaired.version}: mended {repaired.damaged} of {repaired.chunks} chunks, {repaired.from_other} "
        f"from the other slot, {repaired.from_store} from the store ({repaired.fetched_bytes} bytes fetched)"
    )
    for what in (*repaired.files, *repaired.records):
        click.echo(f"  made anew: {what}")
