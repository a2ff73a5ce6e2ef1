"""Reading a slot's chunks over: which of them are not what they should be.

Files are read, not mapped: a bad block or a file that was cut is damage that is found, not a signal that ends the
process.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.patch import run_in_order
from deltastore.snapshot import CHUNK_BYTES, chunk_spans

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from deltastore.checkpoint import Layout
    from deltastore.digest import Hasher
    from deltastore.places import Places
    from deltastore.snapshot import ChunkSpan, Digests, Numbers, Schema

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["SlotFiles", "damaged_chunks"]


class SlotFiles:
    """The weight files of a slot, open for reading; they stay readable when they are unlinked.

    ``broken``: the files, by number, that are missing or whose size or header is wrong. ``read`` may be called from
    several threads.
    """

    def __init__(self, directory: Path, layout: Layout, places: Places) -> None:
        self.directory = directory
        self.places = places
        self.broken: set[int] = set()
        self._open = ExitStack()
        self._descriptors: dict[int, int] = {}
        for number, file in enumerate(layout.files):
            try:
                descriptor = os.open(directory / file.name, os.O_RDONLY | os.O_CLOEXEC)
                self._open.callback(os.close, descriptor)
                self._descriptors[number] = descriptor
                size = os.fstat(descriptor).st_size
                header = os.pread(descriptor, len(file.header_bytes), 0)
            except OSError:
                self.broken.add(number)
                continue
            if size != file.header.file_size or header != file.header_bytes:
                self.broken.add(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, span: ChunkSpan, out: Bytes) -> Numbers:
        """Copy the bytes of a span's chunks to their places in ``out``.

        Returns the places in the span of chunks that could not be read; their bytes in ``out`` mean nothing.
        """
        failed = np.zeros(len(span.numbers), bool)
        for file, offset, start, stop in self.places.stretches(span):
            if self._read(file, offset, out[start:stop]):
                continue
            for place in np.flatnonzero((span.starts < stop) & (span.stops > start)).tolist():
                first, last = int(span.starts[place]), int(span.stops[place])
                failed[place] = not self._read(file, offset + first - start, out[first:last])
        return np.flatnonzero(failed)

    def _read(self, file: int, offset: int, out: Bytes) -> bool:
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            return False
        try:
            return os.preadv(descriptor, [out.data], offset) == len(out)
        except OSError:
            return False


def wrong_chunks(span: ChunkSpan, data: Bytes, failed: Numbers, digests: Digests, hash_function: Hasher) -> Numbers:
    """Return the places in a span of chunks that could not be read, or whose bytes do not have their digests."""
    digest = hash_function.digest
    pieces = zip(span.starts.tolist(), span.stops.tolist(), strict=True)
    found = np.frombuffer(b"".join(digest(data[start:stop]) for start, stop in pieces), np.uint8)
    wrong = (found.reshape(len(span.numbers), -1) != digests[span.numbers]).any(axis=1)
    wrong[failed] = True
    return np.flatnonzero(wrong)


def damaged_chunks(
    files: SlotFiles,
    schema: Schema,
    digests: Digests,
    hash_function: Hasher,
    *,
    numbers: Numbers | None = None,
    workers: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Numbers:
    """Read chunks, all of them unless ``numbers`` (int64, ascending) are given; returns those that are damaged.

    Those of a broken file that can be read and are right are none. ``progress`` is told bytes done.
    """
    local = threading.local()

    def check(span: ChunkSpan) -> tuple[Numbers, int]:
        if not hasattr(local, "buffer"):
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        out = local.buffer[: span.nbytes]
        wrong = wrong_chunks(span, out, files.read(span, out), digests, hash_function)
        return span.numbers[wrong], int((span.stops - span.starts).sum())

    wanted = np.arange(schema.chunks, dtype=np.int64) if numbers is None else numbers
    found = [np.zeros(0, np.int64)]
    for damaged, nbytes in run_in_order(check, chunk_spans(schema, wanted), workers=workers, name="scrub"):
        found.append(damaged)
        if progress is not None:
            progress(nbytes)
    return np.concatenate(found)
