"""``python -m tools.bench patch``: the receiver, from a store to a durable checkpoint, and how its stages overlap."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from .alternation import publish_chain
from .follower import Follower
from .limits import limits, limits_section
from .pairs import repeated, write_checkpoint
from .report import Column, Report, Section, Target, percent, rate, ratio, size, text, times
from .synthetic import make_pair
from .timing import gigabytes, medians, seconds
from .yardstick import YardstickReceiver, YardstickWriter

if TYPE_CHECKING:
    from .pairs import Pair
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_COLUMNS = (
    Column("data", "case", text),
    Column("threads", "threads", text),
    Column("changed", "changed", percent),
    Column("xor in place", "yardstick_seconds", times),
    Column("ours", "seconds", times),
    Column("GB/s", "gbps", rate),
    Column("ratio", "ratio", ratio),
    Column("plan", "plan", times),
    Column("fetch", "fetch", times),
    Column("patch", "patch", times),
    Column("swap", "swap", times),
)
_OVERLAP = (
    Column("case", "case", text),
    Column("link MB/s", "link_mbps", rate),
    Column("parts", "parts", text),
    Column("stored", "stored_bytes", size),
    Column("fetch alone", "fetch_seconds", times),
    Column("patch alone", "patch_seconds", times),
    Column("together", "seconds", times),
    Column("of the slower", "ratio", ratio),
)
_TILE = 256 << 20
#: How long the link takes for a delta, in times of patching alone.
_LINKS = {"fetch-bound": 2.0, "patch-bound": 0.5}


def run(settings: Settings) -> Report:
    """Measure whole patches against the yardstick's, then the overlap of fetching and patching."""
    rows = []
    nbytes = settings.model_bytes(512, 32)
    for kind, density in (("bf16", 0.01), ("bf16", 0.02), ("f32", 1.0)):
        pair = repeated(make_pair(kind, density, min(nbytes, _TILE)), nbytes)
        rows += [_measure(pair, threads, settings) for threads in settings.threads]
    title = "Patch: from a store in the page cache to a durable checkpoint (ours: another directory, then a swap)"
    overlap = _overlap(settings)
    targets = [Target(f"{row['case']} / slower stage alone", 1.15, row["ratio"], at_most=True) for row in overlap]
    sections = (
        limits_section(limits(settings)),
        Section("patch", title, _COLUMNS, rows),
        Section("overlap", "Overlap: fetching and patching against the slower of them alone", _OVERLAP, overlap),
    )
    return Report("patch", sections, targets)


def _measure(pair: Pair, threads: int, settings: Settings) -> Row:
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        publish_chain(home, pair, settings.rounds + 1)
        follower = Follower(home, threads=threads)
        yardstick = YardstickReceiver(write_checkpoint(home / "in-place", pair.schema, pair.old), threads=threads)
        versions = _yardstick_versions(home / "yardstick", pair)
        state = [0]

        def patch_in_place() -> None:
            # One delta leads both ways, but its checksum only one: two versions in turn.
            yardstick.patch(versions[state[0] % 2])
            state[0] += 1

        found = medians({"yardstick": patch_in_place, "ours": follower.advance}, rounds=settings.rounds)
        assert follower.last is not None
        stages = dict(follower.last.stages)
        follower.close()
        yardstick.close()
    finally:
        shutil.rmtree(home)
    return {
        "case": pair.name,
        "threads": threads,
        "bytes": pair.nbytes,
        "changed": pair.changed(),
        "yardstick_seconds": found["yardstick"],
        "seconds": found["ours"],
        "gbps": gigabytes(pair.nbytes, found["ours"]),
        "ratio": found["yardstick"] / found["ours"],
        **{stage: stages.get(stage, 0.0) for stage in ("plan", "fetch", "decode", "verify", "patch", "swap")},
    }


def _yardstick_versions(root: Path, pair: Pair) -> tuple[Path, Path]:
    writer = YardstickWriter(root, pair.schema, pair.old, threads=1)
    forward, _ = writer.publish(pair.new)
    backward, _ = writer.publish(pair.old)
    writer.close()
    return forward, backward


def _overlap(settings: Settings) -> list[Row]:
    """Bring a delta of many parts (f32, all changed) over a link slower, then faster, than patching it."""
    nbytes = settings.model_bytes(512, 32)
    pair = repeated(make_pair("f32", 1.0, min(nbytes, _TILE)), nbytes)
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    rounds = settings.rounds
    try:
        publish_chain(home, pair, 2 + len(_LINKS) * 2 * rounds)
        follower = Follower(home, threads=settings.threads[-1])
        for _ in range(2):
            alone = _patch_alone(follower)
        rows = [_linked(follower, name, alone * share, rounds) for name, share in _LINKS.items()]
        follower.close()
    finally:
        shutil.rmtree(home)
    return rows


def _patch_alone(follower: Follower) -> float:
    follower.link.bytes_per_second = None
    follower.fetch()
    return seconds(follower.advance)


def _linked(follower: Follower, name: str, carried_in: float, rounds: int) -> Row:
    """Take turns: fetch a version's parts only, patch with parts that are here, then both; each on a new version."""
    plan = follower.plan
    taken: dict[str, list[float]] = {"fetch": [], "patch": [], "both": []}
    for _ in range(rounds):
        taken["patch"].append(_patch_alone(follower))
        follower.link.bytes_per_second = plan.stored_bytes / carried_in
        taken["fetch"].append(seconds(follower.fetch))
        follower.forget()
        taken["both"].append(seconds(follower.advance))
    fetch, patch, both = (median(taken[stage]) for stage in ("fetch", "patch", "both"))
    return {
        "case": name,
        "link_mbps": plan.stored_bytes / carried_in / 1e6,
        "parts": sum(len(step.parts) for step in plan.steps),
        "stored_bytes": plan.stored_bytes,
        "fetch_seconds": fetch,
        "patch_seconds": patch,
        "seconds": both,
        "ratio": both / max(fetch, patch),
    }
