"""Building a version as a complete checkpoint directory, from a local checkpoint of the stream or from an anchor."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
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
    from collections.abc import Callable
    from pathlib import Path

    from .manifest import Manifest
    from .plan import Plan
    from .reader import Store
    from .snapshot import ChunkSpan, Digests

    Progress = Callable[[str, int, int], object]

__all__ = ["Source", "build_checkpoint", "identify", "restore"]


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


def build_checkpoint(
    fetch: Fetch,
    source: Source | None,
    directory: Path,
    *,
    workers: int,
    progress: Progress | None = None,
) -> tuple[Source, Replayed]:
    """Write the version that a plan ends at into an empty ``directory``, durably, while its parts are fetched.

    With a source the directory takes its files' layout and its other files, else those that the store keeps of the
    base. Every chunk is hash-checked before it is written. Returns what is in the directory now.
    """
    store = fetch.store
    if source:
        other_files = {name: source.checkpoint.read_other_file(name) for name in source.checkpoint.other_files}
        layout, places = source.checkpoint.layout, source.checkpoint.places
    else:
        other_files = store.base_files(FILES)
        layout = store.layout()
        places = Places([file.header for file in layout.files], store.schema())
    try:
        for name, data in other_files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
    except OSError as error:
        raise disk_error(error, directory) from error
    with DirectoryWriter(directory, layout, places) as writer:
        replayed = replay(
            fetch,
            before=source.digests if source else None,
            read=source.checkpoint.read if source else _nothing,
            write=writer.write,
            workers=workers,
            progress=progress,
        )
        writer.sync()
    if source:
        checkpoint = source.checkpoint.moved(directory)
    else:
        checkpoint = Checkpoint(directory, layout, tuple(sorted(other_files)))
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
    name = os.fsencode(directory.name)[:200].decode("utf-8", "ignore")  # room for what is added
    draft = directory.parent / f".{name}.{secrets.token_hex(4)}.draft"
    spool_directory = draft.with_suffix(".spool")
    try:
        spool = Spool(spool_directory)

        def build(plan: Plan) -> None:
            _remove(draft)
            _make_directory(draft)
            with Fetch(store, plan, spool, limits=limits, progress=progress) as fetch:
                build_checkpoint(fetch, source, draft, workers=threads, progress=progress)

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
