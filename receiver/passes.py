"""Passes of the receiver's loop, made again after failures that may pass by themselves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import (
    CorruptObject,
    DamagedSlot,
    DeltastoreError,
    EngineError,
    SelfTestFailed,
    StorageError,
    StoreNotFound,
    VersionNotFound,
)
from deltastore.spool import disk_error

from .logs import tell_failure
from .stopping import Overtaken

if TYPE_CHECKING:
    from collections.abc import Callable

    from .slots import Slots
    from .status import Status
    from .stopping import Wakeups

__all__ = ["Passes"]

_LONGEST_PAUSE = 60.0
#: Far beyond the longest pause, and far below where a float overflows: a store may be gone for days.
_MOST_DOUBLINGS = 32


class Passes:
    """Makes passes until they succeed. The pause after a failure is ``poll`` seconds, doubled with each in a row."""

    def __init__(self, slots: Slots, status: Status, wakeups: Wakeups, *, poll: float) -> None:
        self._slots = slots
        self._status = status
        self._wakeups = wakeups
        self._poll = poll

    def until_done(self, action: Callable[[], None]) -> None:
        """Do something; after a failure that may pass by itself, again, ever more slowly.

        Raises ``SelfTestFailed``, and what does not pass while nothing is served yet.
        """
        failures = 0
        while not self._wakeups.stopped:
            try:
                self._attempt(action)
            except Overtaken:
                continue
            except SelfTestFailed:
                raise
            except DeltastoreError as error:
                if self._status.version is None and not self.may_pass(error):
                    raise  # nothing is served yet: an operator has to look at it
                failures += 1
                pause = self._put_off(error, failures)
            else:
                return
            self._wakeups.rest(pause)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Make a pass; what the system refused where nobody foresaw it is a failure as any other."""
        try:
            action()
        except OSError as error:
            raise disk_error(error, Path(str(error.filename or self._slots.directory))) from error

    def may_pass(self, error: DeltastoreError) -> bool:
        """Tell whether the same may work later. Bytes damaged on their way may, and can wait where a slot is live."""
        if isinstance(error, CorruptObject) and not isinstance(error, DamagedSlot):
            return self._slots.live_name() is not None
        return isinstance(error, (StorageError, StoreNotFound, VersionNotFound, EngineError))

    def _put_off(self, error: DeltastoreError, failures: int) -> float:
        """Note the failure of a pass, and tell after how many seconds the next one is due.

        Whoever keeps the error in a variable beyond its ``except`` makes a ring of it and its own frame, which keeps
        what the failed pass had open until the garbage is collected.
        """
        self._status.failed(error)
        doubled = self._poll * 2.0 ** min(failures, _MOST_DOUBLINGS)
        pause = min(doubled, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._status.retries("pass", pause=pause, failures=failures)
        tell_failure(error, f"Next try in {pause:.1f} s.", failures=failures, next_try_seconds=pause)
        return pause
