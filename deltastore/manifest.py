"""The records a store is made of: manifests, with the stream's own record inside the first. Pure.

A manifest is two lines: canonical JSON (fields in ascending order, no spaces) and that line's digest. Unknown fields
are ignored (a later release may add some); an unknown format version or required feature is refused. docs/format.md,
section 6, lists every field.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .digest import HASHES
from .errors import CorruptObject, UsageError
from .record import (
    FORMAT,
    MAX_VERSION,
    CommitTime,
    Count,
    Digest,
    Identifier,
    Key,
    VersionNumber,
    decode_json,
    encode_record,
    parse_record,
)
from .signing import SIGNED, Verifier

if TYPE_CHECKING:
    from .digest import Hasher
    from .signing import Signer
    from .storage.base import Buffer

__all__ = [
    "BASE_VERSION",
    "FEATURES",
    "FILES",
    "FORMAT",
    "HEADERS",
    "LATEST_KEY",
    "MAX_MANIFEST_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_PART_BYTES",
    "MAX_SCHEMA_BYTES",
    "MAX_STEP",
    "MAX_TABLE_BYTES",
    "MODEL",
    "AnchorPolicy",
    "Component",
    "LatestHint",
    "Manifest",
    "ObjectRef",
    "PartRef",
    "Scalar",
    "StreamRecord",
    "anchor_policy",
    "encode_latest",
    "encode_manifest",
    "manifest_key",
    "parse_base",
    "parse_latest",
    "parse_manifest",
    "part_key",
]

#: Required features that this release knows; an object that lists another one is refused.
FEATURES: frozenset[str] = frozenset({SIGNED})

BASE_VERSION = 0
LATEST_KEY = "LATEST"
MAX_STEP = 2**62

MAX_MANIFEST_BYTES = 16 << 20
#: The trainer's own fields, as JSON.
MAX_METADATA_BYTES = 64 << 10
MAX_PART_BYTES = 64 << 20
MAX_SCHEMA_BYTES = 512 << 20
MAX_TABLE_BYTES = 1 << 30

#: The component that holds the model's weights; every version has it.
MODEL = "model"
_PART_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
#: Components of version 0 only: the base's other files, and the headers of its weight files, as U8 tensors.
FILES, HEADERS = "files", "headers"

Scalar = str | int | float | bool | None

_PublicKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,62}\Z")]


class ObjectRef(msgspec.Struct, frozen=True):
    """An immutable object: its key, its size in bytes, and the digest of its bytes."""

    key: Key
    size: Count
    digest: Digest


class PartRef(msgspec.Struct, frozen=True):
    """A part.

    An ``ObjectRef`` that also tells how many encoded chunks it holds, and the first and last one's number.
    """

    key: Key
    size: Annotated[int, Meta(ge=1, le=MAX_PART_BYTES)]
    digest: Digest
    chunks: Annotated[int, Meta(ge=1, le=2**62)]
    first: Count
    last: Count


class Component(msgspec.Struct, frozen=True):
    """What one version says of one component: the snapshot it becomes, and the parts that lead there.

    ``digests`` is the table of all chunk digests (version 0 only). ``invertible`` tells whether the parts also lead
    back.
    """

    snapshot_id: Digest
    snapshot_bytes: Count
    total_elements: Count
    changed_elements: Count
    parts: tuple[PartRef, ...]
    invertible: bool
    digests: ObjectRef | None = None


class AnchorPolicy(msgspec.Struct, frozen=True):
    """When a version gets an anchor of its own.

    ``every``: at each multiple of so many versions. ``when``: as soon as the newest version costs a new receiver more
    than this share of its snapshot's bytes; at least 1, since an anchor itself costs most of that.
    """

    every: Annotated[int, Meta(ge=1, le=MAX_VERSION)] | None = None
    when: Annotated[float, Meta(ge=1, le=1e9)] | None = None

    def due(self, version: int, *, cost: int, snapshot_bytes: int) -> bool:
        """Tell whether ``version``, the newest one, wants an anchor; ``cost``: bytes that a new receiver fetches."""
        if version == BASE_VERSION:
            return False
        on_turn = self.every is not None and version % self.every == 0
        return on_turn or (self.when is not None and cost > self.when * snapshot_bytes)


def anchor_policy(every: int | None, when: float | None) -> AnchorPolicy | None:
    """Return the policy that these options make, or ``None`` for neither; raises ``UsageError`` outside the limits."""
    if every is None and when is None:
        return None
    try:
        return msgspec.convert({"every": every, "when": when}, AnchorPolicy)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"The anchor policy cannot be: {error}.", hint="Give a count of versions from 1 on, and a share from 1 on."
        ) from error


class StreamRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What holds for the whole stream; stands in the manifest of version 0.

    ``schemas`` names the schema object of each component; ``signers`` are the public keys that may sign, none in a
    stream that is not signed.
    """

    hash: str
    chunk_bytes: Count
    schemas: dict[_Name, ObjectRef]
    anchors: AnchorPolicy | None = None
    signers: tuple[_PublicKey, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The commit record of one version."""

    format: int
    stream_id: Identifier
    version: VersionNumber
    kind: Literal["base", "delta"]
    commit_id: Identifier
    attempt_id: Identifier
    writer_epoch: Annotated[int, Meta(ge=1, le=2**62)]
    created_at: CommitTime
    components: dict[_Name, Component]
    parent_version: VersionNumber | None = None
    parent_commit_id: Identifier | None = None
    parent_snapshot_id: Digest | None = None
    step: Annotated[int, Meta(ge=-MAX_STEP, le=MAX_STEP)] | None = None
    metadata: dict[str, Scalar] = {}
    required_features: tuple[str, ...] = ()
    stream: StreamRecord | None = None

    @property
    def model(self) -> Component:
        """The component that holds the weights."""
        return self.components[MODEL]

    @property
    def snapshot_id(self) -> str:
        """The id of the model's snapshot."""
        return self.model.snapshot_id

    @property
    def anchored(self) -> bool:
        """Whether the store can build this version from nothing."""
        return self.kind == "base" and bool(self.model.parts or not self.model.snapshot_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts that this version brought."""
        return sum(part.size for component in self.components.values() for part in component.parts)


class LatestHint(msgspec.Struct, frozen=True):
    """A hint at the newest version; readers gallop on from it and do without it."""

    stream_id: Identifier
    version: VersionNumber


def encode_manifest(manifest: Manifest, *, hash_function: Hasher, signer: Signer | None = None) -> bytes:
    """Return a manifest as it is stored: its canonical JSON, the digest of that line, and a signature if it has one.

    Raises ``UsageError`` for one that no reader would take, before any of it is sent.
    """
    data = encode_record(manifest, hash_function=hash_function, signer=signer, kind="manifest")
    if len(data) > MAX_MANIFEST_BYTES:
        key = manifest_key(manifest.version)
        raise UsageError(
            f"{key} would have {len(data)} bytes; the format allows {MAX_MANIFEST_BYTES}.",
            key=key,
            hint="So many bytes changed that one version cannot name all their parts (docs/format.md, section 8).",
        )
    return data


def encode_latest(hint: LatestHint) -> bytes:
    """Return the hint as it is stored."""
    return msgspec.json.encode(hint, order="sorted")


def manifest_key(version: int) -> str:
    """Return the key of a version's manifest."""
    return f"manifests/{version:010d}.json"


def part_key(version: int, attempt_id: str, name: str) -> str:
    """Return the key of an object that one attempt at ``version`` owns."""
    return f"parts/{version:010d}/{attempt_id}/{name}"


def parse_manifest(data: Buffer, *, version: int, verifier: Verifier | None = None) -> Manifest:
    """Parse the manifest found under the key of ``version``; everything in it is checked.

    ``verifier``: that of a signed stream. Raises ``SignatureMismatch`` for a signature that it does not take,
    ``UnsupportedFormat`` for a format or feature of a later release, ``CorruptObject`` for anything else.
    """
    key = manifest_key(version)
    manifest, own_digest = parse_record(data, Manifest, key=key, features=FEATURES, kind="manifest", verifier=verifier)
    problem = (
        _problem(manifest, version)
        or _hash_problem(manifest, own_digest)
        or _signing_problem(manifest, own_digest, signed=verifier is not None)
    )
    if problem:
        raise CorruptObject(f"{key} is damaged: {problem}.", key=key)
    return manifest


class _Claim(msgspec.Struct, frozen=True):
    signers: tuple[_PublicKey, ...] = ()


class _Claims(msgspec.Struct, frozen=True):
    stream: _Claim | None = None


def parse_base(data: Buffer, *, trusted_keys: frozenset[str] | None = None) -> tuple[Manifest, Verifier | None]:
    """Parse version 0's manifest; returns it, and what verifies the other records of its stream if that is signed.

    With ``trusted_keys`` only signatures by those of them that are the stream's signers are taken, and a stream that is
    not signed is refused. Without, the stream's own word for its signers is taken: it finds accidents and no forgery.
    """
    claimed: frozenset[str] = frozenset()
    with suppress(CorruptObject):  # said below of the whole manifest, or that it is of a later format
        claims = decode_json(bytes(data).partition(b"\n")[0], _Claims, manifest_key(BASE_VERSION))
        claimed = frozenset(claims.stream.signers if claims.stream is not None else ())
    if not claimed and trusted_keys is None:
        return parse_manifest(data, version=BASE_VERSION), None
    verifier = Verifier(claimed if trusted_keys is None else claimed & trusted_keys)
    return parse_manifest(data, version=BASE_VERSION, verifier=verifier), verifier


def _signing_problem(manifest: Manifest, own_digest: str, *, signed: bool) -> str | None:
    """Say what a signed stream's manifest lacks, or what another's has too much."""
    if (SIGNED in manifest.required_features) != signed:
        return "it does not say that it is signed, but its stream is" if signed else "it says that it is signed"
    if signed and not own_digest.startswith("blake3:"):
        return "it is signed, but its hash is not blake3"
    if manifest.stream is not None:
        signers = manifest.stream.signers
        if bool(signers) != signed or len(set(signers)) != len(signers):
            return "it names no signers, or one twice, or some although it is not signed"
    return None


def _problem(manifest: Manifest, version: int) -> str | None:
    """Say what contradicts itself in a manifest whose fields are each well-formed."""
    is_base = version == BASE_VERSION
    parents = (manifest.parent_version, manifest.parent_commit_id, manifest.parent_snapshot_id)
    if manifest.version != version:
        return f"it says that it is version {manifest.version}"
    if (manifest.kind == "base") != is_base or (manifest.stream is not None) != is_base:
        return "only version 0 is a base, and it alone describes the stream"
    if MODEL not in manifest.components:
        return "it has no model component"
    if is_base:
        if any(parent is not None for parent in parents):
            return "a base has no parent"
        if manifest.stream is not None and (problem := _stream_problem(manifest.stream, manifest)):
            return problem
    elif manifest.parent_version != version - 1 or None in parents:
        return "it does not name its parent"
    if len(msgspec.json.encode(manifest.metadata)) > MAX_METADATA_BYTES:
        return f"its metadata take more than {MAX_METADATA_BYTES} bytes"
    own = part_key(version, manifest.attempt_id, "")
    for component in manifest.components.values():
        if component.changed_elements > component.total_elements:
            return "it changed more elements than there are"
        if component.digests is not None and not is_base:
            return "only version 0 has digest tables"
        if any(not part.chunks <= part.last - part.first + 1 for part in component.parts):
            return "it names a part with more chunks than its range has"
        keys = [part.key for part in component.parts]
        if any(not (key.startswith(own) and _PART_NAME.match(key, len(own))) for key in keys) or len(set(keys)) != len(
            keys
        ):
            return "it names a part of another attempt, or one twice"
    return None


def _hash_problem(manifest: Manifest, own_digest: str) -> str | None:
    """One hash function for everything in a manifest: else a weaker one could stand in for the stream's."""
    name = manifest.stream.hash if manifest.stream is not None else own_digest.partition(":")[0]
    digests = [own_digest, manifest.parent_snapshot_id or own_digest]
    for component in manifest.components.values():
        digests += [component.snapshot_id, *(part.digest for part in component.parts)]
    return None if all(digest.startswith(f"{name}:") for digest in digests) else "it mixes hash functions"


def _stream_problem(stream: StreamRecord, manifest: Manifest) -> str | None:
    if stream.hash not in HASHES:
        return f"the hash {stream.hash!r} is unknown"
    if set(stream.schemas) != set(manifest.components):
        return "components and schemas differ"
    references = [*stream.schemas.values()]
    for component in manifest.components.values():
        if component.digests is None:
            return "a base component has no digest table"
        references.append(component.digests)
    if any(not reference.digest.startswith(f"{stream.hash}:") for reference in references):
        return "it mixes hash functions"
    return None


def parse_latest(data: Buffer) -> LatestHint | None:
    """Parse the hint; anything that is not one is no hint."""
    try:
        return msgspec.json.decode(str(data, "utf-8"), type=LatestHint)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
