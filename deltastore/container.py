"""The safetensors container: parsing a file's header strictly, and building one. Pure.

Layout (the safetensors specification): u64le header length, a JSON header padded with spaces, then the tensors'
bytes. A header is trusted with nothing: lengths are capped, offsets checked, and the data must be covered without
holes or overlaps.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .errors import CorruptObject
from .snapshot import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .storage.base import Buffer

__all__ = ["MAX_HEADER_BYTES", "Header", "Placed", "build_header", "header_size", "parse_header"]

#: The safetensors library's own limit.
MAX_HEADER_BYTES = 100_000_000

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and where its bytes begin in the file (from the file's start)."""

    spec: TensorSpec
    start: int

    @property
    def end(self) -> int:
        """The byte after the tensor's last, from the file's start."""
        return self.start + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: its tensors in file order, its metadata, its own size and the whole file's, in bytes."""

    tensors: tuple[Placed, ...]
    metadata: Mapping[str, str]
    size: int
    file_size: int


def header_size(prefix: Buffer, *, key: str) -> int:
    """Return the size of a header with its length field, in bytes, from the file's first 8 bytes."""
    if len(prefix) < _LENGTH.size:
        raise CorruptObject(f"{key} is not a safetensors file: it ends within its first 8 bytes.", key=key)
    (length,) = _LENGTH.unpack_from(prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CorruptObject(f"{key} is not a safetensors file: it claims a header of {length} bytes.", key=key)
    return _LENGTH.size + int(length)


def parse_header(data: Buffer, *, key: str) -> Header:
    """Parse a header from the start of ``data``; raises ``CorruptObject`` naming ``key`` when anything is off."""
    size = header_size(data, key=key)
    if len(data) < size:
        raise CorruptObject(f"{key} is cut short: its header of {size} bytes is incomplete.", key=key)
    text = bytes(data[_LENGTH.size : size])
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata: dict[str, str] = {}
        if _METADATA in entries:
            metadata = msgspec.json.decode(entries.pop(_METADATA), type=dict[str, str])
        parsed = [(name, msgspec.json.decode(entry, type=_Entry)) for name, entry in entries.items()]
        # A name that comes twice would be read one way here and another way elsewhere; msgspec keeps the last.
        json.loads(text, object_pairs_hook=_distinct, parse_int=_natural)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptObject(f"{key} has a damaged safetensors header: {error}.", key=key) from error
    parsed.sort(key=lambda item: item[1].data_offsets)
    position = 0
    tensors = []
    for name, entry in parsed:
        try:
            spec = TensorSpec(name, entry.dtype, entry.shape)
        except CorruptObject as error:
            raise CorruptObject(f"{key} has a damaged safetensors header: {error}", key=key) from error
        start, end = entry.data_offsets
        if start != position or end - start != spec.nbytes:
            raise CorruptObject(
                f"{key} places {name!r} at bytes {start} to {end}; it needs {spec.nbytes} bytes at {position}.", key=key
            )
        position = end
        tensors.append(Placed(spec, size + start))
    return Header(tuple(tensors), metadata, size, size + position)


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _natural(digits: str) -> None:
    if digits.startswith("-"):
        raise ValueError(f"the number {digits[:20]} is negative")


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Build the header of a file that holds ``(name, dtype, shape)`` back to back in this order."""
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        end = position + TensorSpec(name, dtype, shape).nbytes
        entries[name] = _Entry(dtype, shape, (position, end))
        position = end
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % 8)
    return _LENGTH.pack(len(encoded)) + encoded
