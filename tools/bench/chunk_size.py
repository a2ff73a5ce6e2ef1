"""``python -m tools.bench.chunk_size``: what the chunk grid costs, in bytes and in time, for 1, 2 and 4 MiB."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from xxhash import xxh3_128_digest

from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder, warm_up

_BYTES = 64 << 20
_ROUNDS = 7


def _snapshots(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return two bf16 snapshots of one float32 master, a step of ``scale`` apart, as bytes."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(_BYTES // 2, generator=generator) * 0.02
    step = torch.randn(_BYTES // 2, generator=generator) * scale
    old, new = (weights.bfloat16().view(torch.uint8).numpy() for weights in (master, master + step))
    return old, new


def _measure(old: np.ndarray, new: np.ndarray, size: int) -> tuple[int, float, float]:
    encoder, decoder = ChunkEncoder(), ChunkDecoder()
    buffer = np.empty(size, np.uint8)
    encode_times, apply_times, stored = [], [], 0
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        chunks = []
        for start in range(0, _BYTES, size):
            np.copyto(buffer, new[start : start + size])
            encoded = encoder.change(old[start : start + size], buffer, width=2)
            assert encoded is not None
            xxh3_128_digest(buffer.data)
            chunks.append(encoded)
        encode_times.append(time.perf_counter() - started)
        stored = sum(len(encoded.payload) for encoded in chunks)
        started = time.perf_counter()
        for number, encoded in enumerate(chunks):
            np.copyto(buffer, old[number * size : (number + 1) * size])
            payload = memoryview(encoded.payload)
            decoder.apply(buffer, encoded.encoding, encoded.changed, payload, width=2)
            xxh3_128_digest(buffer.data)
        apply_times.append(time.perf_counter() - started)
    return stored, _BYTES / statistics.median(encode_times) / 1e9, _BYTES / statistics.median(apply_times) / 1e9


def main() -> None:
    """Print a table: stored bytes and one core's speed, relative to 1 MiB."""
    warm_up([2])
    print("changed   chunk   stored      ratio   encode      ratio   apply       ratio")
    for scale in (2e-7, 6e-7, 3e-6):
        old, new = _snapshots(scale)
        changed = float((old.view(np.uint16) != new.view(np.uint16)).mean())
        base: tuple[int, float, float] | None = None
        for mebibytes in (1, 2, 4):
            figures = _measure(old, new, mebibytes << 20)
            base = base or figures
            stored, encode, apply = figures
            print(
                f"{changed:7.2%} {mebibytes:3} MiB {stored:10,} {stored / base[0]:7.4f}"
                f" {encode:7.2f} GB/s {encode / base[1]:6.2f} {apply:7.2f} GB/s {apply / base[2]:6.2f}"
            )


if __name__ == "__main__":
    main()
