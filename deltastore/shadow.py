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
from .tensors import DeviceBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .device import DeviceShadow
    from .digest import Hasher
    from .part import Part
    from .plan import Plan
    from .reader import Store
    from .restore import Source
    from .snapshot import Digests, Schema, TensorSpec
    from .spool import Spool
    from .tensors import TensorBytes

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Positions = np.ndarray[Any, np.dtype[np.int32]]

__all__ = ["Run", "Shadow", "Version"]

#: Consecutive chunks of one tensor to encode: its number in schema order, its bytes, first chunk, chunk after the last.
Run = tuple[int, "TensorBytes", int, int]
#: One chunk's new bytes: its tensor's number, its own, the bytes, and the elements that changed where that is known.
Version = tuple[int, int, "Bytes", "Positions | None"]


class Shadow:
    """One snapshot in memory: the bytes of each tensor, and the digests of all chunks."""

    def __init__(self, schema: Schema, hash_function: Hasher, *, level: str) -> None:
        self.schema = schema
        self.digests: Digests = np.zeros((schema.chunks, hash_function.size), np.uint8)
        self.hash = hash_function
        self.level = level
        self._tensors = [np.empty(spec.nbytes, np.uint8) for spec in schema]
        self._local = threading.local()
        self._device: DeviceShadow | None = None
        self._device_lock = threading.Lock()

    def load(self, store: Store, plan: Plan, source: Source | None, spool: Spool, *, workers: int) -> None:
        """Fetch a plan's parts and fill the shadow with the version that it ends at."""
        before = source.digests if source else None
        read = source.checkpoint.chunk if source else self.chunk
        self.digests = replay(store, plan, spool, before=before, read=read, write=self._store, workers=workers).digests

    def chunk(self, spec: TensorSpec, chunk: int) -> Bytes:
        """Return one chunk's bytes, as they are until the next ``advance``."""
        start, end = spec.chunk_range(chunk)
        return self._tensors[self.schema.position(spec.name)][start:end]

    def _store(self, spec: TensorSpec, chunk: int, data: Bytes) -> None:
        if self._device is not None:
            self._device.follow(self.schema.position(spec.name), spec.chunk_range(chunk)[0], data)
        self.chunk(spec, chunk)[:] = data

    def encode(self, runs: Sequence[Run]) -> list[ChunkRow]:
        """Compare runs of new bytes with the shadow and encode what changed. Called from several threads."""
        local = self._local
        if not hasattr(local, "encoder"):
            local.encoder = ChunkEncoder(self.level)
            local.buffer = np.empty(CHUNK_BYTES, np.uint8)
        rows = []
        for position, chunk, given, where in self._versions(runs, local.buffer):
            spec = self.schema.tensors[position]
            start, stop = spec.chunk_range(chunk)
            old = self._tensors[position][start:stop]
            if where is None:
                encoded = local.encoder.change(old, given, width=spec.width)
                new = local.encoder.kept
            else:
                encoded = local.encoder.change_at(old, given, where, width=spec.width)
                new = given
            if encoded is not None:
                old_digest = self.digests[int(self.schema.first_chunk[position]) + chunk].tobytes()
                rows.append(ChunkRow(position, chunk, encoded, old_digest, self.hash.digest(new)))
        return rows

    def _versions(self, runs: Sequence[Run], buffer: Bytes) -> Iterator[Version]:
        """Yield each chunk's new bytes, and where they changed if that is known: then they are a private copy."""
        device = self._device_shadow() if any(isinstance(run[1], DeviceBytes) for run in runs) else None
        changes = device.compare(runs) if device is not None else []
        for number, (position, content, first, end) in enumerate(runs):
            if device is not None and isinstance(content, DeviceBytes):
                yield from device.versions(runs[number], changes[number], buffer)
                continue
            spec = self.schema.tensors[position]
            for chunk in range(first, end):
                start, stop = spec.chunk_range(chunk)
                yield position, chunk, content(start, stop), None

    def _device_shadow(self) -> DeviceShadow:
        with self._device_lock:
            if self._device is None:
                from .device import DeviceShadow  # noqa: PLC0415 - torch is there: it made the tensors

                self._device = DeviceShadow(self.schema, self._tensors)
            return self._device

    def advance(self, parts: Sequence[Part], snapshot_id: str, *, workers: int) -> None:
        """Apply a committed version's own parts, hash-checked, so that the shadow holds exactly what readers will."""
        patch = Patch(self.schema, self.hash, before=self.digests)
        patch.add_delta(parts)
        patch.seal(snapshot_id)
        patch.run(self.chunk, self._store, everything=False, workers=workers)
        self.digests = patch.after
