"""``python -m tools.chaos.races --rounds 10000``: races of eight creates on every backend, one winner each.

Four tenths of the rounds on the local disk, three in memory, three on a real S3 server, where half of the writers speak
s3fs and half obstore.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.cli.records import table
from deltastore.storage import close_backend, open_backend
from deltastore.testing.races import race_creates
from deltastore.testing.s3_server import s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

# The S3 server takes its time to turn losers away, and does so for many keys at once.
_ABREAST = {"local": 2, "memory": 2, "s3": 40}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races and print what came of them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos.races", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000, help="of all backends together (10000)")
    options = parser.parse_args(arguments)
    rows = []
    with ExitStack() as whole:
        scratch = whole.enter_context(tempfile.TemporaryDirectory(prefix="deltastore-races-"))
        server = whole.enter_context(s3_server(Path(scratch) / "server"))
        url = f"{server.url}/races"
        for name, share, stores in (
            ("local", 0.4, [(f"{scratch}/local", {})] * 2),
            ("memory", 0.3, [(f"memory://races-{uuid.uuid4().hex}", {})] * 2),
            ("s3", 0.3, [(url, {**server.storage_options, "client": client}) for client in ("s3fs", "obstore")]),
        ):
            rounds, started = round(options.rounds * share), time.monotonic()
            with ExitStack() as stack:
                backends = [open_backend(place, storage_options=given) for place, given in stores]
                for backend in backends:
                    stack.callback(close_backend, backend)
                races = race_creates(backends, rounds, abreast=_ABREAST[name], progress=_told(name, rounds))
            seconds = f"{time.monotonic() - started:.0f}"
            rows.append((name, f"{rounds:,}", f"{races.won:,}", f"{races.unknown:,}", seconds))
    sys.stdout.write(table(("backend", "races", "one winner", "winner unknown", "seconds"), rows) + "\n")
    return 0


def _told(name: str, rounds: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done % 500 == 0:
            sys.stderr.write(f"{name}: {done} of {rounds}\n")

    return progress


if __name__ == "__main__":
    sys.exit(main())
