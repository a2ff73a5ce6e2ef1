from __future__ import annotations

import resource
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import reference
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from reference import APART, DENSE, FULL, RAW, SPARSE, ZERO, ZSTD

from deltastore.codec import LEVELS, DamagedChunk, Encoding
from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder
from deltastore.errors import UsageError

WIDTHS = (1, 2, 4, 8)
GUARD = 0x5A


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def decode(start: bytes, encoding: int, changed: int, payload: bytes, *, width: int, inverse: bool = False) -> bytes:
    """Decode between guard bytes, which must stand whatever the payload says."""
    buffer = np.full(len(start) + 128, GUARD, np.uint8)
    out = buffer[64 : 64 + len(start)]
    out[:] = array(start)
    try:
        ChunkDecoder().apply(out, encoding, changed, memoryview(payload), width=width, inverse=inverse)
    finally:
        assert (buffer[:64] == GUARD).all()
        assert (buffer[-64:] == GUARD).all()
    return out.tobytes()


@st.composite
def chunk_pairs(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    width = draw(st.sampled_from(WIDTHS))
    size = draw(st.one_of(st.integers(1, 40), st.integers(1, 700)))
    density = draw(st.sampled_from([1e-6, 0.01, 0.1, 0.25, 0.5, 1.0]))
    near = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.bytes(size * width)
    numbers = reference.values(old, width)
    for i in set(rng.permutation(size)[: max(1, int(size * density))].tolist()):
        step = int(rng.integers(-3, 4)) if near else int.from_bytes(rng.bytes(width), "little")
        numbers[i] = (numbers[i] + step) % (1 << (8 * width))
    return width, old, reference.data_of(numbers, width)


@given(chunk_pairs(), st.sampled_from(sorted(LEVELS)))
def test_the_reference_decodes_what_the_encoder_writes_at_every_level(
    pair: tuple[int, bytes, bytes], level: str
) -> None:
    width, old, new = pair
    encoded = ChunkEncoder(level).change(array(old), array(new), width=width)
    assert (None if encoded is None else encoded.encoding) == reference.chosen_encoding(old, new, width, level)
    if encoded is None:
        assert old == new
        return
    assert encoded.changed == len(reference.changed_positions(old, new, width))
    found = reference.decode(old, encoded.encoding, encoded.changed, encoded.payload, width)
    assert found == new
    assert decode(old, encoded.encoding, encoded.changed, encoded.payload, width=width) == new
    if encoded.encoding != Encoding.FULL:
        back = reference.decode(new, encoded.encoding, encoded.changed, encoded.payload, width, back=True)
        assert back == old


@given(chunk_pairs(), st.sampled_from([SPARSE, DENSE, FULL]), st.sampled_from([RAW, ZSTD, APART, None]))
def test_the_decoder_accepts_any_choice_that_the_reference_writes(
    pair: tuple[int, bytes, bytes], encoding: int, method: int | None
) -> None:
    width, old, new = pair
    changed, payload = reference.encode(old, new, width, encoding, method)
    if not changed:
        return
    assert decode(old, encoding, changed, payload, width=width) == new
    if encoding == FULL:
        with pytest.raises(DamagedChunk):
            decode(new, encoding, changed, payload, width=width, inverse=True)
    else:
        assert decode(new, encoding, changed, payload, width=width, inverse=True) == old


@pytest.mark.parametrize("width", WIDTHS)
def test_a_full_chunk_replaces_whatever_was_there(width: int) -> None:
    new = np.random.default_rng(3).bytes(64 * width)
    encoded = ChunkEncoder().full(array(new), width=width)
    assert (encoded.encoding, encoded.changed) == (Encoding.FULL, 64)
    assert reference.decode(bytes(len(new)), FULL, 64, encoded.payload, width) == new
    for start in (bytes(len(new)), b"\xff" * len(new), new):
        assert decode(start, FULL, 64, encoded.payload, width=width) == new


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_changed_has_no_encoding(width: int) -> None:
    data = array(np.random.default_rng(4).bytes(96 * width))
    assert ChunkEncoder().change(data, data.copy(), width=width) is None
    assert ChunkEncoder().change(array(b""), array(b""), width=width) is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("elements", [4, 8, 63, 64, 65, 400])
def test_sparse_ends_at_exactly_a_quarter_of_the_elements(width: int, elements: int) -> None:
    quarter = elements // 4
    for changed, expected in ((quarter, Encoding.SPARSE), (quarter + 1, Encoding.DENSE)):
        new = reference.data_of([1] * changed + [0] * (elements - changed), width)
        encoded = ChunkEncoder().change(array(bytes(len(new))), array(new), width=width)
        assert encoded is not None
        assert (encoded.encoding, encoded.changed) == (expected, changed)


@pytest.mark.parametrize("width", WIDTHS)
def test_full_starts_above_a_quarter_of_far_changes(width: int) -> None:
    far = (1 << (8 * width)) // 2
    for count, expected in ((16, Encoding.DENSE), (17, Encoding.FULL)):
        new = reference.data_of([far] * count + [1] * (64 - count), width)
        encoded = ChunkEncoder().change(array(bytes(len(new))), array(new), width=width)
        assert encoded is not None
        assert encoded.encoding == expected


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0001, 0.02, 0.3, 1.0])
def test_a_whole_chunk_of_a_mebibyte_goes_there_and_back(width: int, share: float) -> None:
    rng = np.random.default_rng(5)
    old = rng.integers(0, 256, 1 << 20, np.uint8)
    new = old.copy()
    elements = new.view(f"<u{width}")
    count = int(share * elements.size)
    chosen = rng.permutation(elements.size)[:count]
    elements[chosen] += rng.integers(1, 5, count).astype(elements.dtype)
    encoder = ChunkEncoder()
    encoded = encoder.change(old, new, width=width)
    assert encoded is not None
    assert encoded.changed == count
    found = decode(old.tobytes(), encoded.encoding, encoded.changed, encoded.payload, width=width)
    assert found == new.tobytes()
    back = decode(found, encoded.encoding, encoded.changed, encoded.payload, width=width, inverse=True)
    assert back == old.tobytes()
    if share <= 0.02:
        assert reference.decode(old.tobytes(), encoded.encoding, encoded.changed, encoded.payload, width) == (
            new.tobytes()
        )
        assert encoder.change(old, old.copy(), width=width) is None  # scratch of one chunk harms no other


@pytest.mark.parametrize("width", [2, 4, 8])
def test_tensors_that_start_anywhere_in_a_file_encode_and_decode(width: int) -> None:
    rng = np.random.default_rng(6)
    for shift in range(1, width):
        old_buffer, new_buffer = rng.integers(0, 256, (2, shift + 100 * width), np.uint8)
        old, new = old_buffer[shift:], new_buffer[shift:]
        sparse = old.copy()
        sparse[-1] ^= 0x80
        for target in (new, sparse):
            shifted = np.empty(shift + target.size, np.uint8)
            shifted[shift:] = target
            encoded = ChunkEncoder().change(old, shifted[shift:], width=width)
            assert encoded is not None
            payload = memoryview(encoded.payload)
            out_buffer = np.full(shift + target.size + 8, GUARD, np.uint8)
            out = out_buffer[shift : shift + target.size]
            out[:] = old
            ChunkDecoder().apply(out, encoded.encoding, encoded.changed, payload, width=width)
            assert (out == target).all()
            assert (out_buffer[:shift] == GUARD).all()
            assert (out_buffer[shift + target.size :] == GUARD).all()


def test_inputs_are_left_as_they_were() -> None:
    old, new = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    ChunkEncoder().change(old, new, width=2)
    assert old.flags.writeable
    assert new.flags.writeable
    assert not old.any()
    assert (new == 1).all()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="no level"):
        ChunkEncoder("slow")


def test_streams_of_zeros_cost_five_bytes_and_short_ones_are_stored_raw() -> None:
    new = reference.data_of([1, 0, 0, 0, 0], 2)
    encoded = ChunkEncoder().change(array(bytes(10)), array(new), width=2)
    assert encoded is not None
    zero = b"\x00\x00\x00\x00\x00"
    assert encoded.payload == b"\x01\x00\x00\x00" + zero * 4


# Hostile input.


def small_payloads() -> list[tuple[str, int, int, bytes, bytes, bytes]]:
    """Return (name, width, encoding, changed, start, payload) of every encoding, width and stream method."""
    cases = []
    for width in WIDTHS:
        rng = np.random.default_rng(width)
        old = rng.bytes(12 * width)
        numbers = reference.values(old, width)
        for i, step in ((1, 1), (5, -2), (11, 300)):
            numbers[i] = (numbers[i] + step) % (1 << (8 * width))
        new = reference.data_of(numbers, width)
        for encoding in (SPARSE, DENSE, FULL):
            for method in (None, ZSTD):
                changed, payload = reference.encode(old, new, width, encoding, method)
                name = f"width {width} encoding {encoding} {'zstd' if method else 'plain'}"
                cases.append(pytest.param(width, encoding, changed, old, payload, id=name))
    return cases


@pytest.mark.parametrize(("width", "encoding", "changed", "old", "payload"), small_payloads())
def test_a_payload_cut_anywhere_or_followed_by_anything_is_refused(
    width: int, encoding: int, changed: int, old: bytes, payload: bytes
) -> None:
    for end in range(len(payload)):
        with pytest.raises(DamagedChunk):
            decode(old, encoding, changed, payload[:end], width=width)
    for more in (b"\x00", bytes(5), payload):
        with pytest.raises(DamagedChunk):
            decode(old, encoding, changed, payload + more, width=width)


@pytest.mark.parametrize(("width", "encoding", "changed", "old", "payload"), small_payloads())
def test_every_flipped_bit_is_refused_or_decodes_as_the_reference_does(
    width: int, encoding: int, changed: int, old: bytes, payload: bytes
) -> None:
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            expected = reference.decode(old, encoding, changed, bytes(damaged), width)
        except (reference.DamagedError, zstandard.ZstdError):
            with pytest.raises(DamagedChunk):
                decode(old, encoding, changed, bytes(damaged), width=width)
            continue
        assert decode(old, encoding, changed, bytes(damaged), width=width) == expected


@pytest.mark.parametrize(("width", "encoding", "changed", "old", "payload"), small_payloads())
def test_another_number_of_changes_or_another_encoding_is_refused_or_decodes_as_the_reference_does(
    width: int, encoding: int, changed: int, old: bytes, payload: bytes
) -> None:
    counts = [0, 1, changed - 1, changed + 1, len(old) // width, len(old) // width + 1, 2**32 - 1]
    for other in (0, 1, 2, 3, 4, 255):
        for count in counts:
            for inverse in (False, True):
                arguments = (old, other, count, payload)
                try:
                    expected = reference.decode(*arguments, width, back=inverse)
                except (reference.DamagedError, zstandard.ZstdError):
                    with pytest.raises(DamagedChunk):
                        decode(*arguments, width=width, inverse=inverse)
                    continue
                assert decode(*arguments, width=width, inverse=inverse) == expected


@given(st.sampled_from(WIDTHS), st.integers(0, 5), st.integers(0, 40), st.binary(max_size=120), st.booleans())
def test_random_bytes_are_refused_or_decode_as_the_reference_does(
    width: int, encoding: int, changed: int, payload: bytes, inverse: bool
) -> None:
    old = bytes(range(32 * width % 256)) or bytes(8)
    try:
        expected = reference.decode(old, encoding, changed, payload, width, back=inverse)
    except (reference.DamagedError, zstandard.ZstdError):
        with pytest.raises(DamagedChunk):
            decode(old, encoding, changed, payload, width=width, inverse=inverse)
        return
    assert decode(old, encoding, changed, payload, width=width, inverse=inverse) == expected


@given(st.sampled_from(WIDTHS), st.data())
def test_well_framed_streams_of_random_bytes_decode_as_the_reference_does(width: int, data: st.DataObject) -> None:
    changed = data.draw(st.integers(1, 24))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 20, 254, 255]), max_size=changed + 2).map(bytes))
    streams = [gaps, data.draw(st.binary(min_size=(changed + 7) // 8, max_size=(changed + 7) // 8))]
    streams += [data.draw(st.binary(min_size=changed, max_size=changed)) for _ in range(width)]
    payload = struct.pack("<I", len(gaps)) + b"".join(reference.stored_stream(stream) for stream in streams)
    old = bytes(300 * width)
    try:
        expected = reference.decode(old, SPARSE, changed, payload, width)
    except reference.DamagedError:
        with pytest.raises(DamagedChunk):
            decode(old, SPARSE, changed, payload, width=width)
        return
    assert decode(old, SPARSE, changed, payload, width=width) == expected


def test_an_unfinished_gap_is_refused() -> None:
    old = bytes(600)
    streams = [b"\x00\xff", b"\x00", b"\x00"]
    payload = struct.pack("<I", 2) + b"".join(reference.stored_stream(stream) for stream in streams)
    with pytest.raises(DamagedChunk):
        decode(old, SPARSE, 1, payload, width=1)


def dense_payload(frame: bytes, method: int = ZSTD) -> bytes:
    return struct.pack("<BI", method, len(frame)) + frame


def frame_with_declared_size(raw: bytes, declared: int) -> bytes:
    """Return a zstd frame of ``raw`` whose header declares another content size (8 bytes wide)."""
    original = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False).compress(raw)
    parameters = zstandard.get_frame_parameters(original)
    header = zstandard.frame_header_size(original)
    blocks = original[header:]
    assert parameters.content_size == len(raw)
    # Frame header: magic, descriptor (8-byte content size, not one segment), window descriptor, content size.
    return struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 0x58, declared) + blocks


def test_the_forged_frames_of_these_tests_are_frames() -> None:
    raw = np.random.default_rng(7).bytes(100) * 5
    frame = frame_with_declared_size(raw, len(raw))
    assert zstandard.ZstdDecompressor().decompress(frame) == raw
    assert decode(bytes(500), FULL, 500, dense_payload(frame), width=1) == raw


RAW_500 = b"abcde" * 100
SKIPPABLE = struct.pack("<II", 0x184D2A50, 500) + bytes(500)
HOSTILE_FRAMES = [
    pytest.param(frame_with_declared_size(bytes(500), 1 << 30), id="declares a gibibyte"),
    pytest.param(frame_with_declared_size(bytes(500), (1 << 64) - 1), id="declares the unknown size's number"),
    pytest.param(frame_with_declared_size(bytes(500), (1 << 64) - 2), id="declares the error's number"),
    pytest.param(frame_with_declared_size(bytes(64 << 20), 500), id="holds 64 MiB"),
    pytest.param(frame_with_declared_size(RAW_500[:-1], 500), id="holds one byte less"),
    pytest.param(frame_with_declared_size(RAW_500 + b"x", 500), id="holds one byte more"),
    pytest.param(frame_with_declared_size(b"", 500), id="holds nothing"),
    pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(RAW_500), id="declares no content size"),
    pytest.param(reference.zstd_frame(RAW_500) + reference.zstd_frame(RAW_500), id="two frames"),
    pytest.param(reference.zstd_frame(RAW_500) + SKIPPABLE, id="a skippable frame after it"),
    pytest.param(SKIPPABLE + reference.zstd_frame(RAW_500), id="a skippable frame before it"),
    pytest.param(SKIPPABLE, id="a skippable frame alone"),
    pytest.param(reference.zstd_frame(RAW_500) + b"\x00", id="a byte after it"),
    pytest.param(reference.zstd_frame(RAW_500[:-1]), id="declares one byte less"),
    pytest.param(reference.zstd_frame(RAW_500 + b"x"), id="declares one byte more"),
    pytest.param(reference.zstd_frame(b""), id="an empty frame"),
    pytest.param(b"", id="no frame"),
    pytest.param(b"\x28\xb5\x2f\xfd", id="a magic number alone"),
    pytest.param(
        zstandard.ZstdCompressor(
            dict_data=zstandard.ZstdCompressionDict(bytes(range(256)) * 8, dict_type=1), write_dict_id=True
        ).compress(RAW_500[:250] + bytes(range(250))),
        id="needs a dictionary's window",
    ),
]


@pytest.mark.parametrize("frame", HOSTILE_FRAMES)
def test_hostile_frames_are_refused_before_memory_is_spent_on_them(frame: bytes) -> None:
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with pytest.raises(DamagedChunk):
            decode(bytes(500), DENSE, 3, dense_payload(frame), width=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 32 << 10  # KiB


RAW_BYTE = reference.stored_stream(b"\x05")


def apart(flags: bytes, values: bytes) -> bytes:
    """Return a stream of method 3 of two stored streams."""
    return struct.pack("<BI", APART, len(flags) + len(values)) + flags + values


def test_zeros_apart_are_smaller_than_zstd_alone_and_read_back() -> None:
    rng = np.random.default_rng(12)
    new = rng.integers(1, 5, 20_000, np.uint8) * (rng.random(20_000) < 0.25)
    encoded = ChunkEncoder().full(new.astype(np.uint8), width=1)
    assert encoded.payload[0] == APART
    assert len(encoded.payload) < len(reference.zstd_frame(new.astype(np.uint8).tobytes())) * 0.9
    assert decode(bytes(20_000), FULL, 20_000, encoded.payload, width=1) == new.astype(np.uint8).tobytes()
    assert reference.decode(bytes(20_000), FULL, 20_000, encoded.payload, 1) == new.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(struct.pack("<BI", ZERO, 1) + b"\x00", id="zeros with a stored byte"),
        pytest.param(struct.pack("<BI", RAW, 499) + bytes(499), id="raw and a byte short"),
        pytest.param(struct.pack("<BI", RAW, 501) + bytes(501), id="raw and a byte long"),
        pytest.param(struct.pack("<BI", RAW, 0), id="raw and empty"),
        pytest.param(struct.pack("<BI", 4, 500) + bytes(500), id="an unknown method"),
        pytest.param(apart(b"", b""), id="zeros apart and nothing else"),
        pytest.param(apart(reference.stored_stream(bytes(63)), b""), id="zeros apart and no values"),
        pytest.param(apart(reference.stored_stream(b"\x03" + bytes(62)), RAW_BYTE), id="a value short"),
        pytest.param(apart(reference.stored_stream(b"\x01" + bytes(62)), RAW_BYTE + b"\x00"), id="bytes left over"),
        pytest.param(apart(apart(RAW_BYTE, b""), RAW_BYTE), id="zeros apart inside zeros apart"),
        pytest.param(struct.pack("<BI", 255, 500) + bytes(500), id="the last method"),
        pytest.param(struct.pack("<BI", RAW, 2**32 - 1) + bytes(500), id="a stored length of 4 GiB"),
    ],
)
def test_streams_of_another_length_or_method_are_refused(stream: bytes) -> None:
    for encoding in (DENSE, FULL):
        with pytest.raises(DamagedChunk):
            decode(bytes(500), encoding, 3, stream, width=1)


def test_a_gap_stream_of_an_impossible_length_is_refused_before_memory_is_spent_on_it() -> None:
    rest = b"".join(reference.stored_stream(stream) for stream in (b"\x00", b"\x00"))
    for size in (0, 2**31, 2**32 - 1, 1 + 1, 3):
        payload = struct.pack("<I", size) + struct.pack("<BI", ZERO, 0) + rest
        tracemalloc.start()
        try:
            with pytest.raises(DamagedChunk):
                decode(bytes(100), SPARSE, 1, payload, width=1)  # 1 change among 100 elements: one gap byte
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20


def test_as_many_gap_bytes_as_the_chunk_can_need_are_accepted_and_no_more() -> None:
    old = bytes(600)
    for gaps, fits in ((b"\xff\xff\x00", True), (b"\xff\x00", True), (b"\xff\xff\xff\x00", False)):
        payload = struct.pack("<I", len(gaps))
        payload += b"".join(reference.stored_stream(stream) for stream in (gaps, b"\x00", b"\x00"))
        if fits:
            new = bytearray(old)
            new[sum(gaps)] = 1
            assert decode(old, SPARSE, 1, payload, width=1) == new
        else:
            with pytest.raises(DamagedChunk):
                decode(old, SPARSE, 1, payload, width=1)


def test_a_chunk_cannot_change_its_length() -> None:
    with pytest.raises(ValueError, match="cannot become"):
        ChunkEncoder().change(np.zeros(8, np.uint8), np.zeros(6, np.uint8), width=2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("share", [0.02, 0.4, 1])
def test_what_was_encoded_is_kept_as_a_private_copy(width: int, level: str, share: float) -> None:
    rng = np.random.default_rng(8)
    old = rng.integers(0, 256, 1500 * width, np.uint8)
    new = old.copy()
    moved = rng.random(1500) < share
    new.reshape(1500, width)[moved, 0] ^= 1
    before = new.copy()
    encoder = ChunkEncoder(level)
    encoded = encoder.change(old, new, width=width)
    new[:] = 0  # a trainer that does not keep its promise
    assert encoded is not None
    assert (encoder.kept == before).all()
    arguments = (encoded.encoding, encoded.changed, encoded.payload)
    assert decode(old.tobytes(), *arguments, width=width) == before.tobytes()


@pytest.mark.parametrize(("period", "stored"), [(512, True), (3000, True), (16 << 10, True), (None, False)])
def test_bytes_that_look_random_are_compressed_where_they_repeat(period: int | None, stored: bool) -> None:
    noise = np.random.default_rng(13).integers(0, 256, 1 << 20, np.uint8)
    new = np.resize(noise[:period], noise.size) if period else noise
    encoded = ChunkEncoder().full(new, width=1)
    assert (len(encoded.payload) < 0.1 * new.size) == stored
    assert decode(bytes(new.size), FULL, new.size, encoded.payload, width=1) == new.tobytes()


def test_what_was_warmed_up_compiles_nothing_more_for_real_chunks() -> None:
    code = (
        "import numpy as np\n"
        "from deltastore.codec import applying, chunk, context, kernels, libraries, rice, streams, taking\n"
        "def compiled():\n"
        "    modules = (applying, context, kernels, libraries, rice, streams, taking)\n"
        "    found = [value for module in modules for value in vars(module).values() if hasattr(value, 'signatures')]\n"
        "    return sum(len(kernel.signatures) for kernel in found)\n"
        "def change(width, share):\n"
        "    rng = np.random.default_rng(width)\n"
        "    old = rng.integers(0, 256, 40_000 * width, np.uint8)\n"
        "    new = old.copy()\n"
        "    new.reshape(-1, width)[rng.random(40_000) < share, 0] += 1\n"
        "    return old, new\n"
        "widths = (1, 2, 4, 8)\n"
        "cases = [(width, *change(width, share)) for width in widths for share in (0.01, 1)]\n"
        "applying.warm_up_applying(widths)\n"
        "encoder = chunk.ChunkEncoder()\n"
        "changes = [(width, old, encoder.change(old, new, width=width)) for width, old, new in cases]\n"
        "before = compiled()\n"
        "for width, old, found in changes:\n"
        "    payload = memoryview(found.payload)\n"
        "    applying.ChunkDecoder().apply(old.copy(), found.encoding, found.changed, payload, width=width)\n"
        "print(compiled() - before)\n"
        "chunk.warm_up(widths)\n"
        "before = compiled()\n"
        "for width, old, new in cases:\n"
        "    encoder.change(old, new, width=width)\n"
        "print(compiled() - before)\n"
        "for level in ('fast', 'max'):\n"
        "    taking.warm_up_taking(widths, level)\n"
        "    before = compiled()\n"
        "    for width in widths:\n"
        "        old, new = change(width, 0.01)\n"
        "        spans = taking.Spans(old, np.array([[0, new.ctypes.data, old.size]]), width, old.size)\n"
        "        taken = list(taking.TakingEncoder(level, 'xxh3-128').take_spans(spans))\n"
        "    print(compiled() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "0", "0", "0"]
