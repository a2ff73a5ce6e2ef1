"""Applying parts: what each touched chunk goes through, checked before and after, in one pass.

``Patch`` follows the digests of a window of chunks through the parts of a plan before any of them is built: a part that
does not continue where the one before it ended is found there. ``build`` then builds every chunk once, whatever the
number of versions. The chunks of one span are read at once and written at once: tiny tensors share the calls.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .codec import Encoding
from .codec.applying import ChunkDecoder, Chunks, Steps, Wrong
from .errors import BaseMismatch, CorruptObject
from .memory import ALIGNMENT, address_of, aligned_memory, last_cache_bytes
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

#: A last cache that holds what two cores build at once, and what they read and write meanwhile.
_LARGE_CACHE = 16 << 20
#: Bytes that are read, built and written at once. Between these steps Python's own memory has left the processor's
#: caches, so few large spans cost less than many; but they have to stay in the last cache from one step to the next.
_SPAN_BYTES = CHUNK_BYTES * (1 if (last_cache_bytes() or _LARGE_CACHE) < _LARGE_CACHE else 2)
_NONE = np.empty(0, np.int64)
_NO_STEPS = Steps(_NONE, np.empty((0, 3), np.uint32), _NONE, _NONE, np.empty((0, 3), np.int64))


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
    """What has to be applied to each chunk: a step an encoded chunk, those of a chunk in the plan's order.

    Arrays, whatever their number.
    """

    __slots__ = ("_parts", "steps")

    def __init__(self, parts: list[tuple[Part, bool, slice]]) -> None:
        self._parts = parts  # their payloads stay where they are
        bounds = [0, *accumulate(rows.stop - rows.start for _, _, rows in parts)]
        numbers, starts, stops = (np.empty(bounds[-1], np.int64) for _ in range(3))
        words = np.empty((bounds[-1], 3), np.uint32)
        payloads = np.empty((len(parts), 3), np.int64)
        for place, (part, inverse, rows) in enumerate(parts):
            mine = slice(bounds[place], bounds[place + 1])
            numbers[mine], starts[mine], stops[mine] = part.numbers[rows], part.starts[:-1][rows], part.starts[1:][rows]
            words[mine] = np.stack(
                [np.full_like(part.changed[rows], place), part.encoding[rows], part.changed[rows]], 1
            )
            payloads[place] = address_of(np.frombuffer(part.payload, np.uint8)), len(part.payload), inverse
        order = np.argsort(numbers, kind="stable")
        self.steps = Steps(numbers[order], words[order], starts[order], stops[order], payloads)

    def of(self, span: ChunkSpan) -> Steps:
        """Return the steps that touch a span's chunks."""
        numbers = self.steps.numbers
        first, end = numbers.searchsorted(span.numbers[0]), numbers.searchsorted(span.numbers[-1], side="right")
        return self.steps.cut(int(first), int(end))

    def part(self, steps: Steps, step: int) -> Part:
        """Return the part that a step belongs to."""
        part, _, _ = self._parts[int(steps.words[step, 0])]
        return part


class Spent:
    """What building took: seconds of decoding and of hashing, added up over threads, and the bytes of each.

    Those decoded are counted as they are stored. ``counts``: as ``ChunkDecoder.build`` counts.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = np.zeros(4, np.int64)

    @property
    def decode_seconds(self) -> float:
        """Seconds of decoding."""
        return int(self.counts[0]) / 1e9

    @property
    def decoded_bytes(self) -> int:
        """Bytes decoded."""
        return int(self.counts[1])

    @property
    def verify_seconds(self) -> float:
        """Seconds of hashing."""
        return int(self.counts[2]) / 1e9

    @property
    def verified_bytes(self) -> int:
        """Bytes hashed."""
        return int(self.counts[3])

    def add(self, other: Spent) -> None:
        """Count what another one counted."""
        self.counts += other.counts


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
            local.decoder = ChunkDecoder(batch.patch.hash)
            local.buffer = aligned_memory(_SPAN_BYTES + ALIGNMENT)
        spent = Spent()
        for span in batch.spans:
            begin = places.phase(span) if places is not None else 0
            out = local.buffer[begin : begin + span.nbytes]
            if kept is not None and kept(span, out) and batch.patch.has(span, out, local.decoder, spent):
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
        self.hash = hash_function
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
            self.hash,
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
        numbers = np.arange(self._window.start, self._window.stop) if everything else np.unique(work.steps.numbers)
        spans: list[ChunkSpan] = []
        nbytes = 0
        for span in chunk_spans(self._schema, numbers, nbytes=_SPAN_BYTES):
            spans.append(span)
            nbytes += span.content_bytes
            if nbytes > shares.size - _SPAN_BYTES:
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
        steps = work.of(span)
        wrong = decoder.build(out, self._chunks(span), steps, self.after, spent.counts)
        if wrong is not None:
            self._blame(span, wrong, work, steps, read)

    def has(self, span: ChunkSpan, data: Bytes, decoder: ChunkDecoder, spent: Spent) -> bool:
        """Tell whether ``data`` are the new bytes of a span's chunks."""
        return decoder.build(data, self._chunks(span), _NO_STEPS, self.after, spent.counts) is None

    def _chunks(self, span: ChunkSpan) -> Chunks:
        return Chunks(span.numbers, span.starts, span.stops, self._schema.widths[span.tensors])

    def _blame(self, span: ChunkSpan, wrong: Wrong, work: _Work, steps: Steps, read: Read) -> NoReturn:
        """Say whose fault a wrong chunk is: the local copy's, or a part's."""
        name, number = self._schema.tensors[span.tensors[wrong.chunk]].name, int(span.chunks[wrong.chunk])
        if self._before is not None:
            old = np.empty(span.nbytes, np.uint8)
            read(span, old)
            digest = self.hash.digest(old[span.starts[wrong.chunk] : span.stops[wrong.chunk]].data)
            if digest != self._before[span.numbers[wrong.chunk]].tobytes():
                raise BaseMismatch(
                    f"Chunk {number} of {name!r} in the local checkpoint changed on disk.",
                    tensors=(name,),
                    key=name,
                    hint="Fetch the checkpoint anew: remove it and start the receiver again.",
                )
        touching = np.flatnonzero(steps.numbers == span.numbers[wrong.chunk])
        step = wrong.step if wrong.step is not None else int(touching[-1]) if touching.size else None
        key = work.part(steps, step).key if step is not None else None
        if wrong.step is not None:
            raise CorruptObject(f"{key} has a damaged chunk {number} of {name!r}: {wrong.problem}.", key=key)
        raise CorruptObject(
            f"{key} leads to wrong bytes in chunk {number} of {name!r}.",
            key=key,
            hint="Run `deltastore check --read-data` on the store.",
        )
