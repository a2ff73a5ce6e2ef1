"""Encoding a change and following it in the same pass: afterwards the old bytes are the new ones. Pure.

A writer compares each snapshot with its copy of the one before, which must hold the new bytes next. Both at once reads
every byte once, and needs no private copy of the new bytes: what the old ones became is what was encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np

from .chunk import ChunkEncoder
from .encoding import Encoding
from .kernels import BLOCK, list_lanes, split_changes
from .lanes import LANES, changed_lanes, jit, lowest_bit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .differences import ChangeStreams
    from .encoding import EncodedChunk

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["TINY_BYTES", "TakingEncoder", "TinyChanges", "take_tiny", "warm_up_taking"]

#: Tensors of up to this many bytes are compared in batches.
TINY_BYTES = 1 << 14

#: Above a quarter of the elements a change is not sparse.
_SPARSE_SHARE = 4
#: Streams below this length are never compressed, so a kernel can write them by itself.
_RAW_BELOW = 32
_ELEMENT: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@jit
def _take_changes(old: Array, new: Array, limit: int, positions: Array, differences: Array) -> int:
    """List what changed, and make it the new value in ``old``.

    Every element of ``new`` that is listed is read once more, and that value is the one that counts: whoever writes to
    it meanwhile cannot make ``old`` and the list disagree. ``positions``: int32 (limit + 1024 + 4,); ``differences``:
    the inputs' type, (limit + 1024,). Returns the number of changed elements, or -1 with ``old`` as it was when more
    than ``limit`` changed, or more than half of the first ones.
    """
    found = 0
    begin = -1
    whole = old.size - old.size % LANES
    for block in range(0, whole, BLOCK):
        stop = min(block + BLOCK, whole)
        listed = found
        for start in range(block, stop, LANES):
            listed = list_lanes(changed_lanes(old, new, start), start, positions, listed)
        found = _take_listed(old, new, positions, found, listed, differences)
        if found and begin < 0:
            begin = block
        if found > limit or (found and stop <= begin + 4 * BLOCK and 2 * found > stop - begin):
            _give_back(old, positions[:found], differences)
            return -1
    listed = found
    for i in range(whole, old.size):
        if old[i] != new[i]:
            positions[listed] = i
            listed += 1
    found = _take_listed(old, new, positions, found, listed, differences)
    if found > limit:
        _give_back(old, positions[:found], differences)
        return -1
    return found


@numba.njit(nogil=True, inline="always")
def _take_listed(old: Array, new: Array, positions: Array, found: int, listed: int, differences: Array) -> int:
    """Take the elements listed from ``found`` on; one that changed back since it was listed is left out."""
    for j in range(found, listed):
        i = positions[j]
        value = new[i]
        difference = old.dtype.type(value - old[i])
        positions[found] = i
        differences[found] = difference
        old[i] = value
        found += difference != 0
    return found


@jit
def _give_back(out: Array, positions: Array, differences: Array) -> None:
    """Take differences away again that were taken."""
    for j in range(positions.size):
        out[positions[j]] -= differences[j]


@jit
def _take_and_split(
    old: Array,
    new: Array,
    limit: int,
    positions: Array,
    differences: Array,
    gaps: Array,
    signs: Array,
    planes: Array,
    apart: Array,
    zeros: Array,
) -> tuple[int, int, float]:
    """Do what ``_take_changes`` does, and then ``split_changes``; returns what both do."""
    found: int = _take_changes(old, new, limit, positions, differences)
    if found <= 0:
        return found, 0, 0.0
    length, bits = split_changes(positions[:found], differences[:found], gaps, signs, planes, apart, zeros)
    return found, length, bits


class TakingEncoder(ChunkEncoder):
    """A chunk encoder whose ``take`` makes the old bytes the new ones. One a thread."""

    __slots__ = ()

    def take(self, old: Bytes, new: Bytes, *, width: int) -> EncodedChunk | None:
        """Encode the change between two versions of a chunk as ``change`` does, and make ``old`` the new bytes.

        ``old`` stays as it was when the encoding is ``FULL``, which does not lead back to the old bytes, and when
        anything is raised. ``kept`` holds the new bytes, in ``old`` itself where it can.
        """
        if not (self._contextual and width == 2):
            elements, values = old.view(_ELEMENT[width]), new.view(_ELEMENT[width])
            values.flags.writeable = False
            limit = elements.size // _SPARSE_SHARE
            positions, differences = self._take_lists(limit, values)
            changes = self._take_changes(elements.size, width)
            found = _take_and_split(elements, values, limit, positions, differences, *changes.room)
            if found[0] >= 0:
                self.kept = old
                return self._pack_taken(changes, elements, positions, differences, found) if found[0] else None
        encoded = self.change(old, new, width=width)
        if encoded is not None and encoded.encoding != Encoding.FULL:
            np.copyto(old, self.kept)
        return encoded

    def _pack_taken(
        self,
        changes: ChangeStreams,
        elements: Array,
        positions: Array,
        differences: Array,
        found: tuple[int, int, float],
    ) -> EncodedChunk:
        """Encode what was taken and split; gives it back if that fails."""
        try:
            return self._sparse(changes, found[0], elements.itemsize, *found[1:])
        except BaseException:
            _give_back(elements, positions[: found[0]], differences)
            raise


class TinyChanges(NamedTuple):
    """What became of a batch of tiny tensors.

    ``changed``: int32, elements that changed in each, or -1 where it takes a chunk encoder to say; ``ends``: int64, the
    byte of ``payloads`` after each one's own.
    """

    changed: Array
    ends: Array
    payloads: bytes


@jit
def _take_tiny(
    old: Array, new: Array, old_starts: Array, new_starts: Array, sizes: Array, changed: Array, ends: Array, out: Array
) -> None:
    width = old.itemsize
    places = np.empty(_RAW_BELOW, np.int64)
    end = 0
    for t in range(sizes.size):
        before = old[old_starts[t] : old_starts[t] + sizes[t]]
        after = new[new_starts[t] : new_starts[t] + sizes[t]]
        found = 0
        length = 0
        following = 0
        i = 0
        while i < before.size and length < _RAW_BELOW:
            if i + LANES <= before.size:
                mask = changed_lanes(before, after, i)
                if not mask:
                    i += LANES
                    continue
                i += lowest_bit(mask)
            elif before[i] == after[i]:
                i += 1
                continue
            length += 1 + (i - following) // 255
            if length < _RAW_BELOW:
                places[found] = i
            found += 1
            i += 1
            following = i
        if length >= _RAW_BELOW or found * _SPARSE_SHARE > before.size:
            changed[t] = -1
        elif found == 0:
            changed[t] = 0
        else:
            changed[t] = found
            end = _write_tiny(before, after, places[:found], length, width, out, end)
        ends[t] = end


@jit
def _write_tiny(before: Array, after: Array, places: Array, length: int, width: int, out: Array, end: int) -> int:
    """Write a sparse chunk of short streams (docs/format.md, section 4) to ``out`` and follow it in ``before``."""
    count = places.size
    out[end] = length
    out[end + 1 : end + 4] = 0
    end += 4
    # Gaps.
    start = end + 5
    position = start
    following = 0
    for i in places:
        gap = i - following
        while gap >= 255:
            out[position] = 255
            position += 1
            gap -= 255
        out[position] = gap
        position += 1
        following = i + 1
    end = _close_stream(out, end, position)
    # Signs and magnitudes.
    one = before.dtype.type(1)
    top = before.dtype.type(8 * width - 1)
    start = end + 5
    signs = (count + 7) // 8
    out[start : start + signs] = 0
    for j in range(count):
        difference = before.dtype.type(after[places[j]] - before[places[j]])
        if before.dtype.type(difference >> top):
            out[start + (j >> 3)] |= np.uint8(1 << (j & 7))
    end = _close_stream(out, end, start + signs)
    for plane in range(width):
        start = end + 5
        for j in range(count):
            difference = before.dtype.type(after[places[j]] - before[places[j]])
            if before.dtype.type(difference >> top):
                difference = before.dtype.type(before.dtype.type(0) - difference)
            magnitude = before.dtype.type(difference - one)
            out[start + j] = np.uint8((magnitude >> (8 * plane)) & 255)
        end = _close_stream(out, end, start + count)
    for i in places:
        before[i] = after[i]
    return end


@jit
def _close_stream(out: Array, head: int, end: int) -> int:
    """Write the head of the short stream that lies behind it; returns where the next one begins."""
    out[head + 1 : head + 5] = 0
    for i in range(head + 5, end):
        if out[i]:
            out[head] = 1
            out[head + 1] = end - head - 5
            return end
    out[head] = 0
    return head + 5


def take_tiny(old: Bytes, new: Bytes, old_starts: Array, new_starts: Array, sizes: Array, *, width: int) -> TinyChanges:
    """Compare many tensors of one element width at once, encode those of which little changed, and follow them in old.

    ``old``, ``new``: uint8 that holds all tensors (``new``: private, nobody writes to it); ``old_starts``,
    ``new_starts``, ``sizes``: int64, bytes, multiples of ``width``. What is encoded has the bytes that a chunk encoder
    gives it. Tensors with -1 changes are as they were in ``old``.
    """
    changed, ends = np.empty(sizes.size, np.int32), np.empty(sizes.size, np.int64)
    most = 4 + (2 + width) * 5 + _RAW_BELOW * (2 + width)
    out = np.empty(sizes.size * most, np.uint8)
    values = new.view(_ELEMENT[width])
    values.flags.writeable = False
    starts = (old_starts // width, new_starts // width)
    _take_tiny(old.view(_ELEMENT[width]), values, *starts, sizes // width, changed, ends, out)
    return TinyChanges(changed, ends, out[: int(ends[-1]) if ends.size else 0].tobytes())


def warm_up_taking(widths: Iterable[int]) -> None:
    """Load or compile these kernels for element widths, so that the first real chunk does not wait for it."""
    encoder = TakingEncoder()
    for width in sorted(set(widths)):
        old = np.zeros(64 * width, np.uint8)
        new = old.copy()
        new[0] = 1
        one = np.zeros(1, np.int64)
        take_tiny(old.copy(), new, one, one, one + old.size, width=width)
        encoder.take(old, new, width=width)
        encoder.take(old, ~old, width=width)  # gives back, too
