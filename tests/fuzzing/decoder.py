"""What is fuzzed: a decoder, how its cases are made, and what every case has to keep."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.errors import CorruptObject, UnsupportedFormat

    from .damage import Damage


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder: how cases for it are made from damage, and how one is tried (True: accepted)."""

    name: str
    case: Callable[[Damage], Any]
    size: Callable[[Any], int]
    attempt: Callable[[Any], bool]


class TooMuchMemory(Exception):
    pass


class memory_within:  # noqa: N801 - reads as the statement that it is
    """Fail if more than ``limit`` bytes are taken at once inside; counts only while tracemalloc traces."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._before = 0

    def __enter__(self) -> None:
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, *_: object) -> None:
        if tracemalloc.is_tracing():
            taken = tracemalloc.get_traced_memory()[1] - self._before
            if taken > self._limit:
                raise TooMuchMemory(f"{taken} bytes taken, {self._limit} allowed")


def refused(error: CorruptObject | UnsupportedFormat) -> bool:
    """Whatever is refused is named."""
    assert error.key is not None
    return False
