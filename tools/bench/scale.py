"""``python -m tools.bench scale``: what publish and patch cost from 64 MiB to 8 GiB of weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore import Writer

from .alternation import Alternation
from .follower import Follower
from .pairs import repeated, write_checkpoint
from .report import Column, Report, Section, Target, rate, ratio, size, times
from .synthetic import make_pair
from .timing import gigabytes, medians

if TYPE_CHECKING:
    from .pairs import Pair
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_COLUMNS = (
    Column("weights", "bytes", size),
    Column("tensors", "tensors", str),
    Column("publish", "publish_seconds", times),
    Column("GB/s", "publish_gbps", rate),
    Column("cost a byte", "publish_relative", ratio),
    Column("patch", "patch_seconds", times),
    Column("GB/s", "patch_gbps", rate),
    Column("cost a byte", "patch_relative", ratio),
)
_TILE = 256 << 20
#: The smallest size that the others are compared with: below it, fixed costs (files, fsync) are in the picture.
_REFERENCE = 256 << 20


def run(settings: Settings) -> Report:
    """Measure each size; the cost a byte is relative to that at 256 MiB (or the largest below)."""
    sizes = settings.model_sizes((64, 256, 1024, 4096, 8192), (64, 256, 1024))
    rows = [_measure(repeated(make_pair("bf16", 0.015, min(nbytes, _TILE)), nbytes), settings) for nbytes in sizes]
    reference = max((row for row in rows if row["bytes"] <= _REFERENCE), key=lambda row: row["bytes"], default=rows[0])
    for row in rows:
        for what in ("publish", "patch"):
            row[f"{what}_relative"] = reference[f"{what}_gbps"] / row[f"{what}_gbps"]
    title = "Scale: bf16, 1.5 % changed, all cores; the cost of a byte relative to 256 MiB"
    largest = rows[-1]
    targets = [
        Target(f"{what}, cost of a byte at {size(largest['bytes'])}", 1.25, largest[f"{what}_relative"], at_most=True)
        for what in ("publish", "patch")
    ]
    return Report("scale", (Section("scale", title, _COLUMNS, rows),), targets)


def _measure(pair: Pair, settings: Settings) -> Row:
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
    return {
        "bytes": pair.nbytes,
        "tensors": len(pair.schema),
        "publish_seconds": publish,
        "publish_gbps": gigabytes(pair.nbytes, publish),
        "patch_seconds": patch,
        "patch_gbps": gigabytes(pair.nbytes, patch),
    }
