"""``python -m tools.bench codec``: encode and apply in one process, against the yardstick and the machine's limits."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltastore.codec.chunk import warm_up
from deltastore.codec.kernels import BLOCK
from deltastore.codec.taking import take_changes, warm_up_taking
from deltastore.memory import aligned_copy
from deltastore.snapshot import CHUNK_BYTES

from .contenders import Files, Ours, Yardstick
from .crew import Crew
from .limits import Machine, limits_section
from .pairs import repeated
from .report import Column, Report, Section, Target, percent, rate, ratio, text
from .synthetic import DENSITIES, KINDS, make_pair, unchanged_pair
from .timing import gigabytes, medians
from .trained import trained_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .pairs import Pair
    from .report import Row
    from .settings import Settings

__all__ = ["run"]

LEVELS = ("fast", "max")
#: Up to this share changed, snapshots are larger: a pass over the usual ones takes a few milliseconds.
_FEW = 0.02
#: What bounds all cores together.
_LIMITS = {"encode": "two_stream_read_all", "apply": "file_copy_all"}

_COLUMNS = (
    Column("data", "case", text),
    Column("threads", "threads", text),
    Column("changed", "changed", percent),
    Column("limit", "limit_encode_gbps", rate),
    Column("xor GB/s", "yardstick_encode_gbps", rate),
    Column("fast GB/s", "fast_encode_gbps", rate),
    Column("fast", "fast_encode_ratio", ratio),
    Column("max", "max_encode_ratio", ratio),
    Column("xor stored", "yardstick_stored", percent),
    Column("fast", "fast_stored_ratio", ratio),
    Column("max", "max_stored_ratio", ratio),
    Column("limit", "limit_apply_gbps", rate),
    Column("xor apply", "yardstick_apply_gbps", rate),
    Column("fast GB/s", "fast_apply_gbps", rate),
    Column("fast", "fast_apply_ratio", ratio),
    Column("max", "max_apply_ratio", ratio),
)


def run(settings: Settings) -> Report:
    """Measure every case at one thread and at all cores."""
    warm_up([1, 2, 4])
    warm_up_taking([1, 2, 4])
    with Machine(settings) as machine:
        found = machine.measure()
        rows = [row for pair in _cases(settings) for row in _measure(pair, machine, settings)]
    table = Section("codec", "Encode, stored bytes, and apply; ratios are to the yardstick", _COLUMNS, rows)
    kernel = _kernel(settings) / found["two_stream_read"]
    return Report("codec", (limits_section(found), table), tuple(_targets(rows, found, kernel)))


def _cases(settings: Settings) -> Iterator[Pair]:
    usual, large = settings.model_bytes(128, 16), settings.model_bytes(512, 16)
    quick = {("bf16", 0.01), ("bf16", 0.02), ("f32", 1.0), ("fp8", 0.01), ("int4", 0.01), ("nvfp4", 0.01)}
    for kind in KINDS:
        for density in DENSITIES:
            if settings.case in f"{kind} {density:.1%}" and (not settings.quick or (kind, density) in quick):
                yield make_pair(kind, density, large if density <= _FEW else usual)
    if settings.case in "bf16 unchanged":
        yield unchanged_pair(large)
    if settings.case in "trained":
        for pair in trained_pairs(settings):
            yield repeated(pair, large)


def _measure(pair: Pair, machine: Machine, settings: Settings) -> list[Row]:
    """Measure both codecs with every number of threads, and what bounds them, all in turn."""
    with ExitStack() as stack:
        crews = [stack.enter_context(Crew(threads)) for threads in settings.threads]
        yardsticks = [Yardstick(pair, crew) for crew in crews]
        ours = [{level: Ours(pair, level, crew) for level in LEVELS} for crew in crews]
        contenders = {("limit", 0): machine.calls[_LIMITS["encode"]]}
        for place, yardstick in enumerate(yardsticks):
            contenders["yardstick", place] = yardstick.encode
            contenders |= {(level, place): codec.encode for level, codec in ours[place].items()}
        encode = medians(contenders, rounds=settings.rounds)
        apply = _apply(pair, yardsticks, ours, machine, settings)
    changed = pair.changed()
    rows = []
    for place, threads in enumerate(settings.threads):
        row: Row = {"case": pair.name, "source": pair.source, "threads": threads, "bytes": pair.nbytes}
        row |= {"changed": changed, "yardstick_stored": yardsticks[place].stored_bytes / pair.nbytes}
        for what, taken in (("encode", encode), ("apply", apply)):
            row[f"limit_{what}_gbps"] = machine.gbps(_LIMITS[what], taken["limit", 0])
            row[f"yardstick_{what}_gbps"] = gigabytes(pair.nbytes, taken["yardstick", place])
            for level in LEVELS:
                row[f"{level}_{what}_gbps"] = gigabytes(pair.nbytes, taken[level, place])
                row[f"{level}_{what}_ratio"] = taken["yardstick", place] / taken[level, place]
        for level, codec in ours[place].items():
            row[f"{level}_stored"] = codec.stored_bytes / pair.nbytes
            row[f"{level}_stored_ratio"] = codec.stored_bytes / yardsticks[place].stored_bytes
        rows.append(row)
    return rows


def _apply(
    pair: Pair, yardsticks: list[Yardstick], ours: list[dict[str, Ours]], machine: Machine, settings: Settings
) -> dict[tuple[str, int], float]:
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    try:
        in_place, *others = (Files(home / name, pair, files=max(settings.threads)) for name in ("yardstick", *LEVELS))
        contenders: dict[tuple[str, int], Callable[[], object]] = {("limit", 0): machine.calls[_LIMITS["apply"]]}
        for place, yardstick in enumerate(yardsticks):
            yardstick.prepare()
            contenders["yardstick", place] = partial(yardstick.apply, in_place)
            for level, files in zip(LEVELS, others, strict=True):
                ours[place][level].prepare()
                contenders[level, place] = partial(ours[place][level].apply, files)
        found = medians(contenders, rounds=settings.rounds)
        assert in_place.is_in_place(pair)
        assert all(files.is_new(pair) for files in others)
        return found
    finally:
        shutil.rmtree(home)


def _kernel(settings: Settings) -> float:
    """Return GB/s of a writer's comparison kernel over chunks of bf16 that changed by 1.5 %.

    It lists positions and differences, and leaves the old bytes the new ones: it goes back and forth between the two.
    """
    pair = make_pair("bf16", 0.015, settings.model_bytes(256, 16))
    most = CHUNK_BYTES // 2
    positions, differences = np.empty(most // 4 + BLOCK + 4, np.int32), np.empty(most // 4 + BLOCK, "<u2")
    shadow = [aligned_copy(pair.old[spec.name]).view("<u2") for spec in pair.schema]
    ways = [[given[spec.name].view("<u2") for spec in pair.schema] for given in (pair.new, pair.old)]

    def scan() -> None:
        for old, new in zip(shadow, ways[0], strict=True):
            for start in range(0, old.size, most):
                mine = slice(start, start + most)
                assert take_changes(old[mine], new[mine], most // 4, positions, differences, True) > 0
        ways.reverse()

    return gigabytes(pair.nbytes, medians({"scan": scan}, rounds=settings.rounds)["scan"])


def _targets(rows: list[Row], found: dict[str, float], kernel: float) -> Iterator[Target]:
    """Compare with the figures of the plan; for several cases the worst one counts."""
    one = [row for row in rows if row["threads"] == 1]
    few = [row for row in one if 0.009 < row["changed"] < 0.025]
    usual = [row for row in few if row["case"].startswith("bf16")]
    trained = [row for row in one if row["source"] == "trained"]
    dense = [row for row in one if row["case"] == "f32 100.0%"]
    same = [row for row in one if row["case"] == "bf16 unchanged"]
    yield Target("comparison kernel / two-stream read", 0.5, kernel)
    for name, chosen in (("bf16 1-2 %", usual), ("trained 1-2 %", [row for row in few if row in trained])):
        if chosen:
            yield Target(f"encode, fast, {name}", 3.5, min(row["fast_encode_ratio"] for row in chosen))
            yield Target(f"encode, max, {name}", 1.0, min(row["max_encode_ratio"] for row in chosen))
            yield Target(f"apply, fast, {name}", 2.5, min(row["fast_apply_ratio"] for row in chosen))
    if trained:
        yield Target("stored, fast, trained", 0.50, max(row["fast_stored_ratio"] for row in trained), at_most=True)
        yield Target("stored, max, trained", 0.40, max(row["max_stored_ratio"] for row in trained), at_most=True)
    if dense:
        yield Target("encode, fast, f32 all changed", 0.8, min(row["fast_encode_ratio"] for row in dense))
        yield Target("apply, fast, f32 all changed", 0.8, min(row["fast_apply_ratio"] for row in dense))
        yield Target("stored, fast, f32 all changed", 1.0, dense[0]["fast_stored_ratio"], at_most=True)
    if same:
        yield Target("unchanged / two-stream read", 0.8, same[0]["fast_encode_gbps"] / found["two_stream_read"])
    yield from _scaling(rows)


def _scaling(rows: list[Row]) -> Iterator[Target]:
    """All cores against one: 1.7 times, or 80 % of what all of them can do with the memory, whichever is less.

    Encoding reads two streams; applying reads, hashes and writes files in the page cache. Both limits are measured in
    turn with what they bound.
    """
    pairs = {(row["case"], row["threads"]): row for row in rows}
    most = max(row["threads"] for row in rows) if rows else 1
    cases = [row["case"] for row in rows if row["threads"] == 1 and 0.009 < row["changed"] < 0.025]
    for case in cases if most > 1 else ():
        one, all_cores = pairs[case, 1], pairs[case, most]
        for what in _LIMITS:
            key = f"fast_{what}_gbps"
            wanted = min(1.7, 0.8 * all_cores[f"limit_{what}_gbps"] / one[key])
            yield Target(f"{what}, all cores / one, {case}", wanted, all_cores[key] / one[key])
