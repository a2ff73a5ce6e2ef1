"""The hot loops, compiled by numba, without the GIL.

Letting go of the GIL and waiting for it again costs two threads more than a short loop does: what is done to a few
kilobytes in a row is one kernel.

Each kernel takes one chunk as unsigned integers of the element width (uint8, uint16, uint32 or uint64) and is linear in
its length. Inputs are read-only arrays, outputs writable ones that the caller made large enough; the decoding kernel
whose input holds positions checks each of them and answers with a status instead of touching anything outside.

Streams (docs/format.md, section 4):

- gaps: for each changed element the number of unchanged ones before it, as bytes; 255 means "255 more, read on".
- signs: one bit a changed element, least significant first, set where ``new - old`` is negative.
- planes: byte ``k`` of each value in row ``k``: of magnitudes less one, zigzag differences, or new values.
- flags and values: a stream with its zeros apart: one bit a byte, set where it is not zero, and the bytes that are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import (
    LANES,
    at,
    changed_lanes,
    count_bits,
    equal_bytes,
    fetch_kept,
    fetch_once,
    jit,
    jit_inline,
    jit_step,
    keep_lanes,
    lowest_bit,
)

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "BLOCK",
    "ELEMENTS",
    "add_zigzag",
    "apply_sparse",
    "count_flags",
    "count_many",
    "count_zeros",
    "find_changes",
    "join_signs",
    "join_zeros",
    "keep",
    "list_changes",
    "list_lanes",
    "put_plane",
    "sample_bits",
    "set_apart",
    "split_differences",
    "split_planes",
    "write_gaps",
    "zigzag_planes",
]

#: What elements of so many bytes are for kernels.
ELEMENTS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
#: Elements that kernels of several steps take at a time, so that what one step wrote is still near for the next.
BLOCK = 1024
#: Elements counted at a time, in lanes as narrow as they are: no byte overflows.
_COUNTED = 128
#: Changed elements of 64 that are listed without asking how many there are: a wrong guess of the branch costs more.
_UNASKED = 4


@jit
def count_many(old: Array, new: Array) -> tuple[int, int]:
    """Count the elements that differ, and those whose difference is far: more than an eighth of the value range."""
    kind = old.dtype.type
    eighth = kind(1 << (8 * old.itemsize - 3))
    quarter = kind(1 << (8 * old.itemsize - 2))
    one, zero = kind(1), kind(0)
    changed = 0
    far = 0
    for start in range(0, old.size, _COUNTED):
        before = old[start : start + _COUNTED]
        after = new[start : start + _COUNTED]
        some, some_far = zero, zero
        for i in range(before.size):
            difference = kind(after[i] - before[i])
            some = kind(some + (one if difference else zero))
            some_far = kind(some_far + (one if kind(difference + eighth) > quarter else zero))
        changed += some
        far += some_far
    return changed, far


@jit_inline
def list_lanes(mask: Any, start: int, positions: Array, found: int) -> int:
    """List the elements from ``start`` whose bits are set; returns the list's new length, 4 past which it may write."""
    end: int = found + count_bits(mask)
    for place in range(_UNASKED):
        positions[at(found + place)] = start + lowest_bit(mask)
        mask &= mask - np.uint64(1)
    place = found + _UNASKED
    while mask:
        positions[at(place)] = start + lowest_bit(mask)
        mask &= mask - np.uint64(1)
        place += 1
    return end


@jit_step
def keep(values: Array, out: Array, start: int, stop: int) -> None:
    """Copy elements to the same place in ``out``: numba's own copy of a slice goes one by one."""
    whole = stop - (stop - start) % LANES
    for place in range(start, whole, LANES):
        keep_lanes(values, out, place)
    for i in range(whole, stop):
        out[i] = values[i]


@jit_inline
def _fetch_both(old: Array, new: Array, start: int) -> None:
    fetch_kept(old, start)
    fetch_once(new, start)


@jit
def find_changes(
    old: Array, new: Array, kept: Array, limit: int, positions: Array, differences: Array, hasty: bool
) -> int:
    """Find the changed elements and their differences, and copy ``new`` to ``kept``, in one pass over both inputs.

    Everything is taken from the copy: whoever writes to ``new`` meanwhile cannot make it and the rest disagree.
    ``kept``: as long as the inputs; untouched when nothing changed. ``positions``: int32 (limit + 1024 + 4,);
    ``differences``: the inputs' type, (limit + 1024,). Returns the number of changed elements, or -1 with the copy
    complete: more than ``limit`` changed, or, if ``hasty``, more than half of the first ones.
    """
    whole = old.size - old.size % LANES
    begin = 0
    while begin + 2 * LANES <= whole:
        _fetch_both(old, new, begin)
        _fetch_both(old, new, begin + LANES)
        if changed_lanes(old, new, begin) | changed_lanes(old, new, begin + LANES):
            break
        begin += 2 * LANES
    found = 0
    block = begin
    while block < whole:
        stop = min(block + BLOCK, whole)
        first = found
        for start in range(block, stop, LANES):
            _fetch_both(old, new, start)
            keep_lanes(new, kept, start)
            found = list_lanes(changed_lanes(old, kept, start), start, positions, found)
        for j in range(first, found):
            i = at(positions[at(j)])
            differences[at(j)] = old.dtype.type(kept[i] - old[i])
        if found > limit or (hasty and stop <= begin + 4 * BLOCK and 2 * found > stop - begin):
            keep(old, kept, 0, begin)
            keep(new, kept, stop, new.size)
            return -1
        block = stop
    for i in range(whole, old.size):
        kept[i] = new[i]
        if old[i] != kept[i]:
            positions[found] = i
            differences[found] = old.dtype.type(kept[i] - old[i])
            found += 1
    if found:
        keep(old, kept, 0, begin)
    return found if found <= limit else -1


@jit
def list_changes(old: Array, new: Array, positions: Array) -> int:
    """Write where the elements differ and return how many do. ``positions``: int32, 4 longer than the inputs."""
    found = 0
    whole = old.size - old.size % LANES
    for start in range(0, whole, LANES):
        found = list_lanes(changed_lanes(old, new, start), start, positions, found)
    for i in range(whole, old.size):
        if old[i] != new[i]:
            positions[found] = i
            found += 1
    return found


@jit
def count_zeros(raw: Array) -> int:
    """Count the zeros of a uint8 stream."""
    zeros = 0
    whole = raw.size - raw.size % LANES
    for start in range(0, whole, LANES):
        zeros += count_bits(equal_bytes(raw, start, 0))
    for i in range(whole, raw.size):
        zeros += raw[i] == 0
    return zeros


@jit
def set_apart(raw: Array, flags: Array, values: Array) -> None:
    """Tell which bytes of a uint8 stream are not zero, one bit a byte, and list those bytes in order."""
    found = 0
    whole = raw.size - raw.size % LANES
    for start in range(0, whole, LANES):
        others = ~equal_bytes(raw, start, 0)
        for byte in range(8):
            flags[(start >> 3) + byte] = np.uint8((others >> np.uint64(8 * byte)) & np.uint64(255))
        while others:
            values[at(found)] = raw[at(start + lowest_bit(others))]
            found += 1
            others &= others - np.uint64(1)
    flags[whole >> 3 :] = 0
    for i in range(whole, raw.size):
        if raw[i]:
            flags[i >> 3] |= np.uint8(1 << (i & 7))
            values[found] = raw[i]
            found += 1


@jit
def sample_bits(raw: Array, samples: int) -> float:
    """Return the order-0 entropy, in bits a byte, of about so many bytes of ``raw`` (uint8), evenly spread."""
    counts = np.zeros(256, np.int64)
    step = max(1, raw.size // samples)
    taken = 0
    for i in range(0, raw.size, step):
        counts[raw[i]] += 1
        taken += 1
    bits = 0.0
    for count in counts:
        if count:
            bits -= count * np.log2(count / taken)
    return bits / taken


@jit
def write_gaps(positions: Array, gaps: Array) -> int:
    """Write the gap stream of ``positions`` (int32, ascending); returns its length.

    ``gaps``: uint8 (positions + last position // 255 + 1,).
    """
    length = 0
    following = 0
    for j in range(positions.size):
        gap = positions[j] - following
        while gap >= 255:
            gaps[at(length)] = 255
            length += 1
            gap -= 255
        gaps[at(length)] = np.uint8(gap)
        length += 1
        following = positions[j] + 1
    return length


@jit_step
def _split_planes(values: Array, planes: Array) -> None:
    if values.itemsize == 1:
        row = planes[0]
        for i in range(values.size):
            row[i] = values[i]
        return
    for plane in range(values.itemsize):
        row = planes[plane]
        for i in range(values.size):
            row[i] = np.uint8((values[i] >> (8 * plane)) & 255)


@jit
def split_planes(values: Array, planes: Array) -> None:
    """Write all values as byte planes: uint8 (width, elements)."""
    _split_planes(values, planes)


@jit
def split_differences(differences: Array, signs: Array, planes: Array) -> None:
    """Take differences (none of them zero) apart.

    ``signs``: uint8, one bit a difference, set where it is negative; ``planes``: uint8 (width, differences), of the
    magnitudes less one.
    """
    kind = differences.dtype.type
    half = kind(1 << (8 * differences.itemsize - 1))
    one = kind(1)
    ones = kind(kind(0) - one)
    magnitudes = np.empty(BLOCK, differences.dtype)
    negatives = np.zeros(BLOCK, np.uint8)
    for start in range(0, differences.size, BLOCK):
        # Slices, not start + i: LLVM turns a loop into vectors only where it sees that no index is negative.
        piece = differences[start : start + BLOCK]
        for i in range(piece.size):
            negative = piece[i] >= half
            magnitudes[i] = kind(piece[i] ^ ones) if negative else kind(piece[i] - one)
            negatives[i] = negative
        negatives[piece.size :] = 0
        packed = signs[start >> 3 : (start + BLOCK) >> 3]
        for byte in range(packed.size):
            flags = np.uint8(0)
            for bit in range(8):
                flags |= np.uint8(negatives[8 * byte + bit] << bit)
            packed[byte] = flags
        _split_planes(magnitudes[: piece.size], planes[:, start : start + BLOCK])


@jit
def join_zeros(flags: Array, values: Array, out: Array) -> None:
    """Fill ``out`` (uint8) with values where flags are set, and zeros elsewhere."""
    out[:] = 0
    if not values.size:
        return
    last = values.size - 1
    found = 0
    for start in range(0, out.size, 64):
        word = np.uint64(0)
        for byte in range(start >> 3, min((start >> 3) + 8, flags.size)):
            word |= np.uint64(flags[byte]) << np.uint64(8 * byte - start)
        if start + 64 > out.size:
            word &= (np.uint64(1) << np.uint64(out.size - start)) - np.uint64(1)
        while word:
            out[at(start + lowest_bit(word))] = values[at(min(found, last))]
            found += 1
            word &= word - np.uint64(1)


@jit
def put_plane(out: Array, row: Array, plane: int) -> None:
    """Build values from their byte planes: the lowest plane sets them, each of the others is laid over it."""
    if plane == 0:
        for i in range(out.size):
            out[i] = row[i]
    else:
        for i in range(out.size):
            out[i] |= out.dtype.type(row[i]) << out.dtype.type(8 * plane)


@jit_step
def _spread_bits(packed: Array, bits: Array) -> None:
    """Write the bits of ``packed`` (uint8), least significant first, as bytes: uint8, eight times as long."""
    for byte in range(packed.size):
        # A product lays seven copies side by side, each a bit further: one bit of each stays.
        seven = np.uint64(packed[byte] & 127) * np.uint64(0x0002040810204081)
        spread = (seven | np.uint64(packed[byte] >> 7) << np.uint64(56)) & np.uint64(0x0101010101010101)
        for bit in range(8):
            bits[8 * byte + bit] = np.uint8(spread >> np.uint64(8 * bit) & np.uint64(1))


@jit
def join_signs(signs: Array, differences: Array) -> None:
    """Make differences of magnitudes less one, in place, with ``signs``: one bit a difference."""
    kind = differences.dtype.type
    one = kind(1)
    ones = kind(kind(0) - one)
    negatives = np.empty(BLOCK, np.uint8)
    for start in range(0, differences.size, BLOCK):
        piece = differences[start : start + BLOCK]
        _spread_bits(signs[start >> 3 : (start + piece.size + 7) >> 3], negatives)
        for i in range(piece.size):
            piece[i] = kind(piece[i] ^ ones) if negatives[i] else kind(piece[i] + one)


@jit
def apply_sparse(out: Array, gaps: Array, differences: Array, inverse: bool) -> int:
    """Add differences to ``out`` (or take them away) where the gaps lead.

    Returns 0, or what is wrong: 1: a position outside the chunk; 2: gaps and differences differ in number, or the last
    gap does not end.
    """
    found = 0
    position = 0
    for j in range(gaps.size):
        gap = gaps[j]
        position += gap
        if gap == 255:
            continue
        if position >= out.size:
            return 1
        if found >= differences.size:
            return 2
        difference, i = differences[at(found)], at(position)
        out[i] = out.dtype.type(out[i] - difference if inverse else out[i] + difference)
        position += 1
        found += 1
    if gaps.size and gaps[gaps.size - 1] == 255:
        return 2
    return 0 if found == differences.size else 2


@jit
def zigzag_planes(old: Array, new: Array, planes: Array) -> None:
    """Write the zigzag differences of all elements as byte planes, uint8 (width, elements).

    The differences 0, -1, 1, -2, 2 … become 0, 1, 2, 3, 4 ….
    """
    kind = old.dtype.type
    half = kind(1 << (8 * old.itemsize - 1))
    zero = kind(0)
    ones = kind(zero - kind(1))
    zigzag = np.empty(BLOCK, old.dtype)
    for start in range(0, old.size, BLOCK):
        before = old[start : start + BLOCK]
        after = new[start : start + BLOCK]
        for i in range(before.size):
            difference = kind(after[i] - before[i])
            # A choice, not a shift of the sign: machines have no vector shift of bytes.
            zigzag[i] = kind(kind(difference + difference) ^ (ones if difference >= half else zero))
        _split_planes(zigzag[: before.size], planes[:, start : start + BLOCK])


@jit
def add_zigzag(out: Array, differences: Array, inverse: bool) -> None:
    """Add zigzag differences of all elements to ``out`` (or take them away)."""
    one = out.dtype.type(1)
    for i in range(out.size):
        negative = out.dtype.type(out.dtype.type(0) - out.dtype.type(differences[i] & one))
        difference = out.dtype.type(out.dtype.type(differences[i] >> one) ^ negative)
        out[i] = out.dtype.type(out[i] - difference) if inverse else out.dtype.type(out[i] + difference)


@jit
def count_flags(flags: Array, size: int) -> int:
    """Count the set bits among the first ``size`` of ``flags`` (uint8)."""
    count = 0
    for byte in range(size >> 3):
        count += count_bits(np.uint32(flags[byte]))
    if size & 7:
        count += count_bits(np.uint32(flags[size >> 3] & ((1 << (size & 7)) - 1)))
    return count
