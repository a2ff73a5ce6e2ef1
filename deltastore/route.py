"""Routes: anchors and skip deltas, which lead to a version faster than the deltas from its parents do. Pure.

A route is a few parts and a record (docs/format.md, section 9). Its keys tell where it starts and leads and what it
stores, so that a listing is enough to plan by; the record is read before a route is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from .errors import CorruptObject
from .manifest import MAX_MANIFEST_BYTES, MODEL, PartRef
from .record import (
    CommitTime,
    Count,
    Digest,
    Identifier,
    VersionNumber,
    encode_record,
    parse_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .digest import Hasher
    from .manifest import Manifest
    from .signing import Verifier
    from .storage.base import Buffer, ObjectInfo

__all__ = [
    "MAX_ROUTE_BYTES",
    "ROUTES_PREFIX",
    "ListedRoute",
    "Route",
    "begun_key",
    "encode_route",
    "fits",
    "listed_routes",
    "parse_route",
    "route_key",
    "route_part_key",
]

ROUTES_PREFIX = "routes/"
MAX_ROUTE_BYTES = MAX_MANIFEST_BYTES

_RECORD_NAME = "route.json"
_OBJECT = re.compile(r"routes/(\d{10})/([0-9a-f]{32})/([A-Za-z0-9._-]+)\Z", re.ASCII)
_PART_NAME = re.compile(rf"(?:(\d{{10}})-)?{MODEL}-\d{{5,}}\.safetensors\Z", re.ASCII)


class Route(msgspec.Struct, frozen=True):
    """The record of an anchor (``start`` is ``None``) or a skip delta to ``version``.

    ``abandoned`` marks an attempt that a collector closed: such a record holds nothing else.
    """

    format: int
    stream_id: Identifier
    attempt_id: Identifier
    kind: Literal["anchor", "skip", "abandoned"]
    version: VersionNumber
    created_at: CommitTime
    commit_id: Identifier | None = None
    snapshot_id: Digest | None = None
    start: VersionNumber | None = None
    start_commit_id: Identifier | None = None
    parts: tuple[PartRef, ...] = ()
    changed_elements: Count = 0
    invertible: bool = False
    retention: Count = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class ListedRoute:
    """What a listing tells of a route.

    ``start``: ``None`` for an anchor. ``told``: whether its parts' names told where it starts; a route without parts
    has to be read. Whether it leads back is not known before its record is read.
    """

    version: int
    attempt_id: str
    start: int | None
    stored_bytes: int
    told: bool

    @property
    def key(self) -> str:
        """The key of its record."""
        return route_key(self.version, self.attempt_id)

    @property
    def kind(self) -> str:
        """``anchor``, or ``skip``."""
        return "anchor" if self.start is None else "skip"

    @property
    def retention(self) -> int:
        """The retention record that its maker had read: not told, so none."""
        return 0


def route_key(version: int, attempt_id: str) -> str:
    """Return the key of the record of one attempt at a route to ``version``."""
    return f"{ROUTES_PREFIX}{version:010d}/{attempt_id}/{_RECORD_NAME}"


def begun_key(version: int, attempt_id: str) -> str:
    """Return the key of what says when an attempt at a route was begun."""
    return f"{ROUTES_PREFIX}{version:010d}/{attempt_id}/begun.json"


def route_part_key(start: int | None) -> Callable[[int, str, str], str]:
    """Return what names the parts of a route from ``start``: a skip's names begin with the version it starts from."""
    stem = "" if start is None else f"{start:010d}-"

    def key_of(version: int, attempt_id: str, name: str) -> str:
        return f"{ROUTES_PREFIX}{version:010d}/{attempt_id}/{stem}{name}"

    return key_of


def listed_routes(objects: Iterable[ObjectInfo]) -> list[ListedRoute]:
    """Return the routes that have a record, from a listing of ``routes/``, in ascending order; other keys are ignored.

    Routes that were abandoned look like routes here.
    """
    recorded: set[tuple[int, str]] = set()
    sizes: dict[tuple[int, str], int] = {}
    starts: dict[tuple[int, str], set[str | None]] = {}
    for info in objects:
        found = _OBJECT.match(info.key)
        if found is None:
            continue
        attempt = int(found[1]), found[2]
        if found[3] == _RECORD_NAME:
            recorded.add(attempt)
        elif part := _PART_NAME.match(found[3]):
            sizes[attempt] = sizes.get(attempt, 0) + info.size
            starts.setdefault(attempt, set()).add(part[1])
    routes = []
    for attempt in sorted(recorded):
        names = starts.get(attempt, set())
        told = len(names) == 1
        start = next(iter(names)) if told else None
        routes.append(
            ListedRoute(*attempt, None if start is None else int(start), stored_bytes=sizes.get(attempt, 0), told=told)
        )
    return routes


def encode_route(route: Route, *, hash_function: Hasher) -> bytes:
    """Return a route's record as it is stored."""
    return encode_record(route, hash_function=hash_function, kind="route")


def parse_route(data: Buffer, *, version: int, attempt_id: str, verifier: Verifier | None = None) -> Route:
    """Parse the record found under the key of an attempt at ``version``; everything in it is checked.

    ``verifier``: that of a signed stream; a route needs no signature there, since it leads to a snapshot that a signed
    manifest names. Raises ``SignatureMismatch`` for a signature that it does not take,
    ``UnsupportedFormat`` for a format or feature of a later release, ``CorruptObject`` for anything else.
    """
    key = route_key(version, attempt_id)
    route, own_digest = parse_record(data, Route, key=key, kind="route", verifier=verifier)
    problem = _problem(route, version, attempt_id) or _hash_problem(route, own_digest)
    if problem:
        raise CorruptObject(f"{key} is damaged: {problem}.", key=key)
    return route


def _problem(route: Route, version: int, attempt_id: str) -> str | None:
    """Say what contradicts itself in a record whose fields are each well-formed."""
    if (route.version, route.attempt_id) != (version, attempt_id):
        return f"it says that it is the attempt {route.attempt_id} at version {route.version}"
    if route.kind == "abandoned":
        return "it is abandoned, but has parts" if route.parts else None
    if route.commit_id is None or route.snapshot_id is None:
        return "it does not name the commit and the snapshot that it leads to"
    if (route.kind == "skip") != (route.start is not None) or (route.start is None) != (route.start_commit_id is None):
        return "only a skip has a start, and its commit"
    if route.start is not None and route.start >= version:
        return f"it starts from version {route.start}"
    if route.kind == "anchor" and route.invertible:
        return "an anchor does not lead back"
    names = re.compile(rf"{re.escape(route_part_key(route.start)(version, attempt_id, MODEL))}-\d{{5,}}\.safetensors\Z")
    keys = [part.key for part in route.parts]
    if any(not names.match(key) for key in keys) or len(set(keys)) != len(keys):
        return "it names a part that is not its own, or one twice"
    if any(not part.chunks <= part.last - part.first + 1 for part in route.parts):
        return "it names a part with more chunks than its range has"
    return None


def _hash_problem(route: Route, own_digest: str) -> str | None:
    name = own_digest.partition(":")[0]
    digests = [route.snapshot_id or own_digest, *(part.digest for part in route.parts)]
    return None if all(digest.startswith(f"{name}:") for digest in digests) else "it mixes hash functions"


def fits(route: Route, start: Manifest | None, end: Manifest) -> bool:
    """Tell whether a route is one between these versions as their manifests have them (``start``: of a skip's)."""
    leads = (route.stream_id, route.version, route.commit_id, route.snapshot_id)
    begins = (None, None) if start is None else (start.version, start.commit_id)
    return (
        route.kind != "abandoned"
        and leads == (end.stream_id, end.version, end.commit_id, end.snapshot_id)
        and begins == (route.start, route.start_commit_id)
    )
