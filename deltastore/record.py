"""Records: canonical JSON on one line, and its digest on the next, so that a flipped bit in any field is found. Pure.

Manifests, routes, retention records and tags are records (docs/format.md, section 6.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from .digest import HASHES, hasher
from .errors import CorruptObject, UnsupportedFormat

if TYPE_CHECKING:
    from .digest import Hasher
    from .storage.base import Buffer

__all__ = [
    "FORMAT",
    "MAX_VERSION",
    "CommitTime",
    "Count",
    "Digest",
    "Identifier",
    "Key",
    "VersionNumber",
    "decode_json",
    "encode_record",
    "parse_record",
]

FORMAT = 1
MAX_VERSION = 9_999_999_999

Identifier = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Digest = Annotated[str, Meta(pattern=r"^(xxh3-128:[0-9a-f]{32}|blake3:[0-9a-f]{64})\Z")]
Key = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z", max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
VersionNumber = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
CommitTime = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z\Z")]

_Record = TypeVar("_Record")


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    required_features: tuple[str, ...] = ()


def encode_record(record: object, *, hash_function: Hasher) -> bytes:
    """Return a record as it is stored: its canonical JSON, and the digest of that line."""
    line = msgspec.json.encode(record, order="sorted")
    return b"%b\n%b\n" % (line, hash_function.of(line).encode())


def decode_json(data: Buffer, kind: type[_Record], key: str) -> _Record:
    """Decode JSON strictly as ``kind``; raises ``CorruptObject`` naming ``key``."""
    try:
        # msgspec alone does not look into what it skips: unknown fields may hide what is no UTF-8.
        return msgspec.json.decode(str(data, "utf-8"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{key} is damaged: {error}.", key=key) from error


def parse_record(
    data: Buffer, kind: type[_Record], *, key: str, features: frozenset[str] = frozenset()
) -> tuple[_Record, str]:
    """Parse a stored record strictly; returns it and its own digest, whose hash the caller compares.

    ``features``: the required features that the caller knows. Raises ``UnsupportedFormat`` for a format or feature of
    a later release, ``CorruptObject`` for anything else.
    """
    line, digest = _checked_line(bytes(data), key)
    envelope = decode_json(line, _Envelope, key)
    unknown = sorted(set(envelope.required_features) - features)
    if envelope.format != FORMAT or unknown:
        needs = f"the features {', '.join(unknown)}" if unknown else f"format {envelope.format}"
        raise UnsupportedFormat(f"{key} needs {needs}.", key=key, hint="Use a newer release of deltastore.")
    return decode_json(line, kind, key), digest


def _checked_line(data: bytes, key: str) -> tuple[bytes, str]:
    line, _, rest = data.partition(b"\n")
    name, _, _ = rest.partition(b":")
    known = name.decode("ascii", "replace")
    if known not in HASHES or rest != hasher(known).of(line).encode() + b"\n":
        raise CorruptObject(
            f"{key} is damaged: its digest does not fit.", key=key, hint="Run `deltastore check` on the store."
        )
    return line, rest.decode().rstrip("\n")
