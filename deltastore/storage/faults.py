"""A decorator that makes a backend fail on purpose, call by call.

A script of faults says what goes wrong: before the effect (nothing happened), after it (it happened, the
answer was lost), late (refused now, and it happens after all, later), or in the bytes that a read returns.
Nothing is random and nothing sleeps: where a test needs two things to meet, it gives a hook.
"""

from __future__ import annotations

import enum
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from deltastore.errors import StorageError
from deltastore.storage.base import close_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deltastore.storage.base import Backend, Buffer, ObjectInfo

__all__ = ["Effect", "Fault", "FaultyBackend", "Operation", "flip_bit", "oversize", "truncate"]

_T = TypeVar("_T")

Operation = Literal["read", "read_range", "write", "create", "list", "delete"]


class Effect(enum.Enum):
    """When the call fails, seen from what it does to the store."""

    NONE = "none"
    """It does not fail (there may still be a hook, or damage)."""
    BEFORE = "before"
    """It fails and has done nothing."""
    AFTER = "after"
    """It has done everything and fails all the same: a lost answer."""
    LATE = "late"
    """It fails, and is done later, at ``FaultyBackend.land``: a request still on its way."""


def _lost() -> Exception:
    return StorageError("the connection was lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one call.

    ``operation`` and ``key_prefix`` choose the call, ``error`` makes what is raised, ``damage`` changes
    what a read returns, ``hook`` runs just before the call reaches the store and ``after`` just after it.
    """

    operation: Operation
    effect: Effect = Effect.BEFORE
    key_prefix: str = ""
    error: Callable[[], Exception] = _lost
    damage: Callable[[bytes], bytes] | None = None
    hook: Callable[[], object] | None = None
    after: Callable[[], object] | None = None


@dataclass(slots=True)
class FaultyBackend:
    """Plays a script of faults round another backend.

    Each call takes the first fault left in the script that fits it, and calls that none fits go through.
    ``calls`` tells what was asked for, in order. Threads may share one.
    """

    inner: Backend
    script: Iterable[Fault] = ()
    calls: list[tuple[Operation, str]] = field(init=False, default_factory=list)
    _left: list[Fault] = field(init=False, repr=False)
    _late: list[Callable[[], object]] = field(init=False, repr=False, default_factory=list)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._left = [*self.script]

    @property
    def url(self) -> str:
        """The inner backend's URL."""
        return self.inner.url

    @property
    def remaining(self) -> int:
        """How many faults were not met yet."""
        return len(self._left)

    def add(self, *faults: Fault) -> None:
        """Append to the script."""
        with self._lock:
            self._left += faults

    def land(self) -> None:
        """Let every late request reach the store now, in the order sent; what it answers reaches nobody."""
        with self._lock:
            landing, self._late = self._late, []
        for request in landing:
            with suppress(StorageError):
                request()

    def read(self, key: str, *, limit: int) -> bytes:
        """Read through the script."""
        fault = self._take("read", key)
        return _damaged(fault, self._play(fault, lambda: self.inner.read(key, limit=limit)))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Read a range through the script."""
        fault = self._take("read_range", key)
        return _damaged(fault, self._play(fault, lambda: self.inner.read_range(key, start, end)))

    def write(self, key: str, data: Buffer) -> None:
        """Write through the script."""
        self._play(self._take("write", key), lambda: self.inner.write(key, data))

    def create(self, key: str, data: Buffer) -> None:
        """Create through the script."""
        self._play(self._take("create", key), lambda: self.inner.create(key, data))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List through the script; a listing that fails yields nothing."""
        yield from self._play(self._take("list", prefix), lambda: [*self.inner.list(prefix)])

    def delete(self, key: str) -> None:
        """Delete through the script."""
        self._play(self._take("delete", key), lambda: self.inner.delete(key))

    def close(self) -> None:
        """Close the inner backend's connections, where it has any."""
        close_backend(self.inner)

    def _take(self, operation: Operation, key: str) -> Fault | None:
        with self._lock:
            self.calls.append((operation, key))
            for index, fault in enumerate(self._left):
                if fault.operation == operation and key.startswith(fault.key_prefix):
                    return self._left.pop(index)
        return None

    def _play(self, fault: Fault | None, call: Callable[[], _T]) -> _T:
        if fault is None:
            return call()
        if fault.hook is not None:
            fault.hook()
        if fault.effect is Effect.BEFORE:
            raise fault.error()
        if fault.effect is Effect.LATE:
            with self._lock:
                self._late.append(call)
            raise fault.error()
        result = call()
        if fault.after is not None:
            fault.after()
        if fault.effect is Effect.AFTER:
            raise fault.error()
        return result


def _damaged(fault: Fault | None, data: bytes) -> bytes:
    return data if fault is None or fault.damage is None else fault.damage(data)


def truncate(data: bytes) -> bytes:
    """Return the first half of what was read."""
    return data[: len(data) // 2]


def oversize(data: bytes) -> bytes:
    """Return more than was stored."""
    return data + b"\0" * (len(data) + 1)


def flip_bit(position: int) -> Callable[[bytes], bytes]:
    """Return a damage that flips one bit, counted from the start and round the end."""

    def flip(data: bytes) -> bytes:
        if not data:
            return data
        damaged = bytearray(data)
        bit = position % (8 * len(data))
        damaged[bit // 8] ^= 1 << (bit % 8)
        return bytes(damaged)

    return flip
