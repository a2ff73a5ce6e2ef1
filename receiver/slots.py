"""Two local checkpoints and the swap between them.

    DIR                  a link to the live slot: always one whole, verified version
    DIR.slots/a, b/      the two slots; the live one is never written
    DIR.slots/a.json     what slot a holds: written when the slot is whole and durable, removed before it is touched
    DIR.slots/a.digests  the chunk digests of that snapshot
    DIR.slots/parts/     fetched parts, until they are applied
    DIR.slots/lock       held by the one receiver that works here

The link is the only truth about which slot is live, and a slot's own record about what is in it: one atomic rename of
the link changes both. A kill at any instant leaves the link on a slot that has its record.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from deltastore.checkpoint import Checkpoint, open_checkpoint
from deltastore.clock import now
from deltastore.digest import HASHES, Hasher, hasher
from deltastore.errors import CheckpointError, CorruptObject, SlotError, StorageError, UsageError
from deltastore.materialize import sync_directory, write_file
from deltastore.restore import Source
from deltastore.snapshot import snapshot_id, tensor_digests
from deltastore.spool import disk_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.manifest import Manifest
    from deltastore.snapshot import Digests

__all__ = ["LiveSlot", "SlotRecord", "Slots"]

_NAMES: tuple[Literal["a", "b"], Literal["a", "b"]] = ("a", "b")
_FORMAT = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class _File(msgspec.Struct, frozen=True, array_like=True):
    """A weight file as it was when it was verified: its name, size, modification time (ns) and inode."""

    name: str
    size: int
    modified_ns: int
    inode: int


class SlotRecord(msgspec.Struct, frozen=True):
    """What a slot holds. ``boot_id`` is that of the kernel under which the bytes were last hashed."""

    format: int
    stream_id: str
    version: int
    commit_id: str
    snapshot_id: str
    hash: str
    boot_id: str
    files: tuple[_File, ...]


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """The slot that the link leads to, and its record."""

    name: Literal["a", "b"]
    directory: Path
    record: SlotRecord


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # unknown: equal to no recorded one that counts, so everything is hashed anew


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


class Slots:
    """The slots of one ``--checkpoint DIR``. Take ``lock`` before anything is changed."""

    def __init__(self, checkpoint: str | Path) -> None:
        # Not resolved: the last component is the link itself.
        path = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - Path.absolute keeps `..`, resolve follows the link
        if not path.name:
            raise UsageError(f"{path} cannot be a checkpoint.", hint="Give a path that can become a link.")
        self.link = path.parent.resolve() / path.name
        self.directory = self.link.with_name(f"{self.link.name}.slots")
        self._lock: int | None = None

    # Ownership

    def lock(self, *, url: str | None = None) -> None:
        """Become the one receiver of this checkpoint, until ``unlock``; raises ``SlotError`` saying who is."""
        path = self.directory / "lock"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _holder(path)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise SlotError(
                    f"{path} cannot be locked: {error.strerror}.", key=str(path), hint="Use a local file system."
                ) from error
            raise SlotError(
                f"{self.link} is in the hands of another receiver: {owner}.",
                key=str(path),
                hint="Stop that one first, or give this one a checkpoint of its own.",
            ) from error
        self._lock = descriptor
        self.announce(url)

    def announce(self, url: str | None) -> None:
        """Write into the lock file who holds it and where it listens."""
        if self._lock is not None:
            owner = _Holder(pid=os.getpid(), host=socket.gethostname(), url=url, since=now())
            with suppress(OSError):  # for people only: a full disk must not keep a version from being served
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, msgspec.json.encode(owner) + b"\n", 0)

    def unlock(self) -> None:
        """Let another receiver work here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # What is there

    @property
    def parts(self) -> Path:
        """Where fetched parts wait."""
        return self.directory / "parts"

    def live(self) -> LiveSlot | None:
        """Return the live slot.

        ``None`` when the path is free or is not ours yet. Raises ``SlotError`` on a damaged record.
        """
        name = self._linked_name()
        if name is None:
            return None
        directory = self.directory / name
        if not directory.is_dir():
            raise SlotError(
                f"{self.link} leads to {directory}, which is gone.",
                key=str(directory),
                hint=f"Remove {self.link} and start again.",
            )
        return LiveSlot(name, directory, self._read_record(name))

    def other(self, live: LiveSlot) -> LiveSlot | None:
        """Return the slot that is not live if it still holds its version whole."""
        name: Literal["a", "b"] = "b" if live.name == "a" else "a"
        if not (self.directory / f"{name}.json").exists() or not (self.directory / name).is_dir():
            return None
        return LiveSlot(name, self.directory / name, self._read_record(name))

    def _linked_name(self) -> Literal["a", "b"] | None:
        try:
            target = self.link.readlink()
        except OSError:
            return None
        resolved = (self.link.parent / target).absolute()
        return next((name for name in _NAMES if resolved == self.directory / name), None)

    def _read_record(self, name: str) -> SlotRecord:
        path = self.directory / f"{name}.json"
        try:
            line, _, rest = path.read_bytes().partition(b"\n")
            algorithm = rest.partition(b":")[0].decode("ascii", "replace")
            if algorithm not in HASHES or hasher(algorithm).of(line).encode() + b"\n" != rest:
                raise msgspec.DecodeError("its digest does not fit")
            record = msgspec.json.decode(line, type=SlotRecord)
            if record.format != _FORMAT:
                raise msgspec.DecodeError(f"it has the format {record.format}, this release knows {_FORMAT}")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SlotError(
                f"The record of the live slot, {path}, cannot be used: {error}.",
                key=str(path),
                hint=f"Remove {self.link} (the link only) to build the checkpoint anew.",
            ) from error
        return record

    def digests(self, live: LiveSlot, checkpoint: Checkpoint) -> Digests:
        """Return the live slot's chunk digests, proven against its snapshot id."""
        path = self.directory / f"{live.name}.digests"
        hash_function = hasher(live.record.hash)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise disk_error(error, path) from error
        if len(data) != checkpoint.schema.chunks * hash_function.size:
            raise SlotError(f"{path} has a wrong size.", key=str(path), hint=f"Remove {self.link} and start again.")
        table = np.frombuffer(data, np.uint8).reshape(-1, hash_function.size)
        if snapshot_id(checkpoint.schema, table, hash_function) != live.record.snapshot_id:
            raise SlotError(f"{path} is damaged.", key=str(path), hint=f"Remove {self.link} and start again.")
        return table

    def open(self, live: LiveSlot) -> Checkpoint:
        """Open a slot's checkpoint; raises ``CorruptObject`` when its files are not what was recorded whole."""
        try:
            return open_checkpoint(live.directory)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise  # out of reach, which is no damage
            raise CorruptObject(
                f"The live slot is damaged: {str(error).rstrip('.')}.",
                key=error.key,
                hint=f"Remove {self.link} (the link only) and start the receiver again: it is built anew.",
            ) from error

    def source(self, live: LiveSlot, *, workers: int, progress: Callable[[int], object] | None = None) -> Source:
        """Open the live slot as the source of a patch.

        Its bytes are believed if they were hashed under this kernel and its files were not touched since; else they
        are hashed again. Raises ``CorruptObject`` naming the tensors that are damaged.
        """
        checkpoint = self.open(live)
        digests = self.digests(live, checkpoint)
        record = live.record
        if not record.boot_id or record.boot_id != _boot_id() or record.files != _files(checkpoint):
            self.verify(checkpoint, digests, hasher(record.hash), workers=workers, progress=progress)
            self._write_record(live.name, checkpoint, record)
        return Source(checkpoint, record.version, digests)

    @staticmethod
    def verify(
        checkpoint: Checkpoint,
        digests: Digests,
        hash_function: Hasher,
        *,
        workers: int,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Hash every chunk.

        Raises ``CorruptObject`` naming the first tensors whose bytes are not those of ``digests``.
        """
        found = checkpoint.digests(hash_function, workers=workers, progress=progress)
        damaged = np.flatnonzero((found != digests).any(axis=1))
        if len(damaged):
            schema = checkpoint.schema
            wanted, now = (tensor_digests(schema, table, hash_function) for table in (digests, found))
            names = [spec.name for spec, one, other in zip(schema, wanted, now, strict=True) if one != other]
            raise CorruptObject(
                f"{len(damaged)} of {schema.chunks} chunks in {checkpoint.directory} are damaged, "
                f"in {', '.join(names[:3])}{' …' if len(names) > 3 else ''}.",
                key=str(checkpoint.directory),
                hint="Remove the checkpoint's link and start the receiver again: it is built anew.",
            )

    # Changing

    def prepare(self) -> tuple[Literal["a", "b"], Path]:
        """Empty the slot that is not live and return it.

        Files that a process still maps stay whole for it: they are unlinked.
        """
        name: Literal["a", "b"] = "b" if self._linked_name() == "a" else "a"
        directory = self.directory / name
        try:
            for leftover in (self.directory / f"{name}.json", self.directory / f"{name}.digests"):
                leftover.unlink(missing_ok=True)
            sync_directory(self.directory)
            if directory.is_symlink():  # an adoption that was killed before its exchange
                directory.unlink()
            elif directory.exists():
                shutil.rmtree(directory)
            directory.mkdir()
        except OSError as error:
            raise disk_error(error, directory) from error
        return name, directory

    def forget(self) -> None:
        """Drop what is known of slots that no link leads to: they may be of another stream, or of a lost history."""
        try:
            for name in _NAMES:
                (self.directory / f"{name}.json").unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, self.directory) from error

    def finish(self, name: Literal["a", "b"], held: Source, manifest: Manifest, hash_function: Hasher) -> None:
        """Record what a whole, durable slot holds."""
        record = SlotRecord(
            format=_FORMAT,
            stream_id=manifest.stream_id,
            version=manifest.version,
            commit_id=manifest.commit_id,
            snapshot_id=manifest.snapshot_id,
            hash=hash_function.name,
            boot_id="",
            files=(),
        )
        write_file(self.directory / f"{name}.digests", np.ascontiguousarray(held.digests).tobytes())
        self._write_record(name, held.checkpoint, record)

    def _write_record(self, name: str, checkpoint: Checkpoint, record: SlotRecord) -> None:
        current = msgspec.structs.replace(record, boot_id=_boot_id(), files=_files(checkpoint))
        line = msgspec.json.encode(current, order="sorted")
        digest = hasher(record.hash).of(line).encode()
        write_file(self.directory / f"{name}.json", b"%b\n%b\n" % (line, digest))

    def swap(self, name: Literal["a", "b"]) -> None:
        """Make a recorded slot live.

        One atomic rename of the link. A plain directory at the path moves to ``DIR.original``.
        """
        draft = self.directory / "link"
        target = f"{self.directory.name}/{name}"
        try:
            draft.unlink(missing_ok=True)
            draft.symlink_to(target)
            if self.link.is_dir() and not self.link.is_symlink():
                original = self.link.with_name(f"{self.link.name}.original")
                if original.is_symlink():  # a swap that was killed before its exchange
                    original.unlink()
                if original.exists():
                    raise SlotError(f"{original} is in the way.", key=str(original), hint="Move it elsewhere.")
                draft.replace(original)
                try:
                    _exchange(original, self.link)
                except OSError:
                    original.unlink()
                    raise
            else:
                draft.replace(self.link)
            sync_directory(self.link.parent)
        except OSError as error:
            raise disk_error(error, self.link) from error

    def adopt(self, source: Source, manifest: Manifest, hash_function: Hasher) -> None:
        """Take the plain directory at the path as slot a.

        It changes places with the link in one step, no byte is copied.
        """
        name, directory = self.prepare()
        self.finish(name, source, manifest, hash_function)
        try:
            directory.rmdir()
            directory.symlink_to(f"{self.directory.name}/{name}")
            _exchange(directory, self.link)
            sync_directory(self.directory)
            sync_directory(self.link.parent)
        except OSError as error:
            with suppress(OSError):
                directory.unlink()
            raise StorageError(
                f"{self.link} cannot be adopted: {error.strerror}.",
                key=str(self.link),
                hint="Give it as --base instead, and a new path as --checkpoint.",
            ) from error

    def is_plain(self) -> bool:
        """Tell whether the path is a directory of plain files, which can be adopted as it is."""
        if self.link.is_symlink() or not self.link.is_dir():
            return False
        return not any(path.is_symlink() for path in self.link.rglob("*"))


def _files(checkpoint: Checkpoint) -> tuple[_File, ...]:
    files = []
    for file in checkpoint.layout.files:
        status = (checkpoint.directory / file.name).stat()
        files.append(_File(file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(files)


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places atomically (Linux renameat2); raises ``OSError`` where the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    result = library.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one))
