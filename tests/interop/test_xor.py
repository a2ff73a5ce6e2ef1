"""The XOR codec of other systems: exact both ways, readable by plain zstd, and afraid of nothing that it reads."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deltastore.errors import CorruptObject
from deltastore.interop.xor import XorDecoder, XorEncoder, checksum

tensors = st.integers(0, 4096).flatmap(lambda size: st.tuples(arrays(np.uint8, size), arrays(np.uint8, size)))


def sparse_pair(size: int = 100_000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, size, np.uint8)
    new = old.copy()
    new[random.integers(0, size, size // 100)] ^= 1
    return old, new


@given(tensors)
def test_a_delta_leads_to_the_new_bytes_in_place(pair):
    old, new = pair
    delta = XorEncoder().encode(old, new)
    target = old.copy()
    XorDecoder().apply(target, delta.frame, delta.checksum, name="w")
    assert target.tobytes() == new.tobytes()


@given(tensors)
def test_anybody_reads_it_with_zstd_and_xxhash_alone(pair):
    old, new = pair
    delta = XorEncoder().encode(old, new)
    parameters = zstandard.get_frame_parameters(delta.frame)
    assert parameters.content_size == new.size
    assert not parameters.has_checksum
    raw = zstandard.ZstdDecompressor().decompress(delta.frame) if new.size else b""
    assert raw == (old ^ new).tobytes()
    assert delta.checksum == xxhash.xxh3_128(new.tobytes()).hexdigest()
    assert delta.checksum == delta.checksum.lower()
    assert len(delta.checksum) == 32


@given(tensors)
def test_a_delta_leads_back_under_the_old_checksum(pair):
    old, new = pair
    delta = XorEncoder().encode(old, new)
    target = new.copy()
    XorDecoder().apply(target, delta.frame, checksum(old), name="w")
    assert target.tobytes() == old.tobytes()


def test_one_encoder_serves_tensors_of_any_order_of_sizes():
    encoder, decoder = XorEncoder(), XorDecoder()
    for size in (10, 100_000, 7, 0, 65_536):
        old, new = sparse_pair(size) if size >= 100 else (np.zeros(size, np.uint8), np.ones(size, np.uint8))
        before = old.copy(), new.copy()
        delta = encoder.encode(old, new)
        assert (old == before[0]).all()
        assert (new == before[1]).all()
        decoder.apply(old, delta.frame, delta.checksum, name="w")
        assert (old == new).all()


def test_a_mapped_file_is_patched(tmp_path):
    old, new = sparse_pair()
    path = tmp_path / "w"
    path.write_bytes(old.tobytes())
    delta = XorEncoder().encode(old, new)
    mapped = np.memmap(path, np.uint8, "r+")
    XorDecoder().apply(mapped, delta.frame, delta.checksum, name="w")
    mapped.flush()
    assert path.read_bytes() == new.tobytes()


def test_arrays_that_are_not_one_tensor_are_refused():
    flat = np.zeros(6, np.uint8)
    with pytest.raises(ValueError, match="cannot become"):
        XorEncoder().encode(flat, flat[:5])
    with pytest.raises(ValueError, match="flat bytes"):
        XorEncoder().encode(flat.reshape(2, 3), flat.reshape(2, 3))


def test_the_wrong_base_is_an_error_and_stays_as_it_was():
    old, new = sparse_pair()
    delta = XorEncoder().encode(old, new)
    target = old.copy()
    target[77] ^= 128
    before = target.copy()
    with pytest.raises(CorruptObject, match="checksum") as caught:
        XorDecoder().apply(target, delta.frame, delta.checksum, name="model.norm")
    assert caught.value.key == "model.norm"
    assert caught.value.hint
    assert (target == before).all()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "cannot be read"),
        (b"no frame at all", "cannot be read"),
        (zstandard.ZstdCompressor().compress(bytes(99)), "declares 99 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), "declares no size"),
        (zstandard.ZstdCompressor().compress(bytes(100))[:-1], "cannot be read"),
        (zstandard.ZstdCompressor().compress(bytes(100)) + b"more", "cannot be read"),
    ],
)
def test_a_frame_that_is_not_the_tensors_is_refused(frame, reason):
    target = np.zeros(100, np.uint8)
    with pytest.raises(CorruptObject, match=reason):
        XorDecoder().apply(target, frame, checksum(target), name="w")
    assert not target.any()


def test_a_skippable_frame_is_no_tensor():
    skippable = (0x184D2A50).to_bytes(4, "little") + (100).to_bytes(4, "little") + bytes(100)
    with pytest.raises(CorruptObject):
        XorDecoder().apply(np.zeros(100, np.uint8), skippable, "", name="w")


def test_a_frame_that_claims_a_terabyte_allocates_nothing():
    # Magic number, a single segment with an 8-byte content size, then one empty last block.
    bomb = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(bomb).content_size == 1 << 40
    decoder = XorDecoder()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject, match="declares 1099511627776 bytes"):
            decoder.apply(np.zeros(100, np.uint8), bomb, "", name="w")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@given(st.data())
def test_a_damaged_frame_leads_to_the_new_bytes_or_leaves_the_old(data):
    old, new = sparse_pair(2000)
    delta = XorEncoder().encode(old, new)
    frame = bytearray(delta.frame)
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    target = old.copy()
    try:
        XorDecoder().apply(target, bytes(frame), delta.checksum, name="w")
    except CorruptObject:
        assert (target == old).all()
    else:
        assert (target == new).all()


@given(st.binary(max_size=300), st.integers(0, 300))
def test_random_bytes_are_an_error_of_ours_or_a_tensor(frame, size):
    try:
        difference = XorDecoder().difference(frame, size, name="w")
    except CorruptObject:
        return
    assert difference.size == size
    assert not difference.flags.writeable
