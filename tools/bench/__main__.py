"""``python -m tools.bench NAME``: measurements against what others use and against the machine's own limits."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from .settings import Settings, default_cache

BENCHES = ("codec", "publish", "patch", "memory", "scale", "tiny", "routes", "storage", "generation", "gpu")


def main(arguments: list[str] | None = None) -> int:
    """Run one bench; prints tables, or one JSON object."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="deltastore-bench-", dir=options.directory) as scratch:
        settings = Settings(
            directory=Path(scratch),
            cache=options.cache,
            quick=options.quick,
            rounds=options.rounds,
            mib=options.mib,
            sizes=tuple(options.sizes) if options.sizes else None,
            case=options.case,
        )
        report = import_module(f".{options.bench}", __package__).run(settings)
    print(json.dumps(report.record(settings)) if options.json else report.show(settings))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="small data and few cases: to see that it works")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that a median is of (7)")
    parser.add_argument("--mib", type=int, help="MiB of weights, instead of the bench's own size")
    parser.add_argument("--sizes", type=int, nargs="+", help="several sizes in MiB, for scale and memory")
    parser.add_argument("--case", default="", help="only data whose name contains this (codec)")
    parser.add_argument("--directory", type=Path, help="where scratch files go: a disk, not a memory file system")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where trained snapshots are kept")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
