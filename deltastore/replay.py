"""Following a plan: parts are fetched ahead, in the order of their chunks, while the chunks before them are built.

The chunks are followed window by window. A window is begun when the parts that reach into it are here, whether or not
the chunks before it are all built; those of the windows after it are on their way. What comes out is proven at the end,
against the plan's snapshot id; until then nobody may use it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .errors import CorruptObject
from .limits import UNLIMITED
from .part import parse_part
from .patch import Patch, build, seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from typing_extensions import Self

    from .limits import Limits
    from .manifest import PartRef
    from .part import Part
    from .patch import Batch, Kept, Read, Spent, Write
    from .plan import Plan, Step
    from .reader import Store
    from .snapshot import Digests
    from .spool import Spool

    Progress = Callable[[str, int, int], object]

__all__ = ["Fetch", "Replayed", "counter", "open_part", "replay"]

#: At most so many windows: each costs a little, and more would overlap no better.
_WINDOWS = 64
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

    ``wait`` blocks until one is here; it is parsed once, and forgotten when its chunks are followed. ``all_here`` is
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
        progress: Progress | None = None,
        all_here: Callable[[Fetch], object] | None = None,
    ) -> None:
        self.store = store
        self.plan = plan
        self.limits = limits
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
        self._pool = ThreadPoolExecutor(limits.fetchers, thread_name_prefix="fetch")
        for part in sorted(wanted, key=lambda part: part.first):
            if part.key not in self._futures:
                self._futures[part.key] = self._pool.submit(self._fetch, part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._pool.shutdown(cancel_futures=True)

    def _proceed(self) -> None:
        if self._leaving.is_set():
            raise _Left

    def _fetch(self, part: PartRef) -> int:
        downloaded = self._spool.fetch(self.store.backend, part, limits=self.limits, proceed=self._proceed)
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

    def forget_before(self, number: int) -> None:
        """Drop parsed parts that end before a chunk."""
        for step in self.plan.steps:
            for part in step.parts:
                if part.last < number:
                    self._parsed.pop(part.key, None)

    def downloaded(self) -> int:
        """Return the bytes downloaded by all parts together."""
        return sum(future.result() for future in self._futures.values())

    @property
    def seconds(self) -> float:
        """Seconds from the first request until the last part was here."""
        return self.ended - self._started


def _windows(plan: Plan, chunks: int, *, rows: int | None = None) -> Iterator[range]:
    """Cut the chunks where parts begin, but not finer than is of use; and where a window would have too many rows.

    A step has at most one row for a chunk.
    """
    least = max(_LEAST_WINDOW_CHUNKS, chunks // _WINDOWS)
    most = max(_LEAST_WINDOW_CHUNKS, chunks if rows is None else rows // max(len(plan.steps), 1))
    cuts = [0]
    for first in sorted({part.first for step in plan.steps for part in step.parts}):
        if first - cuts[-1] >= least and chunks - first >= least:
            cuts.append(first)
    for low, high in pairwise([*cuts, chunks]):
        for start in range(low, high, most):
            yield range(start, min(start + most, high))


def replay(
    fetch: Fetch,
    *,
    before: Digests | None,
    read: Read,
    write: Write,
    workers: int,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Apply a plan's parts as they come: every chunk of the result is handed to ``write``, hash-checked.

    ``before`` are the chunk digests of what ``read`` reads, uint8 of shape (chunks, digest size). ``kept`` is as for
    ``build``. Raises ``CorruptObject`` or ``BaseMismatch``; what was written before is then of no use.
    """
    store, plan = fetch.store, fetch.plan
    schema = store.schema()
    if plan.from_anchor or before is None:
        before, after = None, np.zeros((schema.chunks, store.hash.size), np.uint8)
    else:
        after = before.copy()

    def batches() -> Iterator[Batch]:
        for window in _windows(plan, schema.chunks, rows=fetch.limits.window_rows):
            patch = Patch(schema, store.hash, before=before, after=after, window=window)
            for step in plan.steps:
                reaching = [part for part in step.parts if part.first < window.stop and part.last >= window.start]
                parts = [fetch.wait(part, step) for part in reaching]
                if step.kind == "anchor":
                    patch.add_anchor(parts)
                else:
                    patch.add_delta(parts, inverse=step.kind == "inverse")
            fetch.forget_before(window.stop)
            yield from patch.batches(everything=True)

    building = counter(progress, "patch", schema.nbytes)
    spent = build(batches(), read, write, workers=workers, kept=kept, progress=building)
    seal(schema, store.hash, after, plan.snapshot_id, key=_last_key(plan))
    return Replayed(after, fetch.downloaded(), fetch.seconds, spent)


def _last_key(plan: Plan) -> str | None:
    return next((part.key for step in reversed(plan.steps) for part in reversed(step.parts)), None)
