"""Ways from one version to another. Pure.

Versions are places; anchors, deltas and skip deltas are hops between them, and those that invert are hops back too.
The plan is the cheapest chain of hops, by the bytes to fetch and the work to apply them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import CorruptObject, StreamMismatch, UnsupportedFormat, VersionNotFound
from .manifest import BASE_VERSION, FILES, HEADERS, MODEL, Manifest, manifest_key
from .part import PartIdentity
from .route import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .manifest import PartRef
    from .route import ListedRoute

__all__ = [
    "Hop",
    "Kind",
    "Plan",
    "Step",
    "cheapest",
    "check_components",
    "check_link",
    "make_plan",
    "no_way",
    "plan_of",
]

Kind = Literal["anchor", "delta", "skip", "inverse"]

#: Applying a hop touches about every chunk of the snapshot, however few bytes it stores: it is taken to cost as much
#: as fetching this part of the snapshot.
_WORK_SHARE = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One hop of a plan: the record whose parts are applied, and the way they are applied."""

    kind: Kind
    record: Manifest | Route

    @property
    def start(self) -> int | None:
        """The version the hop starts from; ``None`` for an anchor, which needs nothing."""
        return self.record.version if self.kind == "inverse" else self._origin

    @property
    def end(self) -> int:
        """The version the hop leads to."""
        if self.kind == "inverse" and self._origin is not None:
            return self._origin
        return self.record.version

    @property
    def _origin(self) -> int | None:
        """The version that the record's parts start from."""
        return self.record.start if isinstance(self.record, Route) else self.record.parent_version

    @property
    def parts(self) -> tuple[PartRef, ...]:
        """The model's parts that have to be fetched."""
        return self.record.parts if isinstance(self.record, Route) else self.record.model.parts

    @property
    def identity(self) -> PartIdentity:
        """What the parts say of themselves."""
        record = self.record
        return PartIdentity(record.stream_id, record.version, record.attempt_id, MODEL)

    @property
    def stored_bytes(self) -> int:
        """Bytes of those parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Hops that follow each other, and the snapshot they end at."""

    start: int | None
    end: int
    snapshot_id: str
    steps: tuple[Step, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes that have to be fetched."""
        return sum(step.stored_bytes for step in self.steps)

    @property
    def parts(self) -> tuple[PartRef, ...]:
        """All parts that have to be fetched."""
        return tuple(part for step in self.steps for part in step.parts)

    @property
    def from_anchor(self) -> bool:
        """Whether the plan starts from an anchor, so that nothing local is needed."""
        return bool(self.steps) and self.steps[0].kind == "anchor"


@dataclass(frozen=True, slots=True)
class Hop:
    """A hop that a plan may take.

    ``record`` is what it was read from. A listed route, and ``None`` for a delta, are hops whose record was not read
    yet: whether they are there, what they store and whether they lead back is a guess.
    """

    kind: Kind
    start: int | None
    end: int
    stored_bytes: int
    record: Manifest | Route | ListedRoute | None


class _Hops:
    """All hops between versions 0 and ``highest``, those of deltas made as they are asked for."""

    def __init__(
        self,
        manifests: Mapping[int, Manifest],
        routes: Iterable[Route | ListedRoute],
        *,
        highest: int,
        guess: int | None,
        keeps: Callable[[int], bool],
    ) -> None:
        self._manifests = manifests
        self._highest = highest
        self._guess = guess
        self._keeps = keeps
        self._routes: dict[int | None, list[Hop]] = {}
        for route in routes:
            kind: Kind = "anchor" if route.start is None else "skip"
            self._add(Hop(kind, route.start, route.version, route.stored_bytes, route))
            if route.start is not None and (route.invertible if isinstance(route, Route) else True):
                self._add(Hop("inverse", route.version, route.start, route.stored_bytes, route))
        base = manifests.get(BASE_VERSION)
        if base is not None and base.anchored and keeps(BASE_VERSION):
            self._add(Hop("anchor", None, BASE_VERSION, sum(part.size for part in base.model.parts), base))

    def _add(self, hop: Hop) -> None:
        self._routes.setdefault(hop.start, []).append(hop)

    def out_of(self, place: int | None) -> Iterator[Hop]:
        """Yield the hops that start from a version, or from nothing."""
        yield from self._routes.get(place, ())
        if place is None:
            return
        if place < self._highest and (hop := self._delta(place + 1, "delta")):
            yield hop
        if place > BASE_VERSION and (hop := self._delta(place, "inverse")):
            yield hop

    def _delta(self, version: int, kind: Kind) -> Hop | None:
        start, end = (version, version - 1) if kind == "inverse" else (version - 1, version)
        if not self._keeps(version):
            return None
        manifest = self._manifests.get(version)
        if manifest is None:
            return None if self._guess is None else Hop(kind, start, end, self._guess, None)
        if kind == "inverse" and not manifest.model.invertible:
            return None
        return Hop(kind, start, end, sum(part.size for part in manifest.model.parts), manifest)


def cheapest(
    start: int | None,
    end: int,
    manifests: Mapping[int, Manifest],
    routes: Iterable[Route | ListedRoute] = (),
    *,
    guess: int | None = None,
    keeps: Callable[[int], bool] = lambda version: True,  # noqa: ARG005 - all of them
) -> tuple[Hop, ...] | None:
    """Return the cheapest chain of hops from ``start`` (``None``: from nothing) to ``end``; ``None``: there is none.

    ``manifests`` has that of ``end``, and any others. ``guess``: the bytes that a delta whose manifest is not among
    them is taken to store; ``None``: there are no others. ``keeps`` tells whether the parts of a version's own
    manifest are still there to be fetched.
    """
    known = list(routes)
    highest = max([start or 0, end, *(route.version for route in known)])
    hops = _Hops(manifests, known, highest=highest, guess=guess, keeps=keeps)
    work = manifests[end].model.snapshot_bytes // _WORK_SHARE + 1
    came: dict[int | None, tuple[int, int, Hop | None]] = {start: (0, 0, None)}
    queue: list[tuple[int, int, int]] = [(0, 0, -1 if start is None else start)]
    done: set[int] = set()
    while queue:
        cost, length, place = heapq.heappop(queue)
        if place == end:
            return _trace(came, end)
        if place in done:
            continue
        done.add(place)
        # Where somebody stands an anchor is a hop as good as any other.
        sources = (None,) if place < 0 else (place, None) if place == start else (place,)
        for source in sources:
            for hop in hops.out_of(source):
                further = (cost + hop.stored_bytes + work, length + 1)
                if hop.end not in done and (hop.end not in came or further < came[hop.end][:2]):
                    came[hop.end] = (*further, hop)
                    heapq.heappush(queue, (*further, hop.end))
    return None


def _trace(came: Mapping[int | None, tuple[int, int, Hop | None]], end: int) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    place: int | None = end
    while (hop := came[place][2]) is not None:
        hops.append(hop)
        if hop.kind == "anchor":
            break
        place = hop.start
    return tuple(reversed(hops))


def make_plan(start: int | None, end: int, manifests: Mapping[int, Manifest], routes: Iterable[Route] = ()) -> Plan:
    """Return the cheapest plan from ``start`` (``None``: from nothing) to ``end`` over records that were read.

    Raises ``VersionNotFound`` when no way leads there.
    """
    hops = cheapest(start, end, manifests, routes)
    if hops is None:
        raise no_way(start, end)
    return plan_of(start, manifests[end], hops)


def plan_of(start: int | None, end: Manifest, hops: Iterable[Hop]) -> Plan:
    """Return hops whose records were all read as a plan."""
    steps = [Step(hop.kind, hop.record) for hop in hops if isinstance(hop.record, (Manifest, Route))]
    return Plan(start, end.version, end.snapshot_id, tuple(steps))


def no_way(start: int | None, end: int) -> VersionNotFound:
    """Return the error that says that no way leads from ``start`` to ``end``."""
    return VersionNotFound(
        f"No route leads from {'nothing' if start is None else f'version {start}'} to version {end}: "
        "the store has no anchor.",
        hint="Give the base checkpoint with --base.",
    )


def check_components(manifest: Manifest) -> None:
    """Raise ``UnsupportedFormat`` for a version that carries more than the model, such as a draft or an adapter.

    It would have to be patched and activated with the model: an engine with the one and not the other is of no version.
    """
    known = {MODEL, FILES, HEADERS} if manifest.version == BASE_VERSION else {MODEL}
    if unknown := sorted(set(manifest.components) - known):
        raise UnsupportedFormat(
            f"Version {manifest.version} carries {', '.join(unknown)} beside the model, and no engine's adapter of "
            "this release can activate both together.",
            key=manifest_key(manifest.version),
            hint="Publish them as tensors of the model's checkpoint, or upgrade this side.",
        )


def check_link(parent: Manifest, child: Manifest) -> None:
    """Raise unless ``child`` is the next version after ``parent`` in one history."""
    key = manifest_key(child.version)
    if child.stream_id != parent.stream_id:
        raise StreamMismatch(
            f"{key} belongs to the stream {child.stream_id}, its parent to {parent.stream_id}.",
            key=key,
            hint="The store was mixed with another one; restore it from a backup.",
        )
    check_components(child)
    problem = None
    if (child.parent_version, child.version) != (parent.version, parent.version + 1):
        problem = f"it follows version {child.parent_version}, not {parent.version}"
    elif child.parent_commit_id != parent.commit_id:
        problem = f"it follows the commit {child.parent_commit_id}, but version {parent.version} is {parent.commit_id}"
    elif child.parent_snapshot_id != parent.snapshot_id:
        problem = (
            f"it follows the snapshot {child.parent_snapshot_id}, but version {parent.version} is {parent.snapshot_id}"
        )
    elif child.writer_epoch < parent.writer_epoch:
        problem = f"its writer's epoch {child.writer_epoch} is below its parent's {parent.writer_epoch}"
    elif MODEL not in child.components:
        problem = "it has no model"
    if problem:
        raise CorruptObject(f"{key} breaks the chain: {problem}.", key=key, hint="Run `deltastore check` on the store.")
