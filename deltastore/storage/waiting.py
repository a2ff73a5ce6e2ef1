"""How long a request may take, and waiting for it no longer than that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["BASE_TIMEOUT", "CREATE_LIMIT", "LIST_TIMEOUT", "patience", "run_on"]

# A request may take this long, and longer by its bytes at the slowest rate that still counts as alive.
BASE_TIMEOUT: Final = 30.0
_SLOWEST_BYTES_A_SECOND: Final = 1 << 20
# A listing is many requests one after the other.
LIST_TIMEOUT: Final = 300.0

# What is created exclusively goes out in one conditional request, which no service takes at any size.
CREATE_LIMIT: Final = 16 << 20

_WAIT_STEP: Final = 0.5


def patience(base: float, size: int) -> float:
    """Return the seconds that a request of ``size`` bytes may take, ``base`` of them for no bytes."""
    return base + size / _SLOWEST_BYTES_A_SECOND


def run_on(loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[Any]], seconds: float) -> Any:
    """Run a coroutine on an event loop of another thread; cancel it when we stop waiting for it.

    Raises ``TimeoutError`` after ``seconds``.
    """
    answer: list[Any] = []

    async def run() -> None:
        # Not returned: asyncio in debug mode formats results, and large bytes take it seconds.
        answer.append(await call())

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    deadline = time.monotonic() + seconds
    try:
        # In short steps: a signal that another thread receives does not end a wait of this one.
        while not concurrent.futures.wait([future], timeout=min(_WAIT_STEP, seconds)).done:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
        future.result()
    finally:
        future.cancel()
    return answer.pop()
