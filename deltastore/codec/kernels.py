"""The hot loops, compiled by numba, without the GIL.

Each kernel takes one chunk as unsigned integers of the element width (uint8, uint16, uint32 or uint64) and is linear in
its length. Inputs are read-only arrays, outputs writable ones that the caller made large enough; the decoding kernel
whose input holds positions checks each of them and answers with a status instead of touching anything outside.

Streams (docs/format.md, section 4):

- gaps: for each changed element the number of unchanged ones before it, as bytes; 255 means "255 more, read on".
- signs: one bit a changed element, least significant first, set where ``new - old`` is negative.
- planes: byte ``k`` of each value in row ``k``: of magnitudes less one, zigzag differences, or new values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from .lanes import LANES, changed_lanes, count_bits, jit, keep_lanes, lowest_bit

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "add_zigzag",
    "apply_sparse",
    "count_changes",
    "count_far",
    "extract_sparse",
    "is_zero",
    "join_planes",
    "list_changes",
    "split_planes",
    "split_signs",
    "write_gaps",
    "zigzag",
]


@jit
def count_changes(old: Array, new: Array) -> int:
    """Count the elements that differ."""
    changed = 0
    whole = old.size - old.size % LANES
    for start in range(0, whole, LANES):
        changed += count_bits(changed_lanes(old, new, start))
    for i in range(whole, old.size):
        if old[i] != new[i]:
            changed += 1
    return changed


@jit
def is_zero(raw: Array) -> bool:
    """Tell whether a uint8 stream is all zero; returns at the first byte that is not."""
    whole = raw.size - raw.size % 64
    for start in range(0, whole, 64):
        together = np.uint8(0)
        for i in range(start, start + 64):
            together |= raw[i]
        if together:
            return False
    left = np.uint8(0)
    for i in range(whole, raw.size):
        left |= raw[i]
    return bool(left == 0)


@jit
def count_far(old: Array, new: Array) -> int:
    """Count the elements whose difference, either way, is more than an eighth of the value range."""
    width = old.itemsize
    eighth = old.dtype.type(1 << (8 * width - 3))
    quarter = old.dtype.type(1 << (8 * width - 2))
    far = 0
    for i in range(old.size):
        shifted = old.dtype.type(old.dtype.type(new[i] - old[i]) + eighth)
        if shifted > quarter:
            far += 1
    return far


@numba.njit(nogil=True, inline="always")
def _append_gap(gaps: Array, length: int, gap: int) -> int:
    """Append one gap to the stream; returns the stream's new length."""
    while gap >= 255:
        gaps[length] = 255
        length += 1
        gap -= 255
    gaps[length] = np.uint8(gap)
    return length + 1


@jit
def extract_sparse(old: Array, new: Array, kept: Array, limit: int, gaps: Array, differences: Array) -> tuple[int, int]:
    """Copy ``new`` to ``kept``, and write gaps and differences of what changed, in one pass over both inputs.

    Everything is taken from the copy: whoever writes to ``new`` meanwhile cannot make it and the streams disagree.
    ``kept``: as long as the inputs; ``gaps``: uint8 (limit + 32 + elements // 255 + 1,); ``differences``: the inputs'
    type, (limit + 32,). Returns the number of changed elements and the length of the gap stream; (-1, 0) when more
    than ``limit`` changed, with the copy complete all the same.
    """
    found = 0
    length = 0
    following = 0
    whole = old.size - old.size % LANES
    for start in range(0, whole, LANES):
        keep_lanes(new, kept, start)
        mask = changed_lanes(old, kept, start)
        while mask:
            i = start + lowest_bit(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            length = _append_gap(gaps, length, i - following)
            differences[found] = old.dtype.type(kept[i] - old[i])
            following = i + 1
            found += 1
        if found > limit:
            for i in range(start + LANES, old.size):
                kept[i] = new[i]
            return -1, 0
    for i in range(whole, old.size):
        kept[i] = new[i]
        if old[i] != kept[i]:
            length = _append_gap(gaps, length, i - following)
            differences[found] = old.dtype.type(kept[i] - old[i])
            following = i + 1
            found += 1
    return (found, length) if found <= limit else (-1, 0)


@jit
def write_gaps(positions: Array, gaps: Array) -> int:
    """Write the gap stream of ``positions`` (int32, ascending) and return its length.

    ``gaps``: uint8 (positions + last position // 255 + 1,).
    """
    length = 0
    following = 0
    for j in range(positions.size):
        length = _append_gap(gaps, length, positions[j] - following)
        following = positions[j] + 1
    return length


@jit
def list_changes(old: Array, new: Array, positions: Array) -> int:
    """Write where the elements differ and return how many do. ``positions``: int32 of the inputs' length."""
    found = 0
    whole = old.size - old.size % LANES
    for start in range(0, whole, LANES):
        mask = changed_lanes(old, new, start)
        while mask:
            positions[found] = start + lowest_bit(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            found += 1
    for i in range(whole, old.size):
        if old[i] != new[i]:
            positions[found] = i
            found += 1
    return found


@jit
def split_signs(differences: Array, signs: Array, magnitudes: Array) -> None:
    """Take differences apart: ``signs`` uint8, 1 where negative; ``magnitudes`` less one, of the differences' type."""
    top = differences.dtype.type(8 * differences.itemsize - 1)
    zero = differences.dtype.type(0)
    one = differences.dtype.type(1)
    for i in range(differences.size):
        negative = differences.dtype.type(differences[i] >> top)
        ones = differences.dtype.type(zero - negative)
        absolute = differences.dtype.type(differences.dtype.type(differences[i] ^ ones) + negative)
        magnitudes[i] = differences.dtype.type(absolute - one)
        signs[i] = np.uint8(negative)


@jit
def apply_sparse(out: Array, gaps: Array, signs: Array, planes: Array, inverse: bool) -> int:
    """Add the coded differences to ``out`` (or take them away).

    ``signs``: uint8 ((changed + 7) // 8,); ``planes``: uint8 (width, changed). Returns 0, or what is wrong: 1: a
    position outside the chunk; 2: gaps and changed elements differ in number, or the last gap does not end.
    """
    width = out.itemsize
    count = planes.shape[1]
    found = 0
    position = 0
    for j in range(gaps.size):
        gap = gaps[j]
        position += gap
        if gap == 255:
            continue
        if position >= out.size:
            return 1
        if found >= count:
            return 2
        magnitude = out.dtype.type(1)
        for plane in range(width):
            magnitude = out.dtype.type(magnitude + (out.dtype.type(planes[plane, found]) << (8 * plane)))
        negative = (signs[found >> 3] >> (found & 7)) & 1
        if (negative != 0) != inverse:
            out[position] = out.dtype.type(out[position] - magnitude)
        else:
            out[position] = out.dtype.type(out[position] + magnitude)
        position += 1
        found += 1
    if gaps.size and gaps[gaps.size - 1] == 255:
        return 2
    return 0 if found == count else 2


@jit
def zigzag(old: Array, new: Array, out: Array) -> None:
    """Write the zigzag differences of all elements: 0, -1, 1, -2, 2 … become 0, 1, 2, 3, 4 …."""
    top = 8 * old.itemsize - 1
    for i in range(old.size):
        difference = old.dtype.type(new[i] - old[i])
        negative = old.dtype.type(old.dtype.type(0) - old.dtype.type(difference >> top))
        out[i] = old.dtype.type(old.dtype.type(difference << 1) ^ negative)


@jit
def add_zigzag(out: Array, differences: Array, inverse: bool) -> None:
    """Add zigzag differences of all elements to ``out`` (or take them away)."""
    one = out.dtype.type(1)
    for i in range(out.size):
        negative = out.dtype.type(out.dtype.type(0) - out.dtype.type(differences[i] & one))
        difference = out.dtype.type(out.dtype.type(differences[i] >> one) ^ negative)
        out[i] = out.dtype.type(out[i] - difference) if inverse else out.dtype.type(out[i] + difference)


@jit
def split_planes(values: Array, planes: Array) -> None:
    """Write all values as byte planes: uint8 (width, elements)."""
    for plane in range(values.itemsize):
        for i in range(values.size):
            planes[plane, i] = np.uint8((values[i] >> (8 * plane)) & 255)


@jit
def join_planes(out: Array, planes: Array) -> None:
    """Build all values from their byte planes: uint8 (width, elements)."""
    for i in range(out.size):
        out[i] = planes[0, i]
    for plane in range(1, out.itemsize):
        for i in range(out.size):
            out[i] |= out.dtype.type(planes[plane, i]) << out.dtype.type(8 * plane)
