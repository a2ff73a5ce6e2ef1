"""Encoding that follows: the same bytes as the chunk encoder's, and the old bytes are the new ones afterwards."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from deltastore.codec import LEVELS, EncodedChunk, Encoding
from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder
from deltastore.codec.streams import StreamWriter
from deltastore.codec.taking import Spans, Taken, TakingEncoder, give_back

WIDTHS = (1, 2, 4, 8)


@st.composite
def pairs(draw: st.DrawFn, most: int = 3000, width: int | None = None) -> tuple[int, np.ndarray, np.ndarray]:
    width = width or draw(st.sampled_from(WIDTHS))
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

    monkeypatch.setattr(StreamWriter, "write", fail)
    old = np.arange(10_000, dtype=np.uint8)
    new = old.copy()
    new[[0, 700, 701, 9000]] += 3
    shadow = old.copy()
    with pytest.raises(MemoryError):
        TakingEncoder().take(shadow, new, width=2)
    assert shadow.tobytes() == old.tobytes()


def spans_of(cases: list[tuple[np.ndarray, np.ndarray]], width: int, *, apart: int) -> tuple[Spans, np.ndarray]:
    """Lay old bytes one behind the other, and new ones so many elements apart; returns the new ones' memory, too."""
    table, start, place = [], 0, apart * width
    after = np.zeros(sum(new.size + apart * width for _, new in cases) + width, np.uint8)
    for old, new in cases:
        table.append((start, after.ctypes.data + place, old.size))
        after[place : place + new.size] = new
        start += old.size
        place += new.size + apart * width
    return Spans(
        np.concatenate([old for old, _ in cases]), np.array(table, np.int64), width, max(old.size for old, _ in cases)
    ), after


def rows_of(spans: Spans, taken: Taken) -> list[tuple[EncodedChunk, bytes, bytes]]:
    """Return the encoding, the digest, and the bytes as they are now, of each span."""
    rows, begin = [], 0
    assert taken.digests is not None
    for index, (count, end) in enumerate(zip(taken.changed.tolist(), taken.ends.tolist(), strict=True)):
        start, _, size = spans.table[taken.first + index].tolist()
        now = spans.old[start : start + size].tobytes()
        encoded = EncodedChunk(taken.encoding(count), count, taken.payloads[begin:end].tobytes())
        rows.append((encoded, taken.digests[index].tobytes(), now))
        begin = end
    return rows


def check_spans(cases: list[tuple[np.ndarray, np.ndarray]], width: int, level: str = "fast", apart: int = 3) -> None:
    """Take spans together and compare each with what a chunk encoder makes of it; then give them back."""
    spans, after = spans_of(cases, width, apart=apart)
    taking = TakingEncoder(level, "xxh3-128")
    rows = [row for taken in taking.take_spans(spans) for row in rows_of(spans, taken)]
    assert len(rows) == len(cases)
    for (old, new), (found, digest, now) in zip(cases, rows, strict=True):
        expected = ChunkEncoder(level).change(old, new, width=width)
        if found.changed < 0:
            assert expected is not None
            few = (Encoding.SPARSE, Encoding.CONTEXTUAL)
            assert expected.encoding not in few or expected.changed * 5 > old.size // width
            assert (found.payload, now) == (b"", old.tobytes())
        elif found.changed == 0:
            assert expected is None
            assert (found.payload, now) == (b"", old.tobytes())
        else:
            assert expected == found
            assert now == new.tobytes()
            assert digest == xxh3_128_digest(new)
    again, kept = spans_of(cases, width, apart=apart)
    for taken in taking.take_spans(again):
        give_back(again, taken, ChunkDecoder())
    assert again.old.tobytes() == b"".join(old.tobytes() for old, _ in cases)
    assert kept.tobytes() == after.tobytes()


@given(
    st.sampled_from(WIDTHS),
    st.data(),
    st.sampled_from(sorted(LEVELS)),
    st.integers(0, 70),
)
def test_spans_are_encoded_as_each_one_by_itself(width: int, data: st.DataObject, level: str, apart: int) -> None:
    cases = [(old, new) for _, old, new in data.draw(st.lists(pairs(width=width), min_size=1, max_size=8))]
    check_spans(cases, width, level, apart)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("level", sorted(LEVELS))
def test_chunks_that_fill_the_memory_for_what_was_encoded_are_taken_some_at_a_time(width: int, level: str) -> None:
    rng = np.random.default_rng(width)
    old = rng.integers(0, 256, 2 << 20, np.uint8)
    cases = []
    for share in (0.2, 0, 0.24, 0.001, 0.2, 1, 0.22, 0.23, 0.21, 0.24):
        new = old.copy()
        values = new.view(f"<u{width}")
        moved = np.flatnonzero(rng.random(values.size) < share)
        values[moved] += rng.integers(1, 1 << 62, moved.size).astype(values.dtype)
        cases.append((old, new))
    check_spans(cases, width, level)
    spans, _after = spans_of(cases, width, apart=0)
    assert len(list(TakingEncoder(level, "xxh3-128").take_spans(spans))) > 1


def test_no_spans_are_nothing_and_empty_ones_have_not_changed() -> None:
    nothing = Spans(np.empty(0, np.uint8), np.empty((0, 3), np.int64), 2, 0)
    assert not list(TakingEncoder().take_spans(nothing))
    (taken,) = TakingEncoder().take_spans(Spans(np.empty(0, np.uint8), np.zeros((2, 3), np.int64), 2, 0))
    assert taken.changed.tolist() == [0, 0]
    assert taken.digests is None


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_what_is_written_to_meanwhile_leaves_bytes_digest_and_encoding_one(level: str) -> None:
    """A trainer that does not keep its promise: whatever was taken, the three agree."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 256, 8 << 20, np.uint8)
    base = old.copy()
    new = old.copy()
    stop = threading.Event()

    def scribble() -> None:
        noise = np.random.default_rng(4)
        while not stop.is_set():
            new[noise.integers(0, new.size, 20_000)] ^= 1

    table = np.array([(at, new.ctypes.data + at, 2 << 20) for at in range(0, new.size, 2 << 20)], np.int64)
    taking, decoder = TakingEncoder(level, "xxh3-128"), ChunkDecoder()
    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(20):
            spans = Spans(old, table, 2, 2 << 20)
            for taken in taking.take_spans(spans):
                for index, (found, digest, now) in enumerate(rows_of(spans, taken), taken.first):
                    out = base[index << 21 : (index + 1) << 21]
                    if found.changed > 0:
                        decoder.apply(out, found.encoding, found.changed, memoryview(found.payload), width=2)
                        assert digest == xxh3_128_digest(out)
                    assert out.tobytes() == now
    finally:
        stop.set()
        writer.join()


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
    check_spans(cases, width)


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
    check_spans([(old, old), (old, new), (new, old)], width)
