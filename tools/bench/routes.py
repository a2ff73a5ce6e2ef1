"""``python -m tools.bench routes``: a receiver a thousand versions behind, over skip deltas and one by one."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from deltastore import Writer, open_store
from deltastore.compact import anchor, compact
from deltastore.patch import default_workers
from deltastore.plan import make_plan
from deltastore.replay import Fetch, replay
from deltastore.restore import identify
from deltastore.spool import Spool

from .report import Column, Report, Section, Target, size, text, times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.plan import Plan
    from deltastore.reader import Store

    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_MIB = 8
_VERSIONS = 1000
_QUICK_VERSIONS = 40
_DEVIATION = 0.02
#: Chosen so that about 1 % of the bf16 weights change in a step.
_LEARNING_RATE = 7e-7

_COLUMNS = (
    Column("way", "way", text),
    Column("steps", "steps", text),
    Column("stored", "stored_bytes", size),
    Column("of a snapshot", "share", lambda value: f"{value:.2f}"),
    Column("objects read", "objects", text),
    Column("plan", "plan_seconds", times),
    Column("fetch and build", "build_seconds", times),
)


def run(settings: Settings) -> Report:
    """Publish versions of a small model, and compact them; then catch up in each way."""
    versions = _QUICK_VERSIONS if settings.quick else _VERSIONS
    elements = (settings.mib or _MIB) << 19
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        snapshots = _training(elements)
        base = _saved(home / "base", next(snapshots))
        changed = 0.0
        with Writer(home / "store", base=base, level="fast", spool=home) as writer:
            for _ in range(versions):
                published = writer.publish(next(snapshots)).result()
                changed += published.changed_elements / published.total_elements / versions
        rows = [_one_by_one(home, versions)]
        started = time.perf_counter()
        added = compact(open_store(home / "store"), spool=home)
        compacted = time.perf_counter() - started
        rows.append(_planned(home, "skips", 0, versions))
        route = anchor(open_store(home / "store"), versions, spool=home)
        assert route is not None
        rows.append(_planned(home, "anchor", None, versions))
        stored = sum(made.stored_bytes for made in added.routes)
    finally:
        shutil.rmtree(home)
    snapshot_bytes = 2 * elements
    title = f"{versions} versions behind: bf16, {size(snapshot_bytes)}, {changed:.2%} changed in each"
    targets = (
        Target("an anchor's share of its snapshot", 0.75, route.stored_bytes / snapshot_bytes, at_most=True),
        Target("objects read besides parts", 150, rows[1]["objects"], at_most=True),
    )
    notes = (
        f"The compaction made {len(added.routes)} skips of {size(stored)} together in {compacted:.1f} s.",
        f"The deltas store {size(rows[0]['stored_bytes'])}.",
    )
    return Report("routes", (Section("routes", title, _COLUMNS, rows),), targets, notes)


def _training(elements: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield bf16 snapshots of AdamW on float32 masters: gradients of noise round a direction that turns slowly."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(elements, generator=generator)

    master, trend = normal() * _DEVIATION, normal()
    first, second = torch.zeros(elements), torch.zeros(elements)
    step = 0
    while True:
        yield {"model.weight": master.bfloat16().view(-1, 1024)}
        step += 1
        trend.mul_(0.98).add_(normal(), alpha=math.sqrt(1 - 0.98**2))
        gradient = normal().add_(trend, alpha=0.3)
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = second.div(1 - 0.999**step).sqrt_()
        master.addcdiv_(first, scale, value=-_LEARNING_RATE / (1 - 0.9**step))


def _saved(directory: Path, snapshot: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(snapshot, directory / "model.safetensors")
    return directory


class _Counted:
    """A backend that counts the objects read that are no parts."""

    def __init__(self, store: Store) -> None:
        self._inner = store.backend
        self.objects = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read(self, key: str, *, limit: int) -> bytes:
        self.objects += not key.endswith(".safetensors")
        return self._inner.read(key, limit=limit)


def _planned(home: Path, way: str, start: int | None, end: int) -> Row:
    store = open_store(home / "store")
    backend = _Counted(store)
    store.backend = backend  # type: ignore[assignment]
    started = time.perf_counter()
    plan = store.plan(start, end)
    return _row(home, store, way, plan, time.perf_counter() - started, backend.objects)


def _one_by_one(home: Path, end: int) -> Row:
    store = open_store(home / "store")
    backend = _Counted(store)
    store.backend = backend  # type: ignore[assignment]
    started = time.perf_counter()
    plan = make_plan(0, end, store.manifests(range(end + 1)))
    return _row(home, store, "deltas", plan, time.perf_counter() - started, backend.objects)


def _row(home: Path, store: Store, way: str, plan: Plan, planned: float, objects: int) -> Row:
    workers = default_workers()
    source = identify(store, home / "base", workers=workers)
    spool = Spool(home / "spool")
    started = time.perf_counter()
    with Fetch(store, plan, spool) as fetch:
        replay(
            fetch,
            before=None if plan.from_anchor else source.digests,
            read=source.checkpoint.read,
            write=lambda *_: None,
            workers=workers,
        )
    built = time.perf_counter() - started
    shutil.rmtree(spool.directory)
    return {
        "way": way,
        "steps": len(plan.steps),
        "stored_bytes": plan.stored_bytes,
        "share": plan.stored_bytes / store.base.model.snapshot_bytes,
        "objects": objects,
        "plan_seconds": planned,
        "build_seconds": built,
    }
