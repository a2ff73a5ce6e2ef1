"""``python -m tools.bench publish``: a state dict in memory becomes a committed version in a local store.

Both sides do the whole of it, durably: they encode, write files and wait for the disk (a file's own bytes, then its
directory's entry), and bring their copy of the last version up to date.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from deltastore import Writer
from deltastore.storage import open_backend

from .alternation import Alternation
from .follower import SlowBackend
from .limits import limits, limits_section
from .pairs import repeated, write_checkpoint
from .report import Column, Report, Section, Target, percent, rate, ratio, size, text, times
from .synthetic import make_pair, unchanged_pair
from .timing import gigabytes, medians
from .trained import trained_pairs
from .yardstick import YardstickWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage import Backend, Buffer

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
_OVERLAP = (
    Column("case", "case", text),
    Column("link MB/s", "link_mbps", rate),
    Column("parts", "parts", text),
    Column("stored", "stored_bytes", size),
    Column("upload alone", "upload_seconds", times),
    Column("encode alone", "encode_seconds", times),
    Column("together", "seconds", times),
    Column("of the slower", "ratio", ratio),
)
_TILE = 256 << 20
#: How long the link takes for a delta, in times of publishing without one.
_LINKS = {"upload-bound": 2.0, "encode-bound": 0.5}


def run(settings: Settings) -> Report:
    """Publish each case at one thread and at all cores, the yardstick in turn with it."""
    rows = [_measure(pair, threads, settings) for pair in _cases(settings) for threads in settings.threads]
    title = "Publish: from tensors in memory to a durable, committed version; stored is ours over the yardstick's"
    section = Section("publish", title, _COLUMNS, rows)
    usual = [row for row in rows if 0.005 < row["changed"] < 0.03]
    targets = [Target(f"publish, {row['case']}, {row['threads']} threads", 3.0, row["ratio"]) for row in usual]
    overlap = _overlap(settings)
    targets += [Target(f"{row['case']} / slower stage alone", 1.15, row["ratio"], at_most=True) for row in overlap]
    what = "Overlap: encoding and uploading against the slower of them alone (bf16, 2 % changed, all cores)"
    sections = (limits_section(limits(settings)), section, Section("overlap", what, _OVERLAP, overlap))
    return Report("publish", sections, targets)


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


class _Uplink(SlowBackend):
    """A backend whose uploads share a link that carries ``rate`` bytes a second."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.rate = math.inf

    def write(self, key: str, data: Buffer) -> None:
        """Write an object; returns when its last byte would have gone over the link."""
        self._inner.write(key, data)
        with self._lock:
            arrival = self._free_at = max(time.monotonic(), self._free_at) + len(data) / self.rate
        time.sleep(max(0.0, arrival - time.monotonic()))


def _overlap(settings: Settings) -> list[Row]:
    """Publish over no link and over two in turn: one slower, one faster than encoding."""
    nbytes = settings.model_bytes(2048, 32)
    pair = repeated(make_pair("bf16", 0.02, min(nbytes, _TILE)), nbytes)
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    link = _Uplink(open_backend(str(home / "store")))
    try:
        base = write_checkpoint(home / "base", pair.schema, pair.old)
        with mock.patch("deltastore.writer.open_backend", return_value=link):
            writer = Writer(home / "store", base=base, upload_base=False, spool=home)
        with writer:
            chain = Alternation(writer, pair)
            chain.publish()
            free = min(chain.publish().timings["total"] for _ in range(3))
            stored, parts = chain.last.stored_bytes, len(writer.head.model.parts)
            rates = {name: stored / (free * share) for name, share in _LINKS.items()}

            def publish(rate: float) -> None:
                link.rate = rate
                chain.publish()

            contenders = {name: partial(publish, rate) for name, rate in {"free": math.inf, **rates}.items()}
            found = medians(contenders, rounds=settings.rounds, warm=False)
    finally:
        shutil.rmtree(home)
    return [
        {
            "case": name,
            "link_mbps": rate / 1e6,
            "parts": parts,
            "stored_bytes": stored,
            "upload_seconds": stored / rate,
            "encode_seconds": found["free"],
            "seconds": found[name],
            "ratio": found[name] / max(stored / rate, found["free"]),
        }
        for name, rate in rates.items()
    ]
