"""The way back to the version before the live one: what is in the other slot. It needs no store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError

if TYPE_CHECKING:
    from deltastore.restore import Source

    from .slots import LiveSlot, Slots

__all__ = ["Rollback"]

_log = logging.getLogger("receiver")


class Rollback:
    """Looks at the slot that is not live, and makes it live again. The lock of ``slots`` must be held for that."""

    def __init__(self, slots: Slots, *, workers: int) -> None:
        self._slots = slots
        self._workers = workers
        self._source: Source | None = None

    @property
    def source(self) -> Source | None:
        """What the live slot holds; ``None`` before it was looked at, or where there is none."""
        return self._source

    def verify(self, live: LiveSlot) -> None:
        """Raise ``DamagedSlot`` unless a slot holds its version; files that were touched are hashed again."""
        self._slots.source(live, workers=self._workers)

    def previous(self) -> LiveSlot | None:
        """Return the slot that is not live if it holds its version, verified as a live slot is."""
        try:
            live = self._slots.live()
            other = self._slots.other(live) if live is not None else None
            if other is not None:
                self._slots.source(other, workers=self._workers)
        except DeltastoreError as error:
            _log.warning("The version before cannot be used: %s", error)
            return None
        return other

    def go_back(self) -> LiveSlot | None:
        """Make the version before live again if it is still there whole; returns it, or ``None``."""
        other = self.previous()
        if other is not None:
            self._slots.swap(other.name)
            self._source = self._slots.source(other, workers=self._workers)
        return other
