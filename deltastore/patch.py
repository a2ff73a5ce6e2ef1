"""Applying parts: what each touched chunk goes through, checked before and after, in one pass.

``Patch`` follows the digests of a window of chunks through the parts of a plan before any of them is built: a part that
does not continue where the one before it ended is found there. ``Patch.run`` then builds every chunk once, whatever the
number of versions.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from .codec import DamagedChunk, Encoding
from .codec.chunk import ChunkDecoder
from .errors import BaseMismatch, CorruptObject
from .snapshot import CHUNK_BYTES, ChunkRun, chunk_batches, snapshot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .digest import Hasher
    from .part import Part
    from .snapshot import Digests, Schema, TensorSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Read = Callable[[TensorSpec, int], Bytes]
    Write = Callable[[TensorSpec, int, Bytes], object]

__all__ = ["Patch", "default_workers", "run_in_order", "seal"]


def default_workers() -> int:
    """Return how many threads work on chunks unless told otherwise: one for each core this process may use."""
    return min(32, len(os.sched_getaffinity(0)))


def run_in_order(function: Callable[[Any], Any], items: Iterator[Any], *, workers: int, name: str) -> Iterator[Any]:
    """Map ``function`` over ``items`` in threads, a few ahead of the consumer; yields results in order.

    Unlike ``Executor.map`` it takes items only as it goes, so memory is bounded, and stops early when the consumer
    does.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    ahead: deque[Any] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Work:
    """What has to be applied to each chunk.

    One row an encoded chunk, sorted by chunk number. Arrays, whatever their number.
    """

    __slots__ = ("_numbers", "_parts", "_places", "_rows")

    def __init__(self, parts: list[tuple[Part, bool, slice]]) -> None:
        self._parts = parts
        counts = [rows.stop - rows.start for _, _, rows in parts]
        numbers = np.concatenate([np.zeros(0, np.int64), *(part.numbers[rows] for part, _, rows in parts)])
        order = np.argsort(numbers, kind="stable")
        self._numbers = numbers[order]
        self._places = np.repeat(np.arange(len(parts), dtype=np.int32), counts)[order]
        ranges = [np.arange(rows.start, rows.stop, dtype=np.int32) for _, _, rows in parts]
        self._rows = np.concatenate([np.zeros(0, np.int32), *ranges])[order]

    def of(self, number: int) -> list[tuple[Part, bool, int]]:
        """Return (part, inverse, row) for each step that touches a chunk, in the plan's order."""
        first, end = np.searchsorted(self._numbers, (number, number + 1)).tolist()
        hops = []
        for position in range(first, end):
            part, inverse, _ = self._parts[self._places[position]]
            hops.append((part, inverse, int(self._rows[position])))
        return hops

    def touches(self, low: int, last: ChunkRun) -> bool:
        """Tell whether anything has to be done from chunk ``low`` to the end of the run ``last``."""
        first, end = np.searchsorted(self._numbers, (low, last.number + last.end - last.first)).tolist()
        return bool(first < end)


def seal(schema: Schema, hash_function: Hasher, after: Digests, expected: str, *, key: str | None) -> None:
    """Raise ``CorruptObject`` unless chunk digests make the expected snapshot."""
    found = snapshot_id(schema, after, hash_function)
    if found != expected:
        raise CorruptObject(
            f"The parts lead to the snapshot {found}; the manifest promises {expected}.",
            key=key,
            hint="Run `deltastore check` on the store.",
        )


class Patch:
    """Part sets chained over the digests of the chunks in one window of the schema.

    ``before``: digests of the source's chunks, uint8 of shape (chunks, digest size); ``None`` when the first part set
    is an anchor. ``after``: those of the result; given, the window's rows of it are written, so that several windows
    share one. ``window``: the numbers of the chunks to build, all of them unless given. Add part sets in the plan's
    order, ``seal`` the whole, and ``run``.
    """

    def __init__(
        self,
        schema: Schema,
        hash_function: Hasher,
        *,
        before: Digests | None,
        after: Digests | None = None,
        window: range | None = None,
    ) -> None:
        self._schema = schema
        self._hash = hash_function
        self._before = before
        self._window = window if window is not None else range(schema.chunks)
        self._parts: list[tuple[Part, bool, slice]] = []
        if after is None:
            after = before.copy() if before is not None else np.zeros((schema.chunks, hash_function.size), np.uint8)
        self.after: Digests = after

    def _rows(self, part: Part) -> slice:
        """Return which rows of a part lie in the window."""
        low, high = np.searchsorted(part.numbers, (self._window.start, self._window.stop))
        return slice(int(low), int(high))

    def add_anchor(self, parts: Sequence[Part]) -> None:
        """Start from an anchor: full chunks that cover the whole window, each once."""
        covered = np.zeros(len(self._window), bool)
        for part in parts:
            rows = self._rows(part)
            numbers = part.numbers[rows]
            if (part.encoding[rows] != Encoding.FULL).any():
                raise CorruptObject(f"{part.key} belongs to an anchor, but holds differences.", key=part.key)
            if covered[numbers - self._window.start].any():
                raise CorruptObject(f"{part.key} holds a chunk that another part holds too.", key=part.key)
            covered[numbers - self._window.start] = True
            self.after[numbers] = part.new_digests[rows]
            self._parts.append((part, False, rows))
        if not covered.all():
            key = parts[0].key if parts else None
            raise CorruptObject(f"The anchor lacks {int((~covered).sum())} chunks.", key=key)

    def add_delta(self, parts: Sequence[Part], *, inverse: bool = False) -> None:
        """Go on with the parts of one version; raises ``CorruptObject`` when one does not start where we stand."""
        touched = np.zeros(len(self._window), bool)
        for part in parts:
            rows = self._rows(part)
            numbers = part.numbers[rows]
            if touched[numbers - self._window.start].any():
                raise CorruptObject(f"{part.key} changes a chunk that another part changes too.", key=part.key)
            touched[numbers - self._window.start] = True
            start, end = part.old_digests[rows], part.new_digests[rows]
            if inverse:
                start, end = end, start
            differs = (self.after[numbers] != start).any(axis=1)
            if differs.any():
                name = self._schema.tensors[int(part.tensor[rows][differs.argmax()])].name
                raise CorruptObject(
                    f"{part.key} does not continue from the version before it: {name!r} had other bytes.",
                    key=part.key,
                    hint="Run `deltastore check` on the store.",
                )
            self.after[numbers] = end
            self._parts.append((part, inverse, rows))

    def seal(self, expected_snapshot_id: str) -> None:
        """Raise ``CorruptObject`` unless the chained digests, of all chunks, make the expected snapshot."""
        seal(
            self._schema,
            self._hash,
            self.after,
            expected_snapshot_id,
            key=self._parts[-1][0].key if self._parts else None,
        )

    def run(
        self,
        read: Read,
        write: Write,
        *,
        everything: bool,
        workers: int,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Build chunks from ``read`` (the old bytes) and hand them, hash-checked, to ``write``.

        ``everything`` hands on untouched chunks too, hash-checked as well; otherwise only touched ones. ``read`` and
        ``write`` are called from several threads; ``write`` must be done with the array when it returns. ``progress``
        is told bytes done. Raises ``CorruptObject`` or ``BaseMismatch`` before the first wrong byte is handed on.
        """
        work = _Work(self._parts)
        local = threading.local()

        def build_batch(batch: list[ChunkRun]) -> int:
            if not hasattr(local, "decoder"):
                local.decoder = ChunkDecoder()
                local.buffer = np.empty(CHUNK_BYTES, np.uint8)
            for run in batch:
                for chunk in range(run.first, run.end):
                    number = run.number + chunk - run.first
                    hops = work.of(number)
                    if everything or hops:
                        start, stop = run.spec.chunk_range(chunk)
                        out = local.buffer[: stop - start]
                        self._build(run.spec, chunk, number, hops, read, out, local.decoder)
                        write(run.spec, chunk, out)
            return sum(run.nbytes for run in batch)

        batches = chunk_batches(self._schema, low=self._window.start, high=self._window.stop)
        if not everything:
            batches = (batch for batch in batches if work.touches(batch[0].number, batch[-1]))
        for done in run_in_order(build_batch, batches, workers=workers, name="patch"):
            if progress is not None:
                progress(done)

    def _build(
        self,
        spec: TensorSpec,
        chunk: int,
        number: int,
        hops: list[tuple[Part, bool, int]],
        read: Read,
        out: Bytes,
        decoder: ChunkDecoder,
    ) -> None:
        if self._before is not None:
            np.copyto(out, read(spec, chunk))
        key = None
        try:
            for part, inverse, row in hops:
                key = part.key
                payload = part.chunk_payload(row)
                decoder.apply(
                    out, int(part.encoding[row]), int(part.changed[row]), payload, width=spec.width, inverse=inverse
                )
        except DamagedChunk as error:
            raise CorruptObject(f"{key} has a damaged chunk {chunk} of {spec.name!r}: {error}.", key=key) from error
        if self._hash.digest(out) != self.after[number].tobytes():
            self._blame(spec, chunk, number, read, key)

    def _blame(self, spec: TensorSpec, chunk: int, number: int, read: Read, key: str | None) -> None:
        """Say whose fault a wrong digest is: the local copy's, or the part's."""
        if self._before is not None and self._hash.digest(read(spec, chunk)) != self._before[number].tobytes():
            raise BaseMismatch(
                f"Chunk {chunk} of {spec.name!r} in the local checkpoint changed on disk.",
                tensors=(spec.name,),
                key=spec.name,
                hint="Fetch the checkpoint anew: remove it and start the receiver again.",
            )
        raise CorruptObject(
            f"{key} leads to wrong bytes in chunk {chunk} of {spec.name!r}.",
            key=key,
            hint="Run `deltastore check --read-data` on the store.",
        )
