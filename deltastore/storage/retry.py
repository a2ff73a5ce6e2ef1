"""A decorator that repeats what a moment's trouble made fail."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import tenacity

from deltastore.errors import StorageError
from deltastore.storage.base import close_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.storage.base import Backend, Buffer, ObjectInfo

__all__ = ["RetryingBackend"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class RetryingBackend:
    """Repeats reads, writes, lists and deletes that fail with a transient ``StorageError``.

    Pauses grow from ``first_pause`` to ``longest_pause``, each drawn at random below that so that a fleet
    does not come back in step. When the next pause would end later than ``deadline`` seconds after the
    first try, the last error is raised as it is. ``create`` is sent once and never repeated: only its
    caller can tell its own object from another's.
    """

    __slots__ = ("_deadline", "_inner", "_sleep", "_wait")

    def __init__(
        self,
        inner: Backend,
        *,
        deadline: float = 60.0,
        first_pause: float = 0.2,
        longest_pause: float = 5.0,
        sleep: Callable[[float], None] = tenacity.nap.sleep,
    ) -> None:
        self._inner = inner
        self._deadline = deadline
        self._wait = tenacity.wait_random_exponential(multiplier=first_pause, max=longest_pause)
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"RetryingBackend({self._inner!r})"

    @property
    def url(self) -> str:
        """The inner backend's URL."""
        return self._inner.url

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object, trying again on transient errors."""
        return self._repeat(lambda: self._inner.read(key, limit=limit))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object, trying again on transient errors."""
        return self._repeat(lambda: self._inner.read_range(key, start, end))

    def write(self, key: str, data: Buffer) -> None:
        """Store an object, trying again on transient errors: the bytes are the same each time."""
        self._repeat(lambda: self._inner.write(key, data))

    def create(self, key: str, data: Buffer) -> None:
        """Create an object: sent once."""
        self._inner.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix``, once a whole listing is there: one that breaks starts over."""
        yield from self._repeat(lambda: [*self._inner.list(prefix)])

    def delete(self, key: str) -> None:
        """Remove an object, trying again on transient errors."""
        self._repeat(lambda: self._inner.delete(key))

    def close(self) -> None:
        """Close the inner backend's connections, where it has any."""
        close_backend(self._inner)

    def _repeat(self, call: Callable[[], _T]) -> _T:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_before_delay(self._deadline),
            wait=self._wait,
            sleep=self._sleep,
            before_sleep=tenacity.before_sleep_log(_log, logging.INFO),
            reraise=True,
        )
        return retrying(call)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, StorageError) and error.transient
