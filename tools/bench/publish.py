"""``python -m tools.bench publish``: a state dict in memory becomes a committed version in a local store."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore import Writer

from .alternation import Alternation
from .limits import limits, limits_section
from .pairs import repeated, write_checkpoint
from .report import Column, Report, Section, Target, percent, rate, ratio, text, times
from .synthetic import make_pair, unchanged_pair
from .timing import gigabytes, medians
from .trained import trained_pairs
from .yardstick import YardstickWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .pairs import Pair
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_COLUMNS = (
    Column("data", "case", text),
    Column("threads", "threads", text),
    Column("changed", "changed", percent),
    Column("xor", "yardstick_seconds", times),
    Column("ours", "seconds", times),
    Column("GB/s", "gbps", rate),
    Column("ratio", "ratio", ratio),
    Column("stored", "stored_ratio", ratio),
    Column("encode", "encode", times),
    Column("upload", "upload", times),
    Column("commit", "commit", times),
    Column("advance", "advance", times),
)
_TILE = 256 << 20


def run(settings: Settings) -> Report:
    """Publish each case at one thread and at all cores, the yardstick in turn with it."""
    rows = [_measure(pair, threads, settings) for pair in _cases(settings) for threads in settings.threads]
    title = "Publish: from tensors in memory to a durable, committed version; stored is ours over the yardstick's"
    section = Section("publish", title, _COLUMNS, rows)
    usual = [row for row in rows if 0.005 < row["changed"] < 0.03]
    targets = [Target(f"publish, {row['case']}, {row['threads']} threads", 3.0, row["ratio"]) for row in usual]
    return Report("publish", (limits_section(limits(settings)), section), targets)


def _cases(settings: Settings) -> Iterator[Pair]:
    size = settings.model_bytes(512, 32)
    for kind, density in (("bf16", 0.01), ("bf16", 0.02), ("f32", 1.0)):
        yield repeated(make_pair(kind, density, min(size, _TILE)), size)
    yield repeated(unchanged_pair(min(size, _TILE)), size)
    if not settings.quick:
        yield from (repeated(pair, size) for pair in trained_pairs(settings))


def _measure(pair: Pair, threads: int, settings: Settings) -> Row:
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        base = write_checkpoint(home / "base", pair.schema, pair.old)
        yardstick = YardstickWriter(home / "yardstick", pair.schema, pair.old, threads=threads)
        forward = [True]
        stored = [0]

        def publish_yardstick() -> None:
            _, stored[0] = yardstick.publish(pair.new if forward[0] else pair.old)
            forward[0] = not forward[0]

        with Writer(home / "store", base=base, upload_base=False, workers=threads, spool=home) as writer:
            ours = Alternation(writer, pair)
            found = medians({"yardstick": publish_yardstick, "ours": ours.publish}, rounds=settings.rounds)
            last = ours.last
        yardstick.close()
    finally:
        shutil.rmtree(home)
    return {
        "case": pair.name,
        "source": pair.source,
        "threads": threads,
        "bytes": pair.nbytes,
        "changed": pair.changed(),
        "yardstick_seconds": found["yardstick"],
        "seconds": found["ours"],
        "gbps": gigabytes(pair.nbytes, found["ours"]),
        "ratio": found["yardstick"] / found["ours"],
        "stored_ratio": last.stored_bytes / stored[0],
        **{stage: last.timings[stage] for stage in ("encode", "upload", "commit", "advance")},
    }
