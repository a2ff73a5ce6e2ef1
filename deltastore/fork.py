"""Forking: a new stream whose base is a version of another one. They share nothing; either may be deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checkpoint import open_checkpoint
from .init import create_stream, refuse_taken
from .signing import Signer, load_public_key
from .spool import TemporarySpool
from .storage import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from .manifest import AnchorPolicy
    from .reader import Store

__all__ = ["fork_stream"]


def fork_stream(
    url: str | Path,
    source: Store,
    version: int,
    *,
    base: str | Path | None = None,
    hash_name: str | None = None,
    upload_base: bool = True,
    anchors: AnchorPolicy | None = None,
    unsafe_skip_probe: bool = False,
    sign_key: str | Path | None = None,
    other_signers: Iterable[str | Path] = (),
    storage_options: Mapping[str, object] | None = None,
    workers: int | None = None,
    spool: str | Path | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Store:
    """Start a stream at ``url`` from a version of another and return it open.

    Its base has that version's weights, split over files as the source's base is, and that base's other files; its
    metadata say where it came from. ``base`` is a checkpoint of the source to start from, needed where the source does
    not store its own. The version is built on disk in ``spool`` (the system's temporary directory unless given) and
    removed again. The hash is the source's unless given; ``anchors`` is the fork's own policy. ``sign_key`` is a file
    with the private key of a signed fork, ``other_signers`` are further public keys that may sign. Raises
    ``StreamExists`` when the place is taken.
    """
    signer = Signer.load(sign_key) if sign_key is not None else None
    others = [load_public_key(key) for key in other_signers]
    backend = open_backend(str(url), storage_options=storage_options)
    refuse_taken(backend)  # before the source is fetched; looked at again when the stream is made
    manifest = source.manifest(version)
    with TemporarySpool(spool) as room:
        directory = room.directory / "checkpoint"
        source.restore(version, directory, base=base, workers=workers, progress=progress)
        return create_stream(
            backend,
            open_checkpoint(directory),
            hash_name=hash_name or source.hash.name,
            upload_base=upload_base,
            anchors=anchors,
            unsafe_skip_probe=unsafe_skip_probe,
            metadata={
                "forked_from": source.stream_id,
                "forked_from_version": version,
                "forked_from_snapshot_id": manifest.snapshot_id,
            },
            signer=signer,
            other_signers=others,
            workers=workers,
            spool=room.directory,
            progress=progress,
        )
