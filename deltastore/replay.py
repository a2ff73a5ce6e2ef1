"""Following a plan: parts are fetched ahead, in the order in which they are needed, while chunks are built.

The chunks are followed window by window. A window is begun when the parts that reach into it are here, whether or not
the chunks before it are all built; those of the windows after it are on their way. Where the result is spread over
several files, several stretches of chunks are followed side by side, each a front: a file takes one writer at a time.
What comes out is proven at the end, against the plan's snapshot id; until then nobody may use it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .errors import CorruptObject
from .limits import UNLIMITED
from .part import parse_part
from .patch import Patch, build, seal
from .shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from typing_extensions import Self

    from .limits import Limits
    from .manifest import PartRef
    from .part import Part
    from .patch import Batch, Kept, Read, Spent, Write
    from .places import Places
    from .plan import Plan, Step
    from .reader import Store
    from .snapshot import Digests
    from .spool import Spool

    Progress = Callable[[str, int, int], object]

__all__ = ["Fetch", "Replayed", "counter", "in_turn", "open_part", "replay"]

_Item = TypeVar("_Item")

#: At most so many windows, but for those that fronts add: each costs a little, and more would overlap no better.
_WINDOWS = 64
#: At most so many fronts: until each has its first parts, threads may wait that could work.
_FRONTS = 8
#: Nor more than fit with the plan's steps: each front has parts of each step open and rows of each in memory, and with
#: more steps decoding takes most of the time.
_FRONT_STEPS = 64
_LEAST_WINDOW_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay led to.

    The result's chunk digests, the bytes downloaded, seconds until the last part was here, and what building took.
    """

    digests: Digests
    fetched_bytes: int
    fetch_seconds: float
    spent: Spent


def counter(progress: Progress | None, what: str, total: int) -> Callable[[int], None] | None:
    """Return a callback that adds up what it is told and reports it as ``what`` of ``total``."""
    if progress is None:
        return None
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(what, done, total)

    return advance


def open_part(store: Store, spool: Spool, part: PartRef, step: Step) -> Part:
    """Return a step's part that was fetched, parsed; raises ``CorruptObject`` unless it is what its record says."""
    parsed = parse_part(spool.open(part), step.identity, store.schema(), store.hash, key=part.key)
    ends = (part.first, part.last)
    if len(parsed) != part.chunks or (parsed.numbers[0], parsed.numbers[-1]) != ends:
        raise CorruptObject(f"{part.key} does not hold the chunks that its record says.", key=part.key)
    return parsed


class _Left(Exception):
    """Raised in a download that nobody waits for any more."""


class Fetch:
    """The parts of a plan on their way, from the moment that this is made.

    ``wait`` blocks until one is here, parsed once; ``reach`` until all of a window's are. ``fronts``: stretches of
    chunks to follow side by side at the most; parts are fetched in the order of their windows. ``all_here`` is
    called with this, once, in the ``wait`` that finds that the last part has come; it may raise. Leaving the context
    waits for requests that run, and begins no other. Half-fetched parts in ``spool`` that the plan does not need are
    removed.
    """

    def __init__(
        self,
        store: Store,
        plan: Plan,
        spool: Spool,
        *,
        limits: Limits = UNLIMITED,
        fronts: int = 1,
        progress: Progress | None = None,
        all_here: Callable[[Fetch], object] | None = None,
    ) -> None:
        self.store = store
        self.plan = plan
        self.fronts = _fronts(plan, store.schema().chunks, most=fronts, rows=limits.window_rows)
        self._all_here = all_here
        self._leaving = threading.Event()
        self._spool = spool
        self._progress = counter(progress, "fetch", plan.stored_bytes)
        self._started = time.perf_counter()
        self._futures: dict[str, Future[int]] = {}
        self._parsed: dict[str, Part] = {}
        self.ended = self._started
        wanted = [part for step in plan.steps for part in step.parts]
        spool.drop_partials(wanted)
        self._limits = limits
        self._pool = ThreadPoolExecutor(limits.fetchers, thread_name_prefix="fetch")
        turns, self._windows_left = _turns(wanted, self.fronts)
        try:
            for part in sorted(wanted, key=lambda part: turns[part.key]):
                if part.key not in self._futures:
                    self._futures[part.key] = self._pool.submit(self._fetch, part)
        except BaseException:  # an interrupt: nobody has this yet who could leave
            self._leave()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

    def _proceed(self) -> None:
        if self._leaving.is_set():
            raise _Left

    def _fetch(self, part: PartRef) -> int:
        downloaded = self._spool.fetch(self.store.backend, part, limits=self._limits, proceed=self._proceed)
        self.ended = time.perf_counter()
        if self._progress is not None:
            self._progress(part.size)
        return downloaded

    def wait(self, part: PartRef, step: Step) -> Part:
        """Return a part, parsed and in its place; raises what its download raised."""
        if part.key not in self._parsed:
            self._futures[part.key].result()
            self._parsed[part.key] = open_part(self.store, self._spool, part, step)
            if self._all_here is not None and all(future.done() for future in self._futures.values()):
                all_here, self._all_here = self._all_here, None
                all_here(self)
        return self._parsed[part.key]

    def reach(self, window: range) -> list[tuple[Step, list[Part]]]:
        """Return the parts of each step that reach into a window. Once for each; afterwards parts are forgotten."""
        reaching = [(step, [part for part in step.parts if _reaches(part, window)]) for step in self.plan.steps]
        found = [(step, [self.wait(part, step) for part in parts]) for step, parts in reaching]
        for _, parts in reaching:
            for part in parts:
                self._windows_left[part.key] -= 1
                if not self._windows_left[part.key]:
                    del self._parsed[part.key]
        return found

    def downloaded(self) -> int:
        """Return the bytes downloaded by all parts together."""
        return sum(future.result() for future in self._futures.values())

    @property
    def seconds(self) -> float:
        """Seconds from the first request until the last part was here."""
        return self.ended - self._started


def _fronts(plan: Plan, chunks: int, *, most: int, rows: int | None) -> list[list[range]]:
    """Cut the chunks into stretches of about one size, as many as are of use, and each into windows.

    ``rows``: of how many a window may have, all windows that are followed at a time have no more together.
    """
    most = min(most, _FRONTS, _FRONT_STEPS // max(len(plan.steps), 1))
    count = max(1, min(most, chunks // _LEAST_WINDOW_CHUNKS))
    bounds = [chunks * front // count for front in range(count + 1)]
    least = max(_LEAST_WINDOW_CHUNKS, chunks // _WINDOWS)
    share = None if rows is None else rows // count
    return [list(_windows(plan, range(low, high), least=least, rows=share)) for low, high in pairwise(bounds)]


def _windows(plan: Plan, chunks: range, *, least: int, rows: int | None) -> Iterator[range]:
    """Cut chunks where parts begin, but no window below ``least``; and where one would have too many rows.

    A step has at most one row for a chunk.
    """
    most = max(_LEAST_WINDOW_CHUNKS, len(chunks) if rows is None else rows // max(len(plan.steps), 1))
    cuts = [chunks.start]
    for first in sorted({part.first for step in plan.steps for part in step.parts}):
        if first - cuts[-1] >= least and chunks.stop - first >= least:
            cuts.append(first)
    for low, high in pairwise([*cuts, chunks.stop]):
        for start in range(low, high, most):
            yield range(start, min(start + most, high))


def _reaches(part: PartRef, window: range) -> bool:
    return part.first < window.stop and part.last >= window.start


def _turns(parts: Iterable[PartRef], fronts: list[list[range]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return when each part is needed first, windows being followed in turn, and in how many windows it is needed."""
    starts = [window.start for windows in fronts for window in windows]
    turn_of = {window.start: turn for turn, window in enumerate(in_turn(fronts))}
    turns, counts = {}, dict[str, int]()
    for part in parts:
        reached = starts[max(bisect_right(starts, part.first) - 1, 0) : bisect_right(starts, part.last)]
        turns[part.key] = min((turn_of[start] for start in reached), default=0)
        counts[part.key] = counts.get(part.key, 0) + len(reached)
    return turns, counts


def in_turn(fronts: Iterable[Iterable[_Item]]) -> Iterator[_Item]:
    """Yield the first of each, then the second of each, and so on; those that have ended are left out."""
    left = [iter(front) for front in fronts]
    while left:
        for front in left.copy():
            item = next(front, None)
            if item is None:
                left.remove(front)
            else:
                yield item


def replay(
    fetch: Fetch,
    *,
    before: Digests | None,
    read: Read,
    write: Write,
    workers: int,
    places: Places | None = None,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Apply a plan's parts as they come: every chunk of the result is handed to ``write``, hash-checked.

    ``before`` are the chunk digests of what ``read`` reads, uint8 of shape (chunks, digest size). ``places`` and
    ``kept`` are as for ``build``. Raises ``CorruptObject`` or ``BaseMismatch``; what was written before is then of no
    use.
    """
    store, plan = fetch.store, fetch.plan
    schema = store.schema()
    if plan.from_anchor or before is None:
        before, after = None, np.zeros((schema.chunks, store.hash.size), np.uint8)
    else:
        after = before.copy()

    shares = Shares(schema.nbytes, workers=workers)

    def batches(windows: list[range]) -> Iterator[Batch]:
        for window in windows:
            patch = Patch(schema, store.hash, before=before, after=after, window=window)
            for step, parts in fetch.reach(window):
                if step.kind == "anchor":
                    patch.add_anchor(parts)
                else:
                    patch.add_delta(parts, inverse=step.kind == "inverse")
            yield from patch.batches(shares, everything=True)

    building = counter(progress, "patch", schema.nbytes)
    work = in_turn([batches(windows) for windows in fetch.fronts])
    spent = build(work, read, write, workers=workers, places=places, kept=kept, progress=building)
    seal(schema, store.hash, after, plan.snapshot_id, key=_last_key(plan))
    return Replayed(after, fetch.downloaded(), fetch.seconds, spent)


def _last_key(plan: Plan) -> str | None:
    return next((part.key for step in reversed(plan.steps) for part in reversed(step.parts)), None)
