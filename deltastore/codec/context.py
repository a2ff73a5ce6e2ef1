"""Changes of 16-bit floats coded in the context of the old value's exponent (docs/format.md, section 4.2). Pure.

An update moves a weight by about the learning rate whatever the weight's size; whether bf16 shows the move depends on
the distance to the next number, that is on the exponent. So each exponent's elements are counted among themselves,
and the gaps between changed ones get a Rice code that fits how often that exponent changes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from . import rice
from .encoding import DamagedChunk, EncodedChunk, Encoding

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["apply_contextual", "encode_contextual"]

_CLASSES = 256
_MAX_K = 20
_HEAD = struct.Struct("<IIIB")
_EIGHT_ZEROS = np.zeros(8, np.uint8)


def encode_contextual(old: Array, positions: Array, differences: Array, streams: StreamWriter) -> EncodedChunk:
    """Encode the change of a chunk of 16-bit elements.

    ``positions``: int32, ascending, at least one: the changed elements; ``differences``: uint16, theirs.
    """
    found = positions.size
    before = old[positions]
    changed, members = np.zeros((2, _CLASSES), np.int64)
    rice.count_classes(before, changed)
    ranks, ordered = np.empty(found, np.int32), np.empty(found, np.uint16)
    rice.rank_changes(old, positions, differences, changed, members, ranks, ordered)
    gaps = np.empty(found, np.int32)
    events, inverted, parameters = np.empty((3, _CLASSES), np.int64)
    gaps = gaps[: rice.list_events(ranks, changed, members, gaps, events, inverted, parameters)]
    table = np.stack([changed, events * inverted, parameters + 32 * inverted]).astype("<u4")
    bits = _write_rice(gaps, events, parameters)
    crossings, crossing_classes = np.empty(found, np.int32), np.empty(found, np.uint8)
    crossed = rice.list_crossings(before, positions, differences, crossings, crossing_classes)
    k = rice.rice_parameter(crossed, old.size)
    crossing_gaps = np.diff(crossings[:crossed], prepend=np.int32(-1)) - np.int32(1)
    crossing_bits = _write_rice(crossing_gaps, *_one_run(crossed, k))
    streams.begin()
    streams.put(_HEAD.pack(bits.size, crossed, crossing_bits.size, k))
    streams.append(np.ascontiguousarray(table.view(np.uint8).reshape(-1, 4).T).reshape(-1), runs=True)
    for stream in (bits, crossing_bits, crossing_classes[:crossed]):
        streams.append(stream)
    streams.append_differences(ordered)
    return EncodedChunk(Encoding.CONTEXTUAL, found, streams.finish())


def _one_run(count: int, k: int) -> tuple[Array, Array]:
    return np.array([count]), np.array([k])


def _write_rice(values: Array, counts: Array, parameters: Array) -> Array:
    size = (rice.rice_bits(values, counts, parameters) + 7) // 8
    out = np.zeros(size + 4, np.uint8)
    rice.write_rice(values, counts, parameters, out)
    return out[:size]


def _read_rice(stream: Array, counts: Array, parameters: Array, limit: int) -> Array:
    """Read runs of numbers up to ``limit`` as int32; every byte of the stream must belong to one."""
    values = np.empty(int(counts.sum()), np.int32)
    bits = rice.read_rice(np.concatenate([stream, _EIGHT_ZEROS]), counts, parameters, limit, values)
    if bits < 0 or (bits + 7) // 8 != stream.size:
        raise DamagedChunk("its positions do not fit their length, or lead outside the chunk")
    return values


def apply_contextual(elements: Array, reader: StreamReader, changed: int, *, inverse: bool) -> None:
    """Apply a contextual chunk to 16-bit elements in place, or take it back; raises ``DamagedChunk``."""
    if elements.itemsize != 2:
        raise DamagedChunk(f"it is contextual, but its elements have {elements.itemsize} bytes")
    positions_size, crossings, crossing_size, crossing_k = _HEAD.unpack(reader.take(_HEAD.size))
    # A position costs at most its quotient, a stop bit and k bits, and all quotients together are below the chunk's
    # length.
    room = elements.size // 8 + (elements.size * (_MAX_K + 1)) // 8 + 1
    if crossings > changed or crossing_k > _MAX_K or max(positions_size, crossing_size) > room:
        raise DamagedChunk("its head does not fit the chunk")
    planes = reader.next(12 * _CLASSES)
    table = np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4").reshape(3, _CLASSES).astype(np.int64)
    inverted = (table[2] >> 5 & 1).astype(np.uint8)
    events = np.where(inverted, table[1], table[0])
    parameters = table[2] & 31
    if table[2].max() > 63 or parameters.max() > _MAX_K or events.sum() > elements.size or table[0].sum() != changed:
        raise DamagedChunk("its table of classes does not fit the chunk")
    gaps = _read_rice(reader.next(positions_size), events, parameters, elements.size)
    crossing_gaps = _read_rice(reader.next(crossing_size), *_one_run(crossings, crossing_k), elements.size)
    crossing_positions = np.cumsum(crossing_gaps.astype(np.int64) + 1) - 1
    if crossings and crossing_positions[-1] >= elements.size:
        raise DamagedChunk("its crossings lead outside the chunk")
    crossing_classes = reader.next(crossings)
    differences = reader.differences(changed, elements.dtype)
    starts, first_difference = (np.concatenate([[0], np.cumsum(counts)]) for counts in (events, table[0]))
    if rice.apply_ranked(
        elements, starts, inverted, gaps, first_difference, differences, crossing_positions, crossing_classes, inverse
    ):
        raise DamagedChunk("its changes do not fit the classes of the chunk's elements")
