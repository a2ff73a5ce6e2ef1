"""Route records, as far as retention asks of them (docs/format.md, section 9)."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from .errors import CorruptObject, ObjectNotFound
from .manifest import MAX_MANIFEST_BYTES, MODEL, Manifest, PartRef
from .record import CommitTime, Count, Digest, Identifier, VersionNumber, encode_record, parse_record

if TYPE_CHECKING:
    from .digest import Hasher
    from .reader import Store
    from .storage.base import Buffer

__all__ = [
    "MAX_ROUTE_BYTES",
    "ROUTES_PREFIX",
    "Route",
    "encode_route",
    "list_routes",
    "parse_route",
    "read_route",
    "route_key",
]

ROUTES_PREFIX = "routes/"
MAX_ROUTE_BYTES = MAX_MANIFEST_BYTES
_RECORD_KEY = re.compile(r"routes/(\d{10})/([0-9a-f]{32})/route\.json\Z", re.ASCII)


class Route(msgspec.Struct, frozen=True):
    """Another way to a version than its delta: an anchor needs nothing, a skip starts from an earlier version."""

    format: int
    stream_id: Identifier
    attempt_id: Identifier
    kind: Literal["anchor", "skip", "abandoned"]
    start: VersionNumber | None
    start_commit_id: Identifier | None
    version: VersionNumber
    commit_id: Identifier
    snapshot_id: Digest
    parts: tuple[PartRef, ...]
    changed_elements: Count
    invertible: bool
    retention: Count
    created_at: CommitTime

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.size for part in self.parts)

    def as_manifest(self, manifest: Manifest) -> Manifest:
        """Return the version's manifest with this route's parts in place of the version's own."""
        model = msgspec.structs.replace(manifest.model, parts=self.parts, invertible=self.invertible)
        return msgspec.structs.replace(manifest, attempt_id=self.attempt_id, components={MODEL: model})


def route_key(version: int, attempt_id: str, name: str = "route.json") -> str:
    """Return the key of an object that one attempt at a route to ``version`` owns."""
    return f"{ROUTES_PREFIX}{version:010d}/{attempt_id}/{name}"


def encode_route(route: Route, *, hash_function: Hasher) -> bytes:
    """Return a route record as it is stored."""
    return encode_record(route, hash_function=hash_function)


def parse_route(data: Buffer, *, version: int, attempt_id: str, stream_id: str) -> Route:
    """Parse the record found under a route's key; raises ``CorruptObject`` or ``UnsupportedFormat``."""
    key = route_key(version, attempt_id)
    route, _ = parse_record(data, Route, key=key)
    if (route.version, route.attempt_id, route.stream_id) != (version, attempt_id, stream_id):
        raise CorruptObject(f"{key} is another route's record.", key=key)
    return route


def read_route(store: Store, version: int, attempt_id: str) -> Route:
    """Read one route's record; raises ``ObjectNotFound`` when there is none."""
    data = store.backend.read(route_key(version, attempt_id), limit=MAX_ROUTE_BYTES)
    return parse_route(data, version=version, attempt_id=attempt_id, stream_id=store.stream_id)


def list_routes(store: Store) -> list[Route]:
    """Return the routes there are, abandoned attempts left out."""
    found = [match for info in store.backend.list(ROUTES_PREFIX) if (match := _RECORD_KEY.match(info.key))]
    routes = []
    for match in found:
        with suppress(ObjectNotFound):  # collected meanwhile
            routes.append(read_route(store, int(match[1]), match[2]))
    return [route for route in routes if route.kind != "abandoned"]
