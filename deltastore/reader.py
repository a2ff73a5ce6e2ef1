"""Reading a store: which versions there are, how to get to one, and building it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .container import header_size, parse_header
from .digest import hasher
from .errors import (
    BaseMismatch,
    CorruptObject,
    ObjectNotFound,
    SignatureMismatch,
    StorageError,
    StoreNotFound,
    StreamMismatch,
    UnsupportedFormat,
    UsageError,
    VersionNotFound,
)
from .manifest import (
    BASE_VERSION,
    HEADERS,
    LATEST_KEY,
    MAX_MANIFEST_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_TABLE_BYTES,
    MODEL,
    manifest_key,
    parse_base,
    parse_latest,
    parse_manifest,
)
from .plan import check_components, check_link
from .planner import READERS, Planner
from .record import MAX_VERSION
from .retention import MAX_RETENTION_BYTES, Standing, check_successor, parse_retention, retention_key
from .segment import MAX_SEGMENT_BYTES, parse_segment, segment_key, segment_of
from .signing import load_public_keys
from .snapshot import CHUNK_BYTES, Schema, snapshot_id, tensor_digests
from .spool import read_object
from .storage import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .checkpoint import Checkpoint, Layout
    from .digest import Hasher
    from .manifest import Manifest, StreamRecord
    from .plan import Plan
    from .retention import Retention
    from .signing import Verifier
    from .snapshot import Digests
    from .storage import Backend

__all__ = ["Store", "open_store"]

_log = logging.getLogger("deltastore")

#: A segment is read for so many of its manifests at the least; fewer are read by themselves.
_WORTH_A_SEGMENT = 20
#: Manifests kept in memory, and parts that they may name together: enough to follow, and no more after a million
#: versions, or where each has a thousand parts.
_REMEMBERED = 256
_REMEMBERED_PARTS = 16_384
#: More than any version's number has.
_MORE_DIGITS = 12


class Store:
    """A stream in a store, for reading. Thread-safe; remembers recent manifests, which never change.

    ``verifier`` is there in a signed stream: every manifest and tag needs a signature that it takes.
    """

    def __init__(self, backend: Backend, base: Manifest, verifier: Verifier | None = None) -> None:
        if base.stream is None:
            raise CorruptObject("The base manifest has no stream record.", key=manifest_key(BASE_VERSION))
        check_components(base)
        self.backend = backend
        self.base = base
        self.verifier = verifier
        self.stream: StreamRecord = base.stream
        self.hash: Hasher = hasher(base.stream.hash)
        self._recent = {BASE_VERSION: base}
        self._parts = 0
        self._retention: Retention | None = None
        self._lock = threading.Lock()
        self._schemas: dict[str, Schema] = {}
        if base.stream.chunk_bytes != CHUNK_BYTES:
            raise CorruptObject(
                f"The stream has chunks of {base.stream.chunk_bytes} bytes; format 1 has {CHUNK_BYTES}.",
                key=manifest_key(BASE_VERSION),
            )

    @property
    def stream_id(self) -> str:
        """The stream's random id."""
        return self.base.stream_id

    def schema(self, component: str = MODEL) -> Schema:
        """Return the tensors of a component."""
        if component not in self._schemas:
            reference = self.stream.schemas[component]
            data = read_object(self.backend, reference, limit=MAX_SCHEMA_BYTES)
            schema = Schema.from_json(data, key=reference.key)
            self._check_size(component, schema, reference.key)
            self._schemas[component] = schema
        return self._schemas[component]

    def _check_size(self, component: str, schema: Schema, key: str) -> None:
        """Raise ``CorruptObject`` unless a schema is as large as the base is: a few names may claim any size."""
        base = self.base.components[component]
        room = base.digests.size if base.digests is not None else 0
        if schema.chunks * self.hash.size > min(room, MAX_TABLE_BYTES) or schema.nbytes != base.snapshot_bytes:
            raise CorruptObject(f"The schema {key} is of another size than the base.", key=key)

    def base_digests(self, component: str = MODEL) -> Digests:
        """Return the chunk digests of version 0.

        Uint8 of shape (chunks, digest size), proven against its snapshot id.
        """
        entry = self.base.components[component]
        if entry.digests is None:
            raise CorruptObject(f"The base has no digests of {component}.", key=manifest_key(BASE_VERSION))
        key = entry.digests.key
        data = read_object(self.backend, entry.digests, limit=MAX_TABLE_BYTES)
        header = parse_header(data, key=key)
        schema = self.schema(component)
        shape = (schema.chunks, self.hash.size)
        found = [(placed.spec.name, placed.spec.dtype, placed.spec.shape) for placed in header.tensors]
        expected = {"format": "deltastore.digests/1", "component": component}
        if found != [("digests", "U8", shape)] or header.metadata != expected or header.file_size != len(data):
            raise CorruptObject(f"{key} is no digest table of shape {list(shape)}.", key=key)
        table = np.frombuffer(data, np.uint8, offset=header.size).reshape(shape)
        if snapshot_id(schema, table, self.hash) != entry.snapshot_id:
            raise CorruptObject(f"{key} does not hold the digests of the base.", key=key)
        return table

    # Versions

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest; raises ``VersionNotFound`` when the stream has no such version."""
        found = self._read_manifest(version)
        if found is None:
            raise VersionNotFound(
                f"There is no version {version} in {self.backend.url}.",
                key=manifest_key(max(version, 0)),
                hint="`deltastore log` lists the versions there are.",
            )
        return found

    def _read_manifest(self, version: int) -> Manifest | None:
        if not BASE_VERSION <= version <= MAX_VERSION:
            return None
        known = self._recent.get(version)
        if known is not None:
            return known
        manifest = self._fetch_manifest(version)
        if manifest is None:
            return None
        self._remember(manifest)
        return manifest

    def _remember(self, manifest: Manifest) -> None:
        version = manifest.version
        check_components(manifest)
        parent, child = self._recent.get(version - 1), self._recent.get(version + 1)
        if parent is not None:
            check_link(parent, manifest)
        if child is not None:
            check_link(manifest, child)
        with self._lock:
            if version not in self._recent:
                self._recent[version] = manifest
                self._parts += len(manifest.model.parts)
            while len(self._recent) > _REMEMBERED or (self._parts > _REMEMBERED_PARTS and len(self._recent) > 2):
                oldest = next(number for number in self._recent if number != BASE_VERSION)
                self._parts -= len(self._recent.pop(oldest).model.parts)

    def recent(self, highest: int) -> dict[int, Manifest]:
        """Return the manifests up to version ``highest`` that are in memory."""
        with self._lock:
            return {version: manifest for version, manifest in self._recent.items() if version <= highest}

    def _fetch_manifest(self, version: int) -> Manifest | None:
        try:
            data = self.backend.read(manifest_key(version), limit=MAX_MANIFEST_BYTES)
        except ObjectNotFound:
            return None
        manifest = parse_manifest(data, version=version, verifier=self.verifier)
        if manifest.stream_id != self.stream_id:
            raise StreamMismatch(
                f"{manifest_key(version)} belongs to the stream {manifest.stream_id}, not to {self.stream_id}.",
                key=manifest_key(version),
                hint="The store was replaced or mixed with another one; restore it from a backup.",
            )
        return manifest

    def recheck(self, manifest: Manifest) -> None:
        """Read a known version's manifest anew; raises ``StreamMismatch`` when it is gone or is another commit's."""
        found = self._fetch_manifest(manifest.version)
        if found is None or found.commit_id != manifest.commit_id:
            raise StreamMismatch(
                f"Version {manifest.version} of {self.backend.url} is no longer the one that it was: "
                "the store was rolled back or replaced.",
                key=manifest_key(manifest.version),
                hint="Restore the store, or start again from it with a new checkpoint path.",
            )

    def next(self, version: int) -> Manifest | None:
        """Return the manifest after ``version`` if it exists: one read, which is all that a steady poll needs."""
        return self._read_manifest(version + 1)

    def latest(self, *, at_least: int = BASE_VERSION) -> Manifest:
        """Return the newest version's manifest: from a known or hinted version by galloping, without a listing."""
        start = max(at_least, self._hint())
        low = start if self._read_manifest(start) is not None else BASE_VERSION
        return self.manifest(_gallop(low, lambda version: self._read_manifest(version) is not None))

    def _hint(self) -> int:
        try:
            hint = parse_latest(self.backend.read(LATEST_KEY, limit=1024))
        except CorruptObject:
            return BASE_VERSION
        except StorageError as error:
            if error.transient:
                raise
            return BASE_VERSION  # absent, or something that is no hint: versions are found without it
        return hint.version if hint is not None and hint.stream_id == self.stream_id else BASE_VERSION

    def resolve(self, version: str | int) -> Manifest:
        """Return the manifest of ``latest``, a number, or ``tag:NAME``."""
        if isinstance(version, int):
            return self.manifest(version)
        if version == "latest":
            return self.latest()
        if version.isascii() and version.isdigit():
            digits = version.lstrip("0")[:_MORE_DIGITS] or "0"  # Python reads no number of thousands of them
            return self.manifest(int(digits))
        if version.startswith("tag:"):
            from .tags import read_tag, tagged_manifest  # noqa: PLC0415 - only where a tag is named

            return tagged_manifest(self, read_tag(self, version.removeprefix("tag:")))
        raise UsageError(f"{version!r} is no version.", hint="Give a number, latest or tag:NAME.")

    def manifests(self, versions: Iterable[int]) -> dict[int, Manifest]:
        """Read many manifests: a thousand at once where there is a log segment, else side by side."""
        found: dict[int, Manifest] = {}
        missing: dict[int, list[int]] = {}
        for version in dict.fromkeys(versions):
            known = self._recent.get(version)
            if known is not None:
                found[version] = known
            else:
                missing.setdefault(segment_of(version), []).append(version)
        if not missing:
            return found
        with ThreadPoolExecutor(READERS, thread_name_prefix="manifests") as pool:
            worth = [first for first, wanted in missing.items() if len(wanted) >= _WORTH_A_SEGMENT]
            for segment in pool.map(self._read_segment, worth):
                for manifest in segment:
                    if manifest.version in missing.get(segment_of(manifest.version), ()):
                        found[manifest.version] = manifest
            alone = [version for wanted in missing.values() for version in wanted if version not in found]
            found.update(zip(alone, pool.map(self.manifest, alone), strict=True))
        return found

    def _read_segment(self, first: int) -> list[Manifest]:
        """Return the manifests of a log segment; none when it is absent, damaged, or not of this history."""
        try:
            data = self.backend.read(segment_key(first), limit=MAX_SEGMENT_BYTES)
            manifests = parse_segment(data, first=first, verifier=self.verifier)
            self._check_neighbours(manifests)
        except ObjectNotFound:
            return []
        except (CorruptObject, SignatureMismatch, StreamMismatch, UnsupportedFormat) as error:
            _log.warning("A log segment is left out: %s", error)
            return []
        for manifest in manifests:
            self._remember(manifest)
        return manifests

    def _check_neighbours(self, manifests: list[Manifest]) -> None:
        """Raise unless the manifests of a segment are those that are known, and follow and precede them."""
        first, last = manifests[0], manifests[-1]
        before, after = self._recent.get(first.version - 1), self._recent.get(last.version + 1)
        if before is not None:
            check_link(before, first)
        if after is not None:
            check_link(last, after)
        for manifest in manifests:
            known = self._recent.get(manifest.version, manifest)
            if known.commit_id != manifest.commit_id or manifest.stream_id != self.stream_id:
                raise StreamMismatch(
                    f"{segment_key(first.version)} holds another version {manifest.version} than the store.",
                    key=segment_key(first.version),
                )

    def log(self, *, last: int | None = None) -> list[Manifest]:
        """Return all manifests, oldest first, each proven to follow the one before.

        Only the newest ``last`` if given.
        """
        newest = self.latest().version
        first = BASE_VERSION if last is None else max(BASE_VERSION, newest + 1 - last)
        known = self.manifests(range(first, newest + 1))
        history = [known[version] for version in range(first, newest + 1)]
        for parent, child in pairwise(history):
            check_link(parent, child)
        return history

    def find_snapshot(self, snapshot_id: str) -> Manifest | None:
        """Return the newest version with this snapshot, or ``None``."""
        return next((entry for entry in reversed(self.log()) if entry.snapshot_id == snapshot_id), None)

    def plan(self, start: int | None, end: int) -> Plan:
        """Return the cheapest plan from ``start`` (``None``: from nothing) to ``end``.

        Raises ``VersionForgotten`` when ``end`` was let go, ``VersionNotFound`` when no way leads there.
        """
        return Planner(self).plan(start, end)

    def anchored(self, versions: range, standing: Standing | None = None) -> frozenset[int]:
        """Return which of these versions have an anchor besides the base's; ``standing``: if it was read already."""
        if standing is None:
            from .tags import read_standing  # noqa: PLC0415 - seldom needed

            standing, _ = read_standing(self)
        return Planner(self).anchored(versions, standing)

    # Retention

    def retention(self) -> Retention | None:
        """Return the newest retention record, ``None`` while there is none: one read when there is no newer one."""
        with self._lock:
            known = self._retention
        low = known.number if known is not None else 0
        number = _gallop(low, lambda candidate: self.retention_record(candidate) is not None)
        if number == low:
            return known
        record = self.retention_record(number)
        before = known if number == low + 1 else self.retention_record(number - 1)
        if record is None or (number > 1 and before is None):
            raise CorruptObject(
                f"Retention records of {self.backend.url} are gone.",
                key=retention_key(number),
                hint="The store was rolled back or replaced; restore it from a backup.",
            )
        if before is not None:
            check_successor(before, record)
        with self._lock:
            if self._retention is None or self._retention.number < number:
                self._retention = record
        return record

    def retention_record(self, number: int) -> Retention | None:
        """Return one retention record, or ``None`` when there is none of this number."""
        if number > MAX_VERSION:
            return None
        try:
            data = self.backend.read(retention_key(number), limit=MAX_RETENTION_BYTES)
        except ObjectNotFound:
            return None
        return parse_retention(data, number=number, stream_id=self.stream_id, hash_name=self.hash.name)

    def standing(self, version: int) -> Standing:
        """Return what stays, as far as ``version`` is concerned; raises ``VersionForgotten`` if that was let go.

        Tags are looked at only for a version that the newest record does not keep.
        """
        record = self.retention()
        standing = Standing(record)
        if not standing.keeps(version):
            from .tags import read_tags  # noqa: PLC0415 - seldom needed

            standing = Standing(record, tuple(read_tags(self)))
            standing.require(version)
        return standing

    # Bytes

    def base_files(self, component: str) -> dict[str, bytes]:
        """Return the base's other files (``files``) or its weight files' headers (``headers``), by relative name."""
        from .basefiles import read_base_files  # noqa: PLC0415 - brings numba, which `log` and `show` do without

        return read_base_files(self, component)

    def layout(self) -> Layout:
        """Return how the base's tensors are spread over files, as the store remembers it."""
        from .checkpoint import Layout, WeightFile  # noqa: PLC0415 - only where files are written

        key = manifest_key(BASE_VERSION)
        files = []
        for name, data in self.base_files(HEADERS).items():
            if header_size(data, key=key) != len(data):
                raise CorruptObject(f"The stored header of {name} has a wrong length.", key=key)
            files.append(WeightFile(name, data, parse_header(data, key=key)))
        layout = Layout(tuple(files))
        if layout.schema() != self.schema():
            raise CorruptObject("The stored headers do not describe the stream's tensors.", key=key)
        return layout

    def check_base(self, checkpoint: Checkpoint, digests: Digests) -> None:
        """Raise ``BaseMismatch``, naming the first tensors that differ, unless a checkpoint is the stream's base."""
        check_schema(self.schema(), checkpoint)
        if snapshot_id(self.schema(), digests, self.hash) == self.base.snapshot_id:
            return
        wanted = tensor_digests(self.schema(), self.base_digests(), self.hash)
        found = tensor_digests(self.schema(), digests, self.hash)
        names = tuple(spec.name for spec, one, other in zip(self.schema(), wanted, found, strict=True) if one != other)
        raise BaseMismatch(
            f"The checkpoint {checkpoint.directory} is not the stream's base: "
            f"{len(names)} of {len(found)} tensors differ, first {', '.join(names[:3])}.",
            tensors=names[:10],
            key=str(checkpoint.directory),
            hint="Use the checkpoint that the stream was initialised with.",
        )

    def restore(
        self,
        version: int,
        directory: str | Path,
        *,
        base: str | Path | None = None,
        workers: int | None = None,
        max_bandwidth: int | None = None,
        progress: Callable[[str, int, int], object] | None = None,
    ) -> Manifest:
        """Build a version as a complete checkpoint directory; nothing is left behind if it fails.

        ``base`` is a checkpoint that holds any version of the stream; without one the store's anchor is used.
        ``max_bandwidth``: bytes a second that parts are fetched with at most. ``progress`` is told (what, bytes done,
        bytes in all). Raises ``UsageError`` when ``directory`` is not empty.
        """
        from .restore import restore  # noqa: PLC0415 - brings numba, which `log` and `show` do without

        return restore(
            self,
            version,
            Path(directory),
            base=base,
            workers=workers,
            max_bandwidth=max_bandwidth,
            progress=progress,
        )


def _gallop(low: int, exists: Callable[[int], bool]) -> int:
    """Return the last number there is of a row without gaps, in which ``low`` is known to be."""
    stride = 1
    while exists(low + stride):
        low += stride
        stride *= 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if exists(middle):
            low = middle
        else:
            high = middle
    return low


def check_schema(schema: Schema, checkpoint: Checkpoint) -> None:
    """Raise ``BaseMismatch`` naming the first tensors unless a checkpoint has exactly the schema's tensors."""
    lines = schema.differences(checkpoint.schema)
    if lines:
        raise BaseMismatch(
            f"The checkpoint {checkpoint.directory} does not fit the stream: {'; '.join(lines[:3])}"
            + (f"; and {len(lines) - 3} more." if len(lines) > 3 else "."),
            tensors=tuple(line.split(" is ", 1)[0] for line in lines[:10]),
            key=str(checkpoint.directory),
            hint="Use the checkpoint that the stream was initialised with.",
        )


def open_store(
    url: str | Path,
    *,
    storage_options: Mapping[str, object] | None = None,
    cache: str | Path | None = None,
    cache_bytes: int | None = None,
    trusted_keys: Iterable[str | Path] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Store:
    """Open the stream at a URL for reading; raises ``StoreNotFound`` when there is none.

    ``trusted_keys`` are public keys, as 64 hexadecimal digits or in files: nothing that none of them signed is taken
    (``SignatureMismatch``). ``cache``, ``cache_bytes`` and ``sleep`` are as for ``open_backend``.
    """
    keys = None if trusted_keys is None else load_public_keys(trusted_keys)
    backend = open_backend(str(url), storage_options=storage_options, cache=cache, cache_bytes=cache_bytes, sleep=sleep)
    return store_at(backend, trusted_keys=keys)


def store_at(backend: Backend, *, trusted_keys: frozenset[str] | None = None) -> Store:
    """Open the stream in a backend; raises ``StoreNotFound`` when there is none."""
    try:
        data = backend.read(manifest_key(BASE_VERSION), limit=MAX_MANIFEST_BYTES)
    except ObjectNotFound as error:
        raise StoreNotFound(
            f"There is no store at {backend.url}.", key=backend.url, hint="Make one with `deltastore init`."
        ) from error
    return Store(backend, *parse_base(data, trusted_keys=trusted_keys))
