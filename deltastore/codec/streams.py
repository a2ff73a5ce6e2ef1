"""Byte streams inside an encoded chunk: nothing, raw bytes, one zstd frame, or zeros apart from the rest. Pure.

A stream is a method byte, the stored length as u32le, and the stored bytes (docs/format.md, section 4.1). Its raw
length is known to the reader before it starts, so nothing is ever decompressed past what the chunk itself allows.

Zeros apart: the high byte of a difference is mostly zero, at random places. zstd spends most of its time on short
runs there and still codes them badly; one bit a byte, and the bytes that are not zero, are both faster and smaller.

Kernels write and read the streams: all those of a chunk in one call, without the interpreter. ``out`` is where they
write, from byte ``end`` on, with room for ``most_stored``; they return the new end. They read ``payload`` from byte
``place`` on and return where the next stream begins, or what is wrong, a negative number. ``zstd`` is the handle of a
context; ``scratch`` is uint8 of any content, as long as ``changes_room`` or ``reading_scratch`` say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .kernels import (
    apply_sparse,
    count_flags,
    count_zeros,
    join_signs,
    join_zeros,
    keep,
    put_plane,
    sample_bits,
    set_apart,
    split_differences,
    write_gaps,
)
from .lanes import jit, jit_inline, jit_step
from .libraries import Compressor, compress, decompress
from .problems import EARLY, FRAME, GAPS, LEFT_OVER, METHOD, OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from .libraries import Handle

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = [
    "StreamWriter",
    "apply_changes",
    "changes_room",
    "most_stored",
    "planes_room",
    "read_differences",
    "read_number",
    "read_stream",
    "read_values",
    "reading_scratch",
    "write_changes",
    "write_differences",
    "write_number",
    "write_planes",
    "write_stream",
]

ZERO, RAW, ZSTD, APART = 0, 1, 2, 3

#: The bytes of a stream's method and stored length.
_HEAD = 5
#: Shorter streams are stored raw: a zstd frame's own header would eat the gain.
_WORTH_COMPRESSING = 32
#: A longer stream is stored raw if a sample of its bytes is this random, in bits a byte, and a piece of this many from
#: its middle comes to no less than this share.
_RANDOM_FROM = 16 << 10
_RANDOM_BITS = 7.7
_RANDOM_SHARE = 0.97
_TRIED = 32 << 10
_SAMPLE = 4096
#: Zeros are set apart where they are at least this share of a stream of at least so many bytes.
_APART_SHARE = 0.3
_APART_FROM = 256
#: All signs are looked at, from so many bytes on: a shorter sample of noise looks less random than it is.
_SIGNS_FROM = 1024
#: Level 1 with a table of 256 places, for matches of seven bytes and more. What repeats at all in these streams repeats
#: at length; short matches are chance, and their looking up and writing down costs more than literals do. Higher levels
#: take several times as long, and make the streams no smaller. The window is a chunk.
_ZSTD = {
    "compressionLevel": 1,
    "windowLog": 21,
    "hashLog": 8,
    "minMatch": 7,
    "checksumFlag": 0,
    "contentSizeFlag": 1,
}

# Writing


@jit
def most_stored(streams: int, raw_bytes: int) -> int:
    """Return how many bytes so many streams of so many bytes take at the most, while they are compressed too."""
    return raw_bytes + (raw_bytes >> 7) + 128 * streams


@jit
def changes_room(count: int, elements: int, width: int) -> tuple[int, int]:
    """Return the most bytes that ``count`` changes of so many elements take stored, and the scratch for them."""
    gaps = count + elements // 255 + 1
    return 4 + most_stored(2 + width, gaps + (count >> 3) + 1 + width * count), (3 + width) * gaps


@jit_step
def write_number(out: Array, place: int, number: int) -> int:
    """Write a u32le at a place; returns the place after it."""
    for byte in range(4):
        out[place + byte] = np.uint8((number >> (8 * byte)) & 255)
    return place + 4


@jit_step
def _write_head(out: Array, place: int, method: int, stored: int) -> int:
    out[place] = method
    return write_number(out, place + 1, stored)


@jit_step
def _look_random(raw: Array, out: Array, zstd: Handle) -> bool:
    """Tell whether a long stream is not worth an attempt: neither its bytes nor their order show a pattern."""
    if raw.size < _RANDOM_FROM or sample_bits(raw, _SAMPLE) < _RANDOM_BITS:
        return False
    middle = raw[raw.size // 2 :][:_TRIED]
    return compress(zstd, middle, out) > _RANDOM_SHARE * middle.size


@jit_step
def _write_whole(raw: Array, bits: float, out: Array, end: int, zstd: Handle) -> int:
    """Write a stream, not all of it zero, as it is or as one frame. ``bits``: its entropy a byte, or 0: not known."""
    rest = out[end + _HEAD :]
    if raw.size >= _WORTH_COMPRESSING and bits < _RANDOM_BITS and not _look_random(raw, rest, zstd):
        stored = compress(zstd, raw, rest)
        if stored < raw.size:
            return _write_head(out, end, ZSTD, stored) + stored
    keep(raw, rest, 0, raw.size)
    return _write_head(out, end, RAW, raw.size) + raw.size


@jit_step
def _write_stream(raw: Array, bits: float, scratch: Array, out: Array, end: int, zstd: Handle) -> int:
    zeros = count_zeros(raw)
    if zeros == raw.size:
        return _write_head(out, end, ZERO, 0)
    if raw.size < _APART_FROM or zeros < _APART_SHARE * raw.size:
        return _write_whole(raw, bits, out, end, zstd)
    flags = scratch[: (raw.size + 7) >> 3]
    values = scratch[flags.size : flags.size + raw.size - zeros]
    set_apart(raw, flags, values)
    begin = end + _HEAD
    stop = _write_whole(values, 0.0, out, _write_whole(flags, 0.0, out, begin, zstd), zstd)
    _write_head(out, end, APART, stop - begin)
    return stop


@jit
def write_stream(raw: Array, runs: bool, scratch: Array, out: Array, end: int, zstd: Handle) -> int:
    """Write one stream. ``runs``: its zeros come in long runs, at which zstd is good."""
    if runs and count_zeros(raw) < raw.size:
        return _write_whole(raw, 0.0, out, end, zstd)
    return _write_stream(raw, 0.0, scratch, out, end, zstd)


@jit
def planes_room(planes: int, elements: int) -> tuple[int, int]:
    """Return the most bytes that so many byte planes of so many elements take stored, and the scratch for them."""
    return most_stored(3 * planes, planes * elements), 2 * elements


@jit
def write_planes(planes: Array, scratch: Array, out: Array, end: int, zstd: Handle) -> int:
    """Write byte planes: uint8 (width, elements)."""
    for plane in range(planes.shape[0]):
        end = _write_stream(planes[plane], 0.0, scratch, out, end, zstd)
    return end


@jit
def write_differences(differences: Array, scratch: Array, out: Array, end: int, zstd: Handle) -> int:
    """Write the signs and magnitudes less one of differences, none of them zero."""
    count, width = differences.size, differences.itemsize
    signs = scratch[: (count + 7) >> 3]
    planes = scratch[signs.size : signs.size + width * count].reshape(width, count)
    apart = scratch[signs.size + planes.size :]
    split_differences(differences, signs, planes)
    bits = sample_bits(signs, signs.size) if signs.size >= _SIGNS_FROM else 0.0
    end = _write_stream(signs, bits, apart, out, end, zstd)
    return write_planes(planes, apart, out, end, zstd)


@jit
def write_changes(positions: Array, differences: Array, scratch: Array, out: Array, end: int, zstd: Handle) -> int:
    """Write a sparse chunk: differences at ``positions`` (int32, ascending). Room: ``changes_room``."""
    room = positions.size + positions[positions.size - 1] // 255 + 1
    gaps = scratch[: write_gaps(positions, scratch[:room])]
    end = write_number(out, end, gaps.size)
    end = _write_stream(gaps, 0.0, scratch[room:], out, end, zstd)
    return write_differences(differences, scratch, out, end, zstd)


class StreamWriter:
    """Memory that kernels write the streams of one chunk to, and what they compress with. Not for several threads.

    It is given writable arrays, and leaves them as they are: numba compiles a kernel anew for each mix of writable and
    read-only inputs.
    """

    __slots__ = ("_compressor", "_out", "_scratch", "zstd")

    def __init__(self) -> None:
        self._compressor = Compressor(**_ZSTD)
        self.zstd = self._compressor.handle
        self._out = self._scratch = np.empty(0, np.uint8)

    def room(self, stored: int, scratch: int) -> tuple[Bytes, Bytes]:
        """Return memory to write so many bytes to, and scratch memory."""
        if self._out.size < stored:
            self._out = np.empty(stored, np.uint8)
        if self._scratch.size < scratch:
            self._scratch = np.empty(scratch, np.uint8)
        return self._out, self._scratch

    def write(self, kernel: Callable[..., int], room: tuple[int, int], *content: Array) -> bytes:
        """Return what a kernel writes of some content, which takes at most so much stored, and so much scratch."""
        out, scratch = self.room(*room)
        return out[: kernel(*content, scratch, out, 0, self.zstd)].tobytes()


# Reading


def reading_scratch(size: int) -> int:
    """Return the scratch for streams of up to so many bytes of one chunk."""
    return 4 * size + 8


@jit_step
def read_number(payload: Array, place: int) -> int:
    """Return the u32le at a place, whose four bytes must be there."""
    number: Any = 0
    for byte in range(4):
        number |= np.int64(payload[place + byte]) << (8 * byte)
    return number


@jit_step
def _read_whole(payload: Array, place: int, out: Array, zstd: Handle) -> int:
    """Read a stream without zeros apart into ``out``, which has its raw length."""
    if payload.size - place < _HEAD:
        return EARLY
    method, stored = payload[place], read_number(payload, place + 1)
    place += _HEAD
    if stored > payload.size - place:
        return EARLY
    if method == ZERO and stored == 0:
        out[:] = 0
    elif method == RAW and stored == out.size:
        keep(payload[place : place + stored], out, 0, stored)
    elif method == ZSTD and out.size:
        if not decompress(zstd, payload[place : place + stored], out):
            return FRAME
    else:
        return METHOD
    return place + stored


@jit
def read_stream(payload: Array, place: int, out: Array, scratch: Array, zstd: Handle) -> int:
    """Read a stream into ``out``, which has its raw length."""
    if payload.size - place < _HEAD or payload[place] != APART or not out.size:
        return _read_whole(payload, place, out, zstd)
    stop = place + _HEAD + read_number(payload, place + 1)
    if stop > payload.size:
        return EARLY
    flags = scratch[: (out.size + 7) >> 3]
    place = _read_whole(payload[:stop], place + _HEAD, flags, zstd)
    if place < 0:
        return place
    values = scratch[flags.size : flags.size + count_flags(flags, out.size)]
    place = _read_whole(payload[:stop], place, values, zstd)
    if 0 <= place < stop:
        return LEFT_OVER
    join_zeros(flags, values, out)
    return place


@jit_inline
def read_values(payload: Array, place: int, out: Array, scratch: Array, zstd: Handle) -> int:
    """Read the byte planes of values, one a byte of their width."""
    row = scratch[: out.size]
    for plane in range(out.itemsize):
        place = read_stream(payload, place, row, scratch[out.size :], zstd)
        if place < 0:
            break
        put_plane(out, row, plane)
    return place


@jit_inline
def read_differences(payload: Array, place: int, out: Array, scratch: Array, zstd: Handle) -> int:
    """Read the signs and magnitudes less one of differences."""
    signs = scratch[: (out.size + 7) >> 3]
    rest = scratch[signs.size :]
    place = read_stream(payload, place, signs, rest, zstd)
    if place >= 0:
        place = read_values(payload, place, out, rest, zstd)
    if place >= 0:
        join_signs(signs, out)
    return place


@jit_inline
def apply_changes(
    payload: Array, place: int, elements: Array, count: int, inverse: bool, scratch: Array, zstd: Handle
) -> int:
    """Read a sparse chunk of ``count`` changes, and add its differences to ``elements`` (or take them away)."""
    if payload.size - place < 4:
        return EARLY
    size = read_number(payload, place)
    if not count <= size <= count + elements.size // 255:
        return GAPS
    gaps, rest = scratch[:size], scratch[size:]
    place = read_stream(payload, place + 4, gaps, rest, zstd)
    if place < 0:
        return place
    differences = np.empty(count, elements.dtype)
    place = read_differences(payload, place, differences, rest, zstd)
    if place >= 0 and apply_sparse(elements, gaps, differences, inverse):
        return OUTSIDE
    return place
