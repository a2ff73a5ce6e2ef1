"""Writing a checkpoint directory: files laid out by their headers, filled chunk by chunk, made durable.

Everything is written with pwrite into space reserved beforehand: a full disk is an error with a name, not a dead
process.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from .digest import DEFAULT_HASH, hasher
from .snapshot import CHUNK_BYTES
from .spool import disk_error

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from typing_extensions import Self

    from .checkpoint import Layout
    from .snapshot import TensorSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["DirectoryWriter", "sync_directory", "write_all", "write_file"]

_LONG_NAME = 240


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


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a small file atomically and durably."""
    # The longest names that a file system takes leave no room for ours.
    name = path.name if len(os.fsencode(path.name)) < _LONG_NAME else hasher(DEFAULT_HASH).of(os.fsencode(path.name))
    draft = path.with_name(f".{name}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise disk_error(error, path) from error


class DirectoryWriter:
    """The weight files of one new checkpoint directory, open for writing.

    ``write`` may be called from several threads.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._directory = directory
        self._layout = layout
        self._open = ExitStack()
        self._places: dict[str, tuple[int, int, Path]] = {}
        self._descriptors: list[tuple[int, Path]] = []

    def __enter__(self) -> Self:
        try:
            for file in self._layout.files:
                self._create(file.name, file.header_bytes, file.header.file_size)
                descriptor, path = self._descriptors[-1]
                for placed in file.header.tensors:
                    self._places[placed.spec.name] = (descriptor, placed.start, path)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _create(self, name: str, header: bytes, size: int) -> None:
        path = self._directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._open.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)
            write_all(descriptor, header, 0)
        except OSError as error:
            raise disk_error(error, path) from error
        self._descriptors.append((descriptor, path))

    def write(self, spec: TensorSpec, chunk: int, data: Bytes) -> None:
        """Write one chunk of one tensor to its place."""
        descriptor, start, path = self._places[spec.name]
        try:
            write_all(descriptor, data, start + chunk * CHUNK_BYTES)
        except OSError as error:
            raise disk_error(error, path) from error

    def sync(self) -> None:
        """Make everything written so far durable, the directory's entries included."""
        for descriptor, path in self._descriptors:
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise disk_error(error, path) from error
        try:
            sync_directory(self._directory)
        except OSError as error:
            raise disk_error(error, self._directory) from error
