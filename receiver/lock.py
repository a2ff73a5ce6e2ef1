"""One receiver a checkpoint: a lock that ends with its process, and word of who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from deltastore.clock import now
from deltastore.errors import SlotError
from deltastore.spool import disk_error

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lock"]


class _Holder(msgspec.Struct, frozen=True):
    """Who works on a checkpoint, as the lock file tells people."""

    pid: int
    host: str
    url: str | None = None
    since: str | None = None


def _holder(path: Path) -> str:
    try:
        holder = msgspec.json.decode(path.read_bytes(), type=_Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return "one that did not say who it is"
    since = f", since {holder.since}" if holder.since else ""
    return f"process {holder.pid} on {holder.host}{since}{f', at {holder.url}' if holder.url else ''}"


class Lock:
    """The lock file at ``path``, of the receiver that works on ``checkpoint``."""

    def __init__(self, path: Path, *, checkpoint: Path) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._descriptor: int | None = None
        self._lost = False  # once seen it counts, until the lock was taken again
        self.url: str | None = None

    def take(self) -> int:
        """Hold it until ``release`` and return its descriptor; raises ``SlotError`` saying who holds it already.

        Where it was lost it is taken anew.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, self._path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _holder(self._path)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise SlotError(
                    f"{self._path} cannot be locked: {error.strerror}.",
                    key=str(self._path),
                    hint="Use a local file system.",
                ) from error
            raise SlotError(
                f"{self._checkpoint} is in the hands of another receiver: {owner}.",
                key=str(self._path),
                hint="Stop that one first, or give this one a checkpoint of its own.",
            ) from error
        if self._descriptor is not None:  # of a file that is gone by now
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._lost = False
        return descriptor

    def lost(self) -> bool:
        """Tell whether it is held on a file that was removed or replaced since: then another receiver can take it."""
        if self._descriptor is not None and not self._lost:
            try:
                self._lost = not os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
            except (FileNotFoundError, NotADirectoryError):
                self._lost = True
            except OSError as error:
                raise disk_error(error, self._path) from error
        return self._lost

    def announce(self, url: str | None) -> None:
        """Write down who holds it and where that one listens."""
        self.url = url
        if self._descriptor is not None:
            owner = _Holder(pid=os.getpid(), host=socket.gethostname(), url=url, since=now())
            with suppress(OSError):  # for people only: a full disk must not keep a version from being served
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, msgspec.json.encode(owner) + b"\n", 0)

    def release(self) -> None:
        """Let another receiver have it."""
        self._lost = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
