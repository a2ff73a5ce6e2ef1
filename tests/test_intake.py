"""Taking a snapshot in: how much a thread is handed at a time, and what the attempt is told to expect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deltastore.codec import EncodedChunk, Encoding
from deltastore.intake import Intake
from deltastore.part import ChunkRow
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec
from deltastore.tensors import TensorInput

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
CHUNKS = 400
SCHEMA = Schema((TensorSpec("weight", "U8", (CHUNKS * CHUNK_BYTES,)),))


class Recorder:
    """Stands for the shadow and for the attempt: each chunk comes to a share of it."""

    def __init__(self, share: Callable[[int], float]) -> None:
        self.digests = np.zeros((CHUNKS, 16), np.uint8)
        self.tiny = np.zeros(1, bool)
        self.batches: list[int] = []
        self.expected: list[float] = []
        self._share = share

    def encode(self, runs: list[tuple[int, Any, int, int]], _tiny: None) -> list[ChunkRow]:
        [(position, _, first, end)] = runs
        self.batches.append((end - first) * CHUNK_BYTES)
        payloads = {chunk: bytes(int(self._share(chunk) * CHUNK_BYTES)) for chunk in range(first, end)}
        return [
            ChunkRow(position, chunk, EncodedChunk(Encoding.FULL, 1, payload), bytes(16), bytes(16))
            for chunk, payload in payloads.items()
            if payload
        ]

    def add(self, _rows: list[ChunkRow], *, expected: float) -> None:
        self.expected.append(expected)


def take_in(share: Callable[[int], float], *, workers: int) -> Recorder:
    recorder: Any = Recorder(share)
    with ThreadPoolExecutor(1) as pool:
        taking = Intake(SCHEMA, recorder, recorder, pool=pool, workers=workers)
        taking.take([TensorInput(SCHEMA.tensors[0], lambda start, end: np.empty(end - start, np.uint8))], reusable=True)
    assert sum(recorder.batches) == CHUNKS * CHUNK_BYTES
    return recorder


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_large_where_little_changes(workers: int) -> None:
    little = take_in(lambda _: 0.02, workers=workers).batches
    much = take_in(lambda _: 0.8, workers=workers).batches
    assert little[0] == much[0] == 2 * CHUNK_BYTES
    assert max(little) == 32 * MIB
    assert max(much[4:]) <= 32 * MIB / (workers + 1) / 0.8 + CHUNK_BYTES


def test_batches_follow_what_the_last_ones_came_to() -> None:
    batches = take_in(lambda chunk: 0.8 if chunk > CHUNKS // 2 else 0.0, workers=2).batches
    assert max(batches) == 32 * MIB
    last = batches[-8:]
    assert max(last) < 32 * MIB


def test_the_attempt_hears_what_is_still_to_come() -> None:
    expected = take_in(lambda _: 0.1, workers=2).expected
    assert expected == sorted(expected, reverse=True)
    assert expected[0] == pytest.approx((CHUNKS - 2) * 0.1 * CHUNK_BYTES, rel=0.01)
    assert expected[-1] == 0
