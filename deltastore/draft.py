"""One route on its way into a store: encoded chunks become its parts, and its record makes it one."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .attempt import Attempt
from .clock import now
from .codec import Encoding
from .codec.applying import ChunkDecoder
from .codec.chunk import ChunkEncoder
from .commit import commit
from .errors import CorruptObject, StorageError
from .manifest import FORMAT, MODEL
from .part import ChunkRow
from .patch import run_in_order
from .route import MAX_ROUTE_BYTES, Route, begun_key, encode_route, parse_route, route_key, route_part_key
from .snapshot import CHUNK_BYTES, chunk_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from .codec import EncodedChunk
    from .manifest import Manifest
    from .reader import Store
    from .snapshot import ChunkRun, Digests, TensorSpec
    from .spool import Spool

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Content = Callable[[TensorSpec, int], Bytes]

__all__ = ["RouteDraft"]


class RouteDraft:
    """An anchor (``start`` is ``None``) or a skip delta between two versions.

    ``add`` its chunks window by window, then ``commit``, or ``abandon`` it. Used from one thread.
    """

    def __init__(
        self, store: Store, spool: Spool, *, start: Manifest | None, end: Manifest, level: str, workers: int
    ) -> None:
        self.start = start
        self.end = end
        self._store = store
        self._schema = store.schema()
        self._level = level
        self._workers = workers
        # Read before anything is written: a record that comes later does not know this attempt.
        record = store.retention()
        self._retention = record.number if record is not None else 0
        self._changed = 0
        self._invertible = start is not None
        self._sent = False
        self._local = threading.local()
        self._attempt = Attempt(
            store.backend,
            spool,
            stream_id=store.stream_id,
            version=end.version,
            hash_function=store.hash,
            key_of=route_part_key(None if start is None else start.version),
            keep_parts=False,
        )
        self._attempt.begin(MODEL, self._schema)
        self._begun = begun_key(end.version, self._attempt.attempt_id)
        store.backend.write(self._begun, json.dumps({"created_at": now()}).encode())

    def add(
        self,
        window: range,
        old: Content | None,
        new: Content,
        *,
        old_digests: Digests | None,
        new_digests: Digests,
    ) -> None:
        """Encode the chunks of a window; for a skip ``old`` are those that it starts from.

        Digests are those of all chunks, uint8 of shape (chunks, digest size). An encoded chunk is decoded again, and
        must have its digest: raises ``CorruptObject`` when it does not.
        """

        def encode(batch: list[ChunkRun]) -> list[ChunkRow]:
            return [row for run in batch for row in self._rows(run, old, new, old_digests, new_digests)]

        batches = chunk_batches(self._schema, low=window.start, high=window.stop)
        for rows in run_in_order(encode, batches, workers=self._workers, name="encode"):
            self._attempt.add(rows)
            for row in rows:
                self._changed += row.encoded.changed
                self._invertible &= row.encoded.encoding != Encoding.FULL

    def _rows(
        self, run: ChunkRun, old: Content | None, new: Content, old_digests: Digests | None, new_digests: Digests
    ) -> list[ChunkRow]:
        local = self._local
        if not hasattr(local, "encoder"):
            local.encoder, local.decoder = ChunkEncoder(self._level), ChunkDecoder()
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        position = self._schema.position(run.spec.name)
        rows = []
        for chunk in range(run.first, run.end):
            number = run.number + chunk - run.first
            before = old(run.spec, chunk) if old is not None else None
            after = new(run.spec, chunk)
            if before is after:  # nothing touched it on the way
                continue
            if before is None:
                encoded = local.encoder.full(after, width=run.spec.width)
            else:
                encoded = local.encoder.change(before, after, width=run.spec.width)
            if encoded is None:
                continue
            self._prove(run.spec, before, encoded, size=after.size, digest=new_digests[number].tobytes())
            digest = b"" if old_digests is None else old_digests[number].tobytes()
            rows.append(ChunkRow(position, chunk, encoded, digest, new_digests[number].tobytes()))
        return rows

    def _prove(
        self, spec: TensorSpec, before: Bytes | None, encoded: EncodedChunk, *, size: int, digest: bytes
    ) -> None:
        out = self._local.buffer[:size]
        if before is not None:
            np.copyto(out, before)
        payload = memoryview(encoded.payload)
        self._local.decoder.apply(out, encoded.encoding, encoded.changed, payload, width=spec.width)
        if self._store.hash.digest(out) != digest:
            raise CorruptObject(
                f"A chunk of {spec.name!r} does not have the bytes of version {self.end.version}.", key=spec.name
            )

    def commit(self) -> Route:
        """Upload what is left, look whether both versions still are what they were, and create the record."""
        parts = self._attempt.end()
        self._attempt.wait_uploaded()
        for manifest in (self.start, self.end):
            if manifest is not None:
                self._store.recheck(manifest)
        version, attempt_id = self.end.version, self._attempt.attempt_id
        route = Route(
            format=FORMAT,
            stream_id=self._store.stream_id,
            attempt_id=attempt_id,
            kind="anchor" if self.start is None else "skip",
            version=version,
            created_at=now(),
            commit_id=self.end.commit_id,
            snapshot_id=self.end.snapshot_id,
            start=None if self.start is None else self.start.version,
            start_commit_id=None if self.start is None else self.start.commit_id,
            parts=parts,
            changed_elements=self._changed,
            invertible=self._invertible,
            retention=self._retention,
        )
        data = encode_route(route, hash_function=self._store.hash)
        # What no reader would take must not be there.
        parse_route(data, version=version, attempt_id=attempt_id, verifier=self._store.verifier)
        self._sent = True  # from here on the parts may be needed, whatever the answer
        commit(self._store.backend, route_key(version, attempt_id), data, limit=MAX_ROUTE_BYTES)
        return route

    def abandon(self) -> None:
        """Remove what was uploaded, unless the record was sent."""
        if not self._sent:
            with suppress(StorageError):
                self._attempt.abandon()
                self._store.backend.delete(self._begun)
