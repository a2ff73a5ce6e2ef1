"""What a store holds, in bytes: deltas, anchors, skips, and what nothing needs any more."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from .manifest import BASE_VERSION
from .planner import Planner
from .route import ROUTES_PREFIX, begun_key, route_key
from .tags import read_standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .manifest import Manifest
    from .reader import Store

    Progress = Callable[[str, int, int], object]

__all__ = ["Stats", "stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Sizes in bytes.

    ``full_bytes_equivalent``: full checkpoints of all kept versions. ``anchor_bytes`` holds the base with its other
    files, schemas and tables. ``orphan_bytes``: objects that no kept version, route or tag names, unfinished work
    among them; ``deltastore gc`` removes them once that is safe.
    """

    versions: int
    kept_versions: int
    stored_bytes: int
    delta_bytes: int
    anchor_bytes: int
    skip_bytes: int
    full_bytes_equivalent: int
    orphan_bytes: int

    @property
    def saved_ratio(self) -> float:
        """The share of the full checkpoints' bytes that the store does without."""
        return 1 - self.stored_bytes / self.full_bytes_equivalent if self.full_bytes_equivalent else 0.0


def stats(store: Store, *, progress: Progress | None = None) -> Stats:
    """Add up what is stored, by manifests and records, and what lies there besides, by listing."""
    standing, _ = read_standing(store)
    history = store.log()
    routes = [route for route in Planner(store).read_all() if standing.keeps_route(route)]
    needed: set[str] = set()
    deltas = anchors = skips = 0
    for manifest in history:
        sizes = dict(_objects(manifest, parts=standing.keeps_parts(manifest.version)))
        needed.update(sizes)
        if manifest.version == BASE_VERSION:
            anchors += sum(sizes.values())
        else:
            deltas += sum(sizes.values())
    for route in routes:
        needed.update(part.key for part in route.parts)
        needed.update(key(route.version, route.attempt_id) for key in (route_key, begun_key))
        anchors += route.stored_bytes * (route.kind == "anchor")
        skips += route.stored_bytes * (route.kind == "skip")
    orphans = 0
    listed = chain(store.backend.list("parts/"), store.backend.list(ROUTES_PREFIX))
    for seen, info in enumerate(listed, 1):
        orphans += info.size * (info.key not in needed)
        if progress is not None:
            progress("list", seen, max(seen, len(needed)))
    kept = [manifest for manifest in history if standing.keeps(manifest.version)]
    return Stats(
        versions=len(history),
        kept_versions=len(kept),
        stored_bytes=deltas + anchors + skips,
        delta_bytes=deltas,
        anchor_bytes=anchors,
        skip_bytes=skips,
        full_bytes_equivalent=sum(manifest.model.snapshot_bytes for manifest in kept),
        orphan_bytes=orphans,
    )


def _objects(manifest: Manifest, *, parts: bool) -> Iterator[tuple[str, int]]:
    """Yield the objects that stay with a version, its model's parts only if ``parts`` says so."""
    for name, component in manifest.components.items():
        if parts or name != "model":
            yield from ((part.key, part.size) for part in component.parts)
        if component.digests is not None:
            yield component.digests.key, component.digests.size
    if manifest.stream is not None:
        yield from ((schema.key, schema.size) for schema in manifest.stream.schemas.values())
