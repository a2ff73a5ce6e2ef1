"""Log segments: the manifests of a thousand versions in one object, so that a long history is read at once. Pure."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import zstandard

from .errors import CorruptObject, StreamMismatch
from .manifest import parse_manifest
from .plan import check_link
from .record import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .manifest import Manifest
    from .signing import Verifier
    from .storage.base import Buffer

__all__ = [
    "MAX_SEGMENT_BYTES",
    "SEGMENTS_PREFIX",
    "SEGMENT_VERSIONS",
    "build_segment",
    "complete_segments",
    "parse_segment",
    "segment_key",
    "segment_of",
]

SEGMENTS_PREFIX = "segments/"
#: Manifests in a segment, and what segments begin at multiples of.
SEGMENT_VERSIONS = 1000
#: What every backend creates exclusively in one request.
MAX_SEGMENT_BYTES = 16 << 20
MAX_CONTENT_BYTES = 1 << 30

_LEVEL = 9
_NEXT = re.compile(rb"\n(?=\{)")


def segment_of(version: int) -> int:
    """Return the first version of the segment that a version belongs to."""
    return version - version % SEGMENT_VERSIONS


def segment_key(first: int) -> str:
    """Return the key of the segment that begins with version ``first``."""
    return f"{SEGMENTS_PREFIX}{first:010d}.zst"


def complete_segments(newest: int) -> range:
    """Return the first versions of all segments that are complete when ``newest`` is the newest version."""
    return range(0, min(newest, MAX_VERSION) + 2 - SEGMENT_VERSIONS, SEGMENT_VERSIONS)


def build_segment(manifests: Sequence[bytes]) -> bytes | None:
    """Return stored manifests as a segment, or ``None`` when they take more than a segment may."""
    if sum(map(len, manifests)) > MAX_CONTENT_BYTES:
        return None
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(manifests))
    return data if len(data) <= MAX_SEGMENT_BYTES else None


def parse_segment(data: Buffer, *, first: int, verifier: Verifier | None = None) -> list[Manifest]:
    """Return the manifests of a segment, each checked as under its own key, and each following the one before.

    ``verifier``: that of a signed stream. Raises ``CorruptObject``, ``SignatureMismatch`` or ``UnsupportedFormat``.
    """
    key = segment_key(first)
    stored = _split(_inflate(data, key))
    if len(stored) != SEGMENT_VERSIONS:
        raise CorruptObject(f"{key} holds {len(stored)} manifests.", key=key)
    try:
        numbered = enumerate(stored, first)
        manifests = [parse_manifest(entry, version=version, verifier=verifier) for version, entry in numbered]
        for parent, child in pairwise(manifests):
            check_link(parent, child)
    except (CorruptObject, StreamMismatch) as error:
        raise CorruptObject(f"{key} is damaged: {error}", key=key) from error
    return manifests


def _inflate(data: Buffer, key: str) -> bytes:
    # The declared size is checked first: the library allocates what the frame declares.
    try:
        declared = zstandard.get_frame_parameters(data).content_size
        if not 0 < declared <= MAX_CONTENT_BYTES:
            raise CorruptObject(f"{key} declares {declared} bytes.", key=key)
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{key} is damaged: {error}.", key=key) from error


def _split(content: bytes) -> list[bytes]:
    """Cut manifests apart: each begins with a line of JSON, and its other lines begin with no brace."""
    entries = _NEXT.split(content)
    return [entry + b"\n" for entry in entries[:-1]] + entries[-1:]
