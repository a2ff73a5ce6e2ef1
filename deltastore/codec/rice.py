"""The hot loops of contextual chunks: ranks within classes, and Rice codes. Compiled by numba, without the GIL.

An element's *class* is its exponent, bits 7 to 14 of a 16-bit value (docs/format.md, section 4.2). Elements of one
class change about equally often, whatever their place, and of different classes very differently: a class's elements,
counted among themselves, cost close to their entropy. A Rice code of ``v`` is ``v >> k`` zero bits, a one bit, and
the low ``k`` bits; bits fill bytes from the lowest.

Ranks are counted a block at a time: the block's classes are written out as bytes, and then each class that matters is
looked for in 64 of them at once. That is linear in the chunk's length times the classes that matter, of which weights
have about a dozen; counting every element into its class would be linear in the length alone, and slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import LANES, at, count_bits, equal_bytes, jit, jit_inline, jit_step, lowest_bit

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "apply_ranked",
    "count_classes",
    "list_crossings",
    "list_events",
    "rank_changes",
    "read_rice",
    "rice_bits",
    "rice_parameter",
    "write_rice",
]

_BLOCK = 2048
#: A rank that no element has.
NEVER = 1 << 62


@jit_step
def _class_of(value: Any) -> Any:
    return np.uint8((value >> 7) & 255)


@jit_step
def _write_classes(values: Array, classes: Array) -> None:
    for i in range(values.size):
        classes[i] = _class_of(values[i])


@jit
def count_classes(values: Array, counts: Array) -> None:
    """Count the 16-bit ``values`` of each class. ``counts``: int64 (256,), zeroed."""
    for value in values:
        counts[_class_of(value)] += 1


@jit
def rank_changes(
    old: Array, positions: Array, differences: Array, changed: Array, members: Array, ranks: Array, ordered: Array
) -> None:
    """Find the rank of each changed element within its class.

    ``changed``: int64 (256,), from ``count_classes``. Written: ``members``, int64 (256,), zeroed before: the number of
    elements of each class that has a changed one; ``ranks``, int32, and ``ordered``, the differences, both in order of
    (class, rank).
    """
    places = np.cumsum(changed) - changed  # where a class's next changed element goes
    active = np.nonzero(changed)[0][::-1]  # large exponents first: they are the common ones
    classes = np.empty(_BLOCK, np.uint8)
    before = np.empty((256, _BLOCK // LANES), np.int64)  # elements of a class in the block's vectors before this one
    j = 0
    whole = old.size - old.size % _BLOCK
    for start in range(0, whole, _BLOCK):
        _write_classes(old[start : start + _BLOCK], classes)
        seen = 0
        for c in active:
            row = before[c]
            rank = members[c]
            for vector in range(_BLOCK // LANES):
                row[vector] = rank
                rank += count_bits(equal_bytes(classes, vector * LANES, c))
            seen += rank - members[c]
            members[c] = rank
            if seen == _BLOCK:
                break
        while j < positions.size and positions[j] < start + _BLOCK:
            i = at(positions[at(j)] - start)
            c = at(classes[i])
            vector = i // at(LANES)
            lower = (np.uint64(1) << i % at(LANES)) - np.uint64(1)
            rank = before[c, vector] + count_bits(np.uint64(equal_bytes(classes, vector * at(LANES), c) & lower))
            place = at(places[c])
            ranks[place] = rank
            ordered[place] = differences[at(j)]
            places[c] += 1
            j += 1
    for i in range(whole, old.size):
        c = np.int64(_class_of(old[i]))
        if j < positions.size and positions[j] == i:
            ranks[places[c]] = members[c]
            ordered[places[c]] = differences[j]
            places[c] += 1
            j += 1
        if changed[c]:
            members[c] += 1


@jit
def list_crossings(before: Array, positions: Array, differences: Array, gaps: Array, classes: Array) -> int:
    """List the changed elements whose new value has another class; returns how many there are.

    ``before``: their old values, uint16. Written: ``gaps``, int32: the elements between one and the next; ``classes``,
    uint8: their old ones. Both as long as ``positions``.
    """
    found = 0
    following = 0
    for j in range(positions.size):
        c = _class_of(before[j])
        gaps[at(found)] = positions[j] - following
        classes[at(found)] = c
        if c != _class_of(before[j] + differences[j]):
            found += 1
            following = positions[j] + 1
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
            bits += (values[at(j)] >> parameters[run]) + parameters[run] + 1
            j += 1
    return bits


@jit
def write_rice(values: Array, counts: Array, parameters: Array, out: Array) -> None:
    """Write the Rice codes of runs of ``values`` (int32, not negative) to ``out``.

    Uint8, zeroed, four bytes longer than the codes need.
    """
    bit = 0
    j = 0
    for run in range(counts.size):
        k = parameters[run]
        for _ in range(counts[run]):
            value = values[at(j)]
            bit += value >> k
            code = np.uint32((((value & ((1 << k) - 1)) << 1) | 1) << (bit & 7))  # at most 28 bits
            for byte in range(4):
                out[at((bit >> 3) + byte)] |= np.uint8((code >> np.uint32(8 * byte)) & np.uint32(255))
            bit += k + 1
            j += 1


@jit_step
def _window(stream: Array, bit: int) -> Any:
    """Return 57 bits of ``stream`` or more from ``bit``; eight bytes must be there."""
    word = np.uint64(0)
    for byte in range(8):
        word |= np.uint64(stream[at((bit >> 3) + byte)]) << np.uint64(8 * byte)
    return word >> np.uint64(bit & 7)


@jit
def read_rice(stream: Array, counts: Array, parameters: Array, limit: int, values: Array) -> int:
    """Read runs of Rice codes from ``stream`` into ``values`` (int32); return the number of bits read.

    ``stream``: uint8, with eight zeros after its own bytes. Returns -1 when it ends too early or a value is over
    ``limit``.
    """
    end = 8 * (stream.size - 8)
    bit = 0
    j = 0
    for run in range(counts.size):
        k = parameters[run]
        for _ in range(counts[run]):
            quotient = 0
            if bit >= end:
                return -1
            word = _window(stream, bit)
            while not word & np.uint64((1 << 32) - 1):
                quotient += 32
                bit += 32
                if bit >= end:
                    return -1
                word = _window(stream, bit)
            zeros = lowest_bit(word)
            quotient += zeros
            bit += zeros + 1
            if quotient > limit >> k or bit + k > end:
                return -1
            # At most 31 zeros, a one and 20 bits were in the window: it has them all.
            value = (quotient << k) | np.int64((word >> np.uint64(zeros + 1)) & np.uint64((1 << k) - 1))
            bit += k
            if value > limit:
                return -1
            values[j] = value
            j += 1
    return bit


@jit_inline
def _lanes_of(classes: Array, first: int, size: int, c: int) -> Any:
    """Compare up to 64 classes of a block from ``first`` on; none beyond ``size``."""
    lanes = equal_bytes(classes, first, c)
    if size < first + LANES:
        lanes &= (np.uint64(1) << np.uint64(size - first)) - np.uint64(1)
    return lanes


@jit_inline
def _change_events(
    out: Array,
    start: int,
    size: int,
    classes: Array,
    c: int,
    state: Array,
    gaps: Array,
    last: int,
    differences: Array,
    sign: Any,
) -> None:
    """Change those elements of class ``c`` in a block that are its events; those end before number ``last``."""
    rank, event, due, following = state[c, 0], state[c, 1], state[c, 2], state[c, 3]
    for first in range(0, size, LANES):
        lanes = _lanes_of(classes, first, size, c)
        end = rank + count_bits(lanes)
        while due < end:
            while rank < due:
                lanes &= lanes - np.uint64(1)
                rank += 1
            out[at(start + first + lowest_bit(lanes))] += sign * differences[at(following)]
            following += 1
            event += 1
            due = due + 1 + gaps[at(event)] if event < last else NEVER
        rank = end
    state[c, 0], state[c, 1], state[c, 2], state[c, 3] = rank, event, due, following


@jit_inline
def _change_others(
    out: Array,
    start: int,
    size: int,
    classes: Array,
    c: int,
    state: Array,
    gaps: Array,
    last: int,
    differences: Array,
    most: int,
    sign: Any,
) -> None:
    """Change those elements of class ``c`` in a block that are not its events, up to difference ``most``."""
    rank, event, due, following = state[c, 0], state[c, 1], state[c, 2], state[c, 3]
    for first in range(0, size, LANES):
        lanes = _lanes_of(classes, first, size, c)
        while lanes:
            if rank == due:
                event += 1
                due = due + 1 + gaps[at(event)] if event < last else NEVER
            else:
                if following < most:
                    out[at(start + first + lowest_bit(lanes))] += sign * differences[at(following)]
                following += 1
            lanes &= lanes - np.uint64(1)
            rank += 1
    state[c, 0], state[c, 1], state[c, 2], state[c, 3] = rank, event, due, following


@jit_inline
def _list_active(starts: Array, inverted: Array) -> Array:
    """Return the classes that have changed elements, large exponents first: they are the common ones."""
    active = np.empty(256, np.int64)
    found = 0
    for c in range(255, -1, -1):
        active[found] = c
        found += inverted[c] or starts[c] < starts[c + 1]
    return active[:found]


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
    differences (uint16) begin at ``first_difference[c]`` and end where the next class's begin; an ordinary class has
    one for each event. Going back, the class is the old one: that of the new value but for the elements at
    ``crossings`` (ascending).
    """
    sign = np.uint16(65535) if inverse else np.uint16(1)
    # Of each class: its elements before the block, its next event and that one's rank, and its next difference.
    states = np.zeros((256, 4), np.int64)
    active = _list_active(starts, inverted)
    for c in range(256):
        due = gaps[starts[c]] if starts[c] < starts[c + 1] else NEVER
        states[c] = (0, starts[c], due, first_difference[c])
    classes = np.empty(_BLOCK + LANES, np.uint8)
    crossing = 0
    for start in range(0, out.size, _BLOCK):
        size = min(_BLOCK, out.size - start)
        _write_classes(out[start : start + size], classes)
        while inverse and crossing < crossings.size and crossings[crossing] < start + size:
            classes[crossings[crossing] - start] = crossing_classes[crossing]
            crossing += 1
        seen = 0
        for c in active:
            before, last = states[c, 0], starts[c + 1]
            if inverted[c]:
                most = first_difference[c + 1]
                _change_others(out, start, size, classes, c, states, gaps, last, differences, most, sign)
            elif states[c, 1] < last:
                _change_events(out, start, size, classes, c, states, gaps, last, differences, sign)
            seen += states[c, 0] - before
            if seen == size:
                break
    for c in range(256):
        if states[c, 3] != first_difference[c + 1] or states[c, 1] != starts[c + 1]:
            return 1
    return 0
