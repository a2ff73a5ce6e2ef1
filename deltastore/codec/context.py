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
from .differences import pack_differences, unpack_differences
from .encoding import DamagedChunk, EncodedChunk, Encoding

if TYPE_CHECKING:
    from .streams import StreamReader, StreamWriter

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["apply_contextual", "encode_contextual"]

_CLASSES = 256
_MAX_K = 20
_HEAD = struct.Struct("<IIIB")


def encode_contextual(old: Array, new: Array, streams: StreamWriter) -> EncodedChunk:
    """Encode the change between two versions of a chunk of 16-bit elements, of which at least one changed."""
    counters = np.zeros((4, _CLASSES), np.int32)
    positions, ranks = np.empty(old.size, np.int32), np.empty(old.size, np.int32)
    found = rice.rank_changes(old, new, counters, positions, ranks)
    positions = positions[:found]
    before, after = old[positions], new[positions]
    classes = (before >> 7).astype(np.uint8)
    order = np.argsort(classes, kind="stable")
    changed = np.bincount(classes, minlength=_CLASSES)
    members = counters.sum(axis=0, dtype=np.int64)
    gaps = np.empty(found, np.int32)
    events, inverted, parameters = np.empty((3, _CLASSES), np.int64)
    gaps = gaps[: rice.list_events(ranks[:found][order], changed, members, gaps, events, inverted, parameters)]
    table = np.stack([changed, events * inverted, parameters + 32 * inverted]).astype("<u4")
    bits = _write_rice(gaps, events, parameters)
    crossed = (after >> 7).astype(np.uint8) != classes
    crossings, crossing_classes = positions[crossed], classes[crossed]
    k = rice.rice_parameter(crossings.size, old.size)
    crossing_gaps = np.diff(crossings, prepend=np.int32(-1)) - np.int32(1)
    crossing_bits = _write_rice(crossing_gaps, *_one_run(crossings.size, k))
    pieces = [_HEAD.pack(bits.size, crossings.size, crossing_bits.size, k)]
    planes = np.ascontiguousarray(table.view(np.uint8).reshape(-1, 4).T).reshape(-1)
    for stream in (planes, bits, crossing_bits, crossing_classes):
        streams.append(pieces, stream)
    pack_differences(pieces, (after - before)[order], streams)
    return EncodedChunk(Encoding.CONTEXTUAL, found, b"".join(pieces))


def _one_run(count: int, k: int) -> tuple[Array, Array]:
    return np.array([count]), np.array([k])


def _write_rice(values: Array, counts: Array, parameters: Array) -> Array:
    out = np.zeros((rice.rice_bits(values, counts, parameters) + 7) // 8, np.uint8)
    rice.write_rice(values, counts, parameters, out)
    return out


def _read_rice(stream: Array, counts: Array, parameters: Array, limit: int) -> Array:
    """Read runs of numbers up to ``limit`` as int32; every byte of the stream must belong to one."""
    values = np.empty(int(counts.sum()), np.int32)
    bits = rice.read_rice(stream, counts, parameters, limit, values)
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
    differences = unpack_differences(reader, changed, elements.dtype)
    starts, first_difference = (np.concatenate([[0], np.cumsum(counts)]) for counts in (events, table[0]))
    if rice.apply_ranked(
        elements, starts, inverted, gaps, first_difference, differences, crossing_positions, crossing_classes, inverse
    ):
        raise DamagedChunk("its changes do not fit the classes of the chunk's elements")
