"""What an operator told a running receiver, kept beside the slots so that it outlives the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from deltastore.digest import DEFAULT_HASH, hasher
from deltastore.errors import CorruptObject, SlotError, UnsupportedFormat, UsageError
from deltastore.materialize import write_file
from deltastore.record import FORMAT, encode_record, parse_record
from deltastore.spool import disk_error

from .follower import check_target

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Control", "read_control", "write_control"]

_MAX_BYTES = 4096


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A target that takes the place of ``--target`` (``None``: none does), and whether following is paused."""

    format: int = FORMAT
    pinned: str | None = None
    paused: bool = False


def read_control(path: Path) -> Control:
    """Return what is in force; raises ``SlotError`` when that cannot be known."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES)
    except FileNotFoundError:
        return Control()
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        control, _ = parse_record(data, Control, key=str(path))
        if control.pinned is not None:
            check_target(control.pinned)
    except (CorruptObject, UnsupportedFormat, UsageError) as error:
        raise SlotError(
            f"{path}, which says whether this receiver is pinned or paused, cannot be used: {error}",
            key=str(path),
            hint="Say it again: `receiver pin VERSION` or `receiver pin latest`; what is live stays until then.",
        ) from error
    return control


def write_control(path: Path, control: Control) -> None:
    """Put something in force, durably; raises ``StorageError``."""
    write_file(path, encode_record(control, hash_function=hasher(DEFAULT_HASH)))
