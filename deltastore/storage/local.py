"""Objects as files below a directory: a disk, NFS, or any other mounted file system.

A new object is written in full to a temporary file of the same file system and made durable there; only
then does it get its name, by ``rename`` (write) or by ``link`` (create, which fails when the name is
taken). So readers see nothing or all of an object, also after a power loss.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltastore.errors import AccessDenied, DiskFull, ObjectExists, ObjectNotFound, StorageError
from deltastore.storage.base import ObjectInfo
from deltastore.storage.failures import too_large, too_short
from deltastore.storage.keys import check_key, check_prefix, check_range, is_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.storage.base import Buffer

__all__ = ["LocalBackend"]

# Below the root, so that it is on the root's file system; hidden, so that no key and no listing meets it.
_TEMPORARY: Final = ".tmp"

# A concurrent delete may remove a directory that has just become empty, between our making it and using it.
_PLACE_ATTEMPTS: Final = 16

# How many directories to remember as durable before starting over.
_DURABLE_LIMIT: Final = 4096

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_TRANSIENT: Final = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY})


class LocalBackend:
    """The backend of a plain path. Reading needs no directory to exist; writing makes what is missing."""

    __slots__ = ("_durable", "_root")

    def __init__(self, root: Path) -> None:
        # Made absolute once: a daemon that changes its working directory keeps its store. A link in the
        # path is followed at every use, so that it may be repointed.
        self._root = Path(root).absolute()
        self._durable: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalBackend({self.url!r})"

    @property
    def url(self) -> str:
        """The root's path."""
        return str(self._root)

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object; its size is checked against ``limit`` before any byte is read."""
        path = self._path(key)
        with _translated("read", key, absent=True):
            descriptor = _open_for_reading(path)
            try:
                return _read_whole(descriptor, key, limit)
            finally:
                os.close(descriptor)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object."""
        check_range(key, start, end)
        with _translated("read", key, absent=True):
            descriptor = _open_for_reading(self._root / key)
            try:
                return _read_range(descriptor, key, start, end)
            finally:
                os.close(descriptor)

    def write(self, key: str, data: Buffer) -> None:
        """Store an object durably, replacing what is there, by rename."""
        path = self._path(key)
        with _translated("write", key), self._temporary(data) as temporary:
            self._place(partial(temporary.replace, path), path)
            _sync_directory(path.parent)

    def create(self, key: str, data: Buffer) -> None:
        """Store an object durably if and only if the key is free, by hard link."""
        path = self._path(key)

        def link() -> None:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise ObjectExists(f"{key} exists already", key=key) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise StorageError(
                    f"{key} could not be created: {self._root} refuses hard links ({error.strerror})",
                    transient=False,
                    key=key,
                    hint="keep the store in object storage, or on a file system with hard links (ext4, NFS)",
                ) from error

        with _translated("create", key), self._temporary(data) as temporary:
            self._place(link, path)
            _sync_directory(path.parent)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix``; one that vanishes meanwhile is left out."""
        check_prefix(prefix)
        pending = [prefix]
        while pending:
            parent = pending.pop()
            with _translated("list", parent or None):
                directories, objects = _scan(self._root, parent)
            pending += directories
            yield from objects

    def delete(self, key: str) -> None:
        """Remove an object and the directories that it leaves empty."""
        path = self._path(key)
        with _translated("delete", key):
            try:
                path.unlink()
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                return
            # Another deletion may have found the directory empty and removed it.
            with suppress(FileNotFoundError):
                _sync_directory(path.parent)
        self._prune(path.parent)

    def sweep(self, *, older_than: float = 86_400.0) -> int:
        """Remove the temporary files of writers that were killed; return how many bytes came free.

        A file younger than ``older_than`` seconds may belong to a writer at work. Should an older one too,
        its write fails and has stored nothing.
        """
        freed = 0
        try:
            with _translated("sweep", None, absent=True), os.scandir(self._root / _TEMPORARY) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if time.time() - status.st_mtime >= older_than:
                            Path(entry).unlink()
                            freed += status.st_size
        except ObjectNotFound:
            return 0
        return freed

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    @contextmanager
    def _temporary(self, data: Buffer) -> Iterator[Path]:
        """Write ``data`` durably to a file without a name of its own; it is gone after the block."""
        directory = self._root / _TEMPORARY
        path = directory / uuid.uuid4().hex
        try:
            self._place(partial(_write_whole, path, data), path)
            yield path
        finally:
            with suppress(OSError):
                path.unlink()

    def _place(self, action: Callable[[], object], path: Path) -> None:
        """Run ``action``, which gives ``path`` its entry, in a directory made as needed."""
        for _ in range(_PLACE_ATTEMPTS):
            with suppress(FileNotFoundError):
                self._make_directory(path.parent)
                action()
                break
            self._durable.clear()
        else:
            self._make_directory(path.parent)
            action()

    def _make_directory(self, path: Path) -> None:
        """Make a directory and its parents, each with a durable entry in the one above.

        One that exists may have been made a moment ago by a process that has not come to syncing it, so
        existing ones are synced too, once each.
        """
        if path in self._durable:
            return
        try:
            path.mkdir()
        except FileNotFoundError:
            self._make_directory(path.parent)
            path.mkdir(exist_ok=True)
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
            if path == self._root or self._root not in path.parents:
                return
            self._make_directory(path.parent)
        _sync_directory(path.parent)
        if len(self._durable) >= _DURABLE_LIMIT:
            self._durable.clear()
        self._durable.add(path)

    def _prune(self, directory: Path) -> None:
        """Remove directories left empty, as far as the root; whoever needs one again makes it."""
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:
                return
            self._durable.discard(directory)
            directory = directory.parent


def _scan(root: Path, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
    """List the prefixes and the objects directly below a prefix."""
    directories: list[str] = []
    objects: list[ObjectInfo] = []
    try:
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                key = prefix + entry.name
                if not is_key(key):
                    continue
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(key + "/")
                    elif entry.is_file():
                        objects.append(ObjectInfo(key, entry.stat().st_size))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    return directories, objects


def _open_for_reading(path: Path) -> int:
    """Open a file that another host may have made a moment ago."""
    # A FIFO that someone left under the key must not block us.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        # An NFS client that has once seen a name absent goes on believing it, up to a minute by default.
        # Opening the directory makes it ask whether that has changed.
        with suppress(OSError):
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return os.open(path, flags)


def _read_whole(descriptor: int, key: str, limit: int) -> bytes:
    """Read an open file to its end, at most ``limit`` bytes."""
    size = _size(descriptor, key)
    if size > limit:
        raise too_large(key, limit)
    # Nothing rewrites an object in place, so one that shrinks or grows under our hands is not one of ours.
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise _changed(key)
    return data


def _read_range(descriptor: int, key: str, start: int, end: int) -> bytes:
    """Read bytes ``start`` to before ``end`` of an open file."""
    if _size(descriptor, key) < end:
        raise too_short(key, end)
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(start)
        data = file.read(end - start)
    if len(data) != end - start:
        raise _changed(key)
    return data


def _size(descriptor: int, key: str) -> int:
    """Return an open file's size, if it is a file that can be read."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(
            f"{key} is not a regular file",
            transient=False,
            key=key,
            hint="something else was put into the store's directory; move it away",
        )
    return status.st_size


def _changed(key: str) -> StorageError:
    return StorageError(f"{key} changed its size while it was read", key=key, hint="read it again")


def _write_whole(path: Path, data: Buffer) -> None:
    """Write a new file and wait until its bytes are durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    """Wait until the directory's entries are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync directories; they have no entries to lose on this machine.
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _translated(verb: str, key: str | None, *, absent: bool = False) -> Iterator[None]:
    """Turn every ``OSError`` into one of ours; ``absent``: a missing file is ``ObjectNotFound``."""
    try:
        yield
    except OSError as error:
        raise _translation(error, verb, key, absent=absent) from error


def _translation(error: OSError, verb: str, key: str | None, *, absent: bool) -> StorageError:
    name = key or "the store"
    reason = error.strerror or str(error)
    message = f"could not {verb} {name}: {reason}"
    if absent and error.errno in _ABSENT:
        return ObjectNotFound(f"there is no object {name}", key=key)
    if error.errno in _FULL:
        return DiskFull(message, key=key, hint="free some space or raise the quota, then repeat")
    if error.errno in _DENIED:
        hint = "give this user the permission on the store's directory, or mount it writable"
        return AccessDenied(message, key=key, hint=hint)
    if error.errno in {errno.EISDIR, errno.ENOTDIR}:
        hint = "something else was put into the store's directory; move it away"
        return StorageError(message, transient=False, key=key, hint=hint)
    return StorageError(
        message,
        transient=error.errno in _TRANSIENT,
        key=key,
        hint="look at the file system that holds the store",
    )
