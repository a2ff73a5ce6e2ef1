"""Mending the live slot: only its damaged chunks are had again, from the other slot or from the store.

The live slot is not written. The mended one is built in the other slot, of the files that are whole (as links to them)
and of new files in place of those that are not; then the link is swapped, as after a patch.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from deltastore.checkpoint import Checkpoint, open_checkpoint
from deltastore.digest import hasher
from deltastore.errors import (
    BaseMismatch,
    CheckpointError,
    CorruptObject,
    DeltastoreError,
    ObjectNotFound,
    SlotError,
    StorageError,
    VersionNotFound,
)
from deltastore.excerpt import Excerpts, groups, version_digests
from deltastore.limits import UNLIMITED
from deltastore.manifest import FILES
from deltastore.materialize import DirectoryWriter, sync_directory
from deltastore.planner import Planner
from deltastore.replay import counter
from deltastore.restore import Source, identify, outline
from deltastore.snapshot import CHUNK_BYTES, chunk_spans
from deltastore.spool import disk_error

from .other_files import damaged_files, files_again
from .patcher import check_history
from .room import free_bytes
from .scrub import SlotFiles, damaged_chunks, wrong_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from deltastore.limits import Limits
    from deltastore.manifest import Manifest
    from deltastore.plan import Plan
    from deltastore.reader import Store
    from deltastore.restore import Outline
    from deltastore.snapshot import ChunkSpan, Digests, Numbers

    from .slots import LiveSlot, Slots

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Progress = Callable[[str, int, int], object]

__all__ = ["Repaired", "repair"]

_log = logging.getLogger("receiver")
_NO_DIGESTS = np.zeros((0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair found and did.

    ``damaged`` of ``chunks`` chunks, in these tensors; how many of them came from the other slot, and how many from the
    store, and for how many bytes fetched. ``records``: what of ``json`` and ``digests`` was written anew. ``files``:
    the files that were made anew, weights or not.
    """

    version: int
    chunks: int
    damaged: int
    tensors: tuple[str, ...]
    from_other: int
    from_store: int
    fetched_bytes: int
    files: tuple[str, ...]
    records: tuple[str, ...]

    @property
    def mended(self) -> bool:
        """Whether there was anything to mend."""
        return bool(self.files or self.records)


def repair(
    store: Store,
    slots: Slots,
    *,
    base: Path | None = None,
    workers: int,
    limits: Limits = UNLIMITED,
    progress: Progress | None = None,
) -> Repaired:
    """Hash all of the live slot and mend what is damaged. The lock of ``slots`` must be held.

    ``limits`` are for what is fetched and held for it. Raises ``SlotError`` when nothing is live, ``CorruptObject``
    when some chunk cannot be had again from anywhere; what is live stays live then, damaged as it is.
    """
    try:
        live = slots.live()
    except SlotError as error:
        return _recorded_anew(store, slots, error, workers=workers, progress=progress)
    if live is None:
        raise SlotError(
            f"{slots.link} is not a receiver's checkpoint.", key=str(slots.link), hint="Run `receiver once` first."
        )
    check_history(store, slots, live)
    return _Repair(store, slots, live, base, workers=workers, limits=limits, progress=progress).run()


def _recorded_anew(
    store: Store, slots: Slots, problem: SlotError, *, workers: int, progress: Progress | None
) -> Repaired:
    """Find out what a live slot without a usable record holds, and record it."""
    name = slots.live_name()
    if name is None or not (slots.directory / name).is_dir():
        raise problem
    try:
        source = identify(store, slots.directory / name, workers=workers, progress=progress)
    except (BaseMismatch, CheckpointError) as error:
        raise CorruptObject(
            f"{problem} Nor are its files those of any version: {error}",
            key=str(slots.directory / name),
            hint=f"Remove {slots.link} (the link only) and start the receiver again: it is built anew.",
        ) from error
    slots.finish(name, source, store.manifest(source.version), store.hash)
    chunks = source.checkpoint.schema.chunks
    return Repaired(source.version, chunks, 0, (), 0, 0, 0, (), ("json", "digests"))


class _Repair:
    """One repair of a slot whose record is whole."""

    def __init__(
        self,
        store: Store,
        slots: Slots,
        live: LiveSlot,
        base: Path | None,
        *,
        workers: int,
        limits: Limits,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._slots = slots
        self._live = live
        self._base = base
        self._workers = workers
        self._limits = limits
        self._progress = progress
        self._manifest: Manifest = store.manifest(live.record.version)
        self._hash = hasher(live.record.hash)
        self._open = ExitStack()
        self._fetched = self._from_other = self._from_store = 0
        self._planner = Planner(store)
        self._excerpts: dict[tuple[str, ...], Excerpts] = {}
        self._identified: Source | None = None
        self._dead_ends: list[Source | None] = []
        self._other: tuple[SlotFiles, Source] | None = None

    def run(self) -> Repaired:
        with self._open:
            plain = self._outline()
            schema = self._store.schema()
            digests, records = self._digests()
            files = self._open.enter_context(SlotFiles(self._live.directory, plain.layout, plain.places))
            checking = counter(self._progress, "verify", schema.nbytes)
            damaged = damaged_chunks(files, schema, digests, self._hash, workers=self._workers, progress=checking)
            tensors = np.unique(np.searchsorted(schema.first_chunk, damaged, side="right") - 1)
            broken = files.broken | set(plain.places.files_of(tensors).tolist())
            lost = damaged_files(self._live.directory, self._live.record.other_files, self._hash)
            plain = self._with_other_files(plain)
            if broken or lost:
                self._mend(plain, files, digests, damaged, broken)
            elif records:
                self._finish(self._live.name, plain, self._live.directory, digests)
            return Repaired(
                version=self._manifest.version,
                chunks=schema.chunks,
                damaged=len(damaged),
                tensors=tuple(schema.tensors[position].name for position in tensors.tolist()),
                from_other=self._from_other,
                from_store=self._from_store,
                fetched_bytes=self._fetched,
                files=(*(plain.layout.files[number].name for number in sorted(broken)), *lost),
                records=records,
            )

    def _finish(self, name: Literal["a", "b"], plain: Outline, directory: Path, digests: Digests) -> None:
        checkpoint = Checkpoint(directory, plain.layout, tuple(sorted(plain.other_files)))
        source = Source(checkpoint, self._manifest.version, digests)
        self._slots.finish(name, source, self._manifest, self._store.hash)

    # What there is

    def _outline(self) -> Outline:
        """Return what the slot's files are like: by themselves, else by the other slot, else by the store."""
        other = self._spare()
        for slot in (self._live, other):
            if slot is not None:
                with suppress(CheckpointError):
                    checkpoint = open_checkpoint(slot.directory)
                    if checkpoint.schema == self._store.schema():
                        return outline(self._store, Source(checkpoint, slot.record.version, _NO_DIGESTS))
        return outline(self._store, None)

    def _with_other_files(self, plain: Outline) -> Outline:
        """Return an outline whose other files are those that were recorded."""
        other = self._spare()
        directories = [slot.directory for slot in (self._live, other) if slot is not None]
        if self._base is not None:
            directories.append(self._base)
        again = files_again(self._live.record.other_files, self._hash, directories=directories, stored=self._base_files)
        return replace(plain, other_files={**plain.other_files, **again})

    def _base_files(self) -> Mapping[str, bytes]:
        try:
            return self._store.base_files(FILES)
        except VersionNotFound:  # it does not hold its base
            return {}

    def _spare(self) -> LiveSlot | None:
        try:
            return self._slots.other(self._live)
        except SlotError:  # its record is damaged: nothing is known of it
            return None

    def _digests(self) -> tuple[Digests, tuple[str, ...]]:
        """Return the digests that the live slot's chunks should have, and what of its records was not usable."""
        try:
            return self._slots.digests(self._live, self._store.schema()), ()
        except (SlotError, StorageError) as error:
            _log.warning("%s It is made anew from the store.", error)
        table, fetched = version_digests(self._store, self._manifest, limits=self._limits)
        self._fetched += fetched
        return table, ("digests",)

    # Mending

    def _mend(self, plain: Outline, files: SlotFiles, digests: Digests, damaged: Numbers, broken: set[int]) -> None:
        """Make the broken files anew beside the slots, then a slot of them and of those that are whole."""
        staged = self._slots.directory / "mend"
        nbytes = sum(plain.layout.files[number].header.file_size for number in broken)
        self._open_other()
        try:
            shutil.rmtree(staged, ignore_errors=True)
            if free_bytes(self._slots.directory) < nbytes:
                # Its way back and the chunks it shares are given up for its room: the store has them too.
                if self._other is not None:
                    self._other[0].__exit__(None, None, None)
                self._other = None
                self._slots.prepare()
                self._slots.check_room(nbytes)
            staged.mkdir()
            if broken:
                self._write(plain, files, digests, damaged, broken, staged)
            self._install(plain, digests, broken, staged)
        except OSError as error:
            raise disk_error(error, self._slots.directory) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _open_other(self) -> None:
        spare = self._spare()
        if spare is None or spare.record.stream_id != self._store.stream_id:
            return
        try:
            if self._store.manifest(spare.record.version).commit_id != spare.record.commit_id:
                return
            checkpoint = open_checkpoint(spare.directory)
            if checkpoint.schema != self._store.schema():
                return
            table = self._slots.digests(spare, checkpoint.schema)
        except DeltastoreError as error:
            _log.warning("The other slot is of no use: %s", error)
            return
        opened = self._open.enter_context(SlotFiles(spare.directory, checkpoint.layout, checkpoint.places))
        self._other = opened, Source(checkpoint, spare.record.version, table)

    def _write(
        self,
        plain: Outline,
        files: SlotFiles,
        digests: Digests,
        damaged: Numbers,
        broken: set[int],
        staged: Path,
    ) -> None:
        schema = self._store.schema()
        everything = np.arange(schema.chunks, dtype=np.int64)
        tensors = np.searchsorted(schema.first_chunk, everything, side="right") - 1
        numbers = everything[np.isin(plain.places.files_of(tensors), sorted(broken))]
        mending = counter(self._progress, "mend", int(self._bytes_of(numbers)))
        buffer = np.empty(CHUNK_BYTES, np.uint8)
        with DirectoryWriter(staged, plain.layout, plain.places, only=broken, durable=self._slots.durable) as writer:
            for group in groups(numbers, nbytes=self._limits.group_bytes):
                mended = self._again(group[np.isin(group, damaged)], digests)
                for span in chunk_spans(schema, group):
                    out = buffer[: span.nbytes]
                    failed = files.read(span, out)
                    for place, number in enumerate(span.numbers.tolist()):
                        if number in mended:
                            out[span.starts[place] : span.stops[place]] = mended[number]
                            failed = failed[failed != place]
                    if len(wrong_chunks(span, out, failed, digests, self._hash)):
                        raise CorruptObject(
                            f"{files.directory} goes on changing while it is mended.",
                            key=str(files.directory),
                            hint="Stop what writes there, and look at the disk.",
                        )
                    writer.write(span, out)
                    if mending is not None:
                        mending(span.nbytes)
            writer.sync()

    def _bytes_of(self, numbers: Numbers) -> int:
        return sum(span.nbytes for span in chunk_spans(self._store.schema(), numbers)) if len(numbers) else 0

    def _install(self, plain: Outline, digests: Digests, broken: set[int], staged: Path) -> None:
        name, directory = self._slots.prepare()
        for number, file in enumerate(plain.layout.files):
            if number in broken:
                (staged / file.name).replace(directory / file.name)
            else:
                _link_or_copy(self._live.directory / file.name, directory / file.name, durable=self._slots.durable)
        plain.write_other_files(directory, durable=self._slots.durable)
        if self._slots.durable:
            sync_directory(directory)
        self._finish(name, plain, directory, digests)
        self._slots.swap(name)
        self._slots.discard(self._live.name)

    # Chunks had again

    def _again(self, numbers: Numbers, digests: Digests) -> dict[int, Bytes]:
        """Return the right bytes of damaged chunks; raises ``CorruptObject`` when some are nowhere to be had."""
        found = self._shared(numbers, digests)
        self._from_other += len(found)
        missing = np.array([number for number in numbers.tolist() if number not in found], np.int64)
        problem: DeltastoreError | None = None
        for start in self._starts() if len(missing) else ():
            if start in self._dead_ends:
                continue
            try:
                found |= self._fetch(start, missing, digests)
            except (BaseMismatch, CorruptObject, VersionNotFound, ObjectNotFound) as error:
                _log.warning("A way to mend it leads nowhere: %s", error)
                problem = error
                if isinstance(error, VersionNotFound):  # which is so for all chunks
                    self._dead_ends.append(start)
            else:
                self._from_store += len(missing)
                return found
        if len(missing):
            raise CorruptObject(
                f"{len(missing)} damaged chunks of {self._live.directory} are nowhere to be had again: {problem}",
                key=str(self._live.directory),
                hint="Give a checkpoint of the stream as --base.",
            )
        return found

    def _shared(self, numbers: Numbers, digests: Digests) -> dict[int, Bytes]:
        """Return those chunks that the other slot holds with the same bytes."""
        if self._other is None:
            return {}
        files, other = self._other
        same = numbers[(other.digests[numbers] == digests[numbers]).all(axis=1)]
        found: dict[int, Bytes] = {}
        for span in chunk_spans(self._store.schema(), same) if len(same) else ():
            out = np.empty(span.nbytes, np.uint8)
            wrong = wrong_chunks(span, out, files.read(span, out), digests, self._hash).tolist()
            for place, number in enumerate(span.numbers.tolist()):
                if place not in wrong:
                    found[number] = out[span.starts[place] : span.stops[place]]
        return found

    def _starts(self) -> Iterator[Source | None]:
        """Yield what a way through the store may start from: the other slot, an anchor, the base."""
        if self._other is not None and self._other[1].version != self._manifest.version:
            yield self._other[1]
        yield None
        if self._base is not None:
            if self._identified is None:
                self._identified = identify(self._store, self._base, workers=self._workers, progress=self._progress)
            yield self._identified

    def _fetch(self, start: Source | None, numbers: Numbers, digests: Digests) -> dict[int, Bytes]:
        """Return chunks of the live version by the cheapest plan from a source."""
        planner = self._planner
        read = start.checkpoint.read if start is not None else _nothing
        if start is not None and self._other is not None and start is self._other[1]:
            read = self._read_other
        if start is not None and start.version == self._manifest.version:
            found = {}
            for span in chunk_spans(self._store.schema(), numbers):
                out = np.empty(span.nbytes, np.uint8)
                read(span, out)
                if len(wrong_chunks(span, out, numbers[:0], digests, self._hash)):
                    raise CorruptObject(
                        f"{start.checkpoint.directory} changed.",
                        key=str(start.checkpoint.directory),
                        hint="Stop what writes there, and look at the disk.",
                    )
                for place, number in enumerate(span.numbers.tolist()):
                    found[number] = out[span.starts[place] : span.stops[place]]
            return found

        def chunks(plan: Plan) -> dict[int, Bytes]:
            known = tuple(part.key for part in plan.parts)
            excerpts = self._excerpts.setdefault(known, Excerpts(self._store, plan, limits=self._limits))
            fetched = excerpts.fetched_bytes
            try:
                return excerpts.chunks(numbers, digests, before=start.digests if start else None, read=read)
            finally:
                self._fetched += excerpts.fetched_bytes - fetched

        plan = planner.plan(start.version if start is not None else None, self._manifest.version)
        return planner.follow(plan, chunks)

    def _read_other(self, span: ChunkSpan, out: Bytes) -> None:
        assert self._other is not None  # noqa: S101 - only handed on where it is there
        if len(self._other[0].read(span, out)):
            out[:] = 0  # which has another digest, and is told as damage


def _nothing(_span: ChunkSpan, _out: object) -> NoReturn:
    raise AssertionError("a plan that starts from an anchor reads no old bytes")


def _link_or_copy(source: Path, target: Path, *, durable: bool) -> None:
    """Give a whole file a second name; a file system that has no such names gets a copy."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        shutil.copyfile(source, target)
        if durable:
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
