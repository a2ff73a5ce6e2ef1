"""Applying parts: what each touched chunk goes through, checked before and after, in one pass.

``Patch`` follows the digests of all chunks through the parts of a plan before a byte is written: a part that does not
continue where the one before it ended is found there. ``Patch.run`` then builds every chunk once, whatever the number
of versions.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoint import chunk_runs
from .codec import DamagedChunk, Encoding
from .codec.chunk import ChunkDecoder
from .errors import BaseMismatch, CorruptObject
from .snapshot import CHUNK_BYTES, snapshot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .digest import Hasher
    from .part import Part
    from .snapshot import Digests, Schema, TensorSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Read = Callable[[TensorSpec, int], Bytes]
    Write = Callable[[TensorSpec, int, Bytes], object]

__all__ = ["Patch", "default_workers", "run_in_order"]


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


class Patch:
    """The parts of a plan, chained over the digests of all chunks.

    ``before``: digests of the source's chunks, uint8 of shape (chunks, digest size); ``None`` when the first part set
    is an anchor. ``after``: those of the result. Add part sets in the plan's order, then ``seal`` and ``run``.
    """

    def __init__(self, schema: Schema, hash_function: Hasher, *, before: Digests | None) -> None:
        self._schema = schema
        self._hash = hash_function
        self._before = before
        self._parts: list[tuple[Part, bool]] = []
        # One row an encoded chunk, sorted by chunk number when sealed: numbers, places in _parts, rows there.
        self._numbers = np.zeros(0, np.int64)
        self._places = np.zeros(0, np.int32)
        self._rows = np.zeros(0, np.int32)
        self.after: Digests = (
            before.copy() if before is not None else np.zeros((schema.chunks, hash_function.size), np.uint8)
        )

    def add_anchor(self, parts: Sequence[Part]) -> None:
        """Start from an anchor: full chunks that cover the whole snapshot."""
        covered = np.zeros(self._schema.chunks, bool)
        for part in parts:
            if (part.encoding != Encoding.FULL).any():
                raise CorruptObject(f"{part.key} belongs to an anchor, but holds differences.", key=part.key)
            if covered[part.numbers].any():
                raise CorruptObject(f"{part.key} holds a chunk that another part holds too.", key=part.key)
            covered[part.numbers] = True
            self.after[part.numbers] = part.new_digests
            self._parts.append((part, False))
        if not covered.all():
            key = parts[0].key if parts else None
            raise CorruptObject(f"The anchor lacks {int((~covered).sum())} chunks.", key=key)

    def add_delta(self, parts: Sequence[Part], *, inverse: bool = False) -> None:
        """Go on with the parts of one version; raises ``CorruptObject`` when one does not start where we stand."""
        touched = np.zeros(self._schema.chunks, bool)
        for part in parts:
            if touched[part.numbers].any():
                raise CorruptObject(f"{part.key} changes a chunk that another part changes too.", key=part.key)
            touched[part.numbers] = True
            start, end = part.old_digests, part.new_digests
            if inverse:
                start, end = end, start
            differs = (self.after[part.numbers] != start).any(axis=1)
            if differs.any():
                name = self._schema.tensors[int(part.tensor[differs.argmax()])].name
                raise CorruptObject(
                    f"{part.key} does not continue from the version before it: {name!r} had other bytes.",
                    key=part.key,
                    hint="Run `deltastore check` on the store.",
                )
            self.after[part.numbers] = end
            self._parts.append((part, inverse))

    def seal(self, expected_snapshot_id: str) -> None:
        """Sort the work by chunk; raises ``CorruptObject`` unless the chained digests make the expected snapshot."""
        found = snapshot_id(self._schema, self.after, self._hash)
        if found != expected_snapshot_id:
            key = self._parts[-1][0].key if self._parts else None
            raise CorruptObject(
                f"The parts lead to the snapshot {found}; the manifest promises {expected_snapshot_id}.",
                key=key,
                hint="Run `deltastore check` on the store.",
            )

        if self._parts:
            numbers = np.concatenate([part.numbers for part, _ in self._parts])
            order = np.argsort(numbers, kind="stable")
            counts = [len(part) for part, _ in self._parts]
            self._numbers = numbers[order]
            self._places = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[order]
            self._rows = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[order]

    def _work(self, number: int) -> Iterator[tuple[Part, bool, int]]:
        first, end = np.searchsorted(self._numbers, (number, number + 1))
        for position in range(int(first), int(end)):
            part, inverse = self._parts[int(self._places[position])]
            yield part, inverse, int(self._rows[position])

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
        local = threading.local()

        def build_run(run: tuple[TensorSpec, int, int]) -> int:
            if not hasattr(local, "decoder"):
                local.decoder = ChunkDecoder()
                local.buffer = np.empty(CHUNK_BYTES, np.uint8)
            spec, first, end = run
            number = self._schema.chunk_number(spec.name, first)
            for chunk in range(first, end):
                work = list(self._work(number + chunk - first))
                if everything or work:
                    start, stop = spec.chunk_range(chunk)
                    out = local.buffer[: stop - start]
                    self._build(spec, chunk, number + chunk - first, work, read, out, local.decoder)
                    write(spec, chunk, out)
            return spec.chunk_range(end - 1)[1] - first * CHUNK_BYTES

        for done in run_in_order(build_run, chunk_runs(self._schema), workers=workers, name="patch"):
            if progress is not None:
                progress(done)

    def _build(
        self,
        spec: TensorSpec,
        chunk: int,
        number: int,
        work: list[tuple[Part, bool, int]],
        read: Read,
        out: Bytes,
        decoder: ChunkDecoder,
    ) -> None:
        if self._before is not None:
            np.copyto(out, read(spec, chunk))
        key = None
        try:
            for part, inverse, row in work:
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
