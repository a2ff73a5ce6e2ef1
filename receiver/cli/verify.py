"""`receiver verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deltastore.cli.app import debug_option, emit, json_option, local_path, progress_bar
from deltastore.errors import CorruptObject, SlotError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command"]


@click.command("verify")
@click.option("--checkpoint", required=True, metavar="DIR", type=local_path, help="The receiver's checkpoint.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads (default: one a core).")
@json_option
@debug_option
def command(checkpoint: Path, workers: int | None, as_json: bool) -> None:
    """Hash every chunk of the live slot, and its other files, and compare; exits with 3 when something is damaged."""
    from deltastore.digest import hasher  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.patch import default_workers  # noqa: PLC0415
    from receiver.slots import Slots  # noqa: PLC0415

    slots = Slots(checkpoint)
    if slots.live_name() is None:
        raise SlotError(
            f"{checkpoint} is not a receiver's checkpoint.",
            key=str(checkpoint),
            hint="Run `receiver once` on it first.",
        )
    try:
        live = slots.live()
        assert live is not None  # noqa: S101 - the link was looked at just now
        opened = slots.open(live)
        digests = slots.digests(live, opened.schema)
    except SlotError as error:  # a record or a table of digests that cannot be used is damage too
        raise CorruptObject(
            error.message, key=error.key, hint=f"Mend it with `receiver repair`. {error.hint}"
        ) from error
    total, done = opened.schema.nbytes, 0
    with progress_bar() as progress:

        def advance(more: int) -> None:
            nonlocal done
            done += more
            if progress is not None:
                progress("verify", done, total)

        slots.check_other_files(live)
        slots.verify(
            opened,
            digests,
            hasher(live.record.hash),
            workers=workers or default_workers(),
            progress=advance,
        )
    record = {
        "ok": True,
        "version": live.record.version,
        "snapshot_id": live.record.snapshot_id,
        "stream_id": live.record.stream_id,
        "bytes": total,
    }
    if as_json:
        emit(record)
    else:
        click.echo(f"version {live.record.version}  {live.record.snapshot_id}  {total} bytes: whole")
