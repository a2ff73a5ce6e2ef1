"""The writer's copy of the last committed snapshot, which the next one is compared with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .codec.chunk import ChunkEncoder
from .part import ChunkRow
from .patch import Patch
from .replay import replay
from .snapshot import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .digest import Hasher
    from .part import Part
    from .plan import Plan
    from .reader import Store
    from .restore import Source
    from .snapshot import Digests, Schema, TensorSpec
    from .spool import Spool
    from .tensors import TensorBytes

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Run", "Shadow"]

#: Consecutive chunks of one tensor to encode: its number in schema order, its bytes, first chunk, chunk after the last.
Run = tuple[int, "TensorBytes", int, int]


class Shadow:
    """One snapshot in memory: the bytes of each tensor, and the digests of all chunks."""

    def __init__(self, schema: Schema, hash_function: Hasher, *, level: str) -> None:
        self.schema = schema
        self.digests: Digests = np.zeros((schema.chunks, hash_function.size), np.uint8)
        self.hash = hash_function
        self._level = level
        self._tensors = [np.empty(spec.nbytes, np.uint8) for spec in schema]
        self._local = threading.local()

    def load(self, store: Store, plan: Plan, source: Source | None, spool: Spool, *, workers: int) -> None:
        """Fetch a plan's parts and fill the shadow with the version that it ends at."""
        before = source.digests if source else None
        read = source.checkpoint.chunk if source else self._chunk
        self.digests = replay(store, plan, spool, before=before, read=read, write=self._store, workers=workers).digests

    def _chunk(self, spec: TensorSpec, chunk: int) -> Bytes:
        start, end = spec.chunk_range(chunk)
        return self._tensors[self.schema.position(spec.name)][start:end]

    def _store(self, spec: TensorSpec, chunk: int, data: Bytes) -> None:
        self._chunk(spec, chunk)[:] = data

    def encode(self, runs: Sequence[Run]) -> list[ChunkRow]:
        """Compare runs of new bytes with the shadow and encode what changed. Called from several threads."""
        local = self._local
        if not hasattr(local, "encoder"):
            local.encoder = ChunkEncoder(self._level)
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        rows = []
        for position, content, first, end in runs:
            spec = self.schema.tensors[position]
            old_tensor = self._tensors[position]
            number = int(self.schema.first_chunk[position])
            for chunk in range(first, end):
                start, stop = spec.chunk_range(chunk)
                # A private copy: difference and digest are of the same bytes even if the trainer breaks its promise.
                new = local.buffer[: stop - start]
                np.copyto(new, content(start, stop))
                encoded = local.encoder.change(old_tensor[start:stop], new, width=spec.width)
                if encoded is not None:
                    old_digest = self.digests[number + chunk].tobytes()
                    rows.append(ChunkRow(position, chunk, encoded, old_digest, self.hash.digest(new)))
        return rows

    def advance(self, parts: Sequence[Part], snapshot_id: str, *, workers: int) -> None:
        """Apply a committed version's own parts, hash-checked, so that the shadow holds exactly what readers will."""
        patch = Patch(self.schema, self.hash, before=self.digests)
        patch.add_delta(parts)
        patch.seal(snapshot_id)
        patch.run(self._chunk, self._store, everything=False, workers=workers)
        self.digests = patch.after
