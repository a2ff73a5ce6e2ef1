"""Compacting a store: what makes a long history cheap to follow is added to it, and nothing is ever replaced.

Skip deltas and anchors are made in one pass over the chunks of a span of versions. Each chunk is walked through all of
them: where a route starts its bytes are kept, where one ends the whole change is encoded anew. So nothing encoded is
composed, and every encoding serves. Any machine that reads the store can do this, and several may at once.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .draft import RouteDraft
from .errors import CorruptObject, ObjectExists, ObjectNotFound, VersionNotFound
from .limits import FETCHERS
from .manifest import MAX_MANIFEST_BYTES, manifest_key
from .patch import Patch, default_workers, read_each, seal, write_each
from .planner import READERS, Planner
from .replay import counter, open_part
from .restore import identify
from .segment import SEGMENT_VERSIONS, SEGMENTS_PREFIX, build_segment, complete_segments, parse_segment, segment_key
from .snapshot import chunk_batches
from .spool import TemporarySpool
from .tags import read_standing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from .draft import Content
    from .manifest import Manifest, PartRef
    from .part import Part
    from .plan import Plan, Step
    from .reader import Store
    from .restore import Source
    from .route import Route
    from .snapshot import Digests, Schema, TensorSpec
    from .spool import Spool

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Progress = Callable[[str, int, int], object]

__all__ = ["SPANS", "Compacted", "Wanted", "anchor", "compact", "make_routes", "missing_skips", "windows"]

#: How many versions skip deltas lead over; each span starts and ends at its own multiples.
SPANS = (16, 256, 4096)
#: Routes made in one pass: each one fills a part in memory, and keeps a table of digests.
_ROUTES_AT_ONCE = 20
#: Chunks are walked in windows of about so many bytes; a window is in memory once for each route that is under way.
_WINDOW_BYTES = 64 << 20


class Wanted(NamedTuple):
    """A route to be made: where it leads, and where it starts (``None``: an anchor)."""

    version: int
    start: int | None


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction added: routes, and the first versions of log segments."""

    routes: tuple[Route, ...]
    segments: tuple[int, ...]


def missing_skips(newest: int, there: Collection[Wanted]) -> list[Wanted]:
    """Return the skips over all aligned spans up to ``newest`` that are not there."""
    spans = [Wanted(end, end - span) for span in SPANS for end in range(span, newest + 1, span)]
    return [wanted for wanted in spans if wanted not in there]


def _missing_anchors(store: Store, newest: Manifest, there: Collection[Wanted]) -> list[Wanted]:
    policy = store.stream.anchors
    if policy is None:
        return []
    versions = list(range(policy.every, newest.version + 1, policy.every)) if policy.every is not None else []
    if policy.when is not None:
        try:
            cost = store.plan(None, newest.version).stored_bytes
        except VersionNotFound:  # a new receiver has no way at all
            cost = 1 << 62
        if policy.due(newest.version, cost=cost, snapshot_bytes=newest.model.snapshot_bytes):
            versions.append(newest.version)
    wanted = [Wanted(version, None) for version in dict.fromkeys(versions)]
    return [route for route in wanted if route not in there]


def compact(
    store: Store,
    *,
    base: str | Path | None = None,
    level: str = "fast",
    workers: int | None = None,
    spool: str | Path | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Add the skips, the anchors of the stream's policy, and the log segments that a store lacks.

    ``base`` is a checkpoint that holds any version of the stream; without one the store's anchor is used. ``spool`` is
    where parts wait on disk. Killed half-way it leaves nothing that counts, and the next one completes it. Raises
    ``VersionNotFound`` when the base is neither stored nor given.
    """
    newest = store.latest()
    segments = tuple(_add_segments(store, newest.version))
    standing, _ = read_standing(store)
    there = {Wanted(route.version, route.start) for route in Planner(store).staying(standing)}
    compactor = _Compactor(store, base, level=level, workers=workers, spool=spool, progress=progress)
    made = compactor.make(missing_skips(newest.version, there))
    made += compactor.make(_missing_anchors(store, newest, there))
    return Compacted(tuple(made), segments)


def anchor(
    store: Store,
    version: int,
    *,
    base: str | Path | None = None,
    workers: int | None = None,
    spool: str | Path | None = None,
    progress: Progress | None = None,
) -> Route | None:
    """Make an anchor of a version; ``None`` when it has one. The options are those of ``compact``."""
    manifest = store.manifest(version)
    if manifest.anchored or store.anchored(range(version, version + 1)):
        return None
    compactor = _Compactor(store, base, level="fast", workers=workers, spool=spool, progress=progress)
    return compactor.make([Wanted(version, None)])[0]


class _Compactor:
    """Makes routes, as many in a pass as memory allows."""

    def __init__(
        self,
        store: Store,
        base: str | Path | None,
        *,
        level: str,
        workers: int | None,
        spool: str | Path | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._base = base
        self._level = level
        self._workers = workers or default_workers()
        self._spool = spool
        self._progress = progress

    @cached_property
    def _source(self) -> Source | None:
        """The given checkpoint, hashed when it is first needed."""
        if self._base is None:
            return None
        return identify(self._store, self._base, workers=self._workers, progress=self._progress)

    def make(self, wanted: Sequence[Wanted]) -> list[Route]:
        """Make those routes whose ends are kept; those that lead to earlier versions help to make the later."""
        standing, _ = read_standing(self._store)
        kept = [route for route in wanted if all(place is None or standing.keeps(place) for place in route)]
        # Short spans first: a long one that ends with them is then made over those before.
        kept.sort(key=lambda route: (route.version, 1 if route.start is None else -route.start))
        groups = [kept[first : first + _ROUTES_AT_ONCE] for first in range(0, len(kept), _ROUTES_AT_ONCE)]
        built = counter(self._progress, "routes", len(groups) * self._store.schema().nbytes)
        made: list[Route] = []
        with TemporarySpool(self._spool) as parts:
            for group in groups:
                made += make_routes(
                    self._store,
                    group,
                    source=self._source,
                    spool=parts,
                    level=self._level,
                    workers=self._workers,
                    progress=built,
                )
                parts.clear()
        return made


def make_routes(
    store: Store,
    wanted: Sequence[Wanted],
    *,
    source: Source | None,
    spool: Spool,
    level: str,
    workers: int,
    progress: Callable[[int], object] | None = None,
) -> list[Route]:
    """Make routes in one pass over the chunks, from a local checkpoint or from nothing.

    Where parts on the way turn out damaged or gone another way is taken, as a reader does.
    """
    stops = sorted({place for route in wanted for place in route if place is not None})
    manifests = store.manifests(stops)
    planner = Planner(store)
    places = [source.version if source else None, *stops]
    plans = [planner.plan(place, stop) for place, stop in zip(places, stops, strict=False)]
    while True:
        drafts: dict[Wanted, RouteDraft] = {}
        try:
            for route in wanted:
                start = None if route.start is None else manifests[route.start]
                end = manifests[route.version]
                drafts[route] = RouteDraft(store, spool, start=start, end=end, level=level, workers=workers)
            _Walk(store, plans, drafts, source, spool, workers=workers).run(progress)
            return [draft.commit() for draft in drafts.values()]
        except (ObjectNotFound, CorruptObject) as error:
            _abandon(drafts)
            plans = planner.instead_of(plans, error)
        except BaseException:
            _abandon(drafts)
            raise


def _abandon(drafts: dict[Wanted, RouteDraft]) -> None:
    for draft in drafts.values():
        draft.abandon()


class _Walk:
    """One pass: plans that follow each other, and the drafts of routes between the versions that they stop at."""

    def __init__(
        self,
        store: Store,
        plans: Sequence[Plan],
        drafts: dict[Wanted, RouteDraft],
        source: Source | None,
        spool: Spool,
        *,
        workers: int,
    ) -> None:
        self._store = store
        self._schema: Schema = store.schema()
        self._plans = plans
        self._drafts = drafts
        self._source = source
        self._spool = spool
        self._workers = workers
        #: The chunk digests of each stop, filled window by window.
        shape = (self._schema.chunks, store.hash.size)
        self._tables: dict[int, Digests] = {plan.end: np.zeros(shape, np.uint8) for plan in plans}
        #: The window's chunks as they are at the version where the walk is.
        self._chunks: dict[int, Bytes] = {}

    def run(self, progress: Callable[[int], object] | None) -> None:
        """Walk all windows; raises ``CorruptObject`` unless every stop is the snapshot of its manifest."""
        steps = [step for plan in self._plans for step in plan.steps]
        cuts = list(windows(self._schema))
        inputs = _Inputs(self._store, self._spool)
        try:
            for window, following in zip(cuts, [*cuts[1:], range(0)], strict=False):
                inputs.expect(steps, window)
                inputs.expect(steps, following)
                self._walk(window, inputs)
                inputs.forget(steps, window)
                if progress is not None:
                    progress(sum(chunk.nbytes for chunk in self._chunks.values()))
        finally:
            inputs.close()
        for plan in self._plans:
            key = next((part.key for step in reversed(plan.steps) for part in reversed(step.parts)), None)
            seal(self._schema, self._store.hash, self._tables[plan.end], plan.snapshot_id, key=key)

    def _walk(self, window: range, inputs: _Inputs) -> None:
        self._chunks = {}
        kept: dict[Wanted, dict[int, Bytes]] = {}
        before = self._source.digests if self._source else None
        read = self._source.checkpoint.read if self._source else read_each(self._chunk)
        for number, plan in enumerate(self._plans):
            after = self._tables[plan.end]
            if before is not None:
                after[window.start : window.stop] = before[window.start : window.stop]
            origin = None if plan.from_anchor else before
            patch = Patch(self._schema, self._store.hash, before=origin, after=after, window=window)
            for step in plan.steps:
                parts = [inputs.part(part, step) for part in step.parts if _reaches(part, window)]
                if step.kind == "anchor":
                    patch.add_anchor(parts)
                else:
                    patch.add_delta(parts, inverse=step.kind == "inverse")
            everything = number == 0 or plan.from_anchor
            patch.run(read, write_each(self._keep), everything=everything, workers=self._workers)
            self._stop(plan.end, window, kept)
            before, read = after, read_each(self._chunk)

    def _stop(self, version: int, window: range, kept: dict[Wanted, dict[int, Bytes]]) -> None:
        """Encode the routes that end at a version, and keep the chunks where one starts from it."""
        for route, draft in self._drafts.items():
            if route.version == version:
                start = kept.pop(route, None)
                draft.add(
                    window,
                    None if start is None else self._reader(start),
                    self._chunk,
                    old_digests=None if route.start is None else self._tables[route.start],
                    new_digests=self._tables[version],
                )
            elif route.start == version:
                kept[route] = dict(self._chunks)

    def _chunk(self, spec: TensorSpec, chunk: int) -> Bytes:
        return self._chunks[self._schema.chunk_number(spec.name, chunk)]

    def _reader(self, chunks: dict[int, Bytes]) -> Content:
        return lambda spec, chunk: chunks[self._schema.chunk_number(spec.name, chunk)]

    def _keep(self, spec: TensorSpec, chunk: int, data: Bytes) -> None:
        # A new array each time: those that were kept for a route are the same objects until something changes them.
        self._chunks[self._schema.chunk_number(spec.name, chunk)] = data.copy()


def _reaches(part: PartRef, window: range) -> bool:
    return part.first < window.stop and part.last >= window.start


def windows(schema: Schema) -> Iterator[range]:
    """Cut all chunks into runs of about 64 MiB."""
    low = size = 0
    for batch in chunk_batches(schema):
        size += sum(run.nbytes for run in batch)
        if size >= _WINDOW_BYTES:
            end = batch[-1].number + batch[-1].end - batch[-1].first
            yield range(low, end)
            low, size = end, 0
    if low < schema.chunks:
        yield range(low, schema.chunks)


class _Inputs:
    """The parts of the plans: fetched when a window comes near them, and gone when the windows have passed them."""

    def __init__(self, store: Store, spool: Spool) -> None:
        self._store = store
        self._spool = spool
        self._coming: dict[str, Future[int]] = {}
        self._parts: dict[str, Part] = {}
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")

    def expect(self, steps: Sequence[Step], window: range) -> None:
        """Begin to fetch what reaches into a window."""
        for step in steps:
            for part in step.parts:
                if _reaches(part, window) and part.key not in self._coming:
                    self._coming[part.key] = self._pool.submit(self._spool.fetch, self._store.backend, part)

    def part(self, part: PartRef, step: Step) -> Part:
        """Return an expected part; raises what its download raised."""
        if part.key not in self._parts:
            self._coming[part.key].result()
            self._parts[part.key] = open_part(self._store, self._spool, part, step)
        return self._parts[part.key]

    def forget(self, steps: Sequence[Step], window: range) -> None:
        """Drop what does not reach beyond a window, and free its disk."""
        for step in steps:
            for part in step.parts:
                if part.last < window.stop and self._parts.pop(part.key, None) is not None:
                    self._spool.remove(part)

    def close(self) -> None:
        """Wait for downloads that run, begin no other."""
        self._pool.shutdown(cancel_futures=True)


def _add_segments(store: Store, newest: int) -> Iterator[int]:
    """Write the log segments that are complete and not there; yields the first version of each."""
    complete = complete_segments(newest)
    there = {info.key for info in store.backend.list(SEGMENTS_PREFIX)} if complete else set()
    for first in complete:
        if segment_key(first) in there:
            continue

        def read(version: int) -> bytes:
            return store.backend.read(manifest_key(version), limit=MAX_MANIFEST_BYTES)

        with ThreadPoolExecutor(READERS, thread_name_prefix="manifests") as pool:
            data = build_segment(list(pool.map(read, range(first, first + SEGMENT_VERSIONS))))
        if data is None:
            continue
        # What no reader would take must not be there.
        manifests = parse_segment(data, first=first, verifier=store.verifier)
        if manifests[0].stream_id != store.stream_id:
            raise CorruptObject(f"{manifest_key(first)} belongs to another stream.", key=manifest_key(first))
        try:
            store.backend.create(segment_key(first), data)
        except ObjectExists:  # another compactor's, of the same manifests
            continue
        yield first
