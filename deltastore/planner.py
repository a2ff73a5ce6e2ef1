"""Finding plans in a store: routes are listed once, and only the records that a plan goes by are read."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from .errors import (
    CorruptObject,
    ObjectNotFound,
    SignatureMismatch,
    StreamMismatch,
    UnsupportedFormat,
    VersionNotFound,
)
from .manifest import BASE_VERSION
from .plan import cheapest, check_link, no_way, plan_of
from .route import MAX_ROUTE_BYTES, ROUTES_PREFIX, ListedRoute, Route, fits, listed_routes, parse_route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .manifest import Manifest
    from .plan import Hop, Plan, Step
    from .reader import Store

__all__ = ["READERS", "Planner", "read_route"]

#: Small objects read side by side.
READERS = 16

#: What makes a route one to leave out: it is damaged, gone, forged, or not of this history.
_UNUSABLE = (
    CorruptObject,
    ObjectNotFound,
    SignatureMismatch,
    StreamMismatch,
    UnsupportedFormat,
    VersionNotFound,
)

_log = logging.getLogger("deltastore")
_Built = TypeVar("_Built")


def read_route(store: Store, version: int, attempt_id: str) -> Route:
    """Read and check one route's record, whatever its kind.

    Raises ``ObjectNotFound``, ``CorruptObject``, ``SignatureMismatch``, ``UnsupportedFormat`` or
    ``StorageError``.
    """
    listed = ListedRoute(version, attempt_id, None, 0, told=False)
    data = store.backend.read(listed.key, limit=MAX_ROUTE_BYTES)
    route = parse_route(data, version=version, attempt_id=attempt_id, verifier=store.verifier)
    if any(not part.digest.startswith(f"{store.hash.name}:") for part in route.parts):
        raise CorruptObject(f"{listed.key} is damaged: its digests are not of the stream's hash.", key=listed.key)
    return route


class Planner:
    """Finds plans over the routes that a store lists at one moment; remembers what it read, and what is not usable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._routes: dict[str, Route | ListedRoute] | None = None

    def routes(self) -> dict[str, Route | ListedRoute]:
        """Return the routes that are known to be usable or may be, by attempt; lists them when first asked."""
        if self._routes is None:
            listed = listed_routes(self._store.backend.list(ROUTES_PREFIX))
            self._routes = {route.attempt_id: route for route in listed}
            self._read([route for route in listed if not route.told])
        return self._routes

    def anchored(self, versions: range) -> frozenset[int]:
        """Return which of these versions have an anchor besides the base's; reads the anchors' records."""
        anchors = [route for route in self.routes().values() if route.start is None and route.version in versions]
        self._read([route for route in anchors if isinstance(route, ListedRoute)])
        return frozenset(route.version for route in anchors if route.attempt_id in self.routes())

    def plan(self, start: int | None, end: int) -> Plan:
        """Return the cheapest plan from ``start`` (``None``: from nothing) to ``end``.

        Hops that were not read yet are guessed at; the cheapest plan's are read, and it is looked for again until
        all of its hops are. One version forward takes one manifest and no listing. Raises ``VersionNotFound`` when no
        way leads there, ``CorruptObject`` when manifests on the way do not follow each other.
        """
        store = self._store
        last = store.manifest(end)
        known = {BASE_VERSION: store.base, end: last}
        if start is not None:
            known[start] = store.manifest(start)
        near = start is not None and (start == end or (start == end - 1 and store.keeps_parts(end)))
        routes = {} if near else self.routes()
        known |= store.recent(max([start or 0, end, *(route.version for route in routes.values())]))
        while True:
            sizes = [sum(part.size for part in entry.model.parts) for entry in known.values() if entry.version]
            guess = sum(sizes) // len(sizes) if sizes else 0
            hops = cheapest(start, end, known, routes.values(), guess=guess, keeps=store.keeps_parts)
            if hops is None:
                raise no_way(start, end)
            listed = [hop.record for hop in hops if isinstance(hop.record, ListedRoute)]
            deltas = [max(hop.start or 0, hop.end) for hop in hops if hop.record is None]
            if not listed and not deltas:
                break
            known |= store.manifests(deltas)
            self._read(listed)
        _check_links(hops, known)
        return plan_of(start, last, hops)

    def _read(self, listed: Iterable[ListedRoute]) -> None:
        """Read routes' records side by side; those that cannot be used are forgotten."""
        routes = self.routes()
        wanted = list(listed)
        if not wanted:
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="routes") as pool:
            for entry, route in zip(wanted, pool.map(self._usable, wanted), strict=True):
                if route is None:
                    del routes[entry.attempt_id]
                else:
                    routes[entry.attempt_id] = route

    def _usable(self, listed: ListedRoute) -> Route | None:
        """Return a route if it is one: whole, of this history, and not dropped. A route is never needed."""
        try:
            route = read_route(self._store, listed.version, listed.attempt_id)
            if route.kind == "abandoned" or not self._store.is_usable(route):
                return None
            start = None if route.start is None else self._store.manifest(route.start)
            whole = fits(route, start, self._store.manifest(route.version))
        except _UNUSABLE as error:
            _log.warning("A route is left out: %s", error)
            return None
        if not whole:
            _log.warning("A route is left out: %s is not one of this history.", listed.key)
        return route if whole else None

    def follow(self, plan: Plan, build: Callable[[Plan], _Built]) -> _Built:
        """Call ``build`` with a plan; when a route's parts turn out missing or damaged, again with one that avoids it.

        ``build`` must be able to begin anew. Raises what it raised when no route is to blame, or no other way is left.
        """
        while True:
            try:
                return build(plan)
            except (ObjectNotFound, CorruptObject) as error:
                if not self.leave_out(plan.steps, error):
                    raise
                try:
                    plan = self.plan(plan.start, plan.end)
                except VersionNotFound:
                    raise error from None

    def leave_out(self, steps: Iterable[Step], error: ObjectNotFound | CorruptObject) -> bool:
        """Forget the routes that may be to blame for an error met on the way; tells whether there were any.

        Where the error's object is a route's part, that route is. Where it is another part of the plan, whose bytes
        are damaged or do not follow, any route before it may have led to the wrong place.
        """
        taken = [step for step in steps if isinstance(step.record, Route)]
        blamed = [step for step in taken if any(part.key == error.key for part in step.parts)]
        on_the_way = error.key is None or any(part.key == error.key for step in steps for part in step.parts)
        if not blamed and on_the_way and isinstance(error, CorruptObject):
            blamed = taken
        for step in blamed:
            _log.warning("The route from %s to %s is left out: %s", step.start, step.end, error)
            self.routes().pop(step.record.attempt_id, None)
        return bool(blamed)


def _check_links(hops: Iterable[Hop], known: dict[int, Manifest]) -> None:
    """Raise unless neighbouring manifests on the way follow each other in one history."""
    places = {place for hop in hops for place in (hop.start, hop.end) if place is not None}
    for version in sorted(places):
        if version - 1 in places and version in known and version - 1 in known:
            check_link(known[version - 1], known[version])
