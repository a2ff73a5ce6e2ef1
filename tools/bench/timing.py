"""Medians of repeated runs, the contenders taking turns so that a noisy neighbour troubles all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["gigabytes", "medians", "seconds"]


def seconds(function: Callable[[], object]) -> float:
    """Return how long one call takes; the garbage collector waits meanwhile."""
    gc.disable()
    try:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    finally:
        gc.enable()


def medians(contenders: Mapping[str, Callable[[], object]], *, rounds: int, warm: bool = True) -> dict[str, float]:
    """Run every contender once to warm up, then ``rounds`` times in turn; returns the median seconds of each."""
    if warm:
        for function in contenders.values():
            function()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, function in contenders.items():
            taken[name].append(seconds(function))
    return {name: statistics.median(times) for name, times in taken.items()}


def gigabytes(size: int, elapsed: float) -> float:
    """Return a rate in GB/s (10^9 bytes of weights a second)."""
    return size / elapsed / 1e9 if elapsed else 0.0
