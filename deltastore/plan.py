"""Routes from one version to another. Pure.

Forward through deltas, backward through the same deltas where they lead back, or from the anchor: whichever
stores the fewest bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import CorruptObject, StreamMismatch, VersionNotFound
from .manifest import BASE_VERSION, MODEL, manifest_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .manifest import Manifest, PartRef
    from .retention import Standing
    from .route import Route

__all__ = ["Plan", "Step", "check_link", "make_plan", "versions_needed"]


@dataclass(frozen=True, slots=True)
class Step:
    """One hop: the manifest whose parts are applied, and the way they are applied.

    ``route``: whose parts the manifest names, where those are not the version's own.
    """

    kind: Literal["anchor", "delta", "inverse"]
    manifest: Manifest
    route: Route | None = None

    @property
    def start(self) -> int | None:
        """The version the hop starts from; ``None`` for an anchor, which needs nothing."""
        if self.kind == "anchor":
            return None
        return self.manifest.version if self.kind == "inverse" else self.manifest.version - 1

    @property
    def end(self) -> int:
        """The version the hop leads to."""
        return self.manifest.version - 1 if self.kind == "inverse" else self.manifest.version

    @property
    def parts(self) -> tuple[PartRef, ...]:
        """The model's parts that have to be fetched."""
        return self.manifest.model.parts

    @property
    def stored_bytes(self) -> int:
        """Bytes of those parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """A route: hops that follow each other, and the snapshot they end at."""

    start: int | None
    end: int
    snapshot_id: str
    steps: tuple[Step, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes that have to be fetched."""
        return sum(step.stored_bytes for step in self.steps)

    @property
    def from_anchor(self) -> bool:
        """Whether the route starts from an anchor, so that nothing local is needed."""
        return bool(self.steps) and self.steps[0].kind == "anchor"


def versions_needed(start: int | None, end: int) -> range:
    """Return the versions whose manifests ``make_plan`` looks at."""
    if start is not None and start <= end:
        return range(start, end + 1)
    return range(BASE_VERSION, max(start or 0, end) + 1)


def make_plan(
    start: int | None,
    end: int,
    manifests: Mapping[int, Manifest],
    *,
    standing: Standing | None = None,
    anchors: Iterable[Route] = (),
) -> Plan:
    """Choose the route with the fewest stored bytes from ``start`` (``None``: from nothing) to ``end``.

    ``manifests`` holds those of ``versions_needed``; ``standing`` says which parts were let go. Raises
    ``VersionNotFound`` when no route leads there.
    """
    there = [standing is None or standing.keeps_parts(version) for version in range(max(start or 0, end) + 1)]
    routes: list[tuple[Step, ...]] = []
    if start is not None and start <= end and all(there[start + 1 : end + 1]):
        routes.append(tuple(Step("delta", manifests[version]) for version in range(start + 1, end + 1)))
    else:
        for anchor in _anchors(end, manifests, anchors, base_there=there[BASE_VERSION]):
            if all(there[anchor.end + 1 : end + 1]):
                deltas = (Step("delta", manifests[version]) for version in range(anchor.end + 1, end + 1))
                routes.append((anchor, *deltas))
        if start is not None and start > end and all(there[end + 1 : start + 1]):
            back = [manifests[version] for version in range(start, end, -1)]
            if all(manifest.model.invertible for manifest in back):
                routes.append(tuple(Step("inverse", manifest) for manifest in back))
    if not routes:
        raise VersionNotFound(
            f"No route leads from {'nothing' if start is None else f'version {start}'} to version {end}: "
            "the store has no anchor.",
            hint="Give the base checkpoint with --base.",
        )
    steps = min(routes, key=lambda route: sum(step.stored_bytes for step in route))
    return Plan(start, end, manifests[end].snapshot_id, steps)


def _anchors(
    end: int, manifests: Mapping[int, Manifest], anchors: Iterable[Route], *, base_there: bool
) -> Iterator[Step]:
    base = manifests.get(BASE_VERSION)
    if base is not None and base.anchored and base_there:
        yield Step("anchor", base)
    for route in anchors:
        if route.version <= end and route.version in manifests:
            yield Step("anchor", route.as_manifest(manifests[route.version]), route)


def check_link(parent: Manifest, child: Manifest) -> None:
    """Raise unless ``child`` is the next version after ``parent`` in one history."""
    key = manifest_key(child.version)
    if child.stream_id != parent.stream_id:
        raise StreamMismatch(
            f"{key} belongs to the stream {child.stream_id}, its parent to {parent.stream_id}.",
            key=key,
            hint="The store was mixed with another one; restore it from a backup.",
        )
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
    elif set(child.components) != {MODEL}:
        problem = f"it has the components {sorted(child.components)}, of which this release knows only {MODEL!r}"
    if problem:
        raise CorruptObject(f"{key} breaks the chain: {problem}.", key=key, hint="Run `deltastore check` on the store.")
