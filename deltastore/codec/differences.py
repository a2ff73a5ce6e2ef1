"""Differences as streams: signs, and byte planes of magnitudes less one (docs/format.md, section 4). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import kernels

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["pack_differences", "read_difference_planes", "unpack_differences"]


def pack_differences(pieces: list[bytes], differences: Array, streams: StreamWriter) -> None:
    """Append the streams of ``differences`` (none of them zero) to ``pieces``."""
    differences.flags.writeable = False
    signs, magnitudes = np.empty(differences.size, np.uint8), np.empty_like(differences)
    kernels.split_signs(differences, signs, magnitudes)
    magnitudes.flags.writeable = False
    planes = np.empty((differences.itemsize, differences.size), np.uint8)
    kernels.split_planes(magnitudes, planes)
    for stream in (np.packbits(signs, bitorder="little"), *planes):
        streams.append(pieces, stream)


def read_difference_planes(reader: StreamReader, count: int, width: int) -> tuple[Array, Array]:
    """Return packed signs, uint8 ((count + 7) // 8,), and magnitude planes, uint8 (width, count)."""
    signs = reader.next((count + 7) // 8)
    planes = np.empty((width, count), np.uint8)
    for plane in planes:
        plane[:] = reader.next(count)
    return signs, planes


def unpack_differences(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` differences of an unsigned ``dtype``."""
    signs, planes = read_difference_planes(reader, count, dtype.itemsize)
    magnitudes = np.empty(count, dtype)
    kernels.join_planes(magnitudes, planes)
    magnitudes += dtype.type(1)
    negative = np.unpackbits(signs, count=count, bitorder="little").astype(bool)
    return np.where(negative, dtype.type(0) - magnitudes, magnitudes)
