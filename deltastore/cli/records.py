"""Versions and plans as the JSON that scripts rely on, and as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.manifest import Manifest
    from deltastore.plan import Plan
    from deltastore.route import Route

__all__ = ["human_bytes", "plan_record", "route_record", "table", "version_record"]


def version_record(manifest: Manifest, *, anchored: bool = False) -> dict[str, Any]:
    """Return one version's documented fields; ``anchored``: whether it has an anchor besides the base's."""
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
        "anchored": anchored or manifest.anchored,
        "tags": [],
        "metadata": manifest.metadata,
    }


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
