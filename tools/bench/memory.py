"""``python -m tools.bench memory``: a writer's anonymous memory beyond its shadow, and a receiver's, by model size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .pairs import repeated, write_checkpoint
from .report import Column, Report, Section, Target, size, text
from .synthetic import make_pair

if TYPE_CHECKING:
    from .pairs import Pair
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_COLUMNS = (
    Column("data", "case", text),
    Column("model", "bytes", size),
    Column("writer's peak", "writer_peak", size),
    Column("beyond the shadow", "writer_extra", size),
    Column("receiver's peak", "receiver_peak", size),
)
_TILE = 256 << 20
_WRITER_LIMIT = 256 << 20
_RECEIVER_LIMIT = 512 << 20


def run(settings: Settings) -> Report:
    """Publish and receive one version at each size, each in a process of its own."""
    sizes = settings.model_sizes((256, 1024, 4096, 8192), (32, 128))
    rows = []
    for nbytes in sizes:
        rows.append(_measure(repeated(make_pair("bf16", 0.02, min(nbytes, _TILE)), nbytes), settings))
        if nbytes <= sizes[len(sizes) // 2 - 1]:
            # Everything changed: as much is stored as there are weights, so only the smaller ones.
            rows.append(_measure(repeated(make_pair("f32", 1.0, min(nbytes, _TILE)), nbytes), settings))
    title = "Anonymous memory (peak of RssAnon, interpreter and libraries included); the writer reads mapped files"
    mib = 1 << 20
    targets = (
        Target(
            "writer beyond its shadow, MiB",
            _WRITER_LIMIT / mib,
            max(row["writer_extra"] for row in rows) / mib,
            at_most=True,
        ),
        Target("receiver, MiB", _RECEIVER_LIMIT / mib, max(row["receiver_peak"] for row in rows) / mib, at_most=True),
    )
    return Report("memory", (Section("memory", title, _COLUMNS, rows),), targets)


def _measure(pair: Pair, settings: Settings) -> Row:
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        write_checkpoint(home / "checkpoint", pair.schema, pair.old)
        write_checkpoint(home / "new", pair.schema, pair.new)
        writer = _probe("writer", home)
        shutil.rmtree(home / "new")
        receiver = _probe("receiver", home)
    finally:
        shutil.rmtree(home)
    return {
        "case": pair.name,
        "bytes": pair.nbytes,
        "writer_before": writer["before"],
        "writer_peak": writer["peak"],
        "writer_extra": writer["peak"] - pair.nbytes,
        "receiver_before": receiver["before"],
        "receiver_peak": receiver["peak"],
    }


def _probe(role: str, home: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tools.bench.probe", role, str(home)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found
