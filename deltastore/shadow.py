"""The writer's copy of the last committed snapshot, which the next one is compared with.

Chunks are followed while they are encoded, in the same pass: then the shadow is ahead of the store, until the version
is committed (``advance``) or given up (``take_back``, out of the attempt's own parts). Nothing is published between.
While the shadow is ``held`` for somebody who reads it, it is not ahead: it then follows in ``advance`` alone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .codec import DamagedChunk, EncodedChunk, Encoding
from .codec.applying import ChunkDecoder
from .codec.taking import Spans, Taken, TakingEncoder, give_back
from .errors import CorruptObject, PublishError
from .memory import ALIGNMENT, address_of, aligned_copy, aligned_memory, memory_at
from .part import ChunkRow
from .patch import read_each, run_in_order, write_each
from .replay import Fetch, replay
from .snapshot import CHUNK_BYTES
from .tensors import DeviceBytes, HostBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .device import DeviceShadow
    from .digest import Hasher
    from .part import Part
    from .plan import Plan
    from .reader import Store
    from .restore import Source
    from .snapshot import Digests, Schema, TensorSpec
    from .spool import Spool
    from .tensors import TensorBytes

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Positions = np.ndarray[Any, np.dtype[np.int32]]

__all__ = ["Run", "Shadow", "Tiny", "Version", "shared_memory"]

#: Consecutive chunks of one tensor to encode: its number in schema order, its bytes, first chunk, chunk after the last.
Run = tuple[int, "TensorBytes", int, int]
#: One chunk's new bytes: its tensor's number, its own, the bytes, and the elements that changed where that is known.
Version = tuple[int, int, "Bytes", "Positions | None"]

#: Tensors of up to this many bytes are compared in batches.
TINY_BYTES = 1 << 14
#: Rows that a thread applies at a time.
_BATCH_ROWS = 8


class Tiny(NamedTuple):
    """Tiny tensors to encode: their numbers in schema order, and private copies of their bytes.

    Each begins at ``starts`` in ``data``, at a multiple of ``ALIGNMENT``.
    """

    positions: list[int]
    starts: list[int]
    data: Bytes


def shared_memory(sizes: Array) -> tuple[Bytes, Array]:
    """Return uint8 memory for arrays of ``sizes`` bytes (int64), and where each of them starts.

    Each begins a cache line: no vector load then crosses from one into the next. One piece, because NumPy asks for
    large pages where an array is large: reading is bound by the memory.
    """
    room = -(-sizes // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(room)
    return aligned_memory(int(ends[-1]) if ends.size else 0), ends - room


def _cut(digests: Digests) -> list[bytes]:
    """Return each row's bytes."""
    size, data = digests.shape[1], digests.tobytes()
    return [data[start : start + size] for start in range(0, len(data), size)]


def _in_a_row(data: Bytes, spec: TensorSpec, begin: int, stop: int) -> Bytes:
    """Return what a tensor gave for some of its bytes, or a copy, that begins where its elements may."""
    if data.size != stop - begin or not data.flags.c_contiguous:
        raise PublishError(
            f"{spec.name} gave {data.size} bytes for its bytes {begin} to {stop}, or not in a row.",
            tensors=(spec.name,),
        )
    return aligned_copy(data) if address_of(data) % spec.width else data


class Shadow:
    """One snapshot in memory: the bytes of each tensor, and the digests of all chunks."""

    def __init__(self, schema: Schema, hash_function: Hasher, *, level: str) -> None:
        self.schema = schema
        self.digests: Digests = np.zeros((schema.chunks, hash_function.size), np.uint8)
        self.hash = hash_function
        self.level = level
        sizes = np.array([spec.nbytes for spec in schema], np.int64)
        #: Whether each tensor is tiny: compared in batches.
        self.tiny = (sizes <= TINY_BYTES) & (sizes > 0)
        self._sizes = sizes
        try:
            self._memory, self._starts = shared_memory(sizes)
        except MemoryError as error:
            raise PublishError(
                f"The copy of the last snapshot takes {schema.nbytes} bytes of memory, and there are not so many.",
                hint="Publish from a host with room for the model twice.",
            ) from error
        self._widths = np.array([spec.width for spec in schema], np.int64)
        self._tensors = [
            self._memory[start : start + size]
            for start, size in zip(self._starts.tolist(), sizes.tolist(), strict=True)
        ]
        #: Whether somebody reads the committed bytes: then no version is followed before it is committed. Set between
        #: versions only.
        self.held = False
        #: Chunks that hold bytes of a version which is not committed yet.
        self._ahead = np.zeros(schema.chunks, bool)
        self._local = threading.local()
        self._device: DeviceShadow | None = None
        self._device_lock = threading.Lock()

    def load(self, store: Store, plan: Plan, source: Source | None, spool: Spool, *, workers: int) -> None:
        """Fetch a plan's parts and fill the shadow with the version that it ends at.

        A plan that neither starts from an anchor nor has a source starts from what the shadow holds.
        """
        if source is None and not plan.steps:
            return
        before = source.digests if source else self.digests
        read = source.checkpoint.read if source else read_each(self.chunk)
        with Fetch(store, plan, spool) as fetch:
            if source is None and plan.start is not None:
                # What is missing or damaged shows before anything changes: then another plan may start from here.
                for step in plan.steps:
                    for part in step.parts:
                        fetch.wait(part, step)
            write = write_each(self._store)
            self.digests = replay(fetch, before=before, read=read, write=write, workers=workers).digests

    def take(self, spec: TensorSpec, content: TensorBytes, chunk: int) -> None:
        """Take one chunk of a tensor as it is, and note its digest. May be called from several threads."""
        data = self.chunk(spec, chunk)
        data[:] = content(*spec.chunk_range(chunk))
        self.digests[self.schema.chunk_number(spec.name, chunk)] = np.frombuffer(self.hash.digest(data), np.uint8)

    def chunk(self, spec: TensorSpec, chunk: int) -> Bytes:
        """Return one chunk's bytes: the committed ones, until ``advance``, while the shadow is ``held``."""
        start, end = spec.chunk_range(chunk)
        return self._tensors[self.schema.position(spec.name)][start:end]

    def _store(self, spec: TensorSpec, chunk: int, data: Bytes) -> None:
        if self._device is not None:
            self._device.follow(self.schema.position(spec.name), spec.chunk_range(chunk)[0], data)
        self.chunk(spec, chunk)[:] = data

    # Encoding

    def _tools(self) -> threading.local:
        local = self._local
        if not hasattr(local, "encoder"):
            local.encoder, local.decoder = TakingEncoder(self.level, self.hash.name), ChunkDecoder()
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        return local

    def encode(self, runs: Sequence[Run], tiny: Tiny | None = None) -> list[ChunkRow]:
        """Compare new bytes with the shadow, encode what changed, and follow it where that can be undone.

        Called from several threads. What is raised leaves these chunks as they were; those for which even that fails
        stay ahead, so that nothing is published upon them.
        """
        rows: list[ChunkRow] = []
        try:
            if any(type(run[1]) is DeviceBytes for run in runs):
                self._encode_with_device(runs, rows)
            else:
                self._encode_runs(runs, rows)
            if tiny is not None:
                self._encode_tiny(tiny, rows)
            rows.sort()  # by tensor and chunk, of which no two are alike: those encoded one by one came last
        except BaseException:
            self._undo(rows)
            raise
        return rows

    def _encode_runs(self, runs: Iterable[Run], rows: list[ChunkRow]) -> None:
        """Encode runs that lie in the CPU's memory, those of one element width together."""
        widths: dict[int, list[tuple[int, ...]]] = {}  # columns as for ``_encode_spans``
        held: list[object] = []
        for position, content, first, end in runs:
            spec = self.schema.tensors[position]
            begin, stop = first * CHUNK_BYTES, spec.chunk_range(end - 1)[1]
            address = content.at(begin) if type(content) is HostBytes else None
            if address is None or address % spec.width:
                held.append(new := _in_a_row(content(begin, stop), spec, begin, stop))
                address = address_of(new)
            else:
                held.append(content)
            start, address, number = (
                int(self._starts[position]),
                address - begin,
                int(self.schema.first_chunk[position]),
            )
            found = widths.setdefault(spec.width, [])
            for chunk in range(first, end):
                offset = chunk * CHUNK_BYTES
                size = min(offset + CHUNK_BYTES, stop) - offset
                found.append((start + offset, address + offset, size, position, chunk, number + chunk))
        for width, found in widths.items():
            self._encode_spans(Spans(self._memory, np.array(found, np.int64), width, CHUNK_BYTES), held, rows)

    def _encode_spans(self, spans: Spans, owner: object, rows: list[ChunkRow]) -> None:
        """Encode chunks of one width: together where they can be followed, and where much changed one by one.

        Three more columns of their table: a chunk's tensor, its number there, and among all. ``owner`` keeps their new
        bytes where they are.
        """
        one_by_one: list[int] = []
        places, numbers = spans.table[:, 3:5].tolist(), spans.table[:, 5]
        if self._follows:
            # Ahead until it is known what became of them: whatever fails meanwhile, nothing is published upon them.
            self._ahead[numbers] = True
            for taken in self._tools().encoder.take_spans(spans):
                within = slice(taken.first, taken.first + len(taken.changed))
                try:
                    rows += self._rows(taken, numbers[within], places[within])
                except BaseException:
                    give_back(spans, taken, self._tools().decoder)
                    self._ahead[numbers[taken.first :]] = False
                    raise
                self._ahead[numbers[within]] = taken.changed > 0
                if taken.changed.min() < 0:
                    one_by_one += (taken.first + np.flatnonzero(taken.changed < 0)).tolist()
        else:
            one_by_one += range(len(places))
        for index in one_by_one:
            _, address, size, tensor, chunk, _ = spans.table[index].tolist()
            row = self._encode(tensor, chunk, memory_at(address, size, owner), None)
            if row is not None:
                rows.append(row)

    def _rows(self, taken: Taken, numbers: Array, places: list[list[int]]) -> list[ChunkRow]:
        """Return the rows of the chunks, with these numbers and at these places, that were taken.

        Python's own numbers and loops: after a batch the caches have neither these nor NumPy's code, of which each
        further call costs some twenty microseconds.
        """
        counts, ends = taken.changed.tolist(), taken.ends.tolist()
        old_digests = _cut(self.digests[numbers])
        new_digests = _cut(taken.digests) if taken.digests is not None else None
        rows = []
        begin = 0
        for index, (tensor, chunk) in enumerate(places):
            count, end = counts[index], ends[index]
            if count > 0:
                encoded = EncodedChunk(taken.encoding(count), count, taken.payloads[begin:end].tobytes())
                if new_digests is not None:
                    new = new_digests[index]
                else:
                    new = self.hash.digest(self.chunk(self.schema.tensors[tensor], chunk))
                rows.append(ChunkRow(tensor, chunk, encoded, old_digests[index], new))
            begin = end
        return rows

    def _encode(self, position: int, chunk: int, given: Bytes, where: Positions | None) -> ChunkRow | None:
        encoder, spec = self._tools().encoder, self.schema.tensors[position]
        number = int(self.schema.first_chunk[position]) + chunk
        start = chunk * CHUNK_BYTES
        old = self._tensors[position][start : start + CHUNK_BYTES]
        if where is not None:
            encoded, new = encoder.change_at(old, given, where, width=spec.width), given
        elif not self._follows:
            encoded = encoder.change(old, given, width=spec.width)
            new = encoder.kept
        else:
            encoded = encoder.take(old, given, width=spec.width)
            self._ahead[number] = encoded is not None and encoded.encoding != Encoding.FULL
            new = encoder.kept
        if encoded is None:
            return None
        return ChunkRow(position, chunk, encoded, self.digests[number].tobytes(), self.hash.digest(new))

    @property
    def _follows(self) -> bool:
        """Whether chunks are followed while they are encoded; else they are when the version is committed.

        Copies on a device are one reason not to: they follow by changed elements only.
        """
        return self._device is None and not self.held

    def _encode_tiny(self, tiny: Tiny, rows: list[ChunkRow]) -> None:
        tensors, starts = np.array(tiny.positions, np.int64), np.array(tiny.starts, np.int64)
        for width in np.unique(self._widths[tensors]).tolist():
            of_width = self._widths[tensors] == width
            chosen = tensors[of_width]
            columns = (
                *(self._starts[chosen], address_of(tiny.data) + starts[of_width], self._sizes[chosen]),
                *(chosen, np.zeros_like(chosen), self.schema.first_chunk[chosen]),
            )
            self._encode_spans(Spans(self._memory, np.stack(columns, axis=1), width, TINY_BYTES), tiny.data, rows)

    def _encode_with_device(self, runs: Sequence[Run], rows: list[ChunkRow]) -> None:
        """Encode runs some of which lie on a device: where those changed is found there, for all of them together."""
        device, buffer = self._device_shadow(), self._tools().buffer
        changes = device.compare(runs)
        for run, found in zip(runs, changes, strict=True):
            if type(run[1]) is not DeviceBytes:
                self._encode_runs([run], rows)
                continue
            for version in device.versions(run, found, buffer):
                row = self._encode(*version)
                if row is not None:
                    rows.append(row)

    def _device_shadow(self) -> DeviceShadow:
        with self._device_lock:
            if self._device is None:
                from .device import DeviceShadow  # noqa: PLC0415 - torch is there: it made the tensors

                self._device = DeviceShadow(self.schema, self._tensors)
            return self._device

    # Following, and going back

    def advance(self, parts: Callable[[], Iterable[Part]], digests: Digests, *, workers: int) -> None:
        """Become the version that was committed: ``parts`` are its own, asked for only if some was not followed yet."""
        if (self.digests != digests).any(axis=1).sum() != self._ahead.sum():
            self._apply(parts(), backwards=False, workers=workers)
        self.digests = digests
        self._ahead[:] = False

    def take_back(self, parts: Iterable[Part], *, workers: int) -> None:
        """Become the last committed version again, out of the parts of the attempt that is given up.

        May be called again after it was interrupted. Raises ``CorruptObject`` when the old bytes cannot be had.
        """
        self._apply(parts, backwards=True, workers=workers)
        if self._ahead.any():
            raise CorruptObject("Some chunks of the shadow were followed, but what was done to them is not known.")

    def _undo(self, rows: Sequence[ChunkRow]) -> None:
        for row in rows:
            number = int(self.schema.first_chunk[row.tensor]) + row.chunk
            if self._ahead[number]:
                stored = row.encoded.encoding, row.encoded.changed, memoryview(row.encoded.payload)
                self._rebuild(row.tensor, row.chunk, *stored, row.old_digest, backwards=True, key=None)

    def _apply(self, parts: Iterable[Part], *, backwards: bool, workers: int) -> None:
        """Lead the chunks that are ahead back, or those that are not yet there forward, each one hash-checked."""

        def batches() -> Iterator[tuple[Part, list[int]]]:
            for part in parts:
                rows = np.flatnonzero(self._ahead[part.numbers] == backwards).tolist()
                yield from ((part, rows[first : first + _BATCH_ROWS]) for first in range(0, len(rows), _BATCH_ROWS))

        def apply(batch: tuple[Part, list[int]]) -> None:
            part, rows = batch
            for row in rows:
                tensor, chunk = int(part.tensor[row]), int(part.chunk[row])
                stored = int(part.encoding[row]), int(part.changed[row]), part.chunk_payload(row)
                digest = (part.old_digests if backwards else part.new_digests)[row].tobytes()
                self._rebuild(tensor, chunk, *stored, digest, backwards=backwards, key=part.key)

        for _ in run_in_order(apply, batches(), workers=workers, name="shadow"):
            pass

    def _rebuild(
        self,
        position: int,
        chunk: int,
        encoding: int,
        changed: int,
        payload: memoryview,
        digest: bytes,
        *,
        backwards: bool,
        key: str | None,
    ) -> None:
        """Lead one chunk to the bytes with this digest."""
        local, spec = self._tools(), self.schema.tensors[position]
        start, stop = spec.chunk_range(chunk)
        out = local.buffer[: stop - start]
        np.copyto(out, self._tensors[position][start:stop])
        try:
            local.decoder.apply(out, encoding, changed, payload, width=spec.width, inverse=backwards)
        except DamagedChunk as error:
            raise CorruptObject(f"Chunk {chunk} of {spec.name!r} cannot be applied: {error}.", key=key) from error
        if self.hash.digest(out) != digest:
            raise CorruptObject(f"Chunk {chunk} of {spec.name!r} leads to wrong bytes.", key=key)
        self._store(spec, chunk, out)
        self._ahead[int(self.schema.first_chunk[position]) + chunk] = not backwards
