"""Single chunks of a version from a store: only their bytes are fetched, and the tables of the parts they are in.

What comes out is as safe as a whole patch: each chunk is chained over its digests from what it starts from, and has to
end at a digest that the caller knows to be right.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .codec.applying import ChunkDecoder
from .container import header_size
from .errors import CorruptObject
from .limits import UNLIMITED
from .manifest import BASE_VERSION
from .part import Part, parse_part, table_size
from .patch import Patch, Spent, seal
from .planner import READERS, Planner
from .shares import Shares
from .snapshot import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .limits import Limits
    from .manifest import Manifest, PartRef
    from .patch import Bytes, Read
    from .plan import Plan, Step
    from .reader import Store
    from .snapshot import Digests, Numbers

__all__ = ["Excerpts", "groups", "version_digests"]

#: So much of a part is asked for at first: its table too, unless it is long.
_FIRST_BYTES = 64 << 10


class Excerpts:
    """Reads tables and single chunks of a plan's parts, by ranges. ``fetched_bytes`` counts what was asked for.

    Of ``limits`` everything holds but the workers; tables that were read are kept while they are no more than its
    ``window_rows``.
    """

    def __init__(self, store: Store, plan: Plan, *, limits: Limits = UNLIMITED) -> None:
        self.fetched_bytes = 0
        self._counting = threading.Lock()  # several threads fetch
        self._store = store
        self._plan = plan
        self._limits = limits
        self._tables: dict[str, Part] = {}
        self._decoder = ChunkDecoder(store.hash)

    def _range(self, part: PartRef, start: int, end: int) -> bytes:
        if end > part.size:
            raise CorruptObject(f"{part.key} describes more than its {part.size} bytes.", key=part.key)
        pieces = []
        for first in range(start, end, self._limits.piece_bytes):
            stop = min(first + self._limits.piece_bytes, end)
            with self._limits.taking(stop - first, lambda: None):
                pieces.append(self._store.backend.read_range(part.key, first, stop))
            with self._counting:
                self.fetched_bytes += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def table(self, part: PartRef, step: Step) -> Part:
        """Return a part of a step without its payload; raises ``CorruptObject`` unless it is what its record says."""
        known = self._tables.get(part.key)
        if known is None:
            data = self._range(part, 0, min(part.size, _FIRST_BYTES))
            header = header_size(data, key=part.key)
            data += self._range(part, len(data), max(header, len(data)))
            size = table_size(data, key=part.key)
            data += self._range(part, len(data), max(size, len(data)))
            store = self._store
            parsed = parse_part(data[:size], step.identity, store.schema(), store.hash, key=part.key, table_only=True)
            ends = (part.first, part.last)
            if len(parsed) != part.chunks or (parsed.numbers[0], parsed.numbers[-1]) != ends:
                raise CorruptObject(f"{part.key} does not hold the chunks that its record says.", key=part.key)
            self._keep(part.key, parsed)
            return parsed
        return known

    def _keep(self, key: str, table: Part) -> None:
        most = self._limits.window_rows
        if most is not None and sum(map(len, self._tables.values())) + len(table) > most:
            self._tables = {}
        self._tables[key] = table

    def _excerpt(self, part: PartRef, step: Step, numbers: Numbers) -> Part:
        """Return a part with only those of its rows that are about some chunks, their payload included."""
        table = self.table(part, step)
        rows = np.flatnonzero(np.isin(table.numbers, numbers))
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(table.starts[rows + 1] - table.starts[rows], out=starts[1:])
        pieces = []
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):  # rows that are neighbours at once
            if len(run):
                start, end = table.chunk_range(int(run[0]))[0], table.chunk_range(int(run[-1]))[1]
                pieces.append(self._range(part, start, end))
        return replace(
            table,
            tensor=table.tensor[rows],
            chunk=table.chunk[rows],
            numbers=table.numbers[rows],
            encoding=table.encoding[rows],
            changed=table.changed[rows],
            old_digests=table.old_digests[rows],
            new_digests=table.new_digests[rows],
            starts=starts,
            payload=memoryview(b"".join(pieces)),
        )

    def chunks(self, numbers: Numbers, wanted: Digests, *, before: Digests | None, read: Read) -> dict[int, Bytes]:
        """Return the new bytes of some chunks, by their numbers (int64, ascending).

        ``wanted``: the digests of all chunks of the plan's end. ``before``: those of what ``read`` reads, not needed
        where the plan starts from an anchor. Raises ``CorruptObject`` or ``BaseMismatch``.
        """
        schema, hash_function = self._store.schema(), self._store.hash
        if self._plan.from_anchor or before is None:
            before, after = None, np.zeros((schema.chunks, hash_function.size), np.uint8)
        else:
            after = before.copy()
        work = [
            (step, part)
            for step in self._plan.steps
            for part in step.parts
            if ((numbers >= part.first) & (numbers <= part.last)).any()
        ]
        excerpts = self._all_excerpts(work, numbers)
        found: dict[int, Bytes] = {}
        for number in numbers.tolist():
            patch = Patch(schema, hash_function, before=before, after=after, window=range(number, number + 1))
            for step in self._plan.steps:
                parts = [part for (owner, _), part in zip(work, excerpts, strict=True) if owner is step]
                _add(patch, step, [part for part in parts if number in part.numbers])
            if (after[number] != wanted[number]).any():
                key = next((part.key for _, part in reversed(work)), None)
                raise CorruptObject(f"{key} leads to other bytes than the version has.", key=key)
            for batch in patch.batches(Shares(CHUNK_BYTES, workers=1), everything=True):
                for span in batch.spans:
                    found[number] = np.empty(span.nbytes, np.uint8)
                    patch.build_span(span, batch.work, read, found[number], self._decoder, Spent())
        return found

    def _all_excerpts(self, work: Sequence[tuple[Step, PartRef]], numbers: Numbers) -> list[Part]:
        if len(work) == 1:  # no thread for that: each has a heap of its own
            return [self._excerpt(part, step, numbers) for step, part in work]
        readers = READERS if self._limits.room is None else self._limits.fetchers
        with ThreadPoolExecutor(readers, thread_name_prefix="excerpt") as pool:
            return list(pool.map(lambda pair: self._excerpt(pair[1], pair[0], numbers), work))


def _add(patch: Patch, step: Step, parts: list[Part]) -> None:
    if step.kind == "anchor":
        patch.add_anchor(parts)
    else:
        patch.add_delta(parts, inverse=step.kind == "inverse")


def version_digests(store: Store, manifest: Manifest, *, limits: Limits = UNLIMITED) -> tuple[Digests, int]:
    """Return the chunk digests of a version from the tables of parts, proven, and the bytes fetched for them.

    Raises ``VersionNotFound`` when no way leads there, ``CorruptObject``.
    """
    planner = Planner(store)

    def chain(plan: Plan) -> tuple[Digests, int]:
        excerpts = Excerpts(store, plan, limits=limits)
        schema = store.schema()
        after = np.zeros((schema.chunks, store.hash.size), np.uint8)
        if not plan.from_anchor:
            after[:] = store.base_digests()
        for step in plan.steps:  # one after the other: the tables of all together may be long
            patch = Patch(schema, store.hash, before=None, after=after)
            _add(patch, step, [excerpts.table(part, step) for part in step.parts])
        key = next((part.key for step in reversed(plan.steps) for part in reversed(step.parts)), None)
        seal(schema, store.hash, after, manifest.snapshot_id, key=key)
        return after, excerpts.fetched_bytes

    return planner.follow(planner.plan(BASE_VERSION, manifest.version), chain)


def groups(numbers: Numbers, *, nbytes: int) -> Iterable[Numbers]:
    """Cut chunk numbers into groups whose chunks take at most about ``nbytes``."""
    size = max(1, nbytes // CHUNK_BYTES)
    return (numbers[first : first + size] for first in range(0, len(numbers), size))
