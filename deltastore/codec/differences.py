"""Changes as streams: gaps, signs, and byte planes of magnitudes less one (docs/format.md, section 4). Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from . import kernels

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["GAPS", "pack_changes", "pack_differences", "unpack_differences"]

#: The length of the gaps.
GAPS = struct.Struct("<I")


def pack_differences(pieces: list[bytes], differences: Array, streams: StreamWriter) -> None:
    """Append the streams of ``differences`` (none of them zero) to ``pieces``."""
    differences.flags.writeable = False
    signs, planes, zeros = _take_apart(differences)
    kernels.split_differences(differences, signs, planes, zeros[1:])
    for stream, count in zip((signs, *planes), zeros[1:].tolist(), strict=True):
        streams.append(pieces, stream, zeros=count)


def pack_changes(positions: Array, differences: Array, gaps: Array, streams: StreamWriter) -> list[bytes]:
    """Return the streams of changes at ``positions`` (int32, ascending), the gaps' length before them.

    ``gaps``: uint8, scratch (positions + last position // 255 + 1,).
    """
    signs, planes, zeros = _take_apart(differences)
    gaps = gaps[: kernels.split_changes(positions, differences, gaps, signs, planes, zeros)]
    pieces = [GAPS.pack(gaps.size)]
    for stream, count in zip((gaps, signs, *planes), zeros.tolist(), strict=True):
        streams.append(pieces, stream, zeros=count)
    return pieces


def _take_apart(differences: Array) -> tuple[Array, Array, Array]:
    """Return room for signs, planes, and the number of zeros in gaps, signs and each plane."""
    count, width = differences.size, differences.itemsize
    return np.empty((count + 7) // 8, np.uint8), np.empty((width, count), np.uint8), np.empty(2 + width, np.int64)


def unpack_differences(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` differences of an unsigned ``dtype``, read-only."""
    signs = reader.next((count + 7) // 8)
    differences = np.empty(count, dtype)
    kernels.join_differences(signs, reader.next_planes(dtype.itemsize, count), differences)
    differences.flags.writeable = False
    return differences
