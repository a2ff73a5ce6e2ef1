"""Encoding that follows: the same bytes as the chunk encoder's, and the old bytes are the new ones afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltastore.codec import LEVELS, Encoding
from deltastore.codec.chunk import ChunkDecoder, ChunkEncoder
from deltastore.codec.taking import TakingEncoder, take_tiny

WIDTHS = (1, 2, 4, 8)


@st.composite
def pairs(draw: st.DrawFn, most: int = 3000) -> tuple[int, np.ndarray, np.ndarray]:
    width = draw(st.sampled_from(WIDTHS))
    size = draw(st.integers(1, most))
    share = draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.24, 0.26, 0.6, 1]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 256, size * width, np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    chosen = rng.random(size) < share
    steps = rng.integers(-2, 3, size) if draw(st.booleans()) else rng.integers(-(1 << 62), 1 << 62, size)
    elements[chosen] += steps.astype(f"<i{width}").view(f"<u{width}")[chosen]
    return width, old, new


@given(st.lists(pairs(), min_size=1, max_size=4), st.sampled_from(sorted(LEVELS)))
def test_taking_encodes_as_the_chunk_encoder_does_and_follows(chunks: list[Any], level: str) -> None:
    taking = TakingEncoder(level)
    for width, old, new in chunks:  # one encoder: what it remembers of a chunk must not change the next one's bytes
        shadow = old.copy()
        expected = ChunkEncoder(level).change(old, new, width=width)
        found = taking.take(shadow, new.copy(), width=width)
        assert found == expected
        if found is None:
            assert shadow.tobytes() == old.tobytes()
            continue
        assert taking.kept.tobytes() == new.tobytes()
        if found.encoding == Encoding.FULL:
            assert shadow.tobytes() == old.tobytes()
            continue
        assert shadow.tobytes() == new.tobytes()
        payload = memoryview(found.payload)
        ChunkDecoder().apply(shadow, found.encoding, found.changed, payload, width=width, inverse=True)
        assert shadow.tobytes() == old.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("signs", ["random", "runs"])
def test_many_signs_are_told_apart_from_noise_and_lead_both_ways(width, signs):
    rng = np.random.default_rng(width)
    old = rng.integers(0, 1 << 7, 80_000 * width, np.uint8)
    values = old.view(f"<u{width}")
    new = old.copy()
    places = np.flatnonzero(rng.random(values.size) < 0.2)
    up = rng.random(places.size) < 0.5 if signs == "random" else np.arange(places.size) % 4096 < 2048
    steps = np.where(up, 1, -1).astype(f"<i{width}").view(f"<u{width}")
    new.view(f"<u{width}")[places] += steps
    shadow, out = old.copy(), old.copy()
    taken = TakingEncoder().take(shadow, new, width=width)
    assert (shadow == new).all()
    decoder = ChunkDecoder()
    for inverse, wanted in ((False, new), (True, old)):
        decoder.apply(out, taken.encoding, taken.changed, memoryview(taken.payload), width=width, inverse=inverse)
        assert (out == wanted).all()
    # Noise is stored as it is; runs are compressed.
    gaps = int.from_bytes(taken.payload[5:9], "little") if taken.payload[4] else 0
    method, stored = taken.payload[9 + gaps], int.from_bytes(taken.payload[10 + gaps : 14 + gaps], "little")
    raw = (places.size + 7) // 8
    assert (method, stored) == (1, raw) if signs == "random" else stored < raw / 4


def test_what_fails_while_it_is_packed_leaves_the_old_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(TakingEncoder, "_sparse", fail)
    old = np.arange(10_000, dtype=np.uint8)
    new = old.copy()
    new[[0, 700, 701, 9000]] += 3
    shadow = old.copy()
    with pytest.raises(MemoryError):
        TakingEncoder().take(shadow, new, width=2)
    assert shadow.tobytes() == old.tobytes()


def tiny_changes(cases: list[tuple[np.ndarray, np.ndarray]], width: int) -> None:
    """Take tensors in one batch and compare each with what a chunk encoder makes of it."""
    sizes = np.array([old.size for old, _ in cases], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    before = np.concatenate([old for old, _ in cases])
    shift = np.zeros(3 * width, np.uint8)
    after = np.concatenate([shift, *(new for _, new in cases)])
    shadow = before.copy()
    changed, ends, payloads = take_tiny(shadow, after, starts, starts + shift.size, sizes, width=width)
    assert len(payloads) == ends[-1]
    begin = 0
    for (old, new), start, count, end in zip(cases, starts, changed, ends, strict=True):
        now = shadow[start : start + old.size].tobytes()
        expected = ChunkEncoder().change(old, new, width=width)
        if count < 0:
            assert expected is not None
            assert (begin, now) == (end, old.tobytes())
        elif count == 0:
            assert expected is None
            assert (begin, now) == (end, old.tobytes())
        else:
            assert expected == (Encoding.SPARSE, count, payloads[begin:end])
            assert now == new.tobytes()
        begin = end


@given(st.sampled_from(WIDTHS), st.integers(0, 2**32 - 1), st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_a_batch_of_tiny_tensors_is_encoded_as_each_one_by_itself(width: int, seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    cases = []
    for size in sizes:
        old = rng.integers(0, 256, size * width, np.uint8)
        new = old.copy()
        count = min(size, int(rng.choice([0, 1, 2, 8, 9, 29, 33])))
        where = rng.choice(size, count, replace=False)
        steps = rng.integers(-3, 4, count) if rng.random() < 0.5 else rng.integers(-(1 << 62), 1 << 62, count)
        new.view(f"<u{width}")[where] += steps.astype(f"<i{width}").view(f"<u{width}")
        cases.append((old, new))
    tiny_changes(cases, width)


@given(st.sampled_from(WIDTHS), st.lists(st.integers(0, 8000), min_size=1, max_size=40, unique=True))
@example(2, [0])
@example(2, [254])
@example(2, [255])
@example(2, [256, 511, 767])
@example(2, list(range(31)))
@example(2, list(range(32)))
@example(1, [31 * 255 - 1])
@example(1, [30 * 255])
def test_gaps_of_every_length_are_those_of_the_chunk_encoder(width: int, places: list[int]) -> None:
    old = np.zeros(8192 * width, np.uint8)
    new = old.copy()
    new.view(f"<u{width}")[places] = 1
    tiny_changes([(old, old), (old, new), (new, old)], width)
