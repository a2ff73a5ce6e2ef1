"""Where tensors lie in the files of a checkpoint. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .memory import ALIGNMENT
from .snapshot import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .container import Header
    from .snapshot import ChunkSpan, Schema

__all__ = ["Places", "Stretch"]

#: So few chunks are looked at one by one.
_FEW = 8


class Stretch(NamedTuple):
    """Bytes that lie in one piece both in a file and in a span's buffer.

    ``file`` counts the files; ``offset`` is where they begin in it; ``start`` and ``stop`` where they are in the
    buffer.
    """

    file: int
    offset: int
    start: int
    stop: int


class Places:
    """The file and the offset of each tensor of a schema. Two arrays, whatever the number of tensors."""

    __slots__ = ("_files", "_offsets")

    def __init__(self, headers: Sequence[Header], schema: Schema) -> None:
        self._files = np.zeros(len(schema), np.int64)
        self._offsets = np.zeros(len(schema), np.int64)
        for number, header in enumerate(headers):
            positions = [schema.position(placed.spec.name) for placed in header.tensors]
            self._files[positions] = number
            self._offsets[positions] = [placed.start for placed in header.tensors]

    def tensor(self, position: int) -> tuple[int, int]:
        """Return the file of a tensor, given by its number in schema order, and the offset of its first byte."""
        return int(self._files[position]), int(self._offsets[position])

    def files_of(self, tensors: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the files of tensors, given by their numbers in schema order."""
        files: np.ndarray[Any, np.dtype[np.int64]] = self._files[tensors]
        return files

    def phase(self, span: ChunkSpan) -> int:
        """Return how far into a cache line a span begins in its file: a multiple of 8, for the elements' sake."""
        _, offset = self.tensor(int(span.tensors[0]))
        return (offset + int(span.chunks[0]) * CHUNK_BYTES) % ALIGNMENT // 8 * 8

    def stretches(self, span: ChunkSpan) -> Iterator[Stretch]:
        """Yield where the chunks of a span lie: as few stretches as neighbours in the span are neighbours in a file."""
        if len(span.numbers) <= _FEW:
            yield from self._few_stretches(span)
            return
        files = self._files[span.tensors]
        offsets = self._offsets[span.tensors] + span.chunks * CHUNK_BYTES
        ends = offsets + (span.stops - span.starts)
        breaks = (files[1:] != files[:-1]) | (offsets[1:] != ends[:-1]) | (span.starts[1:] != span.stops[:-1])
        firsts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        for first, end in zip(firsts, [*firsts[1:], len(files)], strict=True):
            start, stop = int(span.starts[first]), int(span.stops[end - 1])
            yield Stretch(int(files[first]), int(offsets[first]), start, stop)

    def _few_stretches(self, span: ChunkSpan) -> Iterator[Stretch]:
        """Do what ``stretches`` does, without the cost of arrays."""
        last: Stretch | None = None
        columns = (span.tensors.tolist(), span.chunks.tolist(), span.starts.tolist(), span.stops.tolist())
        for tensor, chunk, start, stop in zip(*columns, strict=True):
            file, offset = self.tensor(tensor)
            offset += chunk * CHUNK_BYTES
            if last is not None and (file, offset - start, start) == (last.file, last.offset - last.start, last.stop):
                last = Stretch(file, last.offset, last.start, stop)
            else:
                if last is not None:
                    yield last
                last = Stretch(file, offset, start, stop)
        if last is not None:
            yield last
