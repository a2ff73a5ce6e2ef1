"""Making a stream: the base is hashed, stored as anchor 0, and committed with the stream's own record."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .attempt import Attempt
from .clock import now
from .codec.chunk import ChunkEncoder
from .commit import commit
from .container import build_header
from .digest import DEFAULT_HASH, Hasher, hasher
from .errors import ObjectNotFound, StreamExists, UsageError, VersionConflict
from .manifest import (
    BASE_VERSION,
    FILES,
    FORMAT,
    HEADERS,
    MAX_MANIFEST_BYTES,
    MODEL,
    Component,
    Manifest,
    StreamRecord,
    encode_manifest,
    manifest_key,
)
from .part import ChunkRow
from .patch import default_workers, run_in_order
from .probe import require_exclusive_creation
from .reader import Store
from .signing import SIGNED, Verifier
from .snapshot import CHUNK_BYTES, ChunkRun, Schema, TensorSpec, chunk_batches, snapshot_id
from .spool import TemporarySpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from .checkpoint import Checkpoint
    from .manifest import AnchorPolicy, ObjectRef, Scalar
    from .signing import Signer
    from .storage import Backend

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Content = Callable[[TensorSpec, int], Bytes]

__all__ = ["create_stream", "refuse_taken"]


def create_stream(
    backend: Backend,
    base: Checkpoint,
    *,
    hash_name: str = DEFAULT_HASH,
    upload_base: bool = True,
    anchors: AnchorPolicy | None = None,
    unsafe_skip_probe: bool = False,
    metadata: Mapping[str, Scalar] | None = None,
    signer: Signer | None = None,
    other_signers: Iterable[str] = (),
    workers: int | None = None,
    spool: Path | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Store:
    """Start a stream from a base checkpoint and return it open; version 0 is its only version.

    ``upload_base=False`` stores only digests: then every receiver needs its own copy of the base. ``anchors`` says
    which later versions get anchors of their own. ``spool`` is where encoded parts wait on disk. With a ``signer``
    every version has to be signed, by it or by one of ``other_signers`` (public keys). Raises ``StreamExists`` when the
    place is taken, and ``StorageError`` when it does not create objects exclusively; nothing is changed then.
    ``unsafe_skip_probe=True`` does not try that: where it is not kept, two writers may each commit the same version,
    and one of the two is lost without a word.
    """
    signers = _signers(signer, other_signers, hash_name)
    refuse_taken(backend)
    if not unsafe_skip_probe:
        require_exclusive_creation(backend)
    hash_function = hasher(hash_name)
    stream_id = secrets.token_hex(16)
    with TemporarySpool(spool) as parts:
        attempt = Attempt(
            backend,
            parts,
            stream_id=stream_id,
            version=BASE_VERSION,
            hash_function=hash_function,
        )
        anchor = _Anchor(attempt, hash_function, workers=workers or default_workers(), progress=progress)
        try:
            anchor.add(MODEL, base.schema, base.chunk, store=upload_base)
            if upload_base:
                anchor.add_files(FILES, {name: base.read_other_file(name) for name in base.other_files})
                anchor.add_files(HEADERS, {file.name: file.header_bytes for file in base.layout.files})
            attempt.wait_uploaded()
            manifest = Manifest(
                format=FORMAT,
                stream_id=stream_id,
                version=BASE_VERSION,
                kind="base",
                commit_id=secrets.token_hex(16),
                attempt_id=attempt.attempt_id,
                writer_epoch=1,
                created_at=now(),
                metadata=dict(metadata or {}),
                components=anchor.components,
                required_features=(SIGNED,) if signers else (),
                stream=StreamRecord(hash_name, CHUNK_BYTES, anchor.schemas, anchors, signers),
            )
            data = encode_manifest(manifest, hash_function=hash_function, signer=signer)
        except BaseException:
            attempt.abandon()
            raise
        try:
            commit(backend, manifest_key(BASE_VERSION), data, limit=MAX_MANIFEST_BYTES)
        except VersionConflict as error:
            attempt.abandon()
            raise _taken(backend) from error
        # Whatever else ends the commit, an interruption too, leaves it in doubt: the parts may be needed, and stay.
        attempt.drop()
    return Store(backend, manifest, Verifier(signers) if signers else None)


def _signers(signer: Signer | None, others: Iterable[str], hash_name: str) -> tuple[str, ...]:
    """Return the public keys that may sign; none for a stream that is not signed."""
    keys = {signer.public_key} if signer is not None else set()
    if signer is None and any(True for _ in others):
        raise UsageError("Only a stream that is signed has signers.", hint="Give the key that signs its base.")
    if keys and hash_name != "blake3":
        raise UsageError(
            f"A signed stream needs blake3: whoever wants to can make other bytes with the same {hash_name}, "
            "and the signature would hold for both.",
            hint="Make the stream with --hash blake3.",
        )
    return tuple(sorted(keys.union(others)))


def _taken(backend: Backend) -> StreamExists:
    return StreamExists(
        f"{backend.url} already holds a stream.", key=backend.url, hint="Publish to it, or use another place."
    )


def refuse_taken(backend: Backend) -> None:
    """Raise ``StreamExists`` when a place holds a stream already."""
    try:
        backend.read(manifest_key(BASE_VERSION), limit=MAX_MANIFEST_BYTES)
    except ObjectNotFound:
        return
    raise _taken(backend)


class _Anchor:
    """Version 0's components, each encoded whole, in one pass over its bytes."""

    def __init__(
        self,
        attempt: Attempt,
        hash_function: Hasher,
        *,
        workers: int,
        progress: Callable[[str, int, int], object] | None,
    ) -> None:
        self.components: dict[str, Component] = {}
        self.schemas: dict[str, ObjectRef] = {}
        self._attempt = attempt
        self._hash = hash_function
        self._workers = workers
        self._progress = progress
        self._local = threading.local()

    def add(self, name: str, schema: Schema, content: Content, *, store: bool) -> None:
        """Add a component; ``store=False`` keeps only its digests."""
        digests = np.zeros((schema.chunks, self._hash.size), np.uint8)

        def encode(batch: list[ChunkRun]) -> tuple[int, list[ChunkRow]]:
            rows = [self._encode(schema, run, content, digests, store=store) for run in batch]
            return sum(run.nbytes for run in batch), [row for some in rows for row in some]

        done = 0
        self._attempt.begin(name, schema)
        for size, rows in run_in_order(encode, chunk_batches(schema), workers=self._workers, name="encode"):
            self._attempt.add(rows)
            done += size
            if self._progress is not None and name == MODEL:
                self._progress("base", done, schema.nbytes)
        self.schemas[name] = self._attempt.put_object(f"{name}-schema.json", schema.to_json())
        self.components[name] = Component(
            snapshot_id=snapshot_id(schema, digests, self._hash),
            snapshot_bytes=schema.nbytes,
            total_elements=schema.elements,
            changed_elements=schema.elements,
            parts=self._attempt.end(),
            invertible=False,
            digests=self._put_table(name, digests),
        )

    def add_files(self, name: str, files: dict[str, bytes]) -> None:
        """Add small files as a component: each a U8 tensor under the file's relative name."""
        schema = Schema(TensorSpec(path, "U8", (len(data),)) for path, data in files.items())

        def content(spec: TensorSpec, chunk: int) -> Bytes:
            start, end = spec.chunk_range(chunk)
            return np.frombuffer(files[spec.name], np.uint8)[start:end]

        self.add(name, schema, content, store=True)

    def _put_table(self, name: str, digests: np.ndarray[Any, np.dtype[np.uint8]]) -> ObjectRef:
        header = build_header([("digests", "U8", digests.shape)], {"format": "deltastore.digests/1", "component": name})
        return self._attempt.put_object(f"{name}-digests.safetensors", header + digests.tobytes())

    def _encode(
        self,
        schema: Schema,
        run: ChunkRun,
        content: Content,
        digests: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        store: bool,
    ) -> list[ChunkRow]:
        local = self._local
        if not hasattr(local, "encoder"):
            local.encoder = ChunkEncoder()
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        position = schema.position(run.spec.name)
        rows = []
        for chunk in range(run.first, run.end):
            number = run.number + chunk - run.first
            data = content(run.spec, chunk)
            # A private copy: bytes and digest stay one even if somebody writes to the file meanwhile.
            buffer = local.buffer[: data.size]
            np.copyto(buffer, data)
            digest = self._hash.digest(buffer)
            digests[number] = np.frombuffer(digest, np.uint8)
            if store:
                encoded = local.encoder.full(buffer, width=run.spec.width)
                rows.append(ChunkRow(position, chunk, encoded, b"", digest))
        return rows
