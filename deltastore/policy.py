"""What to keep: from a policy to the sets of a retention record, with the cheapest way to every kept version. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from .errors import CorruptObject, UsageError
from .manifest import BASE_VERSION
from .retention import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from .retention import Ranges, Retention, StoredRoute

__all__ = ["Choice", "PlannedAnchor", "Policy", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an admin asks for: the newest versions, those that tags name, and every so many from version 0 on."""

    keep_last: int
    keep_tagged: bool = False
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1 or (self.keep_every is not None and self.keep_every < 1):
            raise UsageError("A policy keeps at least one version.", hint="Give numbers from 1 on.")

    def wanted(self, newest: int, *, tagged: AbstractSet[int], advised: AbstractSet[int]) -> set[int]:
        """Return the versions to keep of those up to ``newest``, which is always one of them."""
        window = range(max(BASE_VERSION, newest + 1 - self.keep_last), newest + 1)
        every = range(BASE_VERSION, newest + 1, self.keep_every) if self.keep_every else ()
        named = chain(tagged if self.keep_tagged else (), advised)
        return {*window, *every, *(version for version in named if BASE_VERSION <= version <= newest)}


@dataclass(frozen=True, slots=True)
class PlannedAnchor:
    """An anchor that is not there: to see what it would save."""

    version: int
    stored_bytes: int
    attempt_id: str = ""
    kind: str = "anchor"
    start: int | None = None
    retention: int = 2**62


@dataclass(frozen=True, slots=True)
class Choice:
    """The sets of a record.

    ``relied_on``: the routes that some kept version's way uses; ``stored_bytes``: what stays.
    """

    kept: Ranges
    deltas: Ranges
    routes: tuple[str, ...]
    relied_on: tuple[StoredRoute, ...] = field(compare=False)
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class _Hop:
    """A way into a version: from another one, or from nothing (-1), over an object that costs ``cost`` more bytes.

    Neither ``route`` nor ``delta``: a base that everybody has of their own.
    """

    source: int
    cost: int
    delta: int | None = None
    route: StoredRoute | None = None


def choose(
    record: Retention | None,
    newest: int,
    policy: Policy,
    *,
    part_bytes: Mapping[int, int],
    base_stored: bool,
    routes: Iterable[StoredRoute],
    tagged: AbstractSet[int] = frozenset(),
    advised: AbstractSet[int] = frozenset(),
) -> Choice:
    """Choose what stays after ``record`` (``None``: no version was ever forgotten).

    ``part_bytes``: the bytes of each version's own parts, of version 0's model for 0. ``base_stored``: whether those
    are in the store at all. ``tagged``, ``advised``: versions to keep where they are not forgotten yet. Routes within
    the window of the newest versions stay, for the receivers that move there; of all others only those on the way.
    Raises ``CorruptObject`` if nothing leads to a kept version.
    """
    wanted = {
        version
        for version in policy.wanted(newest, tagged=tagged, advised=advised)
        if record is None or record.keeps(version)
    }
    known = [route for route in routes if route.version <= newest and (record is None or record.keeps_route(route))]
    window = newest + 1 - policy.keep_last
    free = [
        route
        for route in known
        if route.version >= window and route.version in wanted and (route.start is None or route.start >= window)
    ]
    hops = _hops(record, newest, part_bytes, known, free, base_stored=base_stored)
    used = _ways(hops, wanted)
    deltas = {hop.delta for hop in used if hop.delta is not None}
    relied_on = {hop.route.attempt_id: hop.route for hop in used if hop.route is not None}
    staying = {route.attempt_id: route for route in free} | relied_on
    return Choice(
        kept=ranges(wanted),
        deltas=ranges(deltas),
        routes=tuple(sorted(staying)),
        relied_on=tuple(relied_on.values()),
        stored_bytes=sum(part_bytes[version] for version in deltas)
        + sum(route.stored_bytes for route in staying.values()),
    )


def _hops(
    record: Retention | None,
    newest: int,
    part_bytes: Mapping[int, int],
    routes: Iterable[StoredRoute],
    free: Iterable[StoredRoute],
    *,
    base_stored: bool,
) -> list[list[_Hop]]:
    """Return for each version the ways into it."""
    nothing = -1
    hops: list[list[_Hop]] = [[] for _ in range(newest + 1)]
    if not base_stored:
        hops[BASE_VERSION].append(_Hop(nothing, 0))
    for version in range(0 if base_stored else 1, newest + 1):
        if record is None or record.keeps_parts(version):
            hops[version].append(_Hop(version - 1, part_bytes[version], delta=version))
    costless = {route.attempt_id for route in free}
    for route in sorted(routes, key=lambda one: one.attempt_id):
        cost = 0 if route.attempt_id in costless else route.stored_bytes
        hops[route.version].append(_Hop(nothing if route.start is None else route.start, cost, route=route))
    return hops


def _ways(hops: list[list[_Hop]], wanted: AbstractSet[int]) -> list[_Hop]:
    """Choose hops that together lead to every wanted version.

    One pass in ascending order: each wanted version is joined by the cheapest way to what is reached already. Without
    skips that is the least that is possible; with them it is near it.
    """
    costs: list[float] = [math.inf] * len(hops)
    best: list[_Hop | None] = [None] * len(hops)
    reached = [False] * len(hops)
    used: list[_Hop] = []
    for version, ways in enumerate(hops):
        for hop in ways:
            before = 0.0 if hop.source < 0 else costs[hop.source]
            if before + hop.cost < costs[version]:
                costs[version], best[version] = before + hop.cost, hop
        if version not in wanted:
            continue
        if math.isinf(costs[version]):
            raise CorruptObject(f"Nothing in the store leads to version {version}, which is kept.")
        place = version
        while place >= 0 and not reached[place]:
            last = best[place]
            assert last is not None  # noqa: S101 - what costs finitely has a way
            used.append(last)
            reached[place], costs[place] = True, 0.0
            place = last.source
    return used
