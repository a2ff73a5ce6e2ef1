"""Writing a checkpoint directory: files laid out by their headers, filled chunk by chunk, made durable.

An attempt that was cut off leaves files that the next one may go on with: what lies in them is compared, chunk by
chunk, and only what differs is written.

Everything is written with pwrite into space reserved beforehand: a full disk is an error with a name, not a dead
process. What is written goes to the disk while more is written, so that little is left to wait for at the end.
"""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from .digest import DEFAULT_HASH, hasher
from .spool import disk_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from typing_extensions import Self

    from .checkpoint import Layout
    from .places import Places
    from .snapshot import ChunkSpan

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["DirectoryWriter", "sync_directory", "write_all", "write_file"]

_LONG_NAME = 240
#: Files whose space is reserved at a time: where that is memory (tmpfs), it takes about as long as writing does.
_CREATORS = 8
#: So much is written before it is sent to the disk: enough for long writes, little to wait for at the end.
_FLUSH_BYTES = 32 << 20


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """Write a buffer at an offset, however many calls it takes."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable; raises ``OSError``."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create or replace a small file atomically, and durably unless told otherwise."""
    # The longest names that a file system takes leave no room for ours.
    name = path.name if len(os.fsencode(path.name)) < _LONG_NAME else hasher(DEFAULT_HASH).of(os.fsencode(path.name))
    draft = path.with_name(f".{name}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, data, 0)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise disk_error(error, path) from error


class DirectoryWriter:
    """The weight files of one new checkpoint directory, open for writing.

    ``write`` and ``read`` may be called from several threads. ``only``: the numbers of the files to make, all of them
    unless given. ``resume``: files of an attempt that was cut off may lie
    there and are gone on with, in place: nobody else may have them open. ``durable``: ``sync`` waits for the disk.
    ``lost`` is called when the disk could not keep what was written: it tells so once, and the next attempt must not
    believe what it reads back.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        places: Places,
        *,
        only: Collection[int] | None = None,
        resume: bool = False,
        durable: bool = True,
        lost: Callable[[], object] | None = None,
    ) -> None:
        self._only = only
        self._resume = resume
        self._durable = durable
        self._lost = lost
        self._kept: set[int] = set()
        self._directory = directory
        self._layout = layout
        self._places = places
        self._open = ExitStack()
        self._files: dict[int, tuple[int, Path]] = {}
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._lock = threading.Lock()
        self._unflushed: set[int] = set()
        self._unflushed_bytes = 0
        self._flushing: Future[None] | None = None

    def __enter__(self) -> Self:
        numbers = [number for number in range(len(self._layout.files)) if self._only is None or number in self._only]
        try:
            with ThreadPoolExecutor(_CREATORS, thread_name_prefix="create") as pool:
                for _ in pool.map(self._create, numbers):
                    pass
        except BaseException:
            self._open.close()
            raise
        self._open.callback(self._flusher.shutdown, cancel_futures=True)  # the first to go: it uses the files
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _create(self, number: int) -> None:
        file = self._layout.files[number]
        path, size = self._directory / file.name, file.header.file_size
        try:
            descriptor = self._reopen(path, size)
            if descriptor is None:
                path.unlink(missing_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            else:
                self._kept.add(number)
            self._open.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)
            write_all(descriptor, file.header_bytes, 0)
        except OSError as error:
            raise disk_error(error, path) from error
        self._files[number] = (descriptor, path)

    def _reopen(self, path: Path, size: int) -> int | None:
        """Open a file that an attempt before this one made; ``None`` when it has to be made anew."""
        if not self._resume:
            return None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(descriptor)
        # A file with a second name is somebody else's too.
        if not stat.S_ISREG(status.st_mode) or status.st_size != size or status.st_nlink != 1:
            os.close(descriptor)
            return None
        return descriptor

    def read(self, span: ChunkSpan, out: Bytes) -> bool:
        """Copy what an attempt before this one left at a span's places to ``out``; tells whether it left anything."""
        for file, offset, start, stop in self._places.stretches(span):
            if file not in self._kept:
                return False
            try:
                if os.preadv(self._files[file][0], [out[start:stop].data], offset) != stop - start:
                    return False
            except OSError:  # a bad block: written anew it may be a good one
                return False
        return True

    def write(self, span: ChunkSpan, data: Bytes) -> None:
        """Write the chunks of a span, back to back in ``data``, to their places."""
        for file, offset, start, stop in self._places.stretches(span):
            descriptor, path = self._files[file]
            try:
                write_all(descriptor, data[start:stop], offset)
            except OSError as error:
                raise disk_error(error, path) from error
            if self._durable:
                self._flush_in_time(file, stop - start)

    def _flush_in_time(self, file: int, nbytes: int) -> None:
        with self._lock:
            self._unflushed.add(file)
            self._unflushed_bytes += nbytes
            if self._unflushed_bytes >= _FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
                if self._flushing is not None:
                    self._flushing.result()
                files, self._unflushed, self._unflushed_bytes = self._unflushed, set(), 0
                self._flushing = self._flusher.submit(self._flush, files)

    def _flush(self, files: set[int]) -> None:
        for file in sorted(files):
            descriptor, path = self._files[file]
            try:
                os.fdatasync(descriptor)
            except OSError as error:
                self._tell_lost()
                raise disk_error(error, path) from error

    def _tell_lost(self) -> None:
        if self._lost is not None:
            self._lost()

    def sync(self) -> None:
        """Make everything written so far durable, the directory's entries included."""
        if not self._durable:
            return
        if self._flushing is not None:
            self._flushing.result()  # what it could not write, the system will not report again
        for descriptor, path in self._files.values():
            try:
                os.fsync(descriptor)
            except OSError as error:
                self._tell_lost()
                raise disk_error(error, path) from error
        try:
            sync_directory(self._directory)
        except OSError as error:
            raise disk_error(error, self._directory) from error
