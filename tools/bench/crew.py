"""A few threads that share out work, as many as are told: one means the caller's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

__all__ = ["Crew"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Crew:
    """Maps functions over items, in order. Threads stay between calls, so that their scratch memory does."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bench") if threads > 1 else None

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Return the results of all items; raises what one of them raised."""
        if self._pool is None:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
