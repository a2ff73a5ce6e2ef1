"""Being told to stop: what is raised then, and waits that end for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stopped", "wait_unless"]

_WAIT_STEP = 0.1


class Stopped(Exception):
    """Raised out of a patch when the receiver was told to stop; the live slot is untouched."""


def wait_unless(stopped: Callable[[], bool], seconds: float) -> None:
    """Wait so long, or until ``stopped``, which a signal's handler may bring about."""
    until = time.monotonic() + seconds
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _WAIT_STEP))
