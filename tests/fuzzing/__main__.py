"""``make fuzz``."""

from __future__ import annotations

import argparse
import time
import tracemalloc

import fuzzing
from fuzzing.run import DECODERS, fuzz, peak_memory


def main() -> None:
    """Fuzz every decoder and print what became of it."""
    parser = argparse.ArgumentParser(description=fuzzing.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10_000_000, help="bytes for each decoder")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="only decoders whose name contains this")
    options = parser.parse_args()
    decoders = [decoder for decoder in DECODERS if options.only in decoder.name]
    for decoder in decoders:
        fuzz(decoder, 20_000, seed=0)  # compiles kernels, fills caches
    tracemalloc.start()
    print(f"seed {options.seed}; {options.bytes:,} bytes for each of {len(decoders)} decoders")
    before, total = peak_memory(), 0
    for decoder in decoders:
        outcome = fuzz(decoder, options.bytes, seed=options.seed)
        total += outcome.fed
        print(
            f"{outcome.name:18} {outcome.fed:12,} bytes {outcome.cases:9,} cases"
            f" {outcome.accepted / outcome.cases:7.2%} accepted {outcome.seconds:7.1f} s",
            flush=True,
        )
    print(f"{total:,} bytes: errors of ours or correct results; memory grew by {(peak_memory() - before) >> 20} MiB")


main()
