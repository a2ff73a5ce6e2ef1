"""One try to publish a version: encoded chunks become parts, spooled on disk and uploaded while encoding goes on."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import DeltastoreError
from .manifest import MODEL, ObjectRef, PartRef, part_key
from .part import PartIdentity, build_part, parse_part
from .snapshot import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .digest import Hasher
    from .part import ChunkRow, Part
    from .spool import Spool
    from .storage import Backend

__all__ = ["Attempt"]

#: A part is closed when its payload reaches this many bytes: with its table it stays well below the format's 64 MiB.
_PART_BYTES = 16 << 20
#: A part is closed at this many rows too: tables of tiny tensors count.
_PART_ROWS = 1 << 18
_UPLOADERS = 4


class Attempt:
    """Collects one version's parts, or one route's. Used from one thread; uploads run in others.

    ``key_of`` names the attempt's objects: (version, attempt id, name) to key. ``keep_spooled=False`` frees a part's
    disk as soon as it is uploaded.
    """

    def __init__(
        self,
        backend: Backend,
        spool: Spool,
        *,
        stream_id: str,
        version: int,
        hash_function: Hasher,
        key_of: Callable[[int, str, str], str] = part_key,
        keep_spooled: bool = True,
    ) -> None:
        self.attempt_id = secrets.token_hex(16)
        self.version = version
        self._backend = backend
        self._spool = spool
        self._stream_id = stream_id
        self._hash = hash_function
        self._key_of = key_of
        self._keep_spooled = keep_spooled
        self._component = MODEL
        self._schema = Schema(())
        self._rows: list[ChunkRow] = []
        self._payload_bytes = 0
        self._parts: dict[str, list[PartRef]] = {}
        self._objects: list[str] = []
        self._uploads: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(_UPLOADERS, thread_name_prefix="upload")

    def _identity(self, component: str) -> PartIdentity:
        return PartIdentity(self._stream_id, self.version, self.attempt_id, component)

    def begin(self, component: str, schema: Schema) -> None:
        """Say which component the next rows belong to."""
        self._component, self._schema = component, schema
        self._parts[component] = []

    def add(self, rows: Iterable[ChunkRow]) -> None:
        """Append encoded chunks of the component; full parts leave for the store at once."""
        for row in rows:
            self._rows.append(row)
            self._payload_bytes += len(row.encoded.payload)
            if self._payload_bytes >= _PART_BYTES or len(self._rows) >= _PART_ROWS:
                self._close_part()

    def end(self) -> tuple[PartRef, ...]:
        """Close the component's open part, if any; returns all its parts."""
        if self._rows:
            self._close_part()
        return tuple(self._parts[self._component])

    def _close_part(self) -> None:
        parts = self._parts[self._component]
        data = build_part(self._rows, self._identity(self._component), digest_size=self._hash.size)
        numbers = [int(self._schema.first_chunk[row.tensor]) + row.chunk for row in self._rows]
        reference = PartRef(
            key=self._key(f"{self._component}-{len(parts):05d}.safetensors"),
            size=len(data),
            digest=self._hash.of(data),
            chunks=len(numbers),
            first=min(numbers),
            last=max(numbers),
        )
        self._spool.put(data, reference.digest)
        parts.append(reference)
        self._uploads.append(self._pool.submit(self._upload, reference))
        self._rows, self._payload_bytes = [], 0

    def _key(self, name: str) -> str:
        key = self._key_of(self.version, self.attempt_id, name)
        self._objects.append(key)
        return key

    def _upload(self, reference: PartRef) -> None:
        self._backend.write(reference.key, self._spool.open(reference))
        if not self._keep_spooled:
            self._spool.remove(reference)

    def put_object(self, name: str, data: bytes) -> ObjectRef:
        """Store an object of the attempt that is no part (a schema, a digest table) and return its reference."""
        reference = ObjectRef(self._key(name), len(data), self._hash.of(data))
        self._backend.write(reference.key, data)
        return reference

    def wait_uploaded(self) -> None:
        """Block until every part is in the store; raises what an upload raised."""
        for upload in self._uploads:
            upload.result()
        self._pool.shutdown()

    def spooled_parts(self, schema: Schema, component: str = MODEL) -> list[Part]:
        """Return the component's parts as the store has them, read from the spool."""
        return [
            parse_part(self._spool.open(reference), self._identity(component), schema, self._hash, key=reference.key)
            for reference in self._parts.get(component, [])
        ]

    def drop_spool(self) -> None:
        """Free the disk that the parts took."""
        for parts in self._parts.values():
            for reference in parts:
                self._spool.remove(reference)

    def abandon(self) -> None:
        """Stop, and remove what was uploaded. Only for an attempt whose manifest was never sent, or lost."""
        self._pool.shutdown(cancel_futures=True)
        for key in self._objects:
            with suppress(DeltastoreError):  # an orphan does no harm: no manifest names it, and gc finds it
                self._backend.delete(key)
        self.drop_spool()
