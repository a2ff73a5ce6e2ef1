"""A local directory that holds parts: fetched ones until they are applied, encoded ones until they are committed.

A spooled file is found again by its digest and believed only after it was hashed, so a kill costs no second download
and a torn file does no harm. A large part is fetched in pieces, into a partial file that is gone on with after a kill.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .digest import DEFAULT_HASH, hasher
from .errors import CorruptObject, DiskFull, StorageError
from .limits import UNLIMITED
from .manifest import MAX_PART_BYTES
from .memory import mapped_file
from .storage import forget_copy, reads_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from typing_extensions import Self

    from .limits import Limits
    from .manifest import ObjectRef, PartRef
    from .storage import Backend
    from .storage.base import Buffer

__all__ = ["Spool", "TemporarySpool", "disk_error", "read_object"]


def disk_error(error: OSError, path: Path) -> StorageError:
    """Translate a failure to use a local file into an error of ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"The disk of {path} is full.", key=str(path), hint="Free some space and try again.")
    hint = "Check that it is writable and healthy."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "Allow the process more open files (`ulimit -n`)."
    return StorageError(f"{path} cannot be used: {error.strerror}.", key=str(path), hint=hint)


def read_object(backend: Backend, reference: ObjectRef | PartRef, *, limit: int) -> bytes:
    """Read an object that a record refers to; raises ``CorruptObject`` unless size and digest are the recorded ones.

    A cache's copy that is wrong is dropped, and the object read once more.
    """
    _check_limit(reference, limit)
    try:
        return _read_checked(backend, reference)
    except CorruptObject:
        if not forget_copy(backend, reference.key):
            raise
    return _read_checked(backend, reference)


def _check_limit(reference: ObjectRef | PartRef, limit: int) -> None:
    if reference.size > limit:
        raise CorruptObject(
            f"{reference.key} is said to have {reference.size} bytes; the format allows {limit}.", key=reference.key
        )


def _read_checked(backend: Backend, reference: ObjectRef | PartRef) -> bytes:
    data = backend.read(reference.key, limit=reference.size)
    _check_length(data, reference.size, reference)
    _check_digest(data, reference)
    return data


def _check_length(data: bytes, wanted: int, reference: ObjectRef | PartRef) -> None:
    if len(data) != wanted:
        raise CorruptObject(
            f"{reference.key} has {len(data)} bytes instead of {wanted}.",
            key=reference.key,
            hint="Run `deltastore check --read-data` on the store.",
        )


def _check_digest(data: Buffer, reference: ObjectRef | PartRef) -> None:
    name, _, _ = reference.digest.partition(":")
    if hasher(name).of(data) != reference.digest:
        raise CorruptObject(
            f"{reference.key} is damaged: its bytes do not have the recorded digest.",
            key=reference.key,
            hint="Run `deltastore check --read-data` on the store.",
        )


class Spool:
    """Part files below one directory, named by their digests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, directory) from error

    def _path(self, digest: str) -> Path:
        return self.directory / digest.replace(":", "-")

    def _partial(self, reference: PartRef) -> Path:
        """Return where a part is gathered: one file a key, because two keys with the same bytes may come at once."""
        path = self._path(reference.digest)
        return path.with_name(f"{path.name}.{hasher(DEFAULT_HASH).digest(reference.key.encode()).hex()}.partial")

    def put(self, data: bytes, digest: str) -> None:
        """Keep ``data`` under its digest: whole or not at all, but not yet durable."""
        path = self._path(digest)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.draft")  # the same bytes may come twice at once
        try:
            # Cleaners of temporary directories take one away that was of no use for days.
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            with draft.open("wb") as stream:
                stream.write(data)
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise disk_error(error, path) from error

    def open(self, reference: PartRef) -> memoryview:
        """Return a spooled part as a read-only map, verified. Raises ``StorageError`` when it is not here any more."""
        return self._map(self._path(reference.digest), reference)

    def _map(self, path: Path, reference: PartRef) -> memoryview:
        try:
            with path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size != reference.size:
                    raise CorruptObject(f"{path} is not the spooled part {reference.key}.", key=str(path))
                mapped = mapped_file(stream.fileno(), reference.size).data
        except OSError as error:  # taken away, too many open files, too many maps
            raise disk_error(error, path) from error
        _check_digest(mapped, reference)
        return mapped

    def missing_bytes(self, references: Iterable[PartRef]) -> int:
        """Return how many bytes of these parts are not here yet."""
        missing = 0
        for part in references:
            if not self._path(part.digest).exists():
                missing += part.size
                with suppress(OSError):
                    missing -= min(self._partial(part).stat().st_size, part.size)
        return missing

    def fetch(
        self,
        backend: Backend,
        reference: PartRef,
        *,
        limits: Limits = UNLIMITED,
        proceed: Callable[[], object] = lambda: None,
    ) -> int:
        """Make sure that a part is here; returns the bytes that were downloaded for it.

        ``proceed`` is called before each request, and may raise to leave off.
        """
        if self._path(reference.digest).exists():
            with suppress(CorruptObject):
                self.open(reference).release()
                return 0
        _check_limit(reference, MAX_PART_BYTES)
        small = reference.size <= limits.piece_bytes and not self._partial(reference).exists()
        if not small and not reads_whole(backend, reference.key):
            return self._fetch_in_pieces(backend, reference, limits, proceed)
        with limits.taking(reference.size, proceed):
            self.put(read_object(backend, reference, limit=MAX_PART_BYTES), reference.digest)
        return reference.size

    def _fetch_in_pieces(
        self, backend: Backend, reference: PartRef, limits: Limits, proceed: Callable[[], object]
    ) -> int:
        partial = self._partial(reference)
        downloaded = self._gather(partial, backend, reference, limits, proceed)
        try:
            self._map(partial, reference).release()
        except CorruptObject:
            # A machine that lost power may have kept a file's length and not its bytes; or a piece came wrong.
            partial.unlink(missing_ok=True)
            downloaded += self._gather(partial, backend, reference, limits, proceed)
            try:
                self._map(partial, reference).release()
            except CorruptObject:
                partial.unlink(missing_ok=True)
                raise
        try:
            partial.replace(self._path(reference.digest))
        except OSError as error:
            raise disk_error(error, partial) from error
        return downloaded

    @staticmethod
    def _gather(path: Path, backend: Backend, reference: PartRef, limits: Limits, proceed: Callable[[], object]) -> int:
        """Append what is missing to a partial file; returns how many bytes that were."""
        try:
            with path.open("ab") as stream:
                if stream.tell() > reference.size:
                    stream.truncate(0)
                    stream.seek(0)
                here = start = stream.tell()
                while start < reference.size:
                    end = min(start + limits.piece_bytes, reference.size)
                    with limits.taking(end - start, proceed):
                        data = backend.read_range(reference.key, start, end)
                        _check_length(data, end - start, reference)
                        stream.write(data)
                        stream.flush()  # what has arrived outlives this process
                        del data
                    start = end
        except OSError as error:
            raise disk_error(error, path) from error
        return reference.size - here

    def drop_partials(self, wanted: Iterable[PartRef]) -> None:
        """Forget half-fetched parts that are not among the wanted ones."""
        kept = {self._partial(reference) for reference in wanted}
        for path in self.directory.glob("*.partial"):
            if path not in kept:
                with suppress(OSError):
                    path.unlink()

    def remove(self, reference: PartRef) -> None:
        """Forget one part. One that cannot be removed costs room and nothing else."""
        for path in (self._path(reference.digest), self._partial(reference)):
            with suppress(OSError):
                path.unlink()

    def clear(self) -> None:
        """Forget all parts."""
        for path in self.directory.glob("*"):
            with suppress(OSError):
                path.unlink()


def _remove_directory(directory: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


class TemporarySpool(Spool):
    """A spool in a new directory below ``parent`` (the system's temporary one unless given), which goes with it.

    It belongs to the process that made it: a child that was forked leaves it alone.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        try:
            directory = Path(tempfile.mkdtemp(prefix="deltastore-", dir=parent)).absolute()
        except OSError as error:
            raise disk_error(error, Path(parent or os.environ.get("TMPDIR", "/tmp"))) from error  # noqa: S108 - only named
        self._owner = os.getpid()
        self._left = weakref.finalize(self, _remove_directory, directory, self._owner)
        super().__init__(directory)

    def close(self) -> None:
        """Remove the directory with all that is in it, to the end even if it is interrupted once."""
        try:
            _remove_directory(self.directory, self._owner)
        except KeyboardInterrupt:
            _remove_directory(self.directory, self._owner)
            raise
        finally:
            self._left.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
