"""Differences as streams: signs, and byte planes of magnitudes less one (docs/format.md, section 4). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import kernels

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["pack_differences", "unpack_differences"]


def pack_differences(pieces: list[bytes], differences: Array, streams: StreamWriter) -> None:
    """Append the streams of ``differences`` (none of them zero) to ``pieces``."""
    differences.flags.writeable = False
    signs = np.empty(differences.size, np.uint8)
    planes = np.empty((differences.itemsize, differences.size), np.uint8)
    kernels.split_differences(differences, signs, planes)
    for stream in (np.packbits(signs, bitorder="little"), *planes):
        streams.append(pieces, stream)


def unpack_differences(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` differences of an unsigned ``dtype``, read-only."""
    signs = np.unpackbits(reader.next((count + 7) // 8), count=count, bitorder="little")
    planes = reader.next_planes(dtype.itemsize, count)
    differences = np.empty(count, dtype)
    kernels.join_differences(signs, planes, differences)
    differences.flags.writeable = False
    return differences
