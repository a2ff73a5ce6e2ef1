"""One chunk's change as bytes: sparse, contextual, dense or full, chosen from counts. Pure.

An unchanged chunk has no encoding: it is left out. Sparse and dense chunks add and take away the same way, so
they lead from the new bytes back to the old ones too; a full chunk only leads to the new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import UsageError

from . import kernels
from .context import CONTEXTUAL_FROM, CONTEXTUAL_SHARE, CONTEXTUAL_WIDTH, contextual_room, write_contextual
from .encoding import LEVELS, EncodedChunk, Encoding
from .kernels import ELEMENTS
from .streams import StreamWriter, changes_room, planes_room, write_changes, write_planes

if TYPE_CHECKING:
    from collections.abc import Iterable

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Positions = np.ndarray[Any, np.dtype[np.int32]]

__all__ = ["SPARSE_SHARE", "ChunkEncoder", "warm_up"]

#: At a quarter of the elements changed, a gap costs about as much as a plain difference: above, dense wins.
SPARSE_SHARE = 4


def _elements(data: Bytes, width: int) -> Array:
    # Read-only views everywhere: numba compiles a kernel anew for each mix of writable and read-only inputs.
    view: Array = data.view(ELEMENTS[width])
    view.flags.writeable = False
    return view


class ChunkEncoder:
    """Encodes chunks at one level. Keeps scratch memory of a few chunks: one encoder a thread."""

    __slots__ = (
        "_buffer",
        "_contextual",
        "_differences",
        "_positions",
        "_scratch",
        "_streams",
        "kept",
    )

    def __init__(self, level: str = "fast") -> None:
        if level not in LEVELS:
            raise UsageError(f"There is no level {level!r}.", hint=f"Use one of {', '.join(LEVELS)}.")
        self._streams = StreamWriter()
        self._contextual = level == "max"
        self._scratch = np.empty(0, np.uint8)
        self._differences = np.empty(0, np.uint8)
        self._positions = np.empty(0, np.int32)
        self._buffer = np.empty(0, np.uint8)
        self.kept: Bytes = self._buffer

    def take(self, old: Bytes, new: Bytes, *, width: int) -> EncodedChunk | None:
        """Encode the change between two versions of a chunk as ``change`` does, and make ``old`` the new bytes.

        ``old`` stays as it was when the encoding is ``FULL``, which does not lead back to the old bytes, and when
        anything is raised.
        """
        encoded = self.change(old, new, width=width)
        if encoded is not None and encoded.encoding != Encoding.FULL:
            np.copyto(old, self.kept)
        return encoded

    def change(self, old: Bytes, new: Bytes, *, width: int) -> EncodedChunk | None:
        """Encode the change between two versions of a chunk: uint8 of the same length, a multiple of ``width`` bytes.

        Returns ``None`` when nothing changed. Otherwise ``kept`` then holds the new bytes that were compared and
        encoded: a private copy, taken in the same pass, which stays one with the encoding even if somebody writes to
        ``new`` meanwhile.
        """
        if old.size != new.size:
            raise ValueError(f"a chunk of {old.size} bytes cannot become one of {new.size}")
        old_elements, new_elements = _elements(old, width), _elements(new, width)
        if self._buffer.size < new.size:
            self._buffer = np.empty(new.size, np.uint8)
        self.kept = self._buffer[: new.size]
        size = new_elements.size
        changed = self._find(old_elements, new_elements, hasty=True)
        if changed == 0:
            return None
        kept = _elements(self.kept, width)
        if changed < 0:
            changed, far = kernels.count_many(old_elements, kept)
            if not self._are_few(changed, size, width):
                return self._many(old_elements, kept, changed, far)
            changed = self._find(old_elements, kept, hasty=False)
        elif not self._are_few(changed, size, width):
            return self._many(old_elements, kept, *kernels.count_many(old_elements, kept))
        differences = self._differences[: changed * width].view(ELEMENTS[width])
        return self._few(old_elements, self._positions[:changed], differences)

    def _find(self, old: Array, new: Array, *, hasty: bool) -> int:
        limit = new.size // (CONTEXTUAL_SHARE if self._knows_contexts(new.itemsize) else SPARSE_SHARE)
        positions, differences = self._take_lists(limit, new.size, new.dtype)
        found: int = kernels.find_changes(old, new, self.kept.view(new.dtype), limit, positions, differences, hasty)
        return found

    def _take_lists(self, limit: int, elements: int, kind: np.dtype[Any]) -> tuple[Positions, Array]:
        """Return scratch for the positions and differences of up to ``limit`` changed elements and a block."""
        room = min(limit + kernels.BLOCK, elements) + 4
        if self._positions.size < room:
            self._positions = np.empty(room, np.int32)
        if self._differences.size < room * kind.itemsize:
            self._differences = np.empty(room * kind.itemsize, np.uint8)
        return self._positions, self._differences[: room * kind.itemsize].view(kind)

    def _knows_contexts(self, width: int) -> bool:
        return self._contextual and width == CONTEXTUAL_WIDTH

    def _suit_contexts(self, changed: int, elements: int, width: int) -> bool:
        return self._knows_contexts(width) and CONTEXTUAL_FROM <= changed <= elements // CONTEXTUAL_SHARE

    def _are_few(self, changed: int, elements: int, width: int) -> bool:
        return changed * SPARSE_SHARE <= elements or self._suit_contexts(changed, elements, width)

    def _few(self, old: Array, positions: Positions, differences: Array) -> EncodedChunk:
        """Encode the change of a few elements, at least one, at known positions."""
        if self._suit_contexts(positions.size, old.size, old.itemsize):
            room = contextual_room(positions.size, old.size)
            payload = self._streams.write(write_contextual, room, old, positions, differences)
            return EncodedChunk(Encoding.CONTEXTUAL, positions.size, payload)
        room = changes_room(positions.size, old.size, old.itemsize)
        payload = self._streams.write(write_changes, room, positions, differences)
        return EncodedChunk(Encoding.SPARSE, positions.size, payload)

    def change_at(self, old: Bytes, new: Bytes, positions: Positions, *, width: int) -> EncodedChunk | None:
        """Do what ``change`` does, without looking for the changed elements: they are those at ``positions``.

        ``positions``: int32, ascending. Whoever found them promises that all other elements are the same.
        """
        old_elements, new_elements = _elements(old, width), _elements(new, width)
        if not positions.size:
            return None
        differences = new_elements[positions] - old_elements[positions]
        # One of them may have changed back since it was found.
        if not differences.all() or not self._are_few(positions.size, new_elements.size, width):
            return self.change(old, new, width=width)
        return self._few(old_elements, positions.view(), differences)

    def full(self, new: Bytes, *, width: int) -> EncodedChunk:
        """Encode a chunk by itself: uint8 of a multiple of ``width`` bytes, not empty."""
        elements = _elements(new, width)
        return self._full(elements, elements.size)

    def _full(self, new: Array, changed: int) -> EncodedChunk:
        planes = self._take_planes(new)
        kernels.split_planes(new, planes)
        return self._pack(Encoding.FULL, planes, changed)

    def _many(self, old: Array, new: Array, changed: int, far: int) -> EncodedChunk:
        if far * 4 > new.size:
            return self._full(new, changed)
        planes = self._take_planes(new)
        kernels.zigzag_planes(old, new, planes)
        return self._pack(Encoding.DENSE, planes, changed)

    def _pack(self, encoding: Encoding, planes: Bytes, changed: int) -> EncodedChunk:
        payload = self._streams.write(write_planes, planes_room(*planes.shape), planes)
        return EncodedChunk(encoding, changed, payload)

    def _take_planes(self, values: Array) -> Bytes:
        return self._take_scratch(values.nbytes).reshape(values.itemsize, values.size)

    def _take_scratch(self, size: int) -> Bytes:
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]


def warm_up(widths: Iterable[int]) -> None:
    """Load or compile the kernels that encode chunks of these element widths, so that the first one does not wait."""
    encoder = ChunkEncoder()
    for width in sorted(set(widths)):
        old = np.arange(64 * width, dtype=np.uint8)
        sparse, dense, full = old.copy(), old.copy(), old[::-1].copy()
        sparse[0] += 1
        dense[::width] += 1
        for new in (sparse, dense, full):
            encoder.change(old, new, width=width)
