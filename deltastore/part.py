"""Parts: encoded chunks and their table in one safetensors container. Pure.

A part is an ordinary safetensors file: one tensor for each column of the chunk table, and ``payload`` with the encoded
chunks back to back (docs/format.md, section 5). Columns stay arrays: a part of a million rows costs no objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .codec import Encoding
from .container import build_header, parse_header
from .errors import CorruptObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .codec import EncodedChunk
    from .digest import Hasher
    from .snapshot import Digests, Schema
    from .storage.base import Buffer

    Column = np.ndarray[Any, np.dtype[np.uint32]]

__all__ = ["ChunkRow", "Part", "PartIdentity", "build_part", "parse_part", "table_size"]

_FORMAT = "deltastore.part/1"
#: How many tensors a part has: no more and no less.
_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class PartIdentity:
    """Whose part it is: written into its metadata, and compared when it is read."""

    stream_id: str
    version: int
    attempt_id: str
    component: str

    def metadata(self) -> dict[str, str]:
        """Return the container's metadata."""
        return {
            "format": _FORMAT,
            "stream_id": self.stream_id,
            "version": str(self.version),
            "attempt_id": self.attempt_id,
            "component": self.component,
        }


class ChunkRow(NamedTuple):
    """One encoded chunk on its way into a part.

    ``tensor`` is the tensor's number in schema order; ``old_digest`` is empty where there is no old chunk (anchors).
    """

    tensor: int
    chunk: int
    encoded: EncodedChunk
    old_digest: bytes
    new_digest: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A parsed part. All columns have one row an encoded chunk, in ascending order of (tensor, chunk).

    ``numbers``: int64, the chunk's number in schema order; ``starts``: int64, shape (rows + 1,), offsets into
    ``payload``, which itself begins at byte ``payload_start`` of the object; ``old_digests``, ``new_digests``: uint8
    of shape (rows, digest size), old ones all zero where there is no old chunk.
    """

    key: str
    tensor: Column
    chunk: Column
    numbers: np.ndarray[Any, np.dtype[np.int64]]
    encoding: np.ndarray[Any, np.dtype[np.uint8]]
    changed: Column
    old_digests: Digests
    new_digests: Digests
    starts: np.ndarray[Any, np.dtype[np.int64]]
    payload: memoryview
    payload_start: int

    def __len__(self) -> int:
        return len(self.tensor)

    def chunk_payload(self, row: int) -> memoryview:
        """Return the stored bytes of one row's chunk."""
        return self.payload[int(self.starts[row]) : int(self.starts[row + 1])]

    def chunk_range(self, row: int) -> tuple[int, int]:
        """Return the first byte of one row's stored chunk and the byte after its last, from the object's start."""
        return self.payload_start + int(self.starts[row]), self.payload_start + int(self.starts[row + 1])


def build_part(rows: Sequence[ChunkRow], identity: PartIdentity, *, digest_size: int) -> bytes:
    """Build a part from encoded chunks, in any order; each (tensor, chunk) at most once."""
    ordered = sorted(rows, key=lambda row: (row.tensor, row.chunk))
    count = len(ordered)
    absent = bytes(digest_size)
    columns: list[tuple[str, str, tuple[int, ...], bytes]] = [
        ("tensor", "U32", (count,), np.array([row.tensor for row in ordered], "<u4").tobytes()),
        ("chunk", "U32", (count,), np.array([row.chunk for row in ordered], "<u4").tobytes()),
        ("changed", "U32", (count,), np.array([row.encoded.changed for row in ordered], "<u4").tobytes()),
        ("length", "U32", (count,), np.array([len(row.encoded.payload) for row in ordered], "<u4").tobytes()),
        ("encoding", "U8", (count,), bytes(row.encoded.encoding for row in ordered)),
        ("old_digest", "U8", (count, digest_size), b"".join(row.old_digest or absent for row in ordered)),
        ("new_digest", "U8", (count, digest_size), b"".join(row.new_digest for row in ordered)),
    ]
    payload_size = sum(len(row.encoded.payload) for row in ordered)
    header = build_header(
        [*((name, dtype, shape) for name, dtype, shape, _ in columns), ("payload", "U8", (payload_size,))],
        identity.metadata(),
    )
    return b"".join([header, *(data for *_, data in columns), *(row.encoded.payload for row in ordered)])


def table_size(prefix: Buffer, *, key: str) -> int:
    """Return how many bytes a part's header and table take, from at least its header.

    They are the object's first bytes, and all that has to be read to find a chunk in it. Raises ``CorruptObject``
    when its payload does not stand last.
    """
    last = parse_header(prefix, key=key).tensors[-1:]
    if not last or last[0].spec.name != "payload":
        raise CorruptObject(f"{key} does not end with its payload.", key=key)
    return last[0].start


def parse_part(
    data: Buffer,
    identity: PartIdentity,
    schema: Schema,
    hash_function: Hasher,
    *,
    key: str,
    table_only: bool = False,
) -> Part:
    """Parse a part strictly; raises ``CorruptObject`` naming ``key`` when anything is off.

    The returned arrays are read-only views of ``data``. ``table_only``: ``data`` are only the first ``table_size``
    bytes, and the part has no payload.
    """
    view = memoryview(data)
    header = parse_header(view, key=key)
    expected = table_size(view, key=key) if table_only else header.file_size
    if expected != len(view):
        raise CorruptObject(f"{key} has {len(view)} bytes; its header describes {expected}.", key=key)
    if header.metadata != identity.metadata():
        raise CorruptObject(f"{key} is not the part that it is named as: {dict(header.metadata)}.", key=key)
    columns = {placed.spec.name: placed for placed in header.tensors}

    def column(name: str, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
        placed = columns.get(name)
        if placed is None or placed.spec.dtype != dtype or placed.spec.shape != shape:
            raise CorruptObject(f"{key} has no column {name!r} of {dtype}{list(shape)}.", key=key)
        raw = np.frombuffer(view[placed.start : placed.end], np.uint8)
        raw.flags.writeable = False
        return raw.view("<u4") if dtype == "U32" else raw.reshape(shape)

    if "tensor" not in columns or "payload" not in columns or len(columns) != _COLUMNS:
        raise CorruptObject(f"{key} is a safetensors file, but not a part.", key=key)
    count = columns["tensor"].spec.shape[0] if columns["tensor"].spec.shape else 0
    size = hash_function.size
    payload = columns["payload"]
    lengths = column("length", "U32", count)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if starts[-1] != payload.spec.nbytes:
        raise CorruptObject(f"{key} has a payload of another length than its table says.", key=key)
    if payload.spec.dtype != "U8" or payload.spec.shape != (payload.spec.nbytes,):
        raise CorruptObject(f"{key} has no column 'payload' of U8.", key=key)
    tensor, chunk = column("tensor", "U32", count), column("chunk", "U32", count)
    encoding = column("encoding", "U8", count)
    if count and not (encoding.min() >= Encoding.SPARSE and encoding.max() <= max(Encoding)):
        raise CorruptObject(f"{key} has a chunk of an unknown encoding.", key=key)
    return Part(
        key=key,
        tensor=tensor,
        chunk=chunk,
        numbers=_chunk_numbers(tensor, chunk, schema, key),
        encoding=encoding,
        changed=column("changed", "U32", count),
        old_digests=column("old_digest", "U8", count, size),
        new_digests=column("new_digest", "U8", count, size),
        starts=starts,
        payload=view[payload.start : payload.end],
        payload_start=payload.start,
    )


def _chunk_numbers(tensor: Column, chunk: Column, schema: Schema, key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not len(tensor):
        return np.zeros(0, np.int64)
    if tensor.max() >= len(schema):
        raise CorruptObject(f"{key} changes a tensor that the schema does not have.", key=key)
    numbers = schema.first_chunk[tensor] + chunk
    if (numbers >= schema.first_chunk[tensor.astype(np.int64) + 1]).any():
        raise CorruptObject(f"{key} changes a chunk beyond the end of its tensor.", key=key)
    if (np.diff(numbers) <= 0).any():
        raise CorruptObject(f"{key} has its chunks out of order, or one twice.", key=key)
    return numbers
