"""The hot loops of contextual chunks: ranks within classes, and Rice codes. Compiled by numba, without the GIL.

An element's *class* is its exponent, bits 7 to 14 of a 16-bit value (docs/format.md, section 4.2). Elements of one
class change about equally often, whatever their place, and of different classes very differently: a class's elements,
counted among themselves, cost close to their entropy. A Rice code of ``v`` is ``v >> k`` zero bits, a one bit, and
the low ``k`` bits; bits fill bytes from the lowest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import LANES, changed_lanes, count_bits, jit, lanes_of_class, lowest_bit

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "apply_ranked",
    "list_events",
    "rank_changes",
    "read_rice",
    "rice_bits",
    "rice_parameter",
    "write_rice",
]


@jit
def rank_changes(old: Array, new: Array, members: Array, positions: Array, ranks: Array) -> int:
    """Find the changed elements of 16-bit chunks, and the rank of each among the elements of its class.

    ``members``: int32 (4, 256), zeroed; its columns become the numbers of elements of each class. ``positions``,
    ``ranks``: int32 of the chunk's length. Returns how many changed. Counters in four rows, used in turn, keep an
    element from waiting for the one before it; the elements of a changed one's own vector are counted by comparing
    all of them at once.
    """
    found = 0
    whole = old.size - old.size % LANES
    for start in range(0, whole, LANES):
        mask = changed_lanes(old, new, start)
        while mask:
            lane = lowest_bit(mask)
            mask = np.uint32(mask & (mask - np.uint32(1)))
            c = np.intp((old[start + lane] >> 7) & 255)
            before = lanes_of_class(old, start, c) & np.uint32((1 << lane) - 1)
            positions[found] = start + lane
            ranks[found] = members[0, c] + members[1, c] + members[2, c] + members[3, c] + count_bits(np.uint32(before))
            found += 1
        for i in range(start, start + LANES, 4):
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


@jit
def rice_parameter(events: int, members: int) -> int:
    """Return the Rice parameter ``k`` that suits ``events`` among ``members``.

    The best step ``2**k`` is about where ``(1 - p)**(2**k)`` falls to 0.618 (Gallager and Van Voorhis, 1975), with
    ``p = events / members``; here ``2 p / (2 - p)`` stands for ``-ln(1 - p)``.
    """
    k = 0
    while events and k < 20 and (events << k) * 2000 < 481 * (2 * members - events):
        k += 1
    return k


@jit
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


@jit
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


@jit
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


@jit
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
            zeros = lowest_bit(np.uint32(stream[bit >> 3] >> (bit & 7)))
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


@jit
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
