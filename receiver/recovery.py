"""What a receiver that starts does for its engine while the store is out of reach."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deltastore.errors import DamagedSlot, DeltastoreError, SelfTestFailed, SlotError

from .logs import tell, tell_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from .control import Orders
    from .priority import Priority
    from .serving import Serving
    from .slots import LiveSlot, Slots
    from .status import Status

__all__ = ["Recovery"]


class Recovery:
    """Has the engine serve the live slot before the store was reached.

    The receiver before this one may have died between a pause and a resume; what it had in place is here, with its
    record, and is enough to end that pause. ``serve`` loads, confirms and resumes. ``grouped``: members of a group
    decide together, in the store, and wait for it. ``rolling``: an engine that serves is not paused without a turn,
    which is in the store too; one that serves nothing takes nothing from its fleet. ``leave`` ends the work when its
    caller is interrupted.
    """

    def __init__(
        self,
        slots: Slots,
        status: Status,
        serving: Serving,
        *,
        orders: Orders,
        priority: Priority,
        workers: int,
        grouped: bool,
        rolling: bool,
        serve: Callable[[], object],
        leave: Callable[[], object],
    ) -> None:
        self._slots = slots
        self._status = status
        self._serving = serving
        self._orders = orders
        self._priority = priority
        self._workers = workers
        self._grouped = grouped
        self._rolling = rolling
        self._serve = serve
        self._leave = leave

    def attempt(self) -> None:
        """Make good what was left half done; nothing where no slot is live. Raises ``SelfTestFailed`` only.

        All else that stands in the way is told: the next try to reach the store is followed by another attempt.
        """
        if self._grouped or self._slots.live_name() is None:
            return
        try:
            try:
                live = self._priority.run(self._verified, leave=self._leave)
            except (DamagedSlot, SlotError) as error:
                # No engine is to load it, and what it is mended from is in the store.
                tell("damaged", f"{error} It is mended when the store answers.", level=logging.WARNING, key=error.key)
                self._serving.latch(error)
                return
            if live is None:
                return
            self._status.version = live.record.version
            self._status.stream_id = live.record.stream_id
            self._status.assumes(self._assumed(live.record.version))
            if not (self._rolling and self._serving.available()):
                self._serve()
        except SelfTestFailed:
            raise
        except DeltastoreError as error:
            tell_failure(error, "The engine is looked at again when the store was.")

    def _verified(self) -> LiveSlot | None:
        """Return the live slot, whose bytes are those that were recorded."""
        live = self._slots.live()
        if live is not None:
            self._slots.source(live, workers=self._workers)
        return live

    def _assumed(self, version: int) -> int | None:
        """Return the version that counts as wanted until the store tells: a number that was given, or what is here."""
        control = self._orders.control
        if isinstance(control, SlotError):
            return None
        target = self._orders.target_of(control)
        return int(target) if target.isdecimal() else self._status.assumed or version
