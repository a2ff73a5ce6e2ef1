"""What others want of the receiver's loop: that it stops, or looks at the store now; and waits that end for it."""

from __future__ import annotations

import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Overtaken", "Stopped", "Wakeups", "wait_unless"]

_WAIT_STEP = 0.1


class Stopped(Exception):
    """Raised out of a patch when the receiver was told to stop; the live slot is untouched."""


class Overtaken(Exception):
    """Raised out of a patch when an operator wants something else now; the live slot is untouched."""


class Wakeups:
    """Told from any thread, and from a signal's handler, which may run in the very thread that waits.

    An ``Event``'s lock would not bear that.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._queue: SimpleQueue[None] = SimpleQueue()

    @property
    def stopped(self) -> bool:
        """Whether the loop is to end."""
        return self._stopped

    @property
    def woken(self) -> bool:
        """Whether somebody wants something that no ``rest`` has ended for yet."""
        return not self._queue.empty()

    def stop(self) -> None:
        """End the loop soon."""
        self._stopped = True
        self._queue.put(None)

    def wake(self) -> None:
        """End a rest, the one going on or the next."""
        self._queue.put(None)

    def rest(self, seconds: float) -> bool:
        """Wait so long; tells whether somebody ended that."""
        if self._stopped:
            return True
        try:
            self._queue.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        return True

    def pause(self, seconds: float) -> None:
        """Wait so long, whoever wants another look; raises ``Stopped`` at once when the loop is to end."""
        wait_unless(lambda: self._stopped, seconds)
        if self._stopped:
            raise Stopped


def wait_unless(stopped: Callable[[], bool], seconds: float) -> None:
    """Wait so long, or until ``stopped``, which a signal's handler may bring about."""
    until = time.monotonic() + seconds
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _WAIT_STEP))
