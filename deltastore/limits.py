"""What fetching and building may take: bytes a second from the store, and bytes of memory.

One ``Limits`` is shared by all that a process fetches. Only parts go by it: manifests and hints never wait.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import UsageError
from .manifest import MAX_PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FETCHERS", "PIECE_BYTES", "UNLIMITED", "Bandwidth", "Limits", "Room", "chosen_limits", "within_budget"]

#: Parts downloaded side by side.
FETCHERS: Final = 4
#: A part above this size is fetched in pieces of it.
PIECE_BYTES: Final = 8 << 20
#: Chunks mended at a time.
_GROUP_BYTES: Final = 64 << 20
#: A piece is at most a twentieth of what a second may bring, so that no second gets much more than its share; a
#: request for less than this would be mostly request.
_PIECE_SECONDS: Final = 0.05
_LEAST_THROTTLED_BYTES: Final = 64 << 10
#: Who waits for bandwidth looks up so often, in seconds, whether it is still wanted.
_STEP_SECONDS: Final = 0.2

# What a process takes, measured with `python -m tools.bench memory`: interpreter, libraries and kernels; a thread's
# chunk, and the streams and planes that it is decoded from; one encoded chunk's row in the tables of a window, of which
# two may be alive. What is fetched exists twice for a moment: as the library has it, and as it hands it on.
_PROCESS_BYTES: Final = 208 << 20
_WORKER_BYTES: Final = 16 << 20
_ROW_BYTES: Final = 2 * 82
_COPIES: Final = 2
_LEAST_TABLE_BYTES: Final = 16 << 20
_LEAST_PIECE_BYTES: Final = 1 << 20


class Bandwidth:
    """A token bucket: ``rate`` bytes a second together, whoever takes them. Thread-safe.

    What was not used is lost after a twentieth of a second. ``clock`` and ``sleep`` are in seconds; ``sleep`` may raise
    to give up.
    """

    __slots__ = ("_clock", "_lock", "_paid_until", "_rate", "_sleep")

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paid_until = clock()

    @property
    def piece_bytes(self) -> int:
        """Return how much may be taken at once so that the rate is kept from second to second."""
        return max(_LEAST_THROTTLED_BYTES, int(self._rate * _PIECE_SECONDS))

    def take(self, nbytes: int, proceed: Callable[[], object]) -> None:
        """Wait until ``nbytes`` are paid for; ``proceed`` is called meanwhile, and may raise."""
        with self._lock:
            self._paid_until = max(self._paid_until, self._clock() - _PIECE_SECONDS) + nbytes / self._rate
            until = self._paid_until
        while (left := until - self._clock()) > 0:
            proceed()
            self._sleep(min(left, _STEP_SECONDS))


class Room:
    """So many bytes of memory for what is on its way. Thread-safe."""

    __slots__ = ("_free", "_used", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._used = 0
        self._free = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room for ``nbytes``, and have it within the context; all of it is enough for anything."""
        wanted = min(nbytes, self.nbytes)
        with self._free:
            self._free.wait_for(lambda: self._used + wanted <= self.nbytes)
            self._used += wanted
        try:
            yield
        finally:
            with self._free:
                self._used -= wanted
                self._free.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What fetching and building may take.

    ``workers``: threads for chunks (``None``: one for each core). ``fetchers``: parts downloaded side by side.
    ``window_rows``: encoded chunks followed at once (``None``: any number).
    """

    workers: int | None = None
    fetchers: int = FETCHERS
    largest_piece: int = PIECE_BYTES
    window_rows: int | None = None
    room: Room | None = None
    bandwidth: Bandwidth | None = None

    @property
    def piece_bytes(self) -> int:
        """A part above this size is fetched in pieces of it."""
        if self.bandwidth is None:
            return self.largest_piece
        return min(self.largest_piece, self.bandwidth.piece_bytes)

    @property
    def group_bytes(self) -> int:
        """Chunks that are had again together: encoded, and as they come out, each twice for a moment."""
        return _GROUP_BYTES if self.room is None else self.room.nbytes // 4

    @contextmanager
    def taking(self, nbytes: int, proceed: Callable[[], object]) -> Iterator[None]:
        """Wait until ``nbytes`` may be fetched, and have room for them within the context.

        ``proceed`` is called before they are fetched, and may raise to give up.
        """
        if self.room is None:
            self._pay(nbytes, proceed)
            yield
        else:
            with self.room.hold(_COPIES * nbytes):
                self._pay(nbytes, proceed)
                yield

    def _pay(self, nbytes: int, proceed: Callable[[], object]) -> None:
        if self.bandwidth is not None:
            self.bandwidth.take(nbytes, proceed)
        proceed()


UNLIMITED: Final = Limits()


def chosen_limits(
    *,
    workers: int | None,
    cores: int,
    max_bandwidth: int | None,
    memory_budget: int | None,
    whole_parts: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> Limits:
    """Return what an operator's options allow: ``max_bandwidth`` in bytes a second, ``memory_budget`` in bytes.

    ``sleep`` waits for bandwidth, in seconds; the others are as for ``within_budget``, and so is what is raised.
    """
    bandwidth = None if max_bandwidth is None else Bandwidth(max_bandwidth, sleep=sleep)
    if memory_budget is None:
        return Limits(workers=workers, bandwidth=bandwidth)
    return within_budget(memory_budget, workers=workers, cores=cores, whole_parts=whole_parts, bandwidth=bandwidth)


def within_budget(
    budget: int, *, workers: int | None, cores: int, whole_parts: bool, bandwidth: Bandwidth | None = None
) -> Limits:
    """Share out a process's memory: ``budget`` bytes, the interpreter and its libraries included.

    ``workers``: the threads wished for (``None``: one for each of ``cores``, or as many as fit). ``whole_parts``:
    parts are read whole, as through a cache. Raises ``UsageError``, with the least that works, when it is too little.
    """
    fetching = _COPIES * (MAX_PART_BYTES if whole_parts else _LEAST_PIECE_BYTES)
    least = _PROCESS_BYTES + _LEAST_TABLE_BYTES + fetching + (workers or 1) * _WORKER_BYTES
    if budget < least:
        for_whom = "with a cache" if whole_parts else "without a cache"
        raise UsageError(
            f"A memory budget of {budget >> 20} MiB is too little for {workers or 1} worker(s) {for_whom}.",
            hint=f"Give --memory-budget {-(-least >> 20)}MiB or more" + (", or fewer --workers." if workers else "."),
        )
    spare = budget - least
    if workers is None:
        workers = min(cores, 1 + spare // 2 // _WORKER_BYTES)
        spare -= (workers - 1) * _WORKER_BYTES
    tables = _LEAST_TABLE_BYTES + spare // 4
    fetching += spare - spare // 4
    piece = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, fetching // (_COPIES * FETCHERS)))
    return Limits(
        workers=workers,
        fetchers=max(1, min(FETCHERS, fetching // (_COPIES * piece))),
        largest_piece=piece,
        window_rows=tables // _ROW_BYTES,
        room=Room(fetching),
        bandwidth=bandwidth,
    )
