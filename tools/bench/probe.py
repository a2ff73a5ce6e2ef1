"""``python -m tools.bench.probe writer|receiver HOME``: does one thing in a process of its own and prints its memory.

What is sampled is ``RssAnon``: memory that only this process can give back, without the pages of mapped files, which
the system drops when it needs the room.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore import Writer, open_checkpoint
from deltastore.patch import default_workers

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL = 0.002


def anonymous_bytes() -> int:
    """Return this process's anonymous memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def peak_of(work: Callable[[], object]) -> tuple[int, int]:
    """Run ``work``; return the anonymous memory before it, and the most while it ran."""
    before = peak = anonymous_bytes()
    finished = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not finished.wait(_INTERVAL):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        finished.set()
        sampler.join()
    return before, max(peak, anonymous_bytes())


def _write(home: Path) -> None:
    with Writer(home / "store", base=home / "checkpoint", upload_base=False, spool=home) as writer:
        writer.publish(open_checkpoint(home / "new")).result()


def _receive(home: Path) -> None:
    from .follower import Follower  # noqa: PLC0415 - the receiver, which a writer does without

    follower = Follower(home, threads=default_workers())
    follower.advance()
    follower.close()


def main() -> int:
    """Print one JSON object: bytes before and at the peak."""
    role, home = sys.argv[1:]
    before, peak = peak_of(lambda: {"writer": _write, "receiver": _receive}[role](Path(home)))
    print(json.dumps({"before": before, "peak": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
