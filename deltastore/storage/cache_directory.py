"""A directory of copies, shared by any number of processes, on one host or on a shared file system.

    objects/xx/<hash of the key>            the object's bytes, and 32 bytes that seal them
    objects/xx/<hash of the key>.<random>   one on its way in, locked by whoever writes it
    locks/xxx                               who fetches; one file for many keys, never removed
    usage                                   an upper bound of the bytes in all objects; whoever holds its lock may
                                            count, or add a name

No lock is needed for what is read to be right: a copy gets its name by rename, is hashed whenever it is read, and
dropped when it is not what was stored. Locks only keep processes from doing the same work twice, and from exceeding
the bound together. They are ``flock``'s, which the kernel releases when a process ends, so there are no stale ones
and no clock is asked; a process that stands still holds others up for as long as their patience lasts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import secrets
import stat
import struct
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_hexdigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from deltastore.storage.base import Buffer

__all__ = ["CacheDirectory", "CachedObject", "seal"]

_log = logging.getLogger(__name__)

_SEAL: Final = struct.Struct("<8sQ16s")
_MAGIC: Final = b"dscopy/1"
_USAGE: Final = struct.Struct("<Q8s")
_OBJECT: Final = re.compile(r"[0-9a-f]{32}")
_DRAFT: Final = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}")
_PIECE: Final = 1 << 20
# A waiting process looks again after so many seconds, ever more slowly.
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.25
_USAGE_PATIENCE: Final = 10.0
#: Seconds between warnings of the same directory.
_WARN_SECONDS: Final = 60.0


def seal(key: str, data: Buffer) -> bytes:
    """Return 16 bytes that hold for these bytes under this key."""
    digest = xxh3_128(_start(key))
    digest.update(data)
    return digest.digest()


def _start(key: str) -> bytes:
    return key.encode() + b"\0"


class CachedObject:
    """One copy, checked when it was opened; it stays readable when it is dropped meanwhile. ``seal`` is as stored."""

    __slots__ = ("_descriptor", "seal", "size")

    def __init__(self, descriptor: int, size: int, checked: bytes) -> None:
        self._descriptor = descriptor
        self.size = size
        self.seal = checked

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to before ``end``; fewer if the file was cut short meanwhile."""
        return os.pread(self._descriptor, end - start, start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CacheDirectory:
    """Copies in one directory, which is made when it is first needed. Thread-safe.

    ``max_bytes`` bounds all copies together; the least recently read go first. ``patience`` is how many seconds a
    reader waits for another one's fetch of the same object before it fetches itself; ``sleep`` waits meanwhile, and
    may raise to give up.
    """

    def __init__(
        self, root: Path, *, max_bytes: int, patience: float = 120.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._root = Path(root).absolute()
        self._max_bytes = max_bytes
        self._patience = patience
        self._sleep = sleep
        self._warn_from = 0.0

    def __repr__(self) -> str:
        return f"CacheDirectory({str(self._root)!r})"

    # Reading

    def read(self, key: str, *, limit: int, fetch: Callable[[], bytes]) -> bytes:
        """Return an object's copy, or what ``fetch`` returns, of which a copy is kept where that is possible."""
        data = self._find(key, limit)
        if data is not None:
            return data
        with self._turn(key):
            data = self._find(key, limit)
            if data is None:
                data = fetch()
                self._keep(key, data)
        return data

    def open(self, key: str) -> CachedObject | None:
        """Return an object's copy, checked, or ``None``."""
        found = self._open(key)
        if found is None:
            return None
        descriptor, size = found
        digest = xxh3_128(_start(key))
        try:
            for start in range(0, size, _PIECE):
                digest.update(os.pread(descriptor, min(_PIECE, size - start), start))
            checked = digest.digest()
            if os.pread(descriptor, _SEAL.size + 1, size) == _SEAL.pack(_MAGIC, size, checked):
                self._touch(descriptor)
                return CachedObject(descriptor, size, checked)
        except OSError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        self.forget(key)
        return None

    def holds(self, key: str) -> bool:
        """Whether there is a file for an object; what it is worth is known when it is read."""
        return self._path(key).exists()

    def forget(self, key: str) -> None:
        """Drop an object's copy if there is one."""
        with suppress(OSError):
            self._path(key).unlink()

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _find(self, key: str, limit: int) -> bytes | None:
        """Return an object's copy in one pass over it; one of more than ``limit`` bytes is none."""
        found = self._open(key)
        if found is None:
            return None
        descriptor, size = found
        with os.fdopen(descriptor, "rb") as file:
            if size > limit:
                return None
            try:
                data = file.read(size)
                rest = file.read(_SEAL.size + 1)
            except OSError:
                data, rest = b"", b""
            if rest == _SEAL.pack(_MAGIC, size, seal(key, data)):
                self._touch(descriptor)
                return data
        self.forget(key)
        return None

    def _open(self, key: str) -> tuple[int, int] | None:
        """Open a file that may be an object's copy; returns its descriptor and the size that the object would have."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size >= _SEAL.size:
            return descriptor, status.st_size - _SEAL.size
        os.close(descriptor)
        self.forget(key)
        return None

    @staticmethod
    def _touch(descriptor: int) -> None:
        """Note that a copy was read; what was read longest ago goes first."""
        with suppress(OSError):
            os.utime(descriptor)

    def _path(self, key: str) -> Path:
        name = xxh3_128_hexdigest(key.encode())
        return self._root / "objects" / name[:2] / name

    # One fetch for all

    @contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        """Wait until nobody else fetches the object, or its copy is there, or patience ends."""
        path = self._path(key)
        lock = self._open_lock(self._root / "locks" / path.name[:3])
        try:
            if lock is not None:
                self._wait(lambda: _locks(lock) or _appeared(path), self._patience)
            yield
        finally:
            if lock is not None:
                _unlock(lock)

    def _open_lock(self, path: Path) -> int | None:
        """Open a file to be locked; ``None`` where none can be made: then one goes on without."""
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        return None

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is done; tells whether it came to that in time."""
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while not done():
            if time.monotonic() > deadline:
                return False
            self._sleep(random.uniform(0.5, 1.0) * pause)  # noqa: S311 - jitter
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    # Keeping

    def _keep(self, key: str, data: bytes) -> None:
        """Keep a copy if there is room for one; whatever goes wrong, the caller has its bytes."""
        try:
            self._store(key, data)
        except OSError as error:
            if time.monotonic() >= self._warn_from:
                self._warn_from = time.monotonic() + _WARN_SECONDS
                _log.warning("The cache %s keeps nothing: %s.", self._root, error.strerror or error)

    def _store(self, key: str, data: bytes) -> None:
        size = len(data) + _SEAL.size
        if size > self._max_bytes:
            return
        path = self._path(key)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = self._reserve(draft, size)
        try:
            _write(descriptor, data)
            _write(descriptor, _SEAL.pack(_MAGIC, len(data), seal(key, data)))
            # Whoever counts meanwhile would look for the draft in vain, and have passed by where it is now.
            with self._usage():
                # Not made durable: what a power loss leaves is hashed like everything else.
                draft.rename(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        finally:
            _unlock(descriptor)

    def _reserve(self, draft: Path, size: int) -> int:
        """Make room and an empty file of the full size in it; returns its descriptor, locked."""
        draft.parent.mkdir(parents=True, exist_ok=True)
        with self._usage() as usage:
            used = _read_usage(usage)
            if used is None or used + size > self._max_bytes:
                used = self._make_room(size)
            _write_usage(usage, used + size)
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            # Whoever counts next finds it with its lock and at its full size.
            try:
                _locks(descriptor)
                os.ftruncate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                with suppress(OSError):
                    draft.unlink()
                raise
            return descriptor

    @contextmanager
    def _usage(self) -> Iterator[int]:
        """Lock ``usage``, and give its descriptor; ``OSError`` if it cannot be had in time."""
        usage = self._open_lock(self._root / "usage")
        if usage is None:
            raise OSError(errno.EACCES, f"{self._root / 'usage'} cannot be opened")
        try:
            if not self._wait(lambda: _locks(usage), _USAGE_PATIENCE):
                raise OSError(errno.EBUSY, "another process holds its lock")
            yield usage
        finally:
            _unlock(usage)

    def _make_room(self, size: int) -> int:
        """Count what is there, and drop the least recently read until ``size`` more fits; returns what is left."""
        used, copies = self._count()
        if used + size <= self._max_bytes:
            return used
        # An eighth more than needed, so that it is not each new object that counts all the others.
        target = max(self._max_bytes - size - self._max_bytes // 8, 0)
        for _, copy_size, path in sorted(copies):
            if used <= target:
                break
            with suppress(OSError):
                path.unlink()
                used -= copy_size
        if used + size > self._max_bytes:
            raise OSError(errno.ENOSPC, "there is no room beside what others are writing")
        return used

    def _count(self) -> tuple[int, list[tuple[int, int, Path]]]:
        """Return the bytes in use, and of each copy when it was last read (ns), its size and its path.

        Drafts that nobody writes any more are removed.
        """
        used = 0
        copies = []
        for directory in _entries(self._root / "objects"):
            for path in _entries(directory):
                with suppress(OSError):
                    if _DRAFT.fullmatch(path.name) and _remove_abandoned(path):
                        continue
                    status = path.lstat()
                    used += status.st_size
                    if _OBJECT.fullmatch(path.name):
                        copies.append((status.st_mtime_ns, status.st_size, path))
        return used, copies


def _entries(directory: Path) -> list[Path]:
    try:
        return [*directory.iterdir()]
    except OSError:
        return []


def _remove_abandoned(draft: Path) -> bool:
    """Remove a draft if its writer is gone; tells whether it was."""
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if _locks(descriptor):
            draft.unlink()
            return True
        return False
    finally:
        _unlock(descriptor)


def _locks(descriptor: int) -> bool:
    """Lock a file if nobody holds its lock. Where there are no locks at all everybody may go ahead."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _unlock(descriptor: int) -> None:
    # Not by closing alone: a process forked meanwhile has the file open too, and with it the lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _appeared(path: Path) -> bool:
    """Whether a file is there by now."""
    # An NFS client believes for a while that what was absent still is; opening the directory makes it ask.
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return path.exists()


def _write(descriptor: int, data: Buffer) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_usage(descriptor: int) -> int | None:
    """Return the bytes in use at most; ``None`` when nobody has counted yet, or what is there is damaged."""
    data = os.pread(descriptor, _USAGE.size, 0)
    if len(data) != _USAGE.size:
        return None
    used, digest = _USAGE.unpack(data)
    return int(used) if digest == xxh3_64_digest(data[:8]) else None


def _write_usage(descriptor: int, used: int) -> None:
    number = used.to_bytes(8, "little")
    os.pwrite(descriptor, number + xxh3_64_digest(number), 0)
