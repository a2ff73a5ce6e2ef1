"""What an operator told a running receiver, kept beside the slots so that it outlives the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from deltastore.digest import DEFAULT_HASH, hasher
from deltastore.errors import CorruptObject, SlotError, UnsupportedFormat, UsageError
from deltastore.materialize import write_file
from deltastore.record import FORMAT, encode_record, parse_record
from deltastore.spool import disk_error

from .follower import check_target
from .logs import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Control", "Orders", "read_control", "write_control"]

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


class Orders:
    """What is in force, and how operators change it, from any thread.

    ``target`` is what is followed without a pin. ``told`` hears what is in force, and the target that follows from it,
    whenever that changes.
    """

    def __init__(self, path: Path, *, target: str, told: Callable[[Control, str], object]) -> None:
        self.path = path
        self._target = target
        self._told = told
        self._lock = threading.Lock()
        self._begun = False
        self._control: Control | SlotError = Control()

    @property
    def control(self) -> Control | SlotError:
        """What is in force: another object after each order; an error while it cannot be known."""
        return self._control

    def target_of(self, control: Control) -> str:
        """Return the target that follows from what is in force."""
        return control.pinned or self._target

    def begin(self) -> None:
        """Heed what an operator told the receiver before this one; from now on, until ``end``, orders are taken."""
        with self._lock:
            try:
                control = self._control = read_control(self.path)
            except SlotError as error:
                self._control = error
            else:
                self._told(control, self.target_of(control))
            self._begun = True

    def end(self) -> None:
        """Take no more orders."""
        self._begun = False

    def pin(self, target: str) -> Control:
        """Follow another target from now on, also after a restart; the configured one takes the pin away.

        Raises ``UsageError``, ``StorageError`` when it cannot be written down, ``SlotError`` before the start.
        """
        check_target(target)
        if target.isdecimal():
            target = str(int(target))  # 007 is 7
        return self._order(pinned=None if target == self._target else target)

    def pause_following(self) -> Control:
        """Stay at what is live until ``resume_following``, also after a restart; raises as ``pin`` does."""
        return self._order(paused=True)

    def resume_following(self) -> Control:
        """Follow again; raises as ``pin`` does, and ``SlotError`` while it is not known whether there is a pin."""
        return self._order(paused=False)

    def _order(self, **changes: str | bool | None) -> Control:
        with self._lock:
            if not self._begun:
                raise SlotError("The receiver has not begun yet.", hint="Say it again in a moment.")
            before = self._control
            if isinstance(before, SlotError):
                if "pinned" not in changes:
                    raise before
                before = Control()
            control = structs.replace(before, **changes)
            if control == before and not isinstance(self._control, SlotError):
                return control
            write_control(self.path, control)
            self._control = control
        self._told(control, self.target_of(control))
        tell(
            "control",
            f"An operator has it {'pause' if control.paused else 'follow'}, at "
            f"{self.target_of(control)}{' (pinned)' if control.pinned else ''}.",
            pinned=control.pinned,
            paused=control.paused,
        )
        return control
