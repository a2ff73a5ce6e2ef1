"""Reading a slot's chunks over: which of them are not what they should be; all at once, or a few now and then.

Files are read, not mapped: a bad block or a file that was cut is damage that is found, not a signal that ends the
process.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.clock import now as clock_now
from deltastore.errors import StorageError
from deltastore.materialize import write_file
from deltastore.patch import run_in_order
from deltastore.snapshot import CHUNK_BYTES, chunk_spans

from .records import FORMAT, ScrubRecord, read_record, record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from deltastore.checkpoint import Layout
    from deltastore.digest import Hasher
    from deltastore.places import Places
    from deltastore.restore import Source
    from deltastore.snapshot import ChunkSpan, Digests, Numbers, Schema

    from .slots import LiveSlot

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Scrub", "SlotFiles", "damaged_chunks", "wrong_chunks"]

#: How often the place in a pass is written down, in seconds.
_NOTE_SECONDS = 10.0
_STEP_CHUNKS = 1024
#: Of the time that passed between two steps so much counts at most, in seconds: it does not hurry after a patch.
_BURST_SECONDS = 1.0


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


class Scrub:
    """A pass over the live slot's chunks that goes on for ever, a few at a time.

    ``rate``: bytes a second. ``note``: where the place in a pass is kept, so that the next process goes on from there.
    """

    def __init__(self, note: Path, *, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._note = note
        self._rate = rate
        self._clock = clock
        self._last = self._noted = clock()
        self._budget = 0.0
        try:
            self.record = read_record(note, ScrubRecord)
        except (OSError, ValueError):
            self.record = ScrubRecord(FORMAT, "", "", 0, None)

    def step(self, live: LiveSlot, source: Source, hash_function: Hasher, *, stopped: Callable[[], bool]) -> Numbers:
        """Read as many chunks as the time since the last step allows, one second's at the most.

        Returns those that are damaged, if any. It is then past them: the next pass looks at them again.
        """
        now, schema = self._clock(), source.checkpoint.schema
        most = max(self._rate * _BURST_SECONDS, CHUNK_BYTES)
        self._budget = min(self._budget + self._rate * (now - self._last), most)
        self._last = now
        if (self.record.slot, self.record.commit_id) != (live.name, live.record.commit_id):
            self._move(live, 0, self.record.passed_at)
        found = np.zeros(0, np.int64)
        checkpoint = source.checkpoint
        with SlotFiles(checkpoint.directory, checkpoint.layout, checkpoint.places) as files:
            while self._budget > 0 and not len(found) and not stopped():
                numbers = np.arange(self.record.chunk, min(self.record.chunk + _STEP_CHUNKS, schema.chunks))
                span = next(chunk_spans(schema, numbers), None)
                if span is None:
                    self._move(live, 0, clock_now())
                    break
                out = np.empty(span.nbytes, np.uint8)
                found = span.numbers[wrong_chunks(span, out, files.read(span, out), source.digests, hash_function)]
                self._budget -= span.nbytes
                self._move(live, int(span.numbers[-1]) + 1, self.record.passed_at)
        if now - self._noted >= _NOTE_SECONDS or self.record.chunk == 0:
            self._noted = now
            with suppress(StorageError):  # a note lost costs a part of a pass
                write_file(self._note, record_bytes(self.record), durable=False)
        return found

    def _move(self, live: LiveSlot, chunk: int, passed_at: str | None) -> None:
        self.record = ScrubRecord(FORMAT, live.name, live.record.commit_id, chunk, passed_at)
