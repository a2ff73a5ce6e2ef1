from __future__ import annotations

import numpy as np
import pytest
import reference
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CONTEXTUAL, RAW, ZSTD

from deltastore.codec import DamagedChunk, Encoding
from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder
from deltastore.codec.context import contextual_room, write_contextual
from deltastore.codec.streams import StreamWriter

GUARD = 64


def decode(start: bytes, changed: int, payload: bytes, *, inverse: bool = False) -> bytes:
    """Decode between guards, so that a write outside the chunk is seen."""
    buffer = np.full(len(start) + 2 * GUARD, 0xA5, np.uint8)
    out = buffer[GUARD : GUARD + len(start)]
    out[:] = np.frombuffer(start, np.uint8)
    try:
        ChunkDecoder().apply(out, CONTEXTUAL, changed, memoryview(payload), width=2, inverse=inverse)
    finally:
        assert (buffer[:GUARD] == 0xA5).all()
        assert (buffer[-GUARD:] == 0xA5).all()
    return out.tobytes()


def elements(data: bytes) -> np.ndarray:
    view = np.frombuffer(data, "<u2")
    view.flags.writeable = False
    return view


@st.composite
def pairs(draw: st.DrawFn, most: int = 300) -> tuple[bytes, bytes]:
    """Two versions of a chunk of bf16, a few exponents, each with its own share of changed elements."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, most))
    exponents = draw(st.lists(st.integers(0, 255), min_size=1, max_size=6))
    classes = rng.choice(exponents, size)
    old = (rng.integers(0, 2, size) << 15 | classes << 7 | rng.integers(0, 128, size)).astype("<u2")
    shares = dict(
        zip(exponents, draw(st.lists(st.sampled_from([0, 0.02, 0.4, 0.6, 1]), min_size=6, max_size=6)), strict=False)
    )
    moves = rng.random(size) < [shares[c] for c in classes]
    steps = rng.choice(draw(st.sampled_from([[1, -1], [1, -1, 130, -300], [32768, 1, -32767]])), size)
    new = np.where(moves, old + steps, old).astype("<u2")
    new[0] = old[0] + 1  # at least one change
    return old.tobytes(), new.tobytes()


@given(pairs())
def test_the_reference_decodes_what_the_encoder_writes_both_ways(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    before, after = elements(old), elements(new)
    positions = np.flatnonzero(before != after).astype(np.int32)
    differences = after[positions] - before[positions]
    positions.flags.writeable = differences.flags.writeable = False
    changed, room = positions.size, contextual_room(positions.size, before.size)
    payload = StreamWriter().write(write_contextual, room, before, positions, differences)
    assert len(payload) <= room[0]
    assert reference.decode(old, CONTEXTUAL, changed, payload, 2) == new
    assert reference.decode(new, CONTEXTUAL, changed, payload, 2, back=True) == old
    assert decode(old, changed, payload) == new
    assert decode(new, changed, payload, inverse=True) == old


def guarded(size: int) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.full(size + 2 * GUARD, 0xA5, np.uint8)
    return buffer[GUARD : GUARD + size], buffer


@given(
    st.one_of(st.integers(1, 300), st.sampled_from([4096, 65_536, 1 << 20])),
    st.sampled_from(["one", "few", "half", "all"]),
    st.sampled_from(["one class", "few classes", "every class"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_a_change_takes_no_more_room_than_it_is_said_to(
    size: int, share: str, values: str, crossing: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 65536, size, np.uint16)
    if values != "every class":
        old = (old & 0x807F) | (rng.integers(0, 1 if values == "one class" else 4, size) << 7).astype(np.uint16)
    count = {"one": 1, "few": -(-size // 1000), "half": -(-size // 2), "all": size}[share]
    positions = np.sort(rng.choice(size, count, replace=False)).astype(np.int32)
    differences = rng.integers(1, 65536, count, np.uint16) if crossing else np.ones(count, np.uint16)
    given_old = old.copy()
    stored, scratch_bytes = contextual_room(count, size)
    out, out_buffer = guarded(stored)
    scratch, scratch_buffer = guarded(scratch_bytes)
    writer = StreamWriter()
    end = write_contextual(old, positions, differences, scratch, out, 0, writer.zstd)
    assert end <= stored
    for buffer in (out_buffer, scratch_buffer):
        assert (buffer[:GUARD] == 0xA5).all()
        assert (buffer[-GUARD:] == 0xA5).all()
    assert (old == given_old).all()
    new = old.copy()
    new[positions] += differences
    payload = out[:end].tobytes()
    assert decode(old.tobytes(), count, payload) == new.tobytes()
    assert decode(new.tobytes(), count, payload, inverse=True) == old.tobytes()


@given(pairs(), st.sampled_from([0, 1, 5, 20]), st.integers(0, 3), st.sampled_from([RAW, ZSTD, None]))
def test_the_decoder_accepts_any_choice_that_the_reference_writes(
    pair: tuple[bytes, bytes], k: int, which: int, method: int | None
) -> None:
    old, new = pair
    inverted = [set(), set(range(256)), set(range(0, 256, 2)), set(range(1, 256, 2))][which]
    changed, payload = reference.encode_contextual(old, new, inverted, k, method)
    assert decode(old, changed, payload) == new
    assert decode(new, changed, payload, inverse=True) == old


@pytest.mark.parametrize("share", [0.003, 0.02, 0.2, 0.49])
def test_a_whole_chunk_at_level_max_goes_there_and_back(share: float) -> None:
    rng = np.random.default_rng(5)
    master = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
    old = (master.view("<u4") >> 16).astype("<u2")
    new = np.where(rng.random(1 << 20) < share, old + rng.choice([1, 65535], 1 << 20), old).astype("<u2")
    encoded = ChunkEncoder("max").change(old.view(np.uint8), new.view(np.uint8), width=2)
    assert encoded is not None
    assert encoded.encoding == Encoding.CONTEXTUAL
    assert decode(old.tobytes(), encoded.changed, encoded.payload) == new.tobytes()
    assert decode(new.tobytes(), encoded.changed, encoded.payload, inverse=True) == old.tobytes()


def test_contexts_cost_less_than_gaps_where_exponents_decide_what_changes() -> None:
    rng = np.random.default_rng(6)
    master = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
    moved = master + (rng.standard_normal(1 << 20) * 4e-7).astype(np.float32)
    old, new = ((weights.view("<u4") + 0x8000 >> 16).astype("<u2").view(np.uint8) for weights in (master, moved))
    sizes = {}
    for level in ("fast", "max"):
        encoded = ChunkEncoder(level).change(old, new, width=2)
        assert encoded is not None
        sizes[level] = len(encoded.payload)
    assert sizes["max"] < 0.75 * sizes["fast"]


def test_elements_of_another_width_are_never_contextual() -> None:
    old, new = bytes(64), bytes(62) + b"\x01\x00"
    changed, payload = reference.encode_contextual(old, new, set(), 3)
    for width in (1, 4, 8):
        with pytest.raises(DamagedChunk):
            ChunkDecoder().apply(np.zeros(64, np.uint8), CONTEXTUAL, changed, memoryview(payload), width=width)


def small() -> tuple[bytes, bytes, int, bytes]:
    rng = np.random.default_rng(9)
    old = (rng.choice([120, 121, 122], 40) << 7 | rng.integers(0, 128, 40)).astype("<u2")
    new = old.copy()
    new[[3, 4, 17, 39]] += np.array([1, 65535, 200, 65000], "<u2")
    changed, payload = reference.encode_contextual(old.tobytes(), new.tobytes(), {121}, 2)
    return old.tobytes(), new.tobytes(), changed, payload


def test_a_payload_cut_anywhere_or_followed_by_anything_is_refused() -> None:
    old, _, changed, payload = small()
    for end in range(len(payload)):
        with pytest.raises(DamagedChunk):
            decode(old, changed, payload[:end])
    with pytest.raises(DamagedChunk):
        decode(old, changed, payload + b"\x00")


def agree(start: bytes, changed: int, payload: bytes, *, inverse: bool) -> None:
    """Ours refuses what the reference refuses, and decodes the rest as it does."""
    try:
        expected = reference.decode(start, CONTEXTUAL, changed, payload, 2, back=inverse)
    except (reference.DamagedError, zstandard.ZstdError):
        with pytest.raises(DamagedChunk):
            decode(start, changed, payload, inverse=inverse)
        return
    assert decode(start, changed, payload, inverse=inverse) == expected


@pytest.mark.parametrize("inverse", [False, True])
def test_every_flipped_bit_is_refused_or_decodes_as_the_reference_does(inverse: bool) -> None:
    old, new, changed, payload = small()
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        agree(new if inverse else old, changed, bytes(damaged), inverse=inverse)


@given(
    st.lists(
        st.tuples(st.integers(0, 767), st.sampled_from([0, 1, 2, 5, 31, 32, 52, 53, 63, 64, 2**31, 2**32 - 1])),
        max_size=6,
    ),
    st.binary(max_size=12),
    st.binary(max_size=4),
    st.integers(0, 6),
    st.integers(0, 22),
    st.integers(1, 6),
    st.booleans(),
)
def test_well_framed_tables_and_positions_of_random_numbers_decode_as_the_reference_does(
    entries: list[tuple[int, int]],
    positions: bytes,
    crossings: bytes,
    crossed: int,
    k: int,
    changed: int,
    inverse: bool,
) -> None:
    numbers = [0] * 768
    numbers[120] = changed
    for place, number in entries:
        numbers[place] = number
    table = b"".join(reference.planes(numbers, 4))
    streams = [
        table,
        positions,
        crossings,
        bytes(range(crossed)),
        bytes((changed + 7) // 8),
        bytes(changed),
        bytes(changed),
    ]
    head = len(positions).to_bytes(4, "little") + crossed.to_bytes(4, "little") + len(crossings).to_bytes(4, "little")
    payload = head + bytes([k]) + b"".join(reference.stored_stream(stream) for stream in streams)
    agree(small()[0], changed, payload, inverse=inverse)
