"""Changes of 16-bit floats coded in the context of the old value's exponent (docs/format.md, section 4.2). Pure.

An update moves a weight by about the learning rate whatever the weight's size; whether bf16 shows the move depends on
the distance to the next number, that is on the exponent. So each exponent's elements are counted among themselves,
and the gaps between changed ones get a Rice code that fits how often that exponent changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import rice
from .lanes import at, jit, jit_step
from .problems import CLASSES, CODES, EARLY, HEAD, RANKS
from .streams import (
    most_stored,
    read_differences,
    read_number,
    read_stream,
    reading_scratch,
    write_differences,
    write_number,
    write_stream,
)

if TYPE_CHECKING:
    from .libraries import Handle

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "CONTEXTUAL_FROM",
    "CONTEXTUAL_SHARE",
    "CONTEXTUAL_WIDTH",
    "apply_contextual",
    "contextual_room",
    "contextual_scratch",
    "write_contextual",
]

#: Contexts pay for their table of classes from about this many changes on, and up to half of the elements.
CONTEXTUAL_FROM = 256
CONTEXTUAL_SHARE = 2
CONTEXTUAL_WIDTH = 2
_CLASSES = 256
_MAX_K = 20
#: Three numbers and a Rice parameter.
_HEAD_BYTES = 13


@jit
def contextual_room(count: int, elements: int) -> tuple[int, int]:
    """Return the most bytes that ``count`` changes of so many elements take stored, and the scratch for them."""
    streams = most_stored(7, 12 * _CLASSES + 2 * _codes_room(count, elements) + 4 * count)
    return _HEAD_BYTES + streams, 5 * count + 24 * _CLASSES + 2 * _codes_room(count, elements)


@jit_step
def _write_codes(values: Array, counts: Array, parameters: Array) -> Array:
    """Return the Rice codes of runs of ``values``."""
    size = (rice.rice_bits(values, counts, parameters) + 7) >> 3
    codes = np.zeros(size + 4, np.uint8)
    rice.write_rice(values, counts, parameters, codes)
    return codes[:size]


@jit
def write_contextual(
    old: Array, positions: Array, differences: Array, scratch: Array, out: Array, end: int, zstd: Handle
) -> int:
    """Write the change of a chunk of 16-bit elements. Room: ``contextual_room``.

    ``positions``: int32, ascending, at least one: the changed elements; ``differences``: uint16, theirs.
    """
    count = positions.size
    before = np.empty(count, np.uint16)
    for j in range(count):
        before[j] = old[at(positions[j])]
    changed, members = np.zeros(_CLASSES, np.int64), np.zeros(_CLASSES, np.int64)
    rice.count_classes(before, changed)
    ranks, ordered, gaps = np.empty(count, np.int32), np.empty(count, np.uint16), np.empty(count, np.int32)
    rice.rank_changes(old, positions, differences, changed, members, ranks, ordered)
    events, inverted, parameters = np.empty((3, _CLASSES), np.int64)
    listed = rice.list_events(ranks, changed, members, gaps, events, inverted, parameters)
    codes = _write_codes(gaps[:listed], events, parameters)
    classes = np.empty(count, np.uint8)
    crossed = rice.list_crossings(before, positions, differences, gaps, classes)  # the gaps are written by now
    k = rice.rice_parameter(crossed, old.size)
    crossings = _write_codes(gaps[:crossed], np.full(1, crossed), np.full(1, k))
    for number in (codes.size, crossed, crossings.size):
        end = write_number(out, end, number)
    out[end] = k
    planes = np.empty((4, 3 * _CLASSES), np.uint8)
    for c in range(_CLASSES):
        for row, number in enumerate((changed[c], events[c] * inverted[c], parameters[c] + 32 * inverted[c])):
            for byte in range(4):
                planes[byte, row * _CLASSES + c] = np.uint8((number >> (8 * byte)) & 255)
    end = write_stream(planes.reshape(-1), True, scratch, out, end + 1, zstd)
    for stream in (codes, crossings, classes[:crossed]):
        end = write_stream(stream, False, scratch, out, end, zstd)
    return write_differences(ordered, scratch, out, end, zstd)


@jit_step
def _read_classes(
    payload: Array, place: int, changed: int, elements: int, table: Array, inverted: Array, scratch: Array, zstd: Handle
) -> int:
    """Read the table of classes: int64 (3, 256), their changes, events and Rice parameters, and ``inverted``."""
    planes = scratch[: 4 * table.size].reshape(4, table.size)
    place = read_stream(payload, place, planes.reshape(-1), scratch[planes.size :], zstd)
    if place < 0:
        return place
    words = table.reshape(-1)
    for i in range(words.size):
        words[i] = (
            planes[0, i] | np.int64(planes[1, i]) << 8 | np.int64(planes[2, i]) << 16 | np.int64(planes[3, i]) << 24
        )
    if table[2].max() > 63:
        return CLASSES
    for c in range(_CLASSES):
        inverted[c] = table[2, c] >> 5
        table[2, c] &= 31
        if not inverted[c]:
            table[1, c] = table[0, c]
    fit = table[2].max() <= _MAX_K and table[1].sum() <= elements and table[0].sum() == changed
    return place if fit else CLASSES


@jit_step
def _read_rice(
    payload: Array,
    place: int,
    size: int,
    counts: Array,
    parameters: Array,
    limit: int,
    values: Array,
    scratch: Array,
    zstd: Handle,
) -> int:
    """Read runs of numbers up to ``limit``. ``size``: their bytes, each of which must belong to one."""
    stream = np.empty(size + 8, np.uint8)
    stream[size:] = 0
    place = read_stream(payload, place, stream[:size], scratch, zstd)
    if place < 0:
        return place
    bits = rice.read_rice(stream, counts, parameters, limit, values)
    return place if bits >= 0 and (bits + 7) // 8 == size else CODES


@jit_step
def _read_crossings(
    payload: Array,
    place: int,
    size: int,
    k: int,
    elements: int,
    positions: Array,
    classes: Array,
    scratch: Array,
    zstd: Handle,
) -> int:
    """Read the places of crossings, int32, and the classes before, uint8, unless ``place`` is a problem met before.

    ``size``: the bytes of the codes of their gaps.
    """
    if place < 0:
        return place
    counts, parameters = np.full(1, positions.size), np.full(1, k)
    place = _read_rice(payload, place, size, counts, parameters, elements, positions, scratch, zstd)
    if place < 0:
        return place
    position = np.int64(-1)
    for j in range(positions.size):
        position += positions[j] + 1
        if position >= elements:
            return CODES
        positions[j] = position
    return read_stream(payload, place, classes, scratch, zstd)


@jit_step
def _sum_up(counts: Array) -> Array:
    """Return where each run of so many begins, and where the last one ends."""
    ends = np.zeros(counts.size + 1, np.int64)
    for run in range(counts.size):
        ends[run + 1] = ends[run] + counts[run]
    return ends


@jit
def apply_contextual(
    payload: Array, place: int, elements: Array, changed: int, inverse: bool, scratch: Array, zstd: Handle
) -> int:
    """Read a contextual chunk of ``changed`` changes, and add its differences to ``elements`` (or take them away).

    ``elements``: uint16; ``changed``: at least one, at most their number. Reads and returns what streams do
    (``streams``); scratch: ``contextual_scratch``.
    """
    if payload.size - place < _HEAD_BYTES:
        return EARLY
    positions_size, crossings = read_number(payload, place), read_number(payload, place + 4)
    crossing_size, crossing_k = read_number(payload, place + 8), np.int64(payload[place + 12])
    size = elements.size
    if crossings > changed or crossing_k > _MAX_K or max(positions_size, crossing_size) > _codes_room(size, size):
        return HEAD
    table, inverted = np.empty((3, _CLASSES), np.int64), np.empty(_CLASSES, np.uint8)
    place = _read_classes(payload, place + _HEAD_BYTES, changed, size, table, inverted, scratch, zstd)
    if place < 0:
        return place
    gaps, differences = np.empty(table[1].sum(), np.int32), np.empty(changed, np.uint16)
    positions, classes = np.empty(crossings, np.int32), np.empty(crossings, np.uint8)
    place = _read_rice(payload, place, positions_size, table[1], table[2], size, gaps, scratch, zstd)
    place = _read_crossings(payload, place, crossing_size, crossing_k, size, positions, classes, scratch, zstd)
    if place >= 0:
        place = read_differences(payload, place, differences, scratch, zstd)
    events, changes = _sum_up(table[1]), _sum_up(table[0])
    if place >= 0 and rice.apply_ranked(
        elements, events, inverted, gaps, changes, differences, positions, classes, inverse
    ):
        return RANKS
    return place


@jit
def _codes_room(count: int, elements: int) -> int:
    """Return the most bytes of Rice codes that so many positions in a chunk of so many elements may have.

    A position costs at most its quotient, a stop bit and k bits, and all quotients together are below the chunk's
    length.
    """
    return elements // 8 + count * (_MAX_K + 1) // 8 + 1


def contextual_scratch(elements: int) -> int:
    """Return the scratch for reading a contextual chunk of so many elements."""
    return reading_scratch(max(_codes_room(elements, elements), elements, 12 * _CLASSES))
