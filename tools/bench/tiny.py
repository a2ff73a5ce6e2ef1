"""``python -m tools.bench tiny``: what a tensor costs beyond its bytes, on 60,000 small ones."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltastore import Writer
from deltastore.snapshot import Schema, TensorSpec

from .alternation import Alternation
from .follower import Follower
from .pairs import Pair, write_checkpoint
from .report import Column, Report, Section, Target, size, text, times
from .synthetic import make_pair
from .timing import medians

if TYPE_CHECKING:
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_TENSORS = 60_000
_QUICK_TENSORS = 3_000
_LARGEST = 4096

_COLUMNS = (
    Column("tensors", "tensors", text),
    Column("bytes", "bytes", size),
    Column("publish", "publish_seconds", times),
    Column("same bytes, large", "publish_large_seconds", times),
    Column("us a tensor", "publish_us", lambda value: f"{value:.1f}"),
    Column("patch", "patch_seconds", times),
    Column("same bytes, large", "patch_large_seconds", times),
    Column("us a tensor", "patch_us", lambda value: f"{value:.1f}"),
)


def run(settings: Settings) -> Report:
    """Publish and patch many tiny tensors, and the same bytes in few large ones."""
    count = settings.mib * 1000 if settings.mib else _QUICK_TENSORS if settings.quick else _TENSORS
    tiny = _tiny_pair(count)
    publish, patch = _measure(tiny, settings)
    large_publish, large_patch = _measure(make_pair("bf16", 0.015, tiny.nbytes), settings)
    row: Row = {
        "tensors": count,
        "bytes": tiny.nbytes,
        "changed": tiny.changed(),
        "publish_seconds": publish,
        "publish_large_seconds": large_publish,
        "publish_us": (publish - large_publish) / count * 1e6,
        "patch_seconds": patch,
        "patch_large_seconds": large_patch,
        "patch_us": (patch - large_patch) / count * 1e6,
    }
    title = "Tiny tensors: bf16, 1 to 4096 elements, 1.5 % changed, all cores"
    targets = (
        Target("publish, us a tensor beyond its bytes", 20, row["publish_us"], at_most=True),
        Target("patch, us a tensor beyond its bytes", 20, row["patch_us"], at_most=True),
    )
    return Report("tiny", (Section("tiny", title, _COLUMNS, [row]),), targets)


def _tiny_pair(count: int) -> Pair:
    """Cut one long pair into tensors whose sizes are as evenly spread over the orders of magnitude as norms are."""
    random = np.random.default_rng(0)
    elements = np.exp(random.uniform(0, np.log(_LARGEST + 1), count)).astype(np.int64).clip(1, _LARGEST)
    ends = np.cumsum(elements) * 2
    source = make_pair("bf16", 0.015, int(ends[-1]) + (16 << 20))
    old, new = (np.concatenate([side[spec.name] for spec in source.schema]) for side in (source.old, source.new))
    specs, olds, news = [], {}, {}
    for number, (end, length) in enumerate(zip(ends.tolist(), elements.tolist(), strict=True)):
        name = f"model.layers.{number // 1000}.experts.{number % 1000}.norm.weight"
        specs.append(TensorSpec(name, "BF16", (length,)))
        olds[name], news[name] = old[end - 2 * length : end], new[end - 2 * length : end]
    return Pair("tiny", "synthetic", Schema(specs), olds, news)


def _measure(pair: Pair, settings: Settings) -> tuple[float, float]:
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        base = write_checkpoint(home / "checkpoint", pair.schema, pair.old)
        with Writer(home / "store", base=base, upload_base=False, spool=home) as writer:
            publish = medians({"publish": Alternation(writer, pair).publish}, rounds=settings.rounds)["publish"]
        follower = Follower(home, threads=settings.threads[-1])
        patch = medians({"patch": follower.advance}, rounds=settings.rounds)["patch"]
        follower.close()
    finally:
        shutil.rmtree(home)
    return publish, patch
