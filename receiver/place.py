"""What the file system below a checkpoint is like: whether it keeps the promises that slots need."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from deltastore.errors import SlotError

__all__ = ["check_neighbours", "check_place"]

#: File systems whose locks, renames or page cache another host or process does not share with us: statfs's numbers.
_REMOTE = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9P",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
}
_HINT = "Give a --checkpoint on a local disk, or say --unsafe-file-system if you know that this one is as good."


def _statfs_type(path: Path) -> int:
    """Return the number that Linux has for a path's kind of file system; raises ``OSError``."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; its first field is the number
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def check_place(directory: Path, *, locked: int) -> None:
    """Raise ``SlotError`` unless a directory's file system keeps what slots need.

    ``locked`` is a descriptor of ``directory / "lock"`` that holds its lock. The kind of file system is looked at, and
    a lock and the rename of a link are tried.
    """
    kind = None
    with suppress(OSError):
        kind = _REMOTE.get(_statfs_type(directory))
    problem = f"it is on {kind}" if kind else _problem(directory, locked)
    if problem:
        raise SlotError(
            f"{directory} cannot hold slots: {problem}, so two receivers, or a kill, could leave half a version live.",
            key=str(directory),
            hint=_HINT,
        )


def _problem(directory: Path, locked: int) -> str | None:
    second = os.open(f"/proc/self/fd/{locked}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
    else:
        return "it does not keep a lock from being taken twice"
    finally:
        os.close(second)
    probe, draft = directory / "probe", directory / "probe.draft"
    try:
        for target in ("even", "odd") if not probe.is_symlink() else (str(os.getpid()),):
            draft.unlink(missing_ok=True)
            draft.symlink_to(target)
            draft.replace(probe)
        if probe.readlink() != Path(target) or draft.is_symlink():
            return "it does not replace a link by renaming another one"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        return f"a link cannot be made and renamed there ({error.strerror})"
    return None


def check_neighbours(directory: Path, link: Path) -> None:
    """Raise ``SlotError`` where a link made in ``directory`` cannot be renamed to ``link``: found out before the work.

    Raises ``OSError``, too.
    """
    mounted = link.is_mount() and not link.is_symlink()
    problem = f"{link} is a mount point, which cannot become a link" if mounted else None
    try:  # of nothing, to nothing: the kernel compares the file systems first
        (directory / "probe.none").rename(link.parent / f"{directory.name}.none")
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        problem = f"{directory} is on another file system than {link.parent}, where the link to a slot has to be"
    if problem:
        raise SlotError(
            f"{problem}.", key=str(directory), hint="Give a --checkpoint below a directory of the disk with the room."
        )
