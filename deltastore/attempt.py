"""One try to publish a version: encoded chunks become parts, uploaded while encoding goes on.

Parts are kept until the version's fate is known: in memory up to a fixed budget, in the spool from there on.
"""

from __future__ import annotations

import math
import secrets
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import DeltastoreError
from .manifest import MODEL, ObjectRef, PartRef, part_key
from .part import PartIdentity, build_part, parse_part
from .snapshot import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .digest import Hasher
    from .part import ChunkRow, Part
    from .spool import Spool
    from .storage import Backend

__all__ = ["Attempt", "upload_pool"]

#: A part is closed when its payload reaches this many bytes. Even the largest stays below the format's 64 MiB, with a
#: table of the most rows and the chunk that filled it.
_PART_BYTES = 16 << 20
#: The first parts are closed earlier, and the very first at half of this, so that a small version too is on its way
#: while it is encoded; each later one may have a quarter of all bytes before it. The last ones have half of those that
#: are still expected after them, and this at the least: what remains to be sent when all is encoded is little.
_FIRST_PART_BYTES = 1 << 20
_PART_GROWTH = 4
_PART_DECLINE = 2
#: From 128 GiB on parts grow with all bytes before them, that one manifest can name all parts of two trillion bytes.
_MANY_PARTS = 1 << 13
_LARGEST_PART_BYTES = 40 << 20
#: A part is closed at this many rows too: tables of tiny tensors count.
_PART_ROWS = 1 << 18
#: Parts that one attempt keeps in memory, in bytes.
_MEMORY_BYTES = 48 << 20
_UPLOADERS = 4


def upload_pool() -> ThreadPoolExecutor:
    """Return threads that upload parts."""
    return ThreadPoolExecutor(_UPLOADERS, thread_name_prefix="upload")


class Attempt:
    """Collects one version's parts, or one route's. Used from one thread; uploads run in others.

    ``key_of`` names the attempt's objects: (version, attempt id, name) to key. ``keep_parts=False`` frees a part as
    soon as it is uploaded; until then it waits on disk, never in memory. ``pool``: what uploads, of its own unless
    given; whoever makes many attempts need not start threads for each.
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
        keep_parts: bool = True,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self.attempt_id = secrets.token_hex(16)
        self.version = version
        self._backend = backend
        self._spool = spool
        self._stream_id = stream_id
        self._hash = hash_function
        self._key_of = key_of
        self._keep_parts = keep_parts
        self._component = MODEL
        self._schema = Schema(())
        #: Rows of no part yet; those up to ``_counted`` belong to the open one, with ``_payload_bytes`` together.
        self._rows: list[ChunkRow] = []
        self._counted = 0
        self._payload_bytes = 0
        self._closed_bytes = 0
        self._memory: dict[str, bytes] = {}
        self._memory_bytes = 0
        self._parts: dict[str, list[PartRef]] = {}
        self._objects: list[str] = []
        self._uploads: list[Future[None]] = []
        self._owns_pool = pool is None
        self._pool = pool or upload_pool()

    def _identity(self, component: str) -> PartIdentity:
        return PartIdentity(self._stream_id, self.version, self.attempt_id, component)

    def begin(self, component: str, schema: Schema) -> None:
        """Say which component the next rows belong to."""
        self._component, self._schema = component, schema
        self._parts[component] = []

    def add(self, rows: Iterable[ChunkRow], *, expected: float = math.inf) -> None:
        """Append encoded chunks of the component; full parts leave for the store at once.

        ``expected``: about how many encoded bytes will come after these, as far as that is known.
        """
        self.keep(rows)
        while self._counted < len(self._rows):
            self._payload_bytes += len(self._rows[self._counted].encoded.payload)
            self._counted += 1
            if self._payload_bytes >= self._part_bytes(expected) or self._counted >= _PART_ROWS:
                self._close_part()

    def keep(self, rows: Iterable[ChunkRow]) -> None:
        """Append encoded chunks for ``parts`` to tell of, and do nothing else that might fail."""
        self._rows += rows

    def end(self) -> tuple[PartRef, ...]:
        """Close the component's open part, if any; returns all its parts."""
        if self._counted:
            self._close_part()
        return tuple(self._parts[self._component])

    def _part_bytes(self, expected: float) -> float:
        """Return how many payload bytes close the open part."""
        least = _FIRST_PART_BYTES if self._closed_bytes else _FIRST_PART_BYTES // 2
        usual = min(_PART_BYTES, max(least, min(self._closed_bytes // _PART_GROWTH, expected // _PART_DECLINE)))
        return max(usual, min(_LARGEST_PART_BYTES, self._closed_bytes // _MANY_PARTS))

    def _close_part(self) -> None:
        parts = self._parts[self._component]
        rows = self._rows[: self._counted]
        data = build_part(rows, self._identity(self._component), digest_size=self._hash.size)
        numbers = self._schema.first_chunk[[row.tensor for row in rows]] + [row.chunk for row in rows]
        reference = PartRef(
            key=self._key(f"{self._component}-{len(parts):05d}.safetensors"),
            size=len(data),
            digest=self._hash.of(data),
            chunks=len(numbers),
            first=int(numbers.min()),
            last=int(numbers.max()),
        )
        if self._keep_parts and self._memory_bytes + len(data) <= _MEMORY_BYTES:
            self._memory[reference.key] = data
            self._memory_bytes += len(data)
        else:
            self._spool.put(data, reference.digest)
        parts.append(reference)
        self._closed_bytes += self._payload_bytes
        self._rows = self._rows[self._counted :]
        self._counted = self._payload_bytes = 0
        self._uploads.append(self._pool.submit(self._upload, reference))

    def _key(self, name: str) -> str:
        key = self._key_of(self.version, self.attempt_id, name)
        self._objects.append(key)
        return key

    def _upload(self, reference: PartRef) -> None:
        self._backend.write(reference.key, self._read(reference))
        if not self._keep_parts:
            self._spool.remove(reference)

    def _read(self, reference: PartRef) -> bytes | memoryview:
        data = self._memory.get(reference.key)
        return self._spool.open(reference) if data is None else data

    def put_object(self, name: str, data: bytes) -> ObjectRef:
        """Store an object of the attempt that is no part (a schema, a digest table) and return its reference."""
        reference = ObjectRef(self._key(name), len(data), self._hash.of(data))
        self._backend.write(reference.key, data)
        return reference

    def wait_uploaded(self) -> None:
        """Block until every part is in the store; raises what an upload raised."""
        for upload in self._uploads:
            upload.result()
        self._leave_pool()

    def _leave_pool(self) -> None:
        wait([upload for upload in self._uploads if not upload.cancel()])
        if self._owns_pool:
            self._pool.shutdown()

    def parts(self, schema: Schema, component: str = MODEL) -> Iterator[Part]:
        """Yield the component's parts as the store has them, and the open one if it is this component's.

        One at a time: each that is spooled is mapped as long as somebody has it, and there may be thousands.
        """
        identity = self._identity(component)
        for reference in self._parts.get(component, []):
            yield parse_part(self._read(reference), identity, schema, self._hash, key=reference.key)
        if self._rows and component == self._component:
            data = build_part(self._rows, identity, digest_size=self._hash.size)
            yield parse_part(data, identity, schema, self._hash, key="the open part")

    def drop(self) -> None:
        """Free the memory and the disk that the parts took."""
        self._rows, self._memory = [], {}
        for parts in self._parts.values():
            for reference in parts:
                self._spool.remove(reference)

    def abandon(self) -> None:
        """Stop, and remove what was uploaded. Only for an attempt whose manifest was never sent, or lost."""
        self._leave_pool()
        for key in self._objects:
            with suppress(DeltastoreError):  # an orphan does no harm: no manifest names it, and gc finds it
                self._backend.delete(key)
        self.drop()
