"""Applying parts: what each touched chunk goes through, checked before and after, in one pass.

``Patch`` follows the digests of a window of chunks through the parts of a plan before any of them is built: a part that
does not continue where the one before it ended is found there. ``build`` then builds every chunk once, whatever the
number of versions. The chunks of one span are read at once and written at once: tiny tensors share the calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .codec import DamagedChunk, Encoding
from .codec.chunk import ChunkDecoder
from .errors import BaseMismatch, CorruptObject
from .memory import ALIGNMENT, aligned_memory
from .shares import Shares
from .snapshot import CHUNK_BYTES, chunk_spans, snapshot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .digest import Hasher
    from .part import Part
    from .places import Places
    from .snapshot import ChunkSpan, Digests, Schema, TensorSpec

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    #: Copies the old bytes of a span's chunks to their places in a buffer.
    Read = Callable[[ChunkSpan, Bytes], object]
    #: Takes the new bytes of a span's chunks from a buffer.
    Write = Callable[[ChunkSpan, Bytes], object]
    #: Copies what already lies at a span's places to a buffer; tells whether there is anything.
    Kept = Callable[[ChunkSpan, Bytes], bool]

__all__ = ["Batch", "Patch", "Spent", "build", "default_workers", "read_each", "run_in_order", "seal", "write_each"]


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


def read_each(chunk: Callable[[TensorSpec, int], Bytes]) -> Read:
    """Make a ``Read`` of a function that returns one chunk's bytes."""

    def read(span: ChunkSpan, out: Bytes) -> None:
        for spec, number, start, stop in span:
            out[start:stop] = chunk(spec, number)

    return read


def write_each(take: Callable[[TensorSpec, int, Bytes], object]) -> Write:
    """Make a ``Write`` of a function that takes one chunk's bytes."""

    def write(span: ChunkSpan, data: Bytes) -> None:
        for spec, number, start, stop in span:
            take(spec, number, data[start:stop])

    return write


class _Work:
    """What has to be applied to each chunk.

    One row an encoded chunk, sorted by chunk number, steps in the plan's order. Arrays, whatever their number.
    """

    __slots__ = ("_columns", "_parts", "numbers")

    def __init__(self, parts: list[tuple[Part, bool, slice]]) -> None:
        self._parts = parts
        if not parts:
            self.numbers = np.zeros(0, np.int64)
            self._columns: tuple[Array, ...] = ()
            return
        numbers = np.concatenate([part.numbers[rows] for part, _, rows in parts])
        order = np.argsort(numbers, kind="stable")
        counts = [rows.stop - rows.start for _, _, rows in parts]
        places = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
        encoding = np.concatenate([part.encoding[rows] for part, _, rows in parts])
        changed = np.concatenate([part.changed[rows] for part, _, rows in parts])
        starts = np.concatenate([part.starts[:-1][rows] for part, _, rows in parts])
        ends = np.concatenate([part.starts[1:][rows] for part, _, rows in parts])
        self.numbers = numbers[order]
        self._columns = tuple(column[order] for column in (places, encoding, changed, starts, ends))

    def of(self, span: ChunkSpan) -> Iterator[tuple[int, Part, bool, int, int, memoryview]]:
        """Yield (place in the span, part, inverse, encoding, changed, payload) for each step that touches a chunk."""
        first = int(self.numbers.searchsorted(span.numbers[0]))
        end = int(self.numbers.searchsorted(span.numbers[-1], side="right"))
        if first == end:
            return
        chunks = span.numbers.searchsorted(self.numbers[first:end]).tolist()
        columns = (column[first:end].tolist() for column in self._columns)
        for chunk, place, encoding, changed, start, stop in zip(chunks, *columns, strict=True):
            part, inverse, _ = self._parts[place]
            yield chunk, part, inverse, encoding, changed, part.payload[start:stop]


class Spent:
    """What building took: seconds of decoding and of hashing, added up over threads, and the bytes of each.

    Those decoded are counted as they are stored.
    """

    __slots__ = ("decode_seconds", "decoded_bytes", "verified_bytes", "verify_seconds")

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        self.decoded_bytes = 0
        self.verify_seconds = 0.0
        self.verified_bytes = 0

    def add(self, other: Spent) -> None:
        """Count what another one counted."""
        self.decode_seconds += other.decode_seconds
        self.decoded_bytes += other.decoded_bytes
        self.verify_seconds += other.verify_seconds
        self.verified_bytes += other.verified_bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """A thread's share of work: a few spans of one patch, and the bytes of all their chunks."""

    patch: Patch
    work: _Work
    spans: tuple[ChunkSpan, ...]
    nbytes: int


def build(
    batches: Iterable[Batch],
    read: Read,
    write: Write,
    *,
    workers: int,
    places: Places | None = None,
    kept: Kept | None = None,
    progress: Callable[[int], object] | None = None,
) -> Spent:
    """Build chunks from ``read`` (the old bytes) and hand them, hash-checked, to ``write``.

    Batches are taken a few ahead only; taking one may block without holding up the threads that work on those before.
    ``read`` and ``write`` are called from several threads; ``write`` must be done with the array when it returns.
    ``places``: where it writes to, if to files: what lies in memory as it does in the file is copied a quarter faster.
    ``kept``: what an attempt before this one may have written; a span that has its digests is not built again.
    ``progress`` is told bytes done. Returns what it took. Raises ``CorruptObject`` or ``BaseMismatch`` before a wrong
    byte is handed on.
    """
    local = threading.local()

    def build_batch(batch: Batch) -> tuple[int, Spent]:
        if not hasattr(local, "decoder"):
            local.decoder = ChunkDecoder()
            local.buffer = aligned_memory(CHUNK_BYTES + ALIGNMENT)
        spent = Spent()
        for span in batch.spans:
            begin = places.phase(span) if places is not None else 0
            out = local.buffer[begin : begin + span.nbytes]
            if kept is not None and kept(span, out) and batch.patch.has(span, out, spent):
                continue
            batch.patch.build_span(span, batch.work, read, out, local.decoder, spent)
            write(span, out)
        return batch.nbytes, spent

    total = Spent()
    for done, spent in run_in_order(build_batch, iter(batches), workers=workers, name="patch"):
        total.add(spent)
        if progress is not None:
            progress(done)
    return total


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
    order, ``seal`` the whole, and ``run``, or ``build`` the batches of several windows together.
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
        shares = Shares(self._schema.nbytes, workers=workers)
        build(self.batches(shares, everything=everything), read, write, workers=workers, progress=progress)

    def batches(self, shares: Shares, *, everything: bool) -> Iterator[Batch]:
        """Cut the window's chunks into batches: all of them, or with ``everything`` unset only the touched ones.

        ``shares``: those of all work that is done together with this.
        """
        work = _Work(self._parts)
        numbers = np.arange(self._window.start, self._window.stop) if everything else np.unique(work.numbers)
        spans: list[ChunkSpan] = []
        nbytes = 0
        for span in chunk_spans(self._schema, numbers):
            spans.append(span)
            nbytes += span.content_bytes
            if nbytes > shares.size - CHUNK_BYTES:
                shares.take(nbytes)
                yield Batch(self, work, tuple(spans), nbytes)
                spans, nbytes = [], 0
        if spans:
            shares.take(nbytes)
            yield Batch(self, work, tuple(spans), nbytes)

    def build_span(
        self, span: ChunkSpan, work: _Work, read: Read, out: Bytes, decoder: ChunkDecoder, spent: Spent
    ) -> None:
        """Build the new bytes of a span's chunks in ``out``; raises unless each has its digest."""
        if self._before is not None:
            read(span, out)
        starts, stops = span.starts.tolist(), span.stops.tolist()
        tensors, specs = span.tensors.tolist(), self._schema.tensors
        began = time.perf_counter()
        for chunk, part, inverse, encoding, changed, payload in work.of(span):
            spec = specs[tensors[chunk]]
            piece = out[starts[chunk] : stops[chunk]]
            try:
                decoder.apply(piece, encoding, changed, payload, width=spec.width, inverse=inverse)
            except DamagedChunk as error:
                message = f"{part.key} has a damaged chunk {span.chunks[chunk]} of {spec.name!r}: {error}."
                raise CorruptObject(message, key=part.key) from error
            spent.decoded_bytes += len(payload)
        spent.decode_seconds += time.perf_counter() - began
        found = self._digests(out, starts, stops, spent)
        wanted = self.after[span.numbers]
        if found != wanted.tobytes():
            differs = np.frombuffer(found, np.uint8).reshape(wanted.shape) != wanted
            self._blame(span, int(differs.any(axis=1).argmax()), work, read)

    def has(self, span: ChunkSpan, data: Bytes, spent: Spent) -> bool:
        """Tell whether ``data`` are the new bytes of a span's chunks."""
        found = self._digests(data, span.starts.tolist(), span.stops.tolist(), spent)
        return found == self.after[span.numbers].tobytes()

    def _digests(self, data: Bytes, starts: Sequence[int], stops: Sequence[int], spent: Spent) -> bytes:
        began = time.perf_counter()
        view, digest = data.data, self._hash.digest
        found = b"".join([digest(view[start:stop]) for start, stop in zip(starts, stops, strict=True)])
        spent.verify_seconds += time.perf_counter() - began
        spent.verified_bytes += sum(stops) - sum(starts)
        return found

    def _blame(self, span: ChunkSpan, chunk: int, work: _Work, read: Read) -> None:
        """Say whose fault a wrong digest is: the local copy's, or the part's."""
        name, number = self._schema.tensors[span.tensors[chunk]].name, int(span.chunks[chunk])
        if self._before is not None:
            old = np.empty(span.nbytes, np.uint8)
            read(span, old)
            digest = self._digests(old, [int(span.starts[chunk])], [int(span.stops[chunk])], Spent())
            if digest != self._before[span.numbers[chunk]].tobytes():
                raise BaseMismatch(
                    f"Chunk {number} of {name!r} in the local checkpoint changed on disk.",
                    tensors=(name,),
                    key=name,
                    hint="Fetch the checkpoint anew: remove it and start the receiver again.",
                )
        key = next((step[1].key for step in reversed(list(work.of(span))) if step[0] == chunk), None)
        raise CorruptObject(
            f"{key} leads to wrong bytes in chunk {number} of {name!r}.",
            key=key,
            hint="Run `deltastore check --read-data` on the store.",
        )
