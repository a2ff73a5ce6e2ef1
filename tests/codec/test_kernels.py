from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from deltastore.codec import kernels

WIDTHS = (1, 2, 4, 8)
SIZES = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 95, 96, 97, 255, 256, 257, 512, 1023, 1025)
GUARD = 0xA5


def read_only(data: bytes, width: int) -> np.ndarray:
    return np.frombuffer(data, f"<u{width}")


def guarded(shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return an output array and the buffer around it, whose 64 bytes on either side must not change."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.full(size + 128, GUARD, np.uint8)
    return buffer[64 : 64 + size].view(dtype).reshape(shape), buffer


def assert_guards_hold(buffer: np.ndarray) -> None:
    assert (buffer[:64] == GUARD).all()
    assert (buffer[-64:] == GUARD).all()


def special_values(width: int) -> list[int]:
    """Zero, negative zero, one, infinities and NaNs of the float of this width, and the ends of the range."""
    top = 8 * width - 1
    words = {
        2: [0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x3F80, 0x3F81, 0x3F7F, 0x7C00, 0x7E01],
        4: [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC00001, 0x3F800000],
        8: [0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000001, 0x3FF0000000000000],
    }.get(width, [])
    return [0, 1, 1 << top, (1 << top) - 1, (1 << top) + 1, (1 << (top + 1)) - 1, *words]


@st.composite
def chunk_pairs(draw: st.DrawFn) -> tuple[int, bytes, bytes]:
    """Draw (width, old, new) of the same length, from nothing changed to everything changed."""
    width = draw(st.sampled_from(WIDTHS))
    size = draw(st.one_of(st.sampled_from(SIZES), st.integers(0, 1200)))
    density = draw(st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0]))
    kind = draw(st.sampled_from(["random", "special", "near"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.bytes(size * width)
    if kind == "special":
        words = special_values(width)
        old = reference.data_of([words[int(i)] for i in rng.integers(0, len(words), size)], width)
    numbers = reference.values(old, width)
    chosen = [i for i in range(size) if rng.random() < density]
    if density and size and not chosen:
        chosen = [int(rng.integers(0, size))]
    for i in chosen:
        if kind == "special":
            words = special_values(width)
            numbers[i] = words[int(rng.integers(0, len(words)))]
        elif kind == "near":
            numbers[i] = (numbers[i] + int(rng.choice([-2, -1, 1, 2]))) % (1 << (8 * width))
        else:
            numbers[i] = int.from_bytes(rng.bytes(width), "little")
    return width, old, reference.data_of(numbers, width)


def extract(old: np.ndarray, new: np.ndarray, changed: int) -> tuple[bytes, bytes, list[bytes]]:
    positions, positions_buffer = guarded((room(old, changed),), np.dtype(np.int32))
    differences, differences_buffer = guarded((room(old, changed),), old.dtype)
    kept, kept_buffer = guarded(old.shape, old.dtype)
    found = kernels.find_changes(old, new, kept, changed, positions, differences, False)
    assert found == changed
    assert not changed or (kept == new).all()
    listed, listed_buffer = guarded((old.size + 4,), np.dtype(np.int32))
    assert kernels.list_changes(old, new, listed) == changed
    assert (listed[:changed] == positions[:changed]).all()
    gaps, gaps_buffer = guarded((changed + old.size // 255 + 1,), np.dtype(np.uint8))
    signs, signs_buffer = guarded(((changed + 7) // 8,), np.dtype(np.uint8))
    planes, planes_buffer = guarded((old.itemsize, changed), np.dtype(np.uint8))
    length = kernels.write_gaps(positions[:changed], gaps)
    kernels.split_differences(differences[:changed], signs, planes)
    joined, joined_buffer = guarded((changed,), old.dtype)
    for plane, row in enumerate(planes):
        kernels.put_plane(joined, row, plane)
    kernels.join_signs(signs, joined)
    assert (joined == differences[:changed]).all()
    buffers = (positions_buffer, differences_buffer, kept_buffer, listed_buffer, gaps_buffer)
    for buffer in (*buffers, signs_buffer, planes_buffer, joined_buffer):
        assert_guards_hold(buffer)
    return gaps[:length].tobytes(), signs.tobytes(), [plane.tobytes() for plane in planes]


def room(old: np.ndarray, limit: int) -> int:
    """Return how long the outputs of ``find_changes`` must be."""
    return min(limit + kernels.BLOCK, old.size) + 4


def frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


@given(chunk_pairs(), st.integers(0, 40))
def test_extraction_stops_once_more_elements_changed_than_the_limit(pair: tuple[int, bytes, bytes], limit: int) -> None:
    width, old, new = pair
    before, after = read_only(old, width), read_only(new, width)
    changed = len(reference.changed_positions(old, new, width))
    for hasty in (False, True):
        positions, positions_buffer = guarded((room(before, limit),), np.dtype(np.int32))
        differences, differences_buffer = guarded((room(before, limit),), before.dtype)
        kept, kept_buffer = guarded(before.shape, before.dtype)
        found = kernels.find_changes(before, after, kept, limit, positions, differences, hasty)
        assert found == (changed if changed <= limit else -1) or (hasty and found == -1)
        assert not changed or (kept == after).all()
        for buffer in (kept_buffer, positions_buffer, differences_buffer):
            assert_guards_hold(buffer)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("begin", [0, 1, 127, 128, 129, 5000])
def test_a_hasty_search_gives_up_where_the_first_changes_are_many(width: int, begin: int) -> None:
    old, new = np.zeros((2, 20_000), f"<u{width}")
    new[begin : begin + 5000] = 1
    outputs = np.empty(20_004, np.int32), np.empty(20_004, old.dtype)
    for hasty, expected in ((True, -1), (False, 5000)):
        kept = np.full_like(old, 7)
        assert kernels.find_changes(frozen(old), frozen(new), kept, 10_000, *outputs, hasty) == expected
        assert (kept == new).all()


def expected_streams(width: int, old: bytes, new: bytes) -> tuple[bytes, bytes, list[bytes]]:
    before, after = reference.values(old, width), reference.values(new, width)
    positions = reference.changed_positions(old, new, width)
    changes = [reference.signed_change(before[i], after[i], width) for i in positions]
    magnitudes = reference.planes([abs(change) - 1 for change in changes], width)
    return reference.gap_stream(positions), reference.sign_stream(changes), magnitudes


def apply(old: bytes, streams: tuple[bytes, bytes, list[bytes]], width: int, *, inverse: bool) -> tuple[int, bytes]:
    gaps, signs, planes = streams
    out, buffer = guarded((len(old) // width,), np.dtype(f"<u{width}"))
    out[:] = read_only(old, width)
    differences = np.zeros(len(planes[0]), out.dtype)
    for plane, row in enumerate(planes):
        kernels.put_plane(differences, np.frombuffer(bytearray(row), np.uint8), plane)
    kernels.join_signs(np.frombuffer(bytearray(signs), np.uint8), differences)
    status = kernels.apply_sparse(out, np.frombuffer(bytearray(gaps), np.uint8), differences, inverse)
    assert_guards_hold(buffer)
    return status, out.tobytes()


@given(chunk_pairs())
def test_changes_are_counted_as_the_reference_counts_them(pair: tuple[int, bytes, bytes]) -> None:
    width, old, new = pair
    expected = len(reference.changed_positions(old, new, width))
    assert kernels.count_many(read_only(old, width), read_only(new, width))[0] == expected


@given(chunk_pairs())
def test_far_changes_are_those_beyond_an_eighth_of_the_value_range(pair: tuple[int, bytes, bytes]) -> None:
    width, old, new = pair
    eighth = (1 << (8 * width)) // 8
    pairs = zip(reference.values(old, width), reference.values(new, width), strict=True)
    expected = sum(abs(reference.signed_change(before, after, width)) > eighth for before, after in pairs)
    assert kernels.count_many(read_only(old, width), read_only(new, width))[1] == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_a_change_of_exactly_an_eighth_is_not_far_and_one_more_is(width: int) -> None:
    modulus = 1 << (8 * width)
    eighth = modulus // 8
    changes = [eighth, eighth + 1, -eighth, -eighth - 1, 0, modulus // 2, modulus // 2 - 1]
    far = [False, True, False, True, False, True, True]
    for start in (0, 1, modulus // 2, modulus - 1):
        for change, expected in zip(changes, far, strict=True):
            old = reference.data_of([start], width)
            new = reference.data_of([(start + change) % modulus], width)
            assert kernels.count_many(read_only(old, width), read_only(new, width))[1] == expected


@given(chunk_pairs())
def test_sparse_streams_are_byte_for_byte_those_of_the_reference(pair: tuple[int, bytes, bytes]) -> None:
    width, old, new = pair
    changed = len(reference.changed_positions(old, new, width))
    found = extract(read_only(old, width), read_only(new, width), changed)
    assert found == expected_streams(width, old, new)


@given(chunk_pairs())
def test_sparse_streams_of_the_reference_lead_forward_and_back(pair: tuple[int, bytes, bytes]) -> None:
    width, old, new = pair
    streams = expected_streams(width, old, new)
    assert apply(old, streams, width, inverse=False) == (0, new)
    assert apply(new, streams, width, inverse=True) == (0, old)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 257, 508, 509, 510, 511, 764, 765, 766])
@pytest.mark.parametrize("before", [0, 1, 31])
def test_gaps_round_every_escape_boundary_are_exact(width: int, gap: int, before: int) -> None:
    elements = before + 1 + gap + 1
    old = bytes(elements * width)
    numbers = [0] * elements
    numbers[before], numbers[before + 1 + gap] = 5, (1 << (8 * width)) - 7
    new = reference.data_of(numbers, width)
    streams = extract(read_only(old, width), read_only(new, width), 2)
    assert streams == expected_streams(width, old, new)
    assert len(streams[0]) == 2 + before // 255 + gap // 255
    assert apply(old, streams, width, inverse=False) == (0, new)
    assert apply(new, streams, width, inverse=True) == (0, old)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 95, 97])
def test_each_single_changed_element_is_found_at_its_own_place(width: int, size: int) -> None:
    old = np.random.default_rng(size).bytes(size * width)
    for position in range(size):
        numbers = reference.values(old, width)
        numbers[position] ^= 1 << (8 * width - 1)
        new = reference.data_of(numbers, width)
        assert kernels.count_many(read_only(old, width), read_only(new, width))[0] == 1
        streams = extract(read_only(old, width), read_only(new, width), 1)
        assert streams[0] == bytes([position])
        assert apply(old, streams, width, inverse=False) == (0, new)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_change_in_any_single_bit_is_a_change(width: int) -> None:
    old = np.random.default_rng(1).bytes(40 * width)
    for bit in range(8 * width):
        for position in (0, 17, 39):  # within the lanes and in what is left after them
            numbers = reference.values(old, width)
            numbers[position] ^= 1 << bit
            new = reference.data_of(numbers, width)
            assert kernels.count_many(read_only(old, width), read_only(new, width))[0] == 1
            assert extract(read_only(old, width), read_only(new, width), 1)[0] == bytes([position])


@pytest.mark.parametrize("width", WIDTHS)
def test_every_pair_of_special_values_survives_sparse_and_zigzag(width: int) -> None:
    words = special_values(width)
    pairs = [(before, after) for before in words for after in words]
    old = reference.data_of([before for before, _ in pairs], width)
    new = reference.data_of([after for _, after in pairs], width)
    changed = sum(before != after for before, after in pairs)
    streams = extract(read_only(old, width), read_only(new, width), changed)
    assert streams == expected_streams(width, old, new)
    assert apply(old, streams, width, inverse=False) == (0, new)
    assert apply(new, streams, width, inverse=True) == (0, old)
    check_zigzag(width, old, new)


def test_the_most_negative_change_has_the_largest_magnitude() -> None:
    for width in WIDTHS:
        old, new = bytes(width), reference.data_of([1 << (8 * width - 1)], width)
        _, signs, planes = extract(read_only(old, width), read_only(new, width), 1)
        assert signs == b"\x01"
        assert b"".join(planes) == b"\xff" * (width - 1) + b"\x7f"  # 2^(8w-1) less 1


def check_zigzag(width: int, old: bytes, new: bytes) -> None:
    pairs = zip(reference.values(old, width), reference.values(new, width), strict=True)
    expected = [reference.zigzag(reference.signed_change(before, after, width)) for before, after in pairs]
    planes, buffer = guarded((width, len(old) // width), np.dtype(np.uint8))
    kernels.zigzag_planes(read_only(old, width), read_only(new, width), planes)
    assert_guards_hold(buffer)
    assert [plane.tobytes() for plane in planes] == reference.planes(expected, width)
    coded = read_only(reference.data_of(expected, width), width)
    for start, end, inverse in ((old, new, False), (new, old, True)):
        out, buffer = guarded((len(old) // width,), np.dtype(f"<u{width}"))
        out[:] = read_only(start, width)
        kernels.add_zigzag(out, coded, inverse)
        assert_guards_hold(buffer)
        assert out.tobytes() == end


@given(chunk_pairs())
def test_zigzag_differences_are_those_of_the_reference_and_lead_both_ways(
    pair: tuple[int, bytes, bytes],
) -> None:
    check_zigzag(*pair)


def test_every_one_byte_change_has_its_own_zigzag_number() -> None:
    old = bytes(before for before in range(256) for _ in range(256))
    new = bytes(after for _ in range(256) for after in range(256))
    check_zigzag(1, old, new)


@given(chunk_pairs())
def test_planes_are_the_bytes_of_the_values_in_order_and_join_again(pair: tuple[int, bytes, bytes]) -> None:
    width, _, data = pair
    elements = len(data) // width
    planes, planes_buffer = guarded((width, elements), np.dtype(np.uint8))
    kernels.split_planes(read_only(data, width), planes)
    assert_guards_hold(planes_buffer)
    assert [plane.tobytes() for plane in planes] == [data[plane::width] for plane in range(width)]
    out, buffer = guarded((elements,), np.dtype(f"<u{width}"))
    for plane, row in enumerate(planes):
        kernels.put_plane(out, row, plane)
    assert_guards_hold(buffer)
    assert out.tobytes() == data


@given(st.binary(max_size=1200), st.sampled_from([0.0, 0.3, 0.35, 0.9, 1.0]), st.integers(0, 2**32 - 1))
def test_zeros_go_apart_and_come_back(data: bytes, share: float, seed: int) -> None:
    raw = np.frombuffer(data, np.uint8) * (np.random.default_rng(seed).random(len(data)) >= share)
    raw = raw.astype(np.uint8)
    others = [byte for byte in raw.tolist() if byte]
    assert kernels.count_zeros(raw) == len(data) - len(others)
    flags, flags_buffer = guarded(((len(data) + 7) // 8,), np.dtype(np.uint8))
    values, values_buffer = guarded((len(others),), np.dtype(np.uint8))
    kernels.set_apart(raw, flags, values)
    assert values.tolist() == others
    assert (flags == np.packbits(raw != 0, bitorder="little")).all()
    if flags.size:
        flags[-1] |= 255 << (len(data) - 8 * (flags.size - 1)) & 255  # spare bits mean nothing
    assert kernels.count_flags(flags, raw.size) == len(others)
    out, out_buffer = guarded(raw.shape, np.dtype(np.uint8))
    kernels.join_zeros(flags, values, out)
    assert (out == raw).all()
    for buffer in (values_buffer, flags_buffer, out_buffer):
        assert_guards_hold(buffer)


def test_the_sample_tells_random_bytes_from_others() -> None:
    rng = np.random.default_rng(0)
    assert kernels.sample_bits(rng.integers(0, 256, 1 << 16, np.uint8), 4096) > 7.9
    assert kernels.sample_bits(rng.integers(0, 16, 1 << 16, np.uint8), 4096) == pytest.approx(4, abs=0.02)
    assert kernels.sample_bits(np.zeros(5, np.uint8), 4096) == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "gaps",
    [
        pytest.param(b"\x28", id="a position just past the end"),
        pytest.param(b"\xfe", id="a position far past the end"),
        pytest.param(b"\xff\xff\x00", id="escapes that lead past the end"),
        pytest.param(b"\xff" * 40, id="escapes that never end"),
        pytest.param(b"", id="no position"),
        pytest.param(b"\x00\x00", id="a position too many"),
        pytest.param(b"\x00\xff", id="an unfinished gap after the last position"),
        pytest.param(b"\x00\x28", id="a position too many past the end"),
    ],
)
def test_gaps_that_do_not_fit_are_told_and_nothing_outside_is_touched(width: int, gaps: bytes) -> None:
    old = np.random.default_rng(2).bytes(40 * width)
    status, _ = apply(old, (gaps, b"\x00", [b"\x01"] * width), width, inverse=False)
    assert status != 0


@given(
    st.sampled_from(WIDTHS),
    st.integers(0, 70),
    st.binary(max_size=24),
    st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 2**32 - 1)),
)
def test_random_gap_streams_never_write_outside_and_agree_with_the_reference(
    width: int, elements: int, gaps: bytes, rest: tuple[int, bool, int]
) -> None:
    changed, inverse, seed = rest
    rng = np.random.default_rng(seed)
    old, signs = rng.bytes(elements * width), rng.bytes((changed + 7) // 8)
    planes = [rng.bytes(changed) for _ in range(width)]
    status, found = apply(old, (gaps, signs, planes), width, inverse=inverse)
    try:
        positions = reference.gap_positions(gaps, elements, changed)
    except reference.DamagedError:
        assert status != 0
        return
    numbers = reference.values(old, width)
    for i, (position, magnitude) in enumerate(zip(positions, reference.joined(planes), strict=True)):
        negative = bool(signs[i // 8] >> (i % 8) & 1) != inverse
        change = -(magnitude + 1) if negative else magnitude + 1
        numbers[position] = (numbers[position] + change) % (1 << (8 * width))
    assert status == 0
    assert found == reference.data_of(numbers, width)
