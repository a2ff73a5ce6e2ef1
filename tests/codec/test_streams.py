"""Streams: what kernels write is what the reference reads, and neither writing nor reading leaves its memory."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import example, given
from hypothesis import strategies as st

from deltastore.codec import Encoding, streams
from deltastore.codec.libraries import Decompressor
from deltastore.codec.problems import EARLY
from deltastore.codec.streams import StreamWriter

WIDTHS = (1, 2, 4, 8)
GUARD = 0xA5
KINDS = ("noise", "small", "one", "extreme", "negative", "repeated")


def guarded(size: int) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.full(size + 128, GUARD, np.uint8)
    return buffer[64 : 64 + size], buffer


def guards_hold(buffer: np.ndarray) -> bool:
    return bool((buffer[:64] == GUARD).all() and (buffer[-64:] == GUARD).all())


def differences_of(kind: str, count: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return differences, none of them zero."""
    noise = rng.integers(0, 256, count * width, np.uint8).view(f"<u{width}")
    found = {
        "noise": noise,
        "small": (noise & 3).astype(noise.dtype),
        "one": np.ones_like(noise),
        "extreme": np.full_like(noise, 1 << (8 * width - 1)),
        "negative": np.full_like(noise, (1 << (8 * width)) - 1),
        "repeated": np.resize(noise[:7], count),
    }[kind].copy()
    found[found == 0] = 1
    return found


@given(
    st.sampled_from(WIDTHS),
    st.sampled_from(KINDS),
    st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 1023, 1024, 8191, 8192, 8193, 16384, 20_000])),
    st.integers(0, 600),
    st.integers(0, 2**32 - 1),
)
@example(8, "noise", 1, 0, 1)
@example(1, "noise", 131_072, 0, 1)
@example(1, "noise", 131_072, 4, 1)
@example(8, "noise", 32_768, 255, 1)
def test_changes_take_no_more_room_than_they_are_said_to_and_lead_back(
    width: int, kind: str, count: int, spread: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    positions = np.cumsum(rng.integers(1, spread + 2, count)).astype(np.int32) - 1
    elements = int(positions[-1]) + 1
    differences = differences_of(kind, count, width, rng)
    given_differences = differences.copy()
    stored, scratch_bytes = streams.changes_room(count, elements, width)
    out, out_buffer = guarded(stored)
    scratch, scratch_buffer = guarded(scratch_bytes)
    writer = StreamWriter()
    end = streams.write_changes(positions, differences, scratch, out, 0, writer.zstd)
    assert 0 < end <= stored
    assert guards_hold(out_buffer)
    assert guards_hold(scratch_buffer)
    assert (differences == given_differences).all()
    old = rng.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    new.view(f"<u{width}")[positions] += differences
    payload = out[:end].copy()
    assert bytes(reference.decode(old.tobytes(), Encoding.SPARSE, count, payload.tobytes(), width)) == new.tobytes()
    for inverse, start, wanted in ((False, old, new), (True, new, old)):
        found, found_buffer = guarded(start.size)
        found[:] = start
        room, room_buffer = guarded(streams.reading_scratch(count + elements // 255))
        values, zstd = found.view(f"<u{width}"), Decompressor()
        assert streams.apply_changes(payload, 0, values, count, inverse, room, zstd.handle) == end
        assert found.tobytes() == wanted.tobytes()
        assert guards_hold(found_buffer)
        assert guards_hold(room_buffer)


@given(st.sampled_from(WIDTHS), st.binary(max_size=400), st.integers(1, 60), st.booleans())
def test_any_payload_is_read_within_its_bounds(width: int, payload: bytes, count: int, inverse: bool) -> None:
    given_bytes = np.frombuffer(payload, np.uint8).copy()
    out, out_buffer = guarded(300 * width)
    room, room_buffer = guarded(streams.reading_scratch(count + 300 // 255))
    zstd = Decompressor()
    streams.apply_changes(given_bytes, 0, out.view(f"<u{width}"), count, inverse, room, zstd.handle)
    assert guards_hold(out_buffer)
    assert guards_hold(room_buffer)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 40_000)), max_size=4), st.integers(0, 2**32 - 1))
def test_streams_are_read_as_they_were_written_one_behind_the_other(wanted: list[tuple[str, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    raws = [differences_of(kind, size, 1, rng) * (rng.random(size) < rng.random()) for kind, size in wanted]
    raws = [raw.astype(np.uint8) for raw in raws]
    writer, zstd = StreamWriter(), Decompressor()
    out, written = writer.room(*streams.planes_room(2 * len(raws), max((raw.size for raw in raws), default=0)))
    for _ in range(2):  # what the first round left behind must not matter
        end = 0
        for raw in raws:
            for runs in (False, True):
                end = streams.write_stream(raw, runs, written, out, end, writer.zstd)
        payload = out[:end].copy()
        place = 0
        for raw in raws:
            for _ in range(2):
                found, scratch = np.empty(raw.size, np.uint8), np.empty(streams.reading_scratch(raw.size), np.uint8)
                place = streams.read_stream(payload, place, found, scratch, zstd.handle)
                assert found.tobytes() == raw.tobytes()
        assert place == payload.size


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x01\x05\x00\x00\x00abcd"])
def test_what_ends_too_early_is_told(payload: bytes) -> None:
    found, scratch, zstd = np.empty(5, np.uint8), np.empty(streams.reading_scratch(5), np.uint8), Decompressor()
    cut = np.frombuffer(payload, np.uint8).copy()
    assert streams.read_stream(cut, 0, found, scratch, zstd.handle) == EARLY
