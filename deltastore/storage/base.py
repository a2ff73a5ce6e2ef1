"""What a store needs of a place to keep objects: six calls, and what each one promises.

Keys are relative, ``/``-separated, made of ``[A-Za-z0-9._-]``; no component starts with a dot (``keys`` has
the rule; a key outside it raises ``UsageError``). Objects are whole: a reader sees nothing or all of one,
and what one process stored the next call of any other sees. Everything raised is of ``deltastore.errors``;
a call that raises plain ``StorageError`` may or may not have had its effect. Backends may be shared by
threads, which do not wait for each other, and are not carried over a fork.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Backend", "Buffer", "ObjectInfo", "close_backend", "forget_copy", "reads_whole"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it: its key and its size in bytes."""

    key: str
    size: int


class Backend(Protocol):
    """A flat space of immutable objects under one URL."""

    @property
    def url(self) -> str:
        """Where this is, without secrets, for messages."""
        ...

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object.

        Raises ``ObjectNotFound`` when it is absent, ``CorruptObject`` when it is larger than ``limit`` bytes
        (nothing over the limit is held in memory), ``StorageError`` otherwise.
        """
        ...

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to before ``end`` of an object: all of them, without reading the others.

        ``start`` is below ``end``, or it is a ``UsageError``. Raises ``ObjectNotFound`` when the object is absent,
        ``CorruptObject`` when it ends before ``end``, ``StorageError`` otherwise.
        """
        ...

    def write(self, key: str, data: Buffer) -> None:
        """Store an object durably, replacing what is there; atomic for readers.

        Only for keys that one attempt owns, and for hints.
        """
        ...

    def create(self, key: str, data: Buffer) -> None:
        """Store a small object durably if and only if the key is free: of any number of racers one succeeds.

        Sent once, never retried here. Raises ``ObjectExists`` when the backend says the key is taken, and
        ``StorageError`` when the outcome is unknown; the caller reads back in both cases.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with ``prefix``, in any order.

        The prefix ends in ``/`` or is empty. Objects stored for the first time or deleted
        meanwhile may be there or not; one that is replaced meanwhile is there.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; removing an absent one is no error."""
        ...


def close_backend(backend: Backend) -> None:
    """Give back the connections of a backend that keeps any; it opens new ones when it is used again."""
    close = getattr(backend, "close", None)
    if close is not None:
        close()


def forget_copy(backend: Backend, key: str) -> bool:
    """Have a backend that reads through a cache drop its copy of an object, because it is not what it should be.

    Tells whether reading once more may bring other bytes.
    """
    forget = getattr(backend, "forget", None)
    return forget is not None and bool(forget(key))


def reads_whole(backend: Backend, key: str) -> bool:
    """Tell whether an object should be read whole, not in ranges: a cache keeps whole ones only."""
    answer = getattr(backend, "reads_whole", None)
    return answer is not None and bool(answer(key))
