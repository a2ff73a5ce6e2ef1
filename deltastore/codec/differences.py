"""Changes as streams: gaps, signs, and byte planes of magnitudes less one (docs/format.md, section 4). Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from . import kernels

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["GAPS", "ChangeStreams", "pack_differences", "unpack_differences"]

#: The length of the gaps.
GAPS = struct.Struct("<I")


class ChangeStreams:
    """Room for the streams of a few changes, gaps first, and what is known about each. One a thread.

    ``most`` changes of ``elements`` elements of ``width`` bytes at the most.
    """

    __slots__ = ("_apart", "_gaps", "_planes", "_signs", "_zeros", "elements")

    def __init__(self, *, most: int, elements: int, width: int) -> None:
        self.elements = elements
        gaps = most + elements // 255 + 1
        self._gaps, self._signs = np.empty(gaps, np.uint8), np.empty((most + 7) // 8, np.uint8)
        self._planes = np.empty(width * most, np.uint8)
        self._apart, self._zeros = _take_apart(2 + width, gaps)

    @property
    def room(self) -> tuple[Array, ...]:
        """What ``split_changes`` writes to."""
        return self._gaps, self._signs, self._planes, self._apart, self._zeros

    def pack(self, count: int, width: int, gaps: int, sign_bits: float, streams: StreamWriter) -> list[bytes]:
        """Return the streams of ``count`` changes that were split, the gaps' length before them."""
        zeros = self._zeros.tolist()
        pieces = [GAPS.pack(gaps)]
        streams.append(pieces, self._gaps[:gaps], sifted=(zeros[0], self._apart[0]))
        streams.append(pieces, self._signs[: (count + 7) // 8], sifted=(zeros[1], self._apart[1]), bits=sign_bits)
        for plane in range(width):
            raw = self._planes[plane * count : (plane + 1) * count]
            streams.append(pieces, raw, sifted=(zeros[2 + plane], self._apart[2 + plane]))
        return pieces


def pack_differences(pieces: list[bytes], differences: Array, streams: StreamWriter) -> None:
    """Append the streams of ``differences`` (none of them zero) to ``pieces``."""
    differences.flags.writeable = False
    count, width = differences.size, differences.itemsize
    signs, planes = np.empty((count + 7) // 8, np.uint8), np.empty((width, count), np.uint8)
    apart, zeros = _take_apart(1 + width, count)
    bits = kernels.split_differences(differences, signs, planes, apart, zeros)
    streams.append(pieces, signs, sifted=(int(zeros[0]), apart[0]), bits=bits)
    for plane in range(width):
        streams.append(pieces, planes[plane], sifted=(int(zeros[1 + plane]), apart[1 + plane]))


def _take_apart(streams: int, most: int) -> tuple[Array, Array]:
    """Return room for flags and values of streams of ``most`` bytes, and for their numbers of zeros."""
    return np.empty((streams, most + (most + 7) // 8), np.uint8), np.empty(streams, np.int64)


def unpack_differences(reader: StreamReader, count: int, dtype: np.dtype[Any]) -> Array:
    """Return ``count`` differences of an unsigned ``dtype``, read-only."""
    signs = reader.next((count + 7) // 8)
    differences = np.empty(count, dtype)
    kernels.join_differences(signs, reader.next_planes(dtype.itemsize, count), differences)
    differences.flags.writeable = False
    return differences
