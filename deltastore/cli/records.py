"""Versions and plans as the JSON that scripts rely on, and as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from deltastore.manifest import Manifest
    from deltastore.plan import Plan
    from deltastore.retention import Ranges, Standing
    from deltastore.route import Route
    from deltastore.tags import Tag

__all__ = ["human_bytes", "human_ranges", "plan_record", "route_record", "table", "tag_record", "version_record"]


def version_record(
    manifest: Manifest, standing: Standing, tags: Iterable[Tag] = (), anchored: Container[int] = ()
) -> dict[str, Any]:
    """Return one version's documented fields; ``anchored``: the versions that have an anchor besides the base's."""
    model = manifest.model
    return {
        "version": manifest.version,
        "snapshot_id": model.snapshot_id,
        "parent_version": manifest.parent_version,
        "parent_snapshot_id": manifest.parent_snapshot_id,
        "kind": manifest.kind,
        "step": manifest.step,
        "created_at": manifest.created_at,
        "commit_id": manifest.commit_id,
        "writer_epoch": manifest.writer_epoch,
        "changed_elements": model.changed_elements,
        "total_elements": model.total_elements,
        "changed_fraction": model.changed_elements / model.total_elements if model.total_elements else 0.0,
        "stored_bytes": manifest.stored_bytes,
        "snapshot_bytes": model.snapshot_bytes,
        "ratio": manifest.stored_bytes / model.snapshot_bytes if model.snapshot_bytes else 0.0,
        "anchored": manifest.version in anchored or (manifest.anchored and standing.keeps_parts(manifest.version)),
        "forgotten": not standing.keeps(manifest.version),
        "tags": [tag.name for tag in tags if (tag.version, tag.commit_id) == (manifest.version, manifest.commit_id)],
        "metadata": manifest.metadata,
    }


def tag_record(tag: Tag) -> dict[str, Any]:
    """Return a tag's documented fields."""
    return {
        "name": tag.name,
        "version": tag.version,
        "commit_id": tag.commit_id,
        "created_at": tag.created_at,
        "deltas": tag.deltas,
        "routes": tag.routes,
    }


def human_ranges(runs: Ranges) -> str:
    """Return ranges as people read them: ``1-7, 9``; only the first few of many."""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:4]]
    return ", ".join([*shown, "…"] if len(runs) > 4 else shown)


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return a plan's documented fields."""
    return {
        "from": plan.start,
        "to": plan.end,
        "steps": [
            {"kind": step.kind, "from": step.start, "to": step.end, "stored_bytes": step.stored_bytes}
            for step in plan.steps
        ],
        "stored_bytes": plan.stored_bytes,
    }


def route_record(route: Route) -> dict[str, Any]:
    """Return a route's documented fields."""
    return {
        "kind": route.kind,
        "from": route.start,
        "to": route.version,
        "stored_bytes": route.stored_bytes,
        "invertible": route.invertible,
        "attempt_id": route.attempt_id,
    }


def human_bytes(count: float) -> str:
    """Return a size as people read it: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Lay out rows under headings in plain text, numbers and all right-aligned but the last column."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    last = len(headings) - 1

    def line(row: tuple[str, ...]) -> str:
        cells = (cell if column == last else cell.rjust(widths[column]) for column, cell in enumerate(row))
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (headings, *rows))
