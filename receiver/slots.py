"""Two local checkpoints and the swap between them.

    DIR                  a link to the live slot: always one whole, verified version
    DIR.slots/a, b/      the two slots; the live one is never written
    DIR.slots/a.json     what slot a holds: written when the slot is whole and durable, removed before it is touched
    DIR.slots/a.digests  the chunk digests of that snapshot
    DIR.slots/a.goal     what slot a is to become, while it is being written
    DIR.slots/parts/     fetched parts, until they are applied
    DIR.slots/lock       held by the one receiver that works here

The link is the only truth about which slot is live, and a slot's own record about what is in it: one atomic rename of
the link changes both. A kill at any instant leaves the link on a slot that has its record.

A slot with a goal was emptied for it, and nobody loads from it: the next attempt at the same goal goes on with its
files. Nothing is believed of them: each chunk is hashed and compared before it is left as it is. (That this kernel
wrote them would not do: a forced unmount or a failed write loses what a process thought was written.)
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from deltastore.checkpoint import Checkpoint, open_checkpoint
from deltastore.digest import Hasher, hasher
from deltastore.errors import CheckpointError, DamagedSlot, SlotError, StorageError, UsageError
from deltastore.materialize import sync_directory, write_file
from deltastore.restore import Source
from deltastore.snapshot import snapshot_id
from deltastore.spool import disk_error

from .lock import Lock
from .other_files import damaged_files, recorded_files
from .place import check_neighbours, check_place
from .records import FORMAT, File, Goal, SlotRecord, read_record, record_bytes
from .room import check_room, remove_directory
from .scrub import SlotFiles, damaged_chunks

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.manifest import Manifest
    from deltastore.snapshot import Digests, Schema

__all__ = ["Begun", "LiveSlot", "SlotRecord", "Slots"]

_NAMES: tuple[Literal["a", "b"], Literal["a", "b"]] = ("a", "b")
#: Modification times may be this coarse (seconds): a file that was touched just now could be touched again unseen.
_COARSE = 4
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """The slot that the link leads to, and its record."""

    name: Literal["a", "b"]
    directory: Path
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Begun:
    """A slot to be written: ``resumed`` when an attempt at the same goal left files to go on with."""

    name: Literal["a", "b"]
    directory: Path
    resumed: bool


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # unknown: equal to no recorded one that counts, so everything is hashed anew


class Slots:
    """The slots of one ``--checkpoint DIR``. Take ``lock`` before anything is changed.

    ``durable``: nothing is made live before it is on the disk. ``any_place``: file systems that may not keep what slots
    need are taken. ``sleep`` waits for seconds; what it raises ends the wait.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        durable: bool = True,
        any_place: bool = False,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.durable = durable
        self._any_place = any_place
        self._sleep = sleep
        # Not resolved: the last component is the link itself.
        path = Path(os.path.abspath(checkpoint))  # noqa: PTH100 - Path.absolute keeps `..`, resolve follows the link
        if not path.name:
            raise UsageError(f"{path} cannot be a checkpoint.", hint="Give a path that can become a link.")
        self.link = path.parent.resolve() / path.name
        self.directory = self.link.with_name(f"{self.link.name}.slots")
        self._lock = Lock(self.directory / "lock", checkpoint=self.link)

    # Ownership

    def lock(self, *, url: str | None = None) -> None:
        """Become the one receiver of this checkpoint, until ``unlock``; raises ``SlotError`` saying who is."""
        self._make_directory()
        descriptor = self._lock.take()
        try:
            check_neighbours(self.directory, self.link)
            if not self._any_place:
                check_place(self.directory, locked=descriptor)
        except OSError as error:
            self.unlock()
            raise disk_error(error, self.directory) from error
        except SlotError:
            self.unlock()
            raise
        shutil.rmtree(self.directory / "mend", ignore_errors=True)  # of a repair that was cut off
        self.announce(url)

    def _make_directory(self) -> None:
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                self._sync(self.directory.parent)
        except OSError as error:
            raise disk_error(error, self.directory) from error

    def hold_on(self) -> bool:
        """Take the lock again if somebody removed or replaced the slots; tells whether that was so.

        What is there is then to be adopted anew. Raises ``SlotError`` saying who is the one receiver now.
        """
        if not self._lock.lost():
            return False
        self._make_directory()
        self._lock.take()
        self.announce(self._lock.url)
        return True

    def check_held(self) -> None:
        """Raise ``SlotError`` if somebody removed or replaced the slots, which are another receiver's by now, maybe."""
        if self._lock.lost():
            raise SlotError(
                f"{self.directory} was removed or replaced while this receiver worked there.",
                key=str(self.directory),
                hint="It looks again by itself: what is there then is taken over, unless another receiver has it.",
            )

    def announce(self, url: str | None) -> None:
        """Write into the lock file who holds it and where it listens."""
        self._lock.announce(url)

    def unlock(self) -> None:
        """Let another receiver work here."""
        self._lock.release()

    # What is there

    @property
    def parts(self) -> Path:
        """Where fetched parts wait."""
        return self.directory / "parts"

    def live(self) -> LiveSlot | None:
        """Return the live slot.

        ``None`` when the path is free or is not ours yet. Raises ``SlotError`` on a damaged record.
        """
        name = self.live_name()
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

    def live_name(self) -> Literal["a", "b"] | None:
        """Return the name of the slot that the link leads to, whatever is in it."""
        try:
            target = self.link.readlink()
        except OSError:
            return None
        resolved = (self.link.parent / target).absolute()
        named = next((name for name in _NAMES if resolved == self.directory / name), None)
        return named or next((name for name in _NAMES if self._is_reached(name)), None)

    def _is_reached(self, name: str) -> bool:
        """Tell whether the link leads to a slot by another spelling of its path, which somebody may have made."""
        directory = self.directory / name
        try:
            return not directory.is_symlink() and self.link.samefile(directory)
        except OSError:
            return False

    def _read_record(self, name: str) -> SlotRecord:
        path = self.directory / f"{name}.json"
        try:
            return read_record(path, SlotRecord)
        except (OSError, ValueError) as error:
            raise SlotError(
                f"The record of the live slot, {path}, cannot be used: {error}.",
                key=str(path),
                hint=f"Remove {self.link} (the link only) to build the checkpoint anew.",
            ) from error

    def digests(self, live: LiveSlot, schema: Schema) -> Digests:
        """Return a slot's chunk digests, proven against its snapshot id."""
        path = self.directory / f"{live.name}.digests"
        hash_function = hasher(live.record.hash)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            hint = f"Remove {self.link} and start again."
            raise SlotError(f"{path} is gone.", key=str(path), hint=hint) from error
        except OSError as error:
            raise disk_error(error, path) from error
        if len(data) != schema.chunks * hash_function.size:
            raise SlotError(f"{path} has a wrong size.", key=str(path), hint=f"Remove {self.link} and start again.")
        table = np.frombuffer(data, np.uint8).reshape(-1, hash_function.size)
        if snapshot_id(schema, table, hash_function) != live.record.snapshot_id:
            raise SlotError(f"{path} is damaged.", key=str(path), hint=f"Remove {self.link} and start again.")
        return table

    def open(self, live: LiveSlot) -> Checkpoint:
        """Open a slot's checkpoint; raises ``DamagedSlot`` when its files are not what was recorded whole."""
        try:
            return open_checkpoint(live.directory)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise  # out of reach, which is no damage
            raise DamagedSlot(
                f"The live slot is damaged: {str(error).rstrip('.')}.",
                key=error.key,
                hint=f"Mend it with `receiver repair`. Remove {self.link} (the link only) to have it built anew.",
            ) from error

    def source(self, live: LiveSlot, *, workers: int, progress: Callable[[int], object] | None = None) -> Source:
        """Open the live slot as the source of a patch.

        Its bytes are believed if they were hashed under this kernel and its files were not touched since; else they
        are hashed again. Raises ``DamagedSlot`` naming the tensors that are damaged.
        """
        checkpoint = self.open(live)
        self.check_other_files(live)
        digests = self.digests(live, checkpoint.schema)
        record = live.record
        if not record.boot_id or record.boot_id != _boot_id() or record.files != _files(checkpoint):
            files = _settled(checkpoint)  # before they are read: what is written meanwhile shows next time
            self.verify(checkpoint, digests, hasher(record.hash), workers=workers, progress=progress)
            self._write_record(live.name, record, files)
        return Source(checkpoint, record.version, digests)

    def suspect(self) -> None:
        """Have the live slot's bytes hashed before anybody believes them; raises ``SlotError`` or ``StorageError``."""
        live = self.live()
        if live is not None:
            record = msgspec.structs.replace(live.record, boot_id="", files=())
            write_file(self.directory / f"{live.name}.json", record_bytes(record), durable=self.durable)

    def check_other_files(self, live: LiveSlot) -> None:
        """Raise ``DamagedSlot`` unless a slot's config, tokenizer and the like are those that were recorded."""
        names = damaged_files(live.directory, live.record.other_files, hasher(live.record.hash))
        if names:
            path = live.directory / names[0]
            more = f", and {len(names) - 1} more files," if names[1:] else ""
            raise DamagedSlot(f"{path}{more} is damaged.", key=str(path), hint="Mend it with `receiver repair`.")

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

        Raises ``DamagedSlot`` naming the first tensors whose bytes are not those of ``digests``.
        """
        schema = checkpoint.schema
        with SlotFiles(checkpoint.directory, checkpoint.layout, checkpoint.places) as files:
            damaged = damaged_chunks(files, schema, digests, hash_function, workers=workers, progress=progress)
        if len(damaged):
            tensors = np.unique(np.searchsorted(schema.first_chunk, damaged, side="right") - 1).tolist()
            names = [schema.tensors[position].name for position in tensors]
            raise DamagedSlot(
                f"{len(damaged)} of {schema.chunks} chunks in {checkpoint.directory} are damaged, "
                f"in {', '.join(names[:3])}{' …' if len(names) > 3 else ''}.",
                key=str(checkpoint.directory),
                hint="Mend it with `receiver repair`.",
            )

    # Changing

    def _spare(self) -> tuple[Literal["a", "b"], Path]:
        name: Literal["a", "b"] = "b" if self.live_name() == "a" else "a"
        return name, self.directory / name

    def _is_begun(self, name: str, goal: Goal) -> bool:
        """Tell whether a slot's files were made for a goal, and by nobody finished."""
        directory = self.directory / name
        if (self.directory / f"{name}.json").exists() or directory.is_symlink() or not directory.is_dir():
            return False
        try:
            return read_record(self.directory / f"{name}.goal", Goal) == goal
        except (OSError, ValueError):
            return False

    def begin(self, goal: Goal) -> Begun:
        """Return the slot that is not live, with what an attempt at the same goal left in it, or else empty."""
        self.check_held()
        name, directory = self._spare()
        if self._is_begun(name, goal):
            return Begun(name, directory, resumed=True)
        self.prepare()
        write_file(self.directory / f"{name}.goal", record_bytes(goal), durable=self.durable)
        return Begun(name, directory, resumed=False)

    def give_up(self, name: str) -> None:
        """Forget a slot's goal: what its files hold may differ from what is read back from them."""
        with suppress(OSError):  # the disk fails already, which is what is raised
            (self.directory / f"{name}.goal").unlink(missing_ok=True)

    def check_room(self, nbytes: int) -> None:
        """Raise ``DiskFull``, saying what is missing, unless ``nbytes`` can be written once the spare slot is emptied.

        Nothing is changed. Processes that keep the room of the spare slot's files are waited for where that matters.
        """
        _, spare = self._spare()
        check_room(self.directory, nbytes, spare=spare, sleep=self._sleep)

    def prepare(self) -> tuple[Literal["a", "b"], Path]:
        """Empty the slot that is not live and return it.

        Files that a process still maps stay whole for it: they are unlinked.
        """
        self.check_held()
        name, directory = self._spare()
        try:
            for kind in ("goal", "json", "digests"):
                (self.directory / f"{name}.{kind}").unlink(missing_ok=True)
            self._sync(self.directory)
            if directory.is_symlink():  # an adoption that was killed before its exchange
                directory.unlink()
            elif directory.exists():
                remove_directory(directory)
            directory.mkdir()
        except OSError as error:
            raise disk_error(error, directory) from error
        return name, directory

    def _sync(self, directory: Path) -> None:
        if self.durable:
            sync_directory(directory)

    def discard(self, name: str) -> None:
        """Forget what a slot held: it is damaged."""
        path = self.directory / f"{name}.json"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, path) from error

    def forget(self) -> None:
        """Drop what is known of slots that no link leads to: they may be of another stream, or of a lost history."""
        try:
            for name in _NAMES:
                (self.directory / f"{name}.json").unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, self.directory) from error

    def finish(
        self,
        name: Literal["a", "b"],
        held: Source,
        manifest: Manifest,
        hash_function: Hasher,
        *,
        files: tuple[File, ...] | None = None,
    ) -> None:
        """Record what a whole slot holds, which is on the disk by now; its goal is reached.

        ``files``: those that were hashed, as they were before, where somebody else may have written to them meanwhile.
        """
        record = SlotRecord(
            format=FORMAT,
            stream_id=manifest.stream_id,
            version=manifest.version,
            commit_id=manifest.commit_id,
            snapshot_id=manifest.snapshot_id,
            hash=hash_function.name,
            boot_id="",
            files=(),
            other_files=recorded_files(held.checkpoint, hash_function),
        )
        path = self.directory / f"{name}.goal"
        try:
            path.unlink(missing_ok=True)  # first: files that somebody may load are never gone on with
        except OSError as error:
            raise disk_error(error, path) from error
        digests = np.ascontiguousarray(held.digests).tobytes()
        write_file(self.directory / f"{name}.digests", digests, durable=self.durable)
        self._write_record(name, record, _settled(held.checkpoint) if files is None else files)

    def _write_record(self, name: str, record: SlotRecord, files: tuple[File, ...]) -> None:
        current = msgspec.structs.replace(record, boot_id=_boot_id(), files=files)
        write_file(self.directory / f"{name}.json", record_bytes(current), durable=self.durable)

    def swap(self, name: Literal["a", "b"]) -> None:
        """Make a recorded slot live.

        One atomic rename of the link. A plain directory at the path moves to ``DIR.original``.
        """
        self.check_held()
        draft = self.directory / "link"
        target = f"{self.directory.name}/{name}"
        try:
            draft.unlink(missing_ok=True)
            draft.symlink_to(target)
            if self.is_empty():
                self.link.rmdir()
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
            self._sync(self.link.parent)
        except OSError as error:
            raise disk_error(error, self.link) from error

    def seen(self) -> tuple[File, ...]:
        """Return the weight files of what is at the path, if a write from now on is sure to show in their times."""
        files = _files(open_checkpoint(self.link))
        now = time.time_ns()
        return files if all(file.modified_ns <= now - _COARSE * 10**9 for file in files) else ()

    def adopt(self, source: Source, manifest: Manifest, hash_function: Hasher, *, seen: tuple[File, ...] = ()) -> None:
        """Take the plain directory at the path as slot a.

        It changes places with the link in one step, no byte is copied. ``seen``: its files as they were before they
        were hashed; those that are others by now are hashed again before they are believed.
        """
        name, directory = self.prepare()
        self.finish(name, source, manifest, hash_function, files=seen)
        try:
            directory.rmdir()
            directory.symlink_to(f"{self.directory.name}/{name}")
            _exchange(directory, self.link)
            self._sync(self.directory)
            self._sync(self.link.parent)
        except OSError as error:
            with suppress(OSError):
                directory.unlink()
            raise StorageError(
                f"{self.link} cannot be adopted: {error.strerror}.",
                key=str(self.link),
                hint="Give it as --base instead, and a new path as --checkpoint.",
            ) from error

    def is_empty(self) -> bool:
        """Tell whether the path is a directory with nothing in it, as good as none; raises ``OSError``."""
        return self.link.is_dir() and not self.link.is_symlink() and not any(self.link.iterdir())

    def is_plain(self) -> bool:
        """Tell whether the path is a directory of plain files, which can be adopted as it is."""
        if self.link.is_symlink() or not self.link.is_dir():
            return False
        return not any(path.is_symlink() for path in self.link.rglob("*"))


def _files(checkpoint: Checkpoint) -> tuple[File, ...]:
    files = []
    for file in checkpoint.layout.files:
        path = checkpoint.directory / file.name
        try:
            status = path.stat()
        except OSError as error:  # taken away since it was opened
            raise disk_error(error, path) from error
        files.append(File(file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(files)


def _settled(checkpoint: Checkpoint) -> tuple[File, ...]:
    """Return the files as they are, once a write from now on is sure to show in their modification times."""
    for file in checkpoint.layout.files:
        path = checkpoint.directory / file.name
        status, now = path.stat(), time.time_ns()
        if status.st_mtime_ns > now - _COARSE * 10**9:
            with suppress(OSError):  # not ours, or read-only: then its time stays as it is
                os.utime(path, ns=(status.st_atime_ns, now - 2 * _COARSE * 10**9))
    return _files(checkpoint)


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change places atomically (Linux renameat2); raises ``OSError`` where the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    result = library.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one))
