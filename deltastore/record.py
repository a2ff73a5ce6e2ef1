"""Records: canonical JSON on one line, and its digest on the next, so that a flipped bit in any field is found. Pure.

Manifests, routes, retention records and tags are records (docs/format.md, section 6.1). In a signed stream a record has
a third line, the signature of the first (section 13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from .digest import HASHES, hasher
from .errors import CorruptObject, SignatureMismatch, UnsupportedFormat

if TYPE_CHECKING:
    from .digest import Hasher
    from .signing import Signer, Verifier
    from .storage.base import Buffer

__all__ = [
    "FORMAT",
    "FORMATS",
    "MAX_VERSION",
    "CommitTime",
    "Count",
    "Digest",
    "Identifier",
    "Key",
    "RecordKind",
    "VersionNumber",
    "decode_json",
    "encode_record",
    "parse_record",
]

#: The format that is written, and those that are read: 2 has one more kind of stream than 1 (docs/format.md, 4.1).
FORMAT = 2
FORMATS = frozenset({1, 2})
MAX_VERSION = 9_999_999_999

Identifier = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Digest = Annotated[str, Meta(pattern=r"^(xxh3-128:[0-9a-f]{32}|blake3:[0-9a-f]{64})\Z")]
Key = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z", max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
VersionNumber = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
CommitTime = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z\Z")]

#: What a signature is made for: one of another kind of record is none.
RecordKind = Literal["manifest", "route", "tag"]
#: Routes are proven by the snapshot ids of signed manifests, so that those who make them need no key.
_PROVEN_OTHERWISE: frozenset[RecordKind] = frozenset({"route"})

_Record = TypeVar("_Record")


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    required_features: tuple[str, ...] = ()


def encode_record(
    record: object, *, hash_function: Hasher, signer: Signer | None = None, kind: RecordKind = "manifest"
) -> bytes:
    """Return a record as it is stored: its canonical JSON, the digest of that line, and a signature if there is a key.

    ``kind`` is what the signature is made for.
    """
    line = msgspec.json.encode(record, order="sorted")
    signature = signer.sign(kind, line) + b"\n" if signer is not None else b""
    return b"%b\n%b\n%b" % (line, hash_function.of(line).encode(), signature)


def decode_json(data: Buffer, record_type: type[_Record], key: str) -> _Record:
    """Decode JSON strictly as ``record_type``; raises ``CorruptObject`` naming ``key``."""
    try:
        # msgspec alone does not look into what it skips: unknown fields may hide what is no UTF-8.
        return msgspec.json.decode(str(data, "utf-8"), type=record_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{key} is damaged: {error}.", key=key) from error


def parse_record(
    data: Buffer,
    record_type: type[_Record],
    *,
    key: str,
    features: frozenset[str] = frozenset(),
    kind: RecordKind = "manifest",
    verifier: Verifier | None = None,
) -> tuple[_Record, str]:
    """Parse a stored record strictly; returns it and its own digest, whose hash the caller compares.

    ``features``: the required features that the caller knows. ``verifier``: that of a signed stream; the record needs a
    signature for its ``kind`` that it takes (a route may be without one). Without a verifier there must be none.
    Raises ``SignatureMismatch`` then, ``UnsupportedFormat`` for a format or feature of a later release,
    ``CorruptObject`` for anything else.
    """
    line, digest, signature = _checked_lines(bytes(data), key)
    if verifier is None and signature is not None:
        raise CorruptObject(f"{key} is damaged: it goes on after its digest, and its stream is not signed.", key=key)
    if verifier is not None:
        _check_signature(verifier, kind, line, signature, key)
    envelope = decode_json(line, _Envelope, key)
    unknown = sorted(set(envelope.required_features) - features)
    if envelope.format not in FORMATS or unknown:
        needs = f"the features {', '.join(unknown)}" if unknown else f"format {envelope.format}"
        raise UnsupportedFormat(f"{key} needs {needs}.", key=key, hint="Use a newer release of deltastore.")
    return decode_json(line, record_type, key), digest


def _check_signature(verifier: Verifier, kind: RecordKind, line: bytes, signature: bytes | None, key: str) -> None:
    if signature is not None:
        verifier.check(kind, line, signature, key=key)
    elif kind not in _PROVEN_OTHERWISE:
        raise SignatureMismatch(
            f"{key} is not signed.", key=key, hint="Somebody without the key wrote it; restore it from a backup."
        )


def _checked_lines(data: bytes, key: str) -> tuple[bytes, str, bytes | None]:
    """Return the first line, the digest that was proven to be its own, and the signature line if there is one."""
    line, _, rest = data.partition(b"\n")
    digest, newline, signature = rest.partition(b"\n")
    known = digest.partition(b":")[0].decode("ascii", "replace")
    if not newline or known not in HASHES or digest != hasher(known).of(line).encode():
        raise CorruptObject(
            f"{key} is damaged: its digest does not fit.", key=key, hint="Run `deltastore check` on the store."
        )
    return line, digest.decode(), signature or None
