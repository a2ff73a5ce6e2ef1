"""Room on the disk for the next version, and who keeps that of the one before taken."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import DiskFull
from deltastore.spool import disk_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Holder", "allocated_bytes", "check_room", "free_bytes", "holders", "remove_directory"]

#: How long to wait for processes that keep the room of old files taken, in seconds, and how often to look.
_HELD_SECONDS = 120.0
_LOOK_SECONDS = 0.5
#: Files removed at a time: to free the memory that a large one takes (tmpfs) takes a while.
_REMOVERS = 8


def remove_directory(directory: Path) -> None:
    """Remove a directory with all that is in it, a link to one never; raises ``OSError``."""
    if directory.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "It is a link", str(directory))
    with os.scandir(directory) as entries:
        files = [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)]
    with ThreadPoolExecutor(_REMOVERS, thread_name_prefix="remove") as pool:
        for _ in pool.map(os.unlink, files):
            pass
    shutil.rmtree(directory)


def free_bytes(directory: Path) -> int:
    """Return how many bytes may still be written; raises ``OSError``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _plain_files(directory: Path) -> Iterable[os.stat_result]:
    if directory.is_symlink():
        return
    for path in directory.rglob("*"):
        with suppress(OSError):
            status = path.lstat()
            if status.st_nlink == 1 and not path.is_dir():
                yield status


def allocated_bytes(directory: Path) -> int:
    """Return how many bytes of disk the files below a directory take that have no other name."""
    return sum(status.st_blocks * 512 for status in _plain_files(directory))


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that maps files, and how many bytes of disk these keep taken even when they are unlinked."""

    pid: int
    name: str
    nbytes: int


def holders(directory: Path) -> list[Holder]:
    """Return who maps files below a directory, as far as /proc shows it: other users' processes may be hidden."""
    sizes = {status.st_ino: status.st_blocks * 512 for status in _plain_files(directory)}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not sizes:
            continue
        with suppress(OSError, ValueError):
            # address, permissions, offset, device, inode, path. The device is left out: btrfs shows another one here.
            lines = (entry / "maps").read_text(errors="replace").splitlines()
            inodes = {int(fields[4]) for line in lines if len(fields := line.split(None, 5)) == 6}
            if mapped := inodes & sizes.keys():
                name = (entry / "comm").read_text(errors="replace").strip()
                found.append(Holder(int(entry.name), name, sum(sizes[inode] for inode in mapped)))
    return found


def check_room(directory: Path, nbytes: int, *, spare: Path, sleep: Callable[[float], object]) -> None:
    """Raise ``DiskFull``, saying what is missing, unless ``nbytes`` can be written once ``spare`` is emptied.

    Files that a process still maps go on taking their room after they are unlinked; where that matters their holders
    are waited for.
    """
    # So do those of this process: an error that holds its own frames keeps what they had mapped until the garbage is
    # collected, which it may not be for days.
    gc.collect()
    waited = 0.0
    while True:
        try:
            missing = nbytes - free_bytes(directory)
            if missing <= 0:
                return
            released = allocated_bytes(spare)
            held = holders(spare)
        except OSError as error:
            raise disk_error(error, directory) from error
        kept = min(released, sum(holder.nbytes for holder in held))
        if missing <= released - kept:
            return
        if not held or missing > released or waited >= _HELD_SECONDS:
            break
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    message = f"The disk of {directory} lacks {missing - released + kept} bytes for the next version"
    if held and missing <= released:
        who = ", ".join(f"{holder.name} (process {holder.pid})" for holder in held[:3])
        raise DiskFull(
            f"{message}: {who} still maps the version before.",
            key=str(directory),
            hint="Have it let go of that version, or free some space.",
        )
    raise DiskFull(f"{message}.", key=str(directory), hint="Free some space; it goes on by itself.")
