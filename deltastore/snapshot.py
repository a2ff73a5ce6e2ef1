"""Tensor schemas, the chunk grid, and the hash tree that names a snapshot. Pure.

A snapshot is the exact bytes of every tensor at one moment. Its ``snapshot_id`` depends on names, dtypes, shapes and
bytes alone: not on how files are split, nor on any option of the writer. docs/format.md, section 2, has the layout.
"""

from __future__ import annotations

import math
import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .errors import CorruptObject, UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .digest import Hasher
    from .storage.base import Buffer

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "ChunkRun",
    "ChunkSpan",
    "Digests",
    "Dtype",
    "Schema",
    "TensorSpec",
    "chunk_batches",
    "chunk_spans",
    "snapshot_id",
    "tensor_digests",
]

#: The chunk grid of format version 1, in bytes; the last chunk of a tensor may be shorter.
CHUNK_BYTES = 1 << 21

_BATCH_RUNS = 256
_SPAN_CHUNKS = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_NAME_BYTES = 1024
MAX_RANK = 64
MAX_TENSOR_BYTES = 1 << 48
MAX_TENSORS = 1 << 22

#: Chunk digests of a whole snapshot: uint8 of shape (chunks, digest size), in schema order.
Digests = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A safetensors dtype: bits an element takes, and the codec's element width in bytes."""

    bits: int
    width: int


#: Every dtype that safetensors knows. Floats are compared by their own width, everything else byte by byte.
DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, 1),
    "F4": Dtype(4, 1),
    "F6_E2M3": Dtype(6, 1),
    "F6_E3M2": Dtype(6, 1),
    "U8": Dtype(8, 1),
    "I8": Dtype(8, 1),
    "F8_E5M2": Dtype(8, 1),
    "F8_E4M3": Dtype(8, 1),
    "F8_E8M0": Dtype(8, 1),
    "F8_E4M3FNUZ": Dtype(8, 1),
    "F8_E5M2FNUZ": Dtype(8, 1),
    "I16": Dtype(16, 1),
    "U16": Dtype(16, 1),
    "F16": Dtype(16, 2),
    "BF16": Dtype(16, 2),
    "I32": Dtype(32, 1),
    "U32": Dtype(32, 1),
    "F32": Dtype(32, 4),
    "C64": Dtype(64, 4),
    "F64": Dtype(64, 8),
    "I64": Dtype(64, 1),
    "U64": Dtype(64, 1),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named array: its safetensors dtype, its shape, and the codec's element width in bytes (1, 2, 4 or 8).

    Raises ``CorruptObject`` when a field is outside the format's limits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        known = DTYPES.get(self.dtype)
        if known is None:
            raise CorruptObject(
                f"Tensor {self.name!r} has the dtype {self.dtype!r}, which safetensors does not know.", key=self.name
            )
        _check_name(self.name)
        if len(self.shape) > MAX_RANK or any(not 0 <= size < 1 << 64 for size in self.shape):
            raise CorruptObject(f"Tensor {self.name!r} has an impossible shape {self.shape}.", key=self.name)
        bits = math.prod(self.shape) * known.bits
        if bits % 8 or bits // 8 > MAX_TENSOR_BYTES:
            raise CorruptObject(f"Tensor {self.name!r} does not fill whole bytes within the limits.", key=self.name)
        width = self.width or known.width
        if width not in (1, 2, 4, 8) or (bits // 8) % width:
            raise CorruptObject(f"Tensor {self.name!r} has the impossible element width {width}.", key=self.name)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "nbytes", bits // 8)

    @property
    def chunks(self) -> int:
        """How many chunks the tensor's bytes make: 0 for an empty tensor."""
        return -(-self.nbytes // CHUNK_BYTES)

    @property
    def elements(self) -> int:
        """How many elements the codec sees: bytes over width."""
        return self.nbytes // self.width

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the first byte of a chunk and the byte after its last, within the tensor."""
        start = chunk * CHUNK_BYTES
        return start, min(start + CHUNK_BYTES, self.nbytes)


def _check_name(name: str) -> None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise CorruptObject(f"The tensor name {name!r} is not valid Unicode.", key=name) from None
    if not 0 < len(encoded) <= MAX_NAME_BYTES or _CONTROL.search(name):
        raise CorruptObject(f"The tensor name {name[:80]!r} is empty, too long, or has control characters.", key=name)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive chunks of one tensor.

    Chunks ``first`` to ``end`` (exclusive); ``number`` is the first one's in schema order.
    """

    spec: TensorSpec
    number: int
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of these chunks together."""
        return self.spec.chunk_range(self.end - 1)[1] - self.first * CHUNK_BYTES


class _TensorRow(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int


class _SchemaRecord(msgspec.Struct, frozen=True):
    format: int
    tensors: tuple[_TensorRow, ...]


class Schema:
    """The tensors of one component, in ascending order of their names' UTF-8 bytes.

    ``first_chunk`` has shape (tensors + 1,), int64: the number in schema order of each tensor's first chunk. ``sizes``
    and ``widths`` have shape (tensors,), int64: each tensor's bytes, and its elements' width in bytes.
    """

    __slots__ = ("_heads", "_positions", "first_chunk", "sizes", "tensors", "widths")

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors: tuple[TensorSpec, ...] = tuple(sorted(tensors, key=lambda spec: spec.name.encode()))
        if len(self.tensors) > MAX_TENSORS:
            raise CorruptObject(f"A schema of {len(self.tensors)} tensors is over the limit of {MAX_TENSORS}.")
        self._positions = {spec.name: position for position, spec in enumerate(self.tensors)}
        if len(self._positions) != len(self.tensors):
            raise CorruptObject("The schema names a tensor twice.")
        self.first_chunk = np.zeros(len(self.tensors) + 1, np.int64)
        self.sizes = np.array([spec.nbytes for spec in self.tensors], np.int64)
        self.widths = np.array([spec.width for spec in self.tensors], np.int64)
        np.cumsum(-(-self.sizes // CHUNK_BYTES), out=self.first_chunk[1:])
        self._heads: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def __getitem__(self, name: str) -> TensorSpec:
        return self.tensors[self._positions[name]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.tensors == other.tensors

    def __hash__(self) -> int:
        return hash(self.tensors)

    def get(self, name: str) -> TensorSpec | None:
        """Return a tensor's spec, or ``None`` for an unknown name."""
        position = self._positions.get(name)
        return None if position is None else self.tensors[position]

    def position(self, name: str) -> int:
        """Return a tensor's number in schema order; raises ``KeyError`` for an unknown name."""
        return self._positions[name]

    def chunk_number(self, name: str, chunk: int) -> int:
        """Return the number in schema order of one chunk of one tensor."""
        return int(self.first_chunk[self._positions[name]]) + chunk

    @property
    def chunks(self) -> int:
        """How many chunks all tensors make together."""
        return int(self.first_chunk[-1])

    @property
    def nbytes(self) -> int:
        """How many bytes all tensors take together."""
        return int(self.sizes.sum())

    @property
    def elements(self) -> int:
        """How many elements, as the codec sees them, all tensors have together."""
        return sum(spec.elements for spec in self.tensors)

    def heads(self) -> list[bytes]:
        """Return what is hashed before each tensor's chunk digests: its name, dtype, shape and number of chunks."""
        if self._heads is None:
            counts = np.diff(self.first_chunk).tolist()
            self._heads = [_head(spec, count) for spec, count in zip(self.tensors, counts, strict=True)]
        return self._heads

    def to_json(self) -> bytes:
        """Return the canonical JSON of this schema."""
        rows = tuple(_TensorRow(spec.name, spec.dtype, spec.shape, spec.width) for spec in self.tensors)
        return msgspec.json.encode(_SchemaRecord(1, rows), order="sorted")

    @classmethod
    def from_json(cls, data: Buffer, *, key: str) -> Schema:
        """Parse a schema object strictly; raises ``CorruptObject`` or ``UnsupportedFormat`` naming ``key``."""
        try:
            record = msgspec.json.decode(str(data, "utf-8"), type=_SchemaRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptObject(f"The schema {key} is damaged: {error}.", key=key) from error
        if record.format != 1:
            raise UnsupportedFormat(f"The schema {key} has the format {record.format}; this release knows 1.", key=key)
        if any(row.width == 0 for row in record.tensors):
            raise CorruptObject(f"The schema {key} has a tensor without an element width.", key=key)
        try:
            schema = cls(TensorSpec(row.name, row.dtype, row.shape, row.width) for row in record.tensors)
        except CorruptObject as error:
            raise CorruptObject(f"The schema {key} is damaged: {error}", key=key) from error
        if any(row.name != spec.name for row, spec in zip(record.tensors, schema, strict=True)):
            raise CorruptObject(f"The schema {key} has its tensors out of order.", key=key)
        return schema

    def differences(self, other: Schema) -> list[str]:
        """Say, a line a tensor, how ``other`` differs from this schema in names, dtypes and shapes."""
        lines = []
        for spec in self.tensors:
            if spec.name not in other:
                lines.append(f"{spec.name} is missing")
            elif (found := other[spec.name]).dtype != spec.dtype or found.shape != spec.shape:
                wanted = f"{spec.dtype}{list(spec.shape)}"
                lines.append(f"{spec.name} is {found.dtype}{list(found.shape)} instead of {wanted}")
        lines.extend(f"{spec.name} is unknown" for spec in other.tensors if spec.name not in self)
        return lines


def chunk_batches(
    schema: Schema, *, low: int = 0, high: int | None = None, batch_bytes: int = 8 << 20
) -> Iterator[list[ChunkRun]]:
    """Cut chunks ``low`` to ``high`` (exclusive) into batches of about ``batch_bytes``, in schema order.

    A batch is a thread's share of work: a piece of a large tensor, or a few hundred tiny ones.
    """
    most = max(1, batch_bytes // CHUNK_BYTES)
    stop = schema.chunks if high is None else high
    batch: list[ChunkRun] = []
    size = 0
    position = int(np.searchsorted(schema.first_chunk, low, side="right")) - 1
    number = low
    while number < stop:
        spec, begin = schema.tensors[position], int(schema.first_chunk[position])
        end = min(begin + spec.chunks, stop, number + most)
        if end > number:
            run = ChunkRun(spec, number, number - begin, end - begin)
            batch.append(run)
            size += run.nbytes
            number = end
        if number >= begin + spec.chunks:
            position += 1
        if size >= batch_bytes or len(batch) >= _BATCH_RUNS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSpan:
    """Chunks in ascending order whose bytes share one buffer: one large or a few, or many tiny ones.

    Each field has one int64 a chunk: ``numbers`` in schema order, ``tensors`` in schema order too, ``chunks`` within
    its tensor, and where it begins and ends in the buffer: ``starts``, aligned to the element width, and ``stops``.
    """

    schema: Schema
    numbers: Numbers
    tensors: Numbers
    chunks: Numbers
    starts: Numbers
    stops: Numbers

    @property
    def nbytes(self) -> int:
        """How much of the buffer is taken, in bytes."""
        return int(self.stops[-1])

    @property
    def content_bytes(self) -> int:
        """The bytes of all its chunks: less than ``nbytes`` where some lie between chunks of unlike widths."""
        return self.nbytes if len(self.numbers) == 1 else int((self.stops - self.starts).sum())

    def __iter__(self) -> Iterator[tuple[TensorSpec, int, int, int]]:
        """Yield each chunk's tensor, its number in it, and where it begins and ends in the buffer."""
        columns = (column.tolist() for column in (self.tensors, self.chunks, self.starts, self.stops))
        for tensor, chunk, start, stop in zip(*columns, strict=True):
            yield self.schema.tensors[tensor], chunk, start, stop


def chunk_spans(schema: Schema, numbers: Numbers, *, nbytes: int = CHUNK_BYTES) -> Iterator[ChunkSpan]:
    """Cut chunks, int64 numbers in ascending order, into spans of up to ``nbytes``, as few as hold them all."""
    for first in range(0, len(numbers), _SPAN_CHUNKS):
        block = numbers[first : first + _SPAN_CHUNKS]
        tensors = np.searchsorted(schema.first_chunk, block, side="right") - 1
        chunks = block - schema.first_chunk[tensors]
        sizes = np.minimum(schema.sizes[tensors] - chunks * CHUNK_BYTES, CHUNK_BYTES)
        # Sizes are multiples of their own widths: nothing is padded, so neighbours stay neighbours, unless widths mix.
        width = schema.widths[tensors].max()
        ends = np.zeros(len(block) + 1, np.int64)
        np.cumsum(-(-sizes // width) * width, out=ends[1:])
        bounds = ends.tolist()
        low = 0
        while low < len(block):
            high = bisect_right(bounds, bounds[low] + nbytes) - 1
            chosen = slice(low, high)
            starts = ends[chosen] - bounds[low]
            yield ChunkSpan(schema, block[chosen], tensors[chosen], chunks[chosen], starts, starts + sizes[chosen])
            low = high


def tensor_digests(schema: Schema, chunk_digests: Digests, hash_function: Hasher) -> list[bytes]:
    """Return the digest of each tensor, in schema order: its name, dtype, shape and chunk digests, hashed.

    ``chunk_digests``: uint8 of shape (schema.chunks, hash_function.size).
    """
    if chunk_digests.shape != (schema.chunks, hash_function.size):
        raise CorruptObject(
            f"A digest table of shape {chunk_digests.shape} does not fit a schema of {schema.chunks} chunks."
        )
    data = chunk_digests.tobytes()
    ends = (schema.first_chunk * hash_function.size).tolist()
    digest = hash_function.digest
    return [digest(head + data[start:end]) for head, (start, end) in zip(schema.heads(), pairwise(ends), strict=True)]


def _head(spec: TensorSpec, chunks: int) -> bytes:
    name, dtype = spec.name.encode(), spec.dtype.encode()
    return struct.pack(
        f"<20sI{len(name)}sB{len(dtype)}sI{len(spec.shape)}QQ",
        b"deltastore/tensor/1\0",
        len(name),
        name,
        len(dtype),
        dtype,
        len(spec.shape),
        *spec.shape,
        chunks,
    )


def snapshot_id(schema: Schema, chunk_digests: Digests, hash_function: Hasher) -> str:
    """Return the id of the snapshot with these chunk digests: the root of the hash tree, as ``hash:hex``."""
    nodes = tensor_digests(schema, chunk_digests, hash_function)
    head = struct.pack("<22sQ", b"deltastore/snapshot/1\0", len(nodes))
    return hash_function.of(head + b"".join(nodes))
