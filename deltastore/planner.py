"""Finding plans in a store: routes are listed once, and only the records that a plan goes by are read."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from .errors import (
    CorruptObject,
    DeltastoreError,
    ObjectNotFound,
    SignatureMismatch,
    StreamMismatch,
    UnsupportedFormat,
    VersionForgotten,
    VersionNotFound,
)
from .manifest import BASE_VERSION
from .plan import cheapest, check_link, no_way, plan_of
from .route import MAX_ROUTE_BYTES, ROUTES_PREFIX, ListedRoute, Route, fits, listed_routes, parse_route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .manifest import Manifest
    from .plan import Hop, Plan, Step
    from .reader import Store
    from .retention import Standing

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
    VersionForgotten,
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
    """Finds plans over the routes that a store lists at one moment; remembers what it read, and what is not usable.

    Routes are listed anew when a newer retention record is found: the moment then is a later one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._routes: dict[str, Route | ListedRoute] | None = None
        #: Attempts whose record or parts turned out not to be usable.
        self._left_out: set[str] = set()
        self._record = 0

    def routes(self) -> dict[str, Route | ListedRoute]:
        """Return the routes that are known to be usable or may be, by attempt; lists them when first asked.

        What retention let go is among them as long as it is there.
        """
        if self._routes is None:
            listed = listed_routes(self._store.backend.list(ROUTES_PREFIX))
            self._routes = {route.attempt_id: route for route in listed if route.attempt_id not in self._left_out}
            self._read([route for route in listed if not route.told and route.attempt_id in self._routes])
        return self._routes

    @property
    def left_out(self) -> frozenset[str]:
        """The attempts that were listed with a record, but cannot be used as far as is known."""
        return frozenset(self._left_out)

    def read_all(self) -> list[Route]:
        """Return all routes that can be used, with their records, whatever retention says."""
        self._read([route for route in self.routes().values() if isinstance(route, ListedRoute)])
        return [route for route in self.routes().values() if isinstance(route, Route)]

    def staying(self, standing: Standing) -> list[Route | ListedRoute]:
        """Return the routes that stay; reads the records of those of which the listing does not tell."""
        routes = self.routes()
        self._read(
            [route for route in routes.values() if isinstance(route, ListedRoute) and not standing.keeps_route(route)]
        )
        return [route for route in routes.values() if standing.keeps_route(route)]

    def anchored(self, versions: range, standing: Standing) -> frozenset[int]:
        """Return which of these versions have an anchor that stays besides the base's; reads the anchors' records."""
        anchors = [route for route in self.routes().values() if route.start is None and route.version in versions]
        self._read([route for route in anchors if isinstance(route, ListedRoute)])
        usable = [self.routes().get(route.attempt_id) for route in anchors]
        return frozenset(route.version for route in usable if route is not None and standing.keeps_route(route))

    def plan(self, start: int | None, end: int) -> Plan:
        """Return the cheapest plan from ``start`` (``None``: from nothing) to ``end``, of what retention keeps.

        Hops that were not read yet are guessed at; the cheapest plan's are read, and it is looked for again until
        all of its hops are. One version forward takes one manifest, a look for a newer retention record, and no
        listing. Raises ``VersionForgotten`` when ``end`` was let go, ``VersionNotFound`` when no way leads there,
        ``CorruptObject`` when manifests on the way do not follow each other.
        """
        store = self._store
        last = store.manifest(end)
        known = {BASE_VERSION: store.base, end: last}
        if start is not None:
            known[start] = store.manifest(start)
        standing = self._look(end)
        while True:
            try:
                return self._plan(start, last, known, standing)
            except VersionNotFound:
                # A route may have been let go, and collected, since the record was read: a newer one says so.
                newer = self._look(end)
                if newer == standing:
                    raise
                standing, self._routes = newer, None

    def _look(self, end: int) -> Standing:
        """Return what stays now, as far as a plan to ``end`` is concerned."""
        standing = self._store.standing(end)
        number = standing.record.number if standing.record is not None else 0
        if number != self._record:
            self._record, self._routes = number, None
        return standing

    def _plan(self, start: int | None, last: Manifest, manifests: dict[int, Manifest], standing: Standing) -> Plan:
        store, end = self._store, last.version
        near = start is not None and (start == end or (start == end - 1 and standing.keeps_parts(end)))
        routes = {} if near else self.routes()
        known = manifests | store.recent(max([start or 0, end, *(route.version for route in routes.values())]))
        while True:
            usable = [one for one in routes.values() if isinstance(one, ListedRoute) or standing.keeps_route(one)]
            sizes = [sum(part.size for part in entry.model.parts) for entry in known.values() if entry.version]
            guess = sum(sizes) // len(sizes) if sizes else 0
            hops = cheapest(start, end, known, usable, guess=guess, keeps=standing.keeps_parts)
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
        """Read routes' records side by side; those that cannot be used are forgotten: a route is never needed."""
        routes = self.routes()
        wanted = list(listed)
        if not wanted:
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="routes") as pool:
            found = dict(zip(wanted, pool.map(self._read_one, wanted), strict=True))
        read = [route for route in found.values() if route is not None]
        manifests = self._manifests({place for route in read for place in (route.start, route.version)} - {None})
        for entry, route in found.items():
            if route is not None and _leads(route, manifests):
                routes[entry.attempt_id] = route
                continue
            if route is not None:
                _log.warning("A route is left out: %s is not one of this history.", entry.key)
            self._leave_out(entry.attempt_id)

    def _read_one(self, listed: ListedRoute) -> Route | None:
        try:
            route = read_route(self._store, listed.version, listed.attempt_id)
        except _UNUSABLE as error:
            _log.warning("A route is left out: %s", error)
            return None
        return None if route.kind == "abandoned" else route

    def _manifests(self, versions: Iterable[int | None]) -> dict[int, Manifest]:
        """Return the manifests of those versions that can be read."""
        wanted = [version for version in versions if version is not None]
        try:
            return self._store.manifests(wanted)
        except _UNUSABLE:  # one of them: then each by itself
            found = {}
            for version in wanted:
                with suppress(*_UNUSABLE):
                    found[version] = self._store.manifest(version)
            return found

    def _leave_out(self, attempt_id: str) -> None:
        self._left_out.add(attempt_id)
        self.routes().pop(attempt_id, None)

    def follow(self, plan: Plan, build: Callable[[Plan], _Built]) -> _Built:
        """Call ``build`` with a plan; where an object of it turns out missing or damaged, again with ``instead_of``.

        ``build`` must be able to begin anew.
        """
        while True:
            try:
                return build(plan)
            except (ObjectNotFound, CorruptObject) as error:
                (plan,) = self.instead_of([plan], error)

    def instead_of(self, plans: Sequence[Plan], error: ObjectNotFound | CorruptObject) -> list[Plan]:
        """Return other plans between the same versions after an error that was met on the way of these.

        They avoid the routes that may be to blame, and whatever the newest retention record lets go: what vanishes
        beside a collector was let go. Raises ``VersionForgotten`` when the end was let go meanwhile,
        ``VersionNotFound`` when all ways there from the start were, and the error itself when it is damage, and no
        other way is left.
        """
        record = self._record
        blamed = self.leave_out([step for plan in plans for step in plan.steps], error)
        if not blamed and isinstance(error, CorruptObject):
            raise error
        try:
            others = [self.plan(plan.start, plan.end) for plan in plans]
        except VersionNotFound:
            if self._record != record:
                raise
            raise error from None
        if others == list(plans):
            lost = self._lost(plans, error)
            raise lost from (None if lost is error else error)
        return others

    def _lost(self, plans: Sequence[Plan], error: ObjectNotFound | CorruptObject) -> DeltastoreError:
        """Return what it means that an object of the only plans is gone."""
        record = self._store.retention()
        forgotten = [plan.end for plan in plans if record is not None and not record.keeps(plan.end)]
        if not forgotten:
            return error
        return VersionForgotten(
            f"Version {forgotten[0]} is forgotten: whoever set its tag was stopped before it was sure, "
            f"and {error.key} is gone.",
            key=error.key,
            hint="Delete the tag with `deltastore tag STORE NAME --delete`, and ask for a version that is kept.",
        )

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
            self._leave_out(step.record.attempt_id)
        return bool(blamed)


def _leads(route: Route, manifests: dict[int, Manifest]) -> bool:
    """Tell whether a route is one of this history, as far as its ends' manifests could be read."""
    start, end = None if route.start is None else manifests.get(route.start), manifests.get(route.version)
    return end is not None and fits(route, start, end)


def _check_links(hops: Iterable[Hop], known: dict[int, Manifest]) -> None:
    """Raise unless neighbouring manifests on the way follow each other in one history."""
    places = {place for hop in hops for place in (hop.start, hop.end) if place is not None}
    for version in sorted(places):
        if version - 1 in places and version in known and version - 1 in known:
            check_link(known[version - 1], known[version])
