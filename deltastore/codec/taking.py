"""Encoding many changes at once, and following them in the same pass: afterwards the old bytes are the new ones. Pure.

A writer compares each snapshot with its copy of the one before, which must hold the new bytes next. Both at once reads
every byte once, and needs no private copy of the new bytes: what the old ones became is what was encoded. Consecutive
chunks, or many tiny tensors, are compared, encoded, followed and hashed in one call, without the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from .applying import ChunkDecoder
from .chunk import SPARSE_SHARE, ChunkEncoder
from .context import CONTEXTUAL_FROM, CONTEXTUAL_SHARE, contextual_room, write_contextual
from .encoding import Encoding
from .kernels import BLOCK, ELEMENTS, list_lanes
from .lanes import LANES, at, changed_lanes, fetch_kept, fetch_once, jit, jit_inline
from .libraries import hash_address, pointer, write_digest
from .streams import changes_room, write_changes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .libraries import Handle

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Spans", "Taken", "TakingEncoder", "give_back", "take_changes", "warm_up_taking"]

#: What is encoded in one call waits in so many bytes of memory, beyond what a span may come to.
_OUT_BYTES = 2 << 20
#: More changes than there are.
_NEVER = 1 << 31


@jit
def take_changes(old: Array, new: Array, limit: int, positions: Array, differences: Array, follow: bool) -> int:
    """List what changed and, if ``follow``, make it the new value in ``old``.

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
            fetch_kept(old, start)
            fetch_once(new, start)
            listed = list_lanes(changed_lanes(old, new, start), start, positions, listed)
        found = _take_listed(old, new, positions, found, listed, differences, follow)
        if found and begin < 0:
            begin = block
        if found > limit or (found and stop <= begin + 4 * BLOCK and 2 * found > stop - begin):
            if follow:
                _give_back(old, positions[:found], differences)
            return -1
    listed = found
    for i in range(whole, old.size):
        if old[i] != new[i]:
            positions[listed] = i
            listed += 1
    found = _take_listed(old, new, positions, found, listed, differences, follow)
    if found > limit:
        if follow:
            _give_back(old, positions[:found], differences)
        return -1
    return found


@jit_inline
def _take_listed(
    old: Array, new: Array, positions: Array, found: int, listed: int, differences: Array, follow: bool
) -> int:
    """Take the elements listed from ``found`` on; one that changed back since it was listed is left out."""
    for j in range(found, listed):
        i = at(positions[at(j)])
        value = new[i]
        difference = old.dtype.type(value - old[i])
        positions[at(found)] = i
        differences[at(found)] = difference
        if follow:
            old[i] = value
        found += difference != 0
    return found


@jit
def _give_back(out: Array, positions: Array, differences: Array) -> None:
    """Take differences away again that were taken."""
    for j in range(positions.size):
        out[at(positions[at(j)])] -= differences[at(j)]


@jit
def _follow(out: Array, positions: Array, differences: Array) -> None:
    """Add differences."""
    for j in range(positions.size):
        out[at(positions[at(j)])] += differences[at(j)]


@jit
def _take_spans(
    old: Array,
    spans: Array,
    positions: Array,
    differences: Array,
    scratch: Array,
    out: Array,
    zstd: Handle,
    xxh3: int,
    changed: Array,
    ends: Array,
    digests: Array,
) -> int:
    """Take spans, one after another, while ``out`` has room for what they may come to; returns how many were taken.

    ``spans``: the table of ``Spans``; ``changed``, ``ends``, ``digests``: those of ``Taken``, a row a span.
    """
    end = np.int64(0)  # not a literal, for which numba would compile everything anew
    for span in range(spans.shape[0]):
        begin, size = spans[span, 0] // old.itemsize, spans[span, 2] // old.itemsize
        before = old[begin : begin + size]
        after = carray(pointer(spans[span, 1]), (size,), old.dtype)
        limit = size // SPARSE_SHARE
        if out.size - end < changes_room(limit, size, old.itemsize)[0]:
            return span
        found = take_changes(before, after, limit, positions, differences, True)
        if found > 0:
            end = write_changes(positions[:found], differences[:found], scratch, out, end, zstd)
            if xxh3:
                write_digest(xxh3, before, digests[span])
        changed[span] = found
        ends[span] = end
    return spans.shape[0]


@jit
def _take_in_context(
    old: Array,
    spans: Array,
    positions: Array,
    differences: Array,
    scratch: Array,
    out: Array,
    zstd: Handle,
    xxh3: int,
    changed: Array,
    ends: Array,
    digests: Array,
) -> int:
    """Do what ``_take_spans`` does with 16-bit elements, those of many changes in the context of their old values.

    The old bytes follow once they are encoded: the old values are the context.
    """
    end = np.int64(0)
    for span in range(spans.shape[0]):
        begin, size = spans[span, 0] // old.itemsize, spans[span, 2] // old.itemsize
        before = old[begin : begin + size]
        after = carray(pointer(spans[span, 1]), (size,), old.dtype)
        found = take_changes(before, after, size // CONTEXTUAL_SHARE, positions, differences, False)
        if found < CONTEXTUAL_FROM and found > size // SPARSE_SHARE:
            found = -1
        if found > 0:
            mine, values = positions[:found], differences[:found]
            if out.size - end < contextual_room(found, size)[0]:
                return span
            if found < CONTEXTUAL_FROM:
                end = write_changes(mine, values, scratch, out, end, zstd)
            else:
                end = write_contextual(before, mine, values, scratch, out, end, zstd)
            _follow(before, mine, values)
            if xxh3:
                write_digest(xxh3, before, digests[span])
        changed[span] = found
        ends[span] = end
    return spans.shape[0]


class Spans(NamedTuple):
    """Stretches of bytes to take, each at most a chunk, of one element width.

    ``old``: uint8 that holds the old bytes of all; ``table``: int64 of three columns or more: for each the byte of
    ``old`` where it begins, the address of its new bytes, and its bytes, all of them multiples of ``width``, and no
    more than ``most``. Somebody keeps the new bytes where they are.
    """

    old: Bytes
    table: Array
    width: int
    most: int


class Taken(NamedTuple):
    """What became of spans ``first`` to ``first + len(changed)``.

    ``changed``: int32, elements that changed in each, or -1 where it takes a chunk encoder to say, and the old bytes
    are as they were; ``ends``: int64, the byte of ``payloads`` after each one's own; ``digests``: uint8 of shape
    (spans, 16), the new bytes' xxh3-128 where any changed, or ``None``. From ``contextual_from`` changes on a span is
    contextual, else sparse. Valid until the encoder's next use.
    """

    first: int
    changed: Array
    ends: Array
    digests: Array | None
    payloads: Bytes
    contextual_from: int

    def encoding(self, changed: int) -> Encoding:
        """Return how a span with so many changes is encoded."""
        return Encoding.SPARSE if changed < self.contextual_from else Encoding.CONTEXTUAL


class TakingEncoder(ChunkEncoder):
    """A chunk encoder that also takes many chunks at once. One a thread.

    ``hash_name``: the hash function whose digests are wanted.
    """

    __slots__ = ("_xxh3",)

    def __init__(self, level: str = "fast", hash_name: str = "") -> None:
        super().__init__(level)
        self._xxh3 = hash_address(hash_name)

    def take_spans(self, spans: Spans) -> Iterator[Taken]:
        """Encode what changed a little as ``change`` does, and make the old bytes the new ones there.

        Some spans at a time. Whoever cannot use what was yielded must ``give_back`` it.
        """
        kind, count = ELEMENTS[spans.width], len(spans.table)
        old = spans.old.view(kind)
        largest = spans.most // spans.width
        take, contextual_from, limit = _take_spans, _NEVER, largest // SPARSE_SHARE
        if self._knows_contexts(spans.width):
            take, contextual_from, limit = _take_in_context, CONTEXTUAL_FROM, largest // CONTEXTUAL_SHARE
            stored, scratch = contextual_room(limit, largest)
        else:
            stored, scratch = changes_room(limit, largest, spans.width)
        lists = self._take_lists(limit, largest, kind)
        out, room = self._streams.room(stored + _OUT_BYTES, scratch)
        tools = (*lists, room, out, self._streams.zstd, self._xxh3)
        changed, ends, digests = np.empty(count, np.int32), np.empty(count, np.int64), np.empty((count, 16), np.uint8)
        first = 0
        while first < count:
            done = take(old, spans.table[first:], *tools, changed[first:], ends[first:], digests[first:])
            found = slice(first, first + done)
            its_digests = digests[found] if self._xxh3 else None
            yield Taken(first, changed[found], ends[found], its_digests, out, contextual_from)
            first += done


def give_back(spans: Spans, taken: Taken, decoder: ChunkDecoder) -> None:
    """Make the old bytes of spans that were taken the old ones again."""
    begin = 0
    for index in np.flatnonzero(taken.changed > 0).tolist():
        start, _, size = spans.table[taken.first + index, :3].tolist()
        end, changed = int(taken.ends[index]), int(taken.changed[index])
        old, payload = spans.old[start : start + size], taken.payloads[begin:end].data
        decoder.apply(old, taken.encoding(changed), changed, payload, width=spans.width, inverse=True)
        begin = end


def warm_up_taking(widths: Iterable[int], level: str = "fast") -> None:
    """Load or compile these kernels for element widths, so that the first real chunk does not wait for it."""
    encoder, decoder = TakingEncoder(level), ChunkDecoder()
    for width in sorted(set(widths)):
        old = np.zeros(64 * width, np.uint8)
        new = old.copy()
        new[0] = 1
        spans = Spans(old, np.array([[0, new.ctypes.data, old.size]]), width, old.size)
        for taken in encoder.take_spans(spans):
            give_back(spans, taken, decoder)
