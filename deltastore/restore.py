"""Building a version as a complete checkpoint directory, from a local checkpoint of the stream or from an anchor."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError, UsageError
from .limits import Bandwidth, Limits
from .manifest import FILES
from .materialize import DirectoryWriter, sync_directory, write_file
from .patch import default_workers
from .places import Places
from .planner import Planner
from .reader import check_schema
from .replay import Fetch, Replayed, counter, replay
from .snapshot import snapshot_id
from .spool import Spool, disk_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .checkpoint import Layout
    from .digest import Hasher
    from .manifest import Manifest
    from .plan import Plan
    from .reader import Store
    from .snapshot import ChunkSpan, Digests

    Progress = Callable[[str, int, int], object]

__all__ = ["Outline", "Source", "build_checkpoint", "identify", "outline", "restore"]


class Source:
    """A local checkpoint known to hold a version of the stream: the checkpoint, that version, its chunk digests."""

    __slots__ = ("checkpoint", "digests", "version")

    def __init__(self, checkpoint: Checkpoint, version: int, digests: Digests) -> None:
        self.checkpoint = checkpoint
        self.version = version
        self.digests = digests


def identify(store: Store, directory: str | Path, *, workers: int, progress: Progress | None = None) -> Source:
    """Open a checkpoint and find out, by hashing all of it, which version of the stream it holds.

    Raises ``BaseMismatch``, naming the first tensors that differ from the base, when it holds none.
    """
    checkpoint = open_checkpoint(directory)
    check_schema(store.schema(), checkpoint)
    digests = checkpoint.digests(
        store.hash, workers=workers, progress=counter(progress, "verify", checkpoint.schema.nbytes)
    )
    found = snapshot_id(checkpoint.schema, digests, store.hash)
    if found == store.base.snapshot_id:
        return Source(checkpoint, store.base.version, digests)
    match = store.find_snapshot(found)
    if match is None:
        store.check_base(checkpoint, digests)
        raise CheckpointError(f"The checkpoint {directory} changed while it was read.", key=str(directory))
    return Source(checkpoint, match.version, digests)


@dataclass(frozen=True, slots=True)
class Outline:
    """A checkpoint but for its tensors' bytes: how they are spread over files, and the files beside them."""

    layout: Layout
    places: Places
    other_files: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        weights = sum(file.header.file_size for file in self.layout.files)
        return weights + sum(len(data) for data in self.other_files.values())

    def fronts(self, workers: int) -> int:
        """Return how many stretches of chunks to build side by side: a file takes one writer at a time."""
        return min(workers, len(self.layout.files))

    def digest(self, hash_function: Hasher) -> str:
        """Return the digest of all of it: of two directories with the same outline only the tensors may differ."""
        files = [(file.name, file.header_bytes) for file in self.layout.files] + sorted(self.other_files.items())
        heads = [f"{len(os.fsencode(name))} {len(data)} {name} ".encode() + bytes(data) for name, data in files]
        return hash_function.of(b"%d " % len(self.layout.files) + b"".join(heads))

    def write_other_files(self, directory: Path, *, durable: bool) -> None:
        """Write the files beside the tensors."""
        try:
            for name, data in self.other_files.items():
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data, durable=durable)
        except OSError as error:
            raise disk_error(error, directory) from error


def outline(store: Store, source: Source | None) -> Outline:
    """Return what a new checkpoint looks like: as its source does, else as the store remembers the base."""
    if source is not None:
        checkpoint = source.checkpoint
        others = {name: checkpoint.read_other_file(name) for name in checkpoint.other_files}
        return Outline(checkpoint.layout, checkpoint.places, others)
    layout = store.layout()
    return Outline(layout, Places([file.header for file in layout.files], store.schema()), store.base_files(FILES))


def build_checkpoint(
    fetch: Fetch,
    source: Source | None,
    plain: Outline,
    directory: Path,
    *,
    workers: int,
    resume: bool = False,
    durable: bool = True,
    lost: Callable[[], object] | None = None,
    progress: Progress | None = None,
) -> tuple[Source, Replayed]:
    """Write the version that a plan ends at into ``directory`` while its parts are fetched.

    ``plain`` is the directory's outline. Every chunk is hash-checked before it is written. ``resume``, ``durable`` and
    ``lost`` are as for ``DirectoryWriter``; unless ``resume`` is set the directory is empty. Returns what is in the
    directory now.
    """
    plain.write_other_files(directory, durable=durable)
    with DirectoryWriter(directory, plain.layout, plain.places, resume=resume, durable=durable, lost=lost) as writer:
        replayed = replay(
            fetch,
            before=source.digests if source else None,
            read=source.checkpoint.read if source else _nothing,
            write=writer.write,
            workers=workers,
            places=plain.places,
            kept=writer.read if resume else None,
            progress=progress,
        )
        writer.sync()
    if source:
        checkpoint = source.checkpoint.moved(directory)
    else:
        checkpoint = Checkpoint(directory, plain.layout, tuple(sorted(plain.other_files)))
    return Source(checkpoint, fetch.plan.end, replayed.digests), replayed


def _nothing(_span: ChunkSpan, _out: object) -> NoReturn:
    raise AssertionError("a plan that starts from an anchor reads no old bytes")


def restore(
    store: Store,
    version: int,
    directory: Path,
    *,
    base: str | Path | None = None,
    workers: int | None = None,
    max_bandwidth: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """See ``Store.restore``."""
    manifest = store.manifest(version)
    directory = directory.resolve() if directory.is_symlink() else directory.absolute()
    mode: int | None = None
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} exists and is not empty.", key=str(directory), hint="Give a new directory.")
        if directory.exists():
            if directory.is_mount():  # nothing can take a mount point's place, and its disk is not its parent's
                raise UsageError(
                    f"{directory} is a mount point.", key=str(directory), hint="Give a new directory inside it."
                )
            mode = stat.S_IMODE(directory.stat().st_mode)
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, directory) from error
    threads = workers or default_workers()
    source = identify(store, base, workers=threads, progress=progress) if base is not None else None
    limits = Limits(bandwidth=None if max_bandwidth is None else Bandwidth(max_bandwidth))
    planner = Planner(store)
    plan = planner.plan(source.version if source else None, version)
    plain = outline(store, source)
    name = os.fsencode(directory.name)[:200].decode("utf-8", "ignore")  # room for what is added
    draft = directory.parent / f".{name}.{secrets.token_hex(4)}.draft"
    spool_directory = draft.with_suffix(".spool")
    try:
        spool = Spool(spool_directory)

        def build(plan: Plan) -> None:
            _remove(draft)
            _make_directory(draft)
            fronts = plain.fronts(threads)
            with Fetch(store, plan, spool, limits=limits, fronts=fronts, progress=progress) as fetch:
                build_checkpoint(fetch, source, plain, draft, workers=threads, progress=progress)

        planner.follow(plan, build)
        try:
            if mode is not None:
                draft.chmod(mode)
            draft.replace(directory)
            sync_directory(directory.parent)
        except OSError as error:
            raise disk_error(error, directory) from error
    finally:
        _remove(draft, spool_directory)
    return manifest


def _remove(*directories: Path) -> None:
    """Remove directories with all that is in them, to the end even if it is interrupted once."""
    try:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
    except KeyboardInterrupt:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _make_directory(path: Path) -> None:
    try:
        path.mkdir()
    except OSError as error:
        raise disk_error(error, path) from error
