"""A decorator that makes a backend fail on purpose, call by call.

A script of faults says what goes wrong: before the effect (nothing happened), after it (it happened, the
answer was lost), late (refused now, and it happens after all, later), or in the bytes that a read returns.
``make_fault`` makes those that networks and servers are known for (``FaultKind``), ``RandomFaults`` deals them
out by a seed. Nothing else is random, and only what stalls or is slow sleeps: where a test needs two things
to meet, it gives a hook.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from deltastore.errors import AccessDenied, StorageError, UsageError
from deltastore.storage.base import close_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deltastore.storage.base import Backend, Buffer, ObjectInfo

__all__ = [
    "Effect",
    "Fault",
    "FaultKind",
    "FaultyBackend",
    "Operation",
    "RandomFaults",
    "flip_bit",
    "make_fault",
    "oversize",
    "truncate",
]

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


class FaultKind(enum.Enum):
    """What networks and servers do to a request; ``tools.chaos`` does the same on the wire."""

    REFUSE = "refuse"
    """The connection is refused: nothing happened."""
    RESET = "reset"
    """The connection breaks while the bytes travel: nothing whole has arrived."""
    STALL = "stall"
    """Nothing comes any more, until the caller's deadline."""
    INTERNAL_ERROR = "500"
    """The server answers that it failed."""
    BUSY = "503"
    """The server answers that there is too much to do."""
    DENY = "403"
    """The server answers that the credentials are not good any more."""
    TRUNCATE = "truncate"
    """Fewer bytes are read than were stored, and nobody says so."""
    FLIP = "flip"
    """One bit of what is read is another."""
    SLOW = "slow"
    """All goes well, and takes its time."""
    LOSE_ANSWER = "lose-answer"
    """All is done, and the answer is lost."""


_DAMAGES: Final = frozenset({FaultKind.TRUNCATE, FaultKind.FLIP})


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


def make_fault(
    kind: FaultKind,
    operation: Operation,
    *,
    key_prefix: str = "",
    bit: int = 0,
    seconds: float = 0.0,
    sleep: Callable[[float], object] = time.sleep,
) -> Fault:
    """Make the fault of a kind for one call.

    ``bit`` is the one that is flipped; ``seconds`` is how long it stalls or how much slower it is. Raises
    ``UsageError`` for damage to the bytes of a call that returns none.
    """
    if kind in _DAMAGES:
        if not operation.startswith("read"):
            raise UsageError(f"{kind.value} is about what is read, and {operation} reads nothing")
        damage = truncate if kind is FaultKind.TRUNCATE else flip_bit(bit)
        return Fault(operation=operation, effect=Effect.NONE, key_prefix=key_prefix, damage=damage)
    if kind is FaultKind.SLOW:
        return Fault(operation=operation, effect=Effect.NONE, key_prefix=key_prefix, hook=lambda: sleep(seconds))
    if kind is FaultKind.LOSE_ANSWER:
        return Fault(operation=operation, effect=Effect.AFTER, key_prefix=key_prefix)
    hook = (lambda: sleep(seconds)) if kind is FaultKind.STALL else None
    return Fault(operation=operation, key_prefix=key_prefix, error=lambda: _error(kind), hook=hook)


def _error(kind: FaultKind) -> StorageError:
    if kind is FaultKind.DENY:
        return AccessDenied("the credentials have expired", hint="renew the credentials")
    said = {
        FaultKind.REFUSE: "the connection was refused",
        FaultKind.RESET: "the connection was reset",
        FaultKind.STALL: "no answer in time",
        FaultKind.INTERNAL_ERROR: "the server failed",
        FaultKind.BUSY: "the server is busy",
    }
    return StorageError(said[kind], hint="repeat")


class RandomFaults:
    """Deals out faults to a share of all calls: the same ones for the same seed and the same calls in order."""

    def __init__(
        self,
        *,
        seed: int,
        share: float,
        kinds: Iterable[FaultKind] = tuple(FaultKind),
        seconds: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._share = share
        self._kinds = tuple(kinds)
        self._seconds = seconds
        self._sleep = sleep

    def draw(self, operation: Operation) -> Fault | None:
        """Return what goes wrong with the next call, if anything does."""
        # As many draws for each call, so that one that changes does not change all that follow.
        dice, which, bit = self._random.random(), self._random.random(), self._random.randrange(1 << 30)
        kinds = [kind for kind in self._kinds if operation.startswith("read") or kind not in _DAMAGES]
        if dice >= self._share or not kinds:
            return None
        kind = kinds[int(which * len(kinds))]
        return make_fault(kind, operation, bit=bit, seconds=self._seconds, sleep=self._sleep)


@dataclass(slots=True)
class FaultyBackend:
    """Plays a script of faults round another backend.

    Each call takes the first fault left in the script that fits it; one that none fits gets what ``chance`` deals
    it, and goes through where that is nothing. ``calls`` tells what was asked for, in order. Threads may share one.
    """

    inner: Backend
    script: Iterable[Fault] = ()
    chance: RandomFaults | None = None
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
            return self.chance.draw(operation) if self.chance is not None else None

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
