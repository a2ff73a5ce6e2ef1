"""The hot loops, compiled by numba, without the GIL.

Each kernel takes one chunk as unsigned integers of the element width (uint8, uint16, uint32 or uint64) and is linear
in its length. Inputs are read-only arrays, outputs writable ones that the caller made large enough; the decoding
kernel whose input holds positions checks each of them and answers with a status instead of touching anything outside.

Streams (docs/format.md, section 4):

- gaps: for each changed element the number of unchanged ones before it, as bytes; 255 means "255 more, read on".
- signs: one bit a changed element, least significant first, set where ``new - old`` is negative.
- planes: byte ``k`` of each value in row ``k``: of magnitudes less one, zigzag differences, or new values.
- Rice codes: a number ``v`` as ``v >> k`` zero bits, a one bit, and the low ``k`` bits; bits fill bytes from the
lowest.

Contexts (section 4.2): an element's *class* is its exponent, bits 7 to 14 of a 16-bit value. Elements of one class
change about equally often, whatever their place, and of different classes very differently: a class's elements,
counted among themselves, cost close to their entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "add_zigzag",
    "apply_ranked",
    "apply_sparse",
    "count_changes",
    "count_far",
    "extract_sparse",
    "is_zero",
    "join_planes",
    "list_events",
    "rank_changes",
    "read_rice",
    "rice_bits",
    "rice_parameter",
    "split_planes",
    "split_signs",
    "write_rice",
    "zigzag",
]

_LANES = 32

_jit = numba.njit(nogil=True, cache=True)
#: Typed as anything: inside kernels an intrinsic is called without the typing context that its definition takes.
_intrinsic: Any = intrinsic


@_intrinsic
def _changed_lanes(_typing: Any, old: Any, new: Any, start: Any) -> Any:
    """Compare 32 elements of two arrays from ``start``: a uint32 whose bit ``i`` is set where element ``i`` differs.

    One vector compare in LLVM's own terms, so that each machine uses the widest registers it has; numba's loop
    vectoriser does not find this form by itself.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), _LANES)

        def load(kind: Any, value: Any) -> Any:
            data = context.make_array(kind)(context, builder, value).data
            lanes = builder.load(builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer()))
            lanes.align = 1  # tensors in a mapped file start anywhere
            return lanes

        old_lanes = load(signature.args[0], arguments[0])
        new_lanes = load(signature.args[1], arguments[1])
        return builder.bitcast(builder.icmp_unsigned("!=", old_lanes, new_lanes), ir.IntType(_LANES))

    return types.uint32(old, new, start), generate


@_intrinsic
def _lowest_bit(_typing: Any, mask: Any) -> Any:
    """Return the number of the lowest set bit of a non-zero uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))
        return builder.zext(number, ir.IntType(64))

    return types.intp(mask), generate


@_intrinsic
def _count_bits(_typing: Any, mask: Any) -> Any:
    """Return how many bits of a uint32 are set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

    return types.intp(mask), generate


@_jit
def count_changes(old: Array, new: Array) -> int:
    """Count the elements that differ."""
    changed = 0
    whole = old.size - old.size % _LANES
    for start in range(0, whole, _LANES):
        changed += _count_bits(_changed_lanes(old, new, start))
    for i in range(whole, old.size):
        if old[i] != new[i]:
            changed += 1
    return changed


@_jit
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
    return left == 0


@_jit
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


@_jit
def extract_sparse(old: Array, new: Array, limit: int, gaps: Array, differences: Array) -> tuple[int, int]:
    """Write the gaps and differences of the changed elements in one pass over both inputs.

    ``gaps``: uint8 (limit + 32 + elements // 255 + 1,); ``differences``: the inputs' type, (limit + 32,). Returns the
    number of changed elements and the length of the gap stream; (-1, 0) as soon as more than ``limit`` are found.
    """
    found = 0
    length = 0
    following = 0
    whole = old.size - old.size % _LANES
    for start in range(0, whole, _LANES):
        mask = _changed_lanes(old, new, start)
        while mask:
            i = start + _lowest_bit(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            length = _append_gap(gaps, length, i - following)
            differences[found] = old.dtype.type(new[i] - old[i])
            following = i + 1
            found += 1
        if found > limit:
            return -1, 0
    for i in range(whole, old.size):
        if old[i] != new[i]:
            length = _append_gap(gaps, length, i - following)
            differences[found] = old.dtype.type(new[i] - old[i])
            following = i + 1
            found += 1
    return (found, length) if found <= limit else (-1, 0)


@_jit
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


@_jit
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


@_jit
def zigzag(old: Array, new: Array, out: Array) -> None:
    """Write the zigzag differences of all elements: 0, -1, 1, -2, 2 … become 0, 1, 2, 3, 4 …."""
    top = 8 * old.itemsize - 1
    for i in range(old.size):
        difference = old.dtype.type(new[i] - old[i])
        negative = old.dtype.type(old.dtype.type(0) - old.dtype.type(difference >> top))
        out[i] = old.dtype.type(old.dtype.type(difference << 1) ^ negative)


@_jit
def add_zigzag(out: Array, differences: Array, inverse: bool) -> None:
    """Add zigzag differences of all elements to ``out`` (or take them away)."""
    one = out.dtype.type(1)
    for i in range(out.size):
        negative = out.dtype.type(out.dtype.type(0) - out.dtype.type(differences[i] & one))
        difference = out.dtype.type(out.dtype.type(differences[i] >> one) ^ negative)
        out[i] = out.dtype.type(out[i] - difference) if inverse else out.dtype.type(out[i] + difference)


@_jit
def split_planes(values: Array, planes: Array) -> None:
    """Write all values as byte planes: uint8 (width, elements)."""
    for plane in range(values.itemsize):
        for i in range(values.size):
            planes[plane, i] = np.uint8((values[i] >> (8 * plane)) & 255)


@_jit
def join_planes(out: Array, planes: Array) -> None:
    """Build all values from their byte planes: uint8 (width, elements)."""
    for i in range(out.size):
        out[i] = planes[0, i]
    for plane in range(1, out.itemsize):
        for i in range(out.size):
            out[i] |= out.dtype.type(planes[plane, i]) << out.dtype.type(8 * plane)


# Contexts


@_intrinsic
def _lanes_of_class(_typing: Any, values: Any, start: Any, _wanted: Any) -> Any:
    """Compare the class of 32 elements of a uint16 array from ``start``.

    A uint32 whose bit ``i`` is set where it is ``context``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(16), _LANES)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        lanes = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer()))
        lanes.align = 1
        classes = builder.and_(lanes, ir.Constant(vector, [0x7F80] * _LANES))
        wanted = builder.shl(builder.trunc(arguments[2], ir.IntType(16)), ir.Constant(ir.IntType(16), 7))
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), wanted, ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        everywhere = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), places)
        return builder.bitcast(builder.icmp_unsigned("==", classes, everywhere), ir.IntType(_LANES))

    return types.uint32(values, start, types.intp), generate


@_jit
def rank_changes(old: Array, new: Array, members: Array, positions: Array, ranks: Array) -> int:
    """Find the changed elements of 16-bit chunks, and the rank of each among the elements of its class.

    ``members``: int32 (4, 256), zeroed; its columns become the numbers of elements of each class. ``positions``,
    ``ranks``: int32 of the chunk's length. Returns how many changed. Counters in four rows, used in turn, keep an
    element from waiting for the one before it; the elements of a changed one's own vector are counted by comparing
    all of them at once.
    """
    found = 0
    whole = old.size - old.size % _LANES
    for start in range(0, whole, _LANES):
        mask = _changed_lanes(old, new, start)
        while mask:
            lane = _lowest_bit(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            c = np.intp((old[start + lane] >> 7) & 255)
            before = _lanes_of_class(old, start, c) & np.uint32((1 << lane) - 1)
            positions[found] = start + lane
            ranks[found] = (
                members[0, c] + members[1, c] + members[2, c] + members[3, c] + _count_bits(np.uint32(before))
            )
            found += 1
        for i in range(start, start + _LANES, 4):
            members[0, np.uint64((old[i] >> 7) & 255)] += 1
            members[1, np.uint64((old[i + 1] >> 7) & 255)] += 1
            members[2, np.uint64((old[i + 2] >> 7) & 255)] += 1
            members[3, np.uint64((old[i + 3] >> 7) & 255)] += 1
    for i in range(whole, old.size):
        c = np.intp((old[i] >> 7) & 255)
        if old[i] != new[i]:
            positions[found] = i
            ranks[found] = members[0, c] + members[1, c] + members[2, c] + members[3, c]
            found += 1
        members[0, c] += 1
    return found


@_jit
def rice_parameter(events: int, members: int) -> int:
    """Return the Rice parameter ``k`` that suits ``events`` among ``members``.

    The best step ``2**k`` is about where ``(1 - p)**(2**k)`` falls to 0.618 (Gallager and Van Voorhis, 1975), with
    ``p = events / members``; here ``2 p / (2 - p)`` stands for ``-ln(1 - p)``.
    """
    k = 0
    while events and k < 20 and (events << k) * 2000 < 481 * (2 * members - events):
        k += 1
    return k


@_jit
def list_events(
    ranks: Array, changed: Array, members: Array, gaps: Array, events: Array, inverted: Array, parameters: Array
) -> int:
    """Turn ranks, sorted by class, into the gaps between events; return the number of events.

    ``ranks``: int32; ``changed``, ``members``: int64 (256,). Written: ``gaps``, int32, as long as ``ranks``, which is
    enough since the rarer kind is listed; ``events``, ``inverted``, ``parameters``, int64 (256,): how many events a
    class has, 1 where they are its unchanged elements because those are rarer, and the Rice parameter of its gaps.
    """
    first = 0
    length = 0
    for c in range(256):
        end = first + changed[c]
        begun = length
        following = 0
        inverted[c] = 2 * changed[c] > members[c]
        if inverted[c]:
            for j in range(first, end + 1):
                # All ranks between this changed element and the one before it are unchanged ones.
                stop = ranks[j] if j < end else members[c]
                start = ranks[j - 1] + 1 if j > first else 0
                for rank in range(start, stop):
                    gaps[length] = rank - following
                    following = rank + 1
                    length += 1
        else:
            for j in range(first, end):
                gaps[length] = ranks[j] - following
                following = ranks[j] + 1
                length += 1
        events[c] = length - begun
        parameters[c] = rice_parameter(events[c], members[c])
        first = end
    return length


@_jit
def rice_bits(values: Array, counts: Array, parameters: Array) -> int:
    """Return how many bits the Rice codes of runs of ``values`` take.

    ``counts[r]`` of them with ``parameters[r]``, back to back.
    """
    bits = 0
    j = 0
    for run in range(counts.size):
        for _ in range(counts[run]):
            bits += (values[j] >> parameters[run]) + parameters[run] + 1
            j += 1
    return bits


@_jit
def write_rice(values: Array, counts: Array, parameters: Array, out: Array) -> None:
    """Write the Rice codes of runs of ``values`` (int32, not negative) to ``out``.

    Uint8, zeroed, of ``rice_bits`` bits.
    """
    bit = 0
    j = 0
    for run in range(counts.size):
        k = parameters[run]
        for _ in range(counts[run]):
            bit += values[j] >> k
            out[bit >> 3] |= np.uint8(1 << (bit & 7))
            bit += 1
            for place in range(k):
                out[bit >> 3] |= np.uint8(((values[j] >> place) & 1) << (bit & 7))
                bit += 1
            j += 1


@_jit
def read_rice(stream: Array, counts: Array, parameters: Array, limit: int, values: Array) -> int:
    """Read runs of Rice codes from ``stream`` (uint8) into ``values`` (int32); return the number of bits read.

    Returns -1 when the stream ends too early or a value is over ``limit``.
    """
    end = 8 * stream.size
    bit = 0
    j = 0
    for run in range(counts.size):
        k = parameters[run]
        for _ in range(counts[run]):
            value = 0
            while bit < end and not (stream[bit >> 3] >> (bit & 7)):
                zeros = 8 - (bit & 7)
                value += zeros
                bit += zeros
            if bit >= end:
                return -1
            zeros = _lowest_bit(np.uint32(stream[bit >> 3] >> (bit & 7)))
            value += zeros
            bit += zeros + 1
            if value > limit >> k or bit + k > end:
                return -1
            low = 0
            for place in range(k):
                low |= ((stream[bit >> 3] >> (bit & 7)) & 1) << place
                bit += 1
            value = (value << k) | low
            if value > limit:
                return -1
            values[j] = value
            j += 1
    return bit


@_jit
def apply_ranked(
    out: Array,
    starts: Array,
    inverted: Array,
    gaps: Array,
    first_difference: Array,
    differences: Array,
    crossings: Array,
    crossing_classes: Array,
    inverse: bool,
) -> int:
    """Add differences, found by class and rank, to a 16-bit chunk (or take them away); return 1 if they do not fit.

    For class ``c`` the events are ``gaps[starts[c]:starts[c + 1]]`` (int32): the numbers of its elements between one
    event and the next. An event is a changed element, or an unchanged one where ``inverted[c]`` (uint8). Its
    differences (uint16) begin at ``first_difference[c]`` and end where the next class's begin. Going back, the class
    is the old one: that of the new value but for the elements at ``crossings`` (int32, ascending).
    """
    event = starts[:-1].copy()
    following = first_difference[:-1].copy()
    until = np.empty(256, np.int32)  # elements to come before the next event
    quiet = np.empty(256, np.int32)  # the same, but zero for inverted classes: each of their elements has work to do
    for k in range(256):
        until[k] = gaps[event[k]] if event[k] < starts[k + 1] else out.size
        quiet[k] = 0 if inverted[k] else until[k]
    crossing = 0
    next_crossing = crossings[0] if inverse and crossings.size else out.size
    for i in range(out.size):
        c = np.uint64((out[i] >> 7) & 255)
        if i == next_crossing:
            c = np.uint64(crossing_classes[crossing])
            crossing += 1
            next_crossing = crossings[crossing] if crossing < crossings.size else out.size
        if quiet[c]:
            quiet[c] -= 1
            continue
        if inverted[c] and until[c]:
            until[c] -= 1
        else:
            event[c] += 1
            until[c] = gaps[event[c]] if event[c] < starts[c + 1] else out.size
            if inverted[c]:
                continue
            quiet[c] = until[c]
        j = following[c]
        if j >= first_difference[c + 1]:
            return 1
        following[c] = j + 1
        out[i] = out[i] - differences[j] if inverse else out[i] + differences[j]
    for k in range(256):
        if following[k] != first_difference[k + 1] or event[k] != starts[k + 1]:
            return 1
    return 0
