from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import safetensors_file
from safetensors.torch import save

from deltastore.container import MAX_HEADER_BYTES, build_header, header_size, parse_header
from deltastore.errors import CorruptObject
from deltastore.snapshot import DTYPES

if TYPE_CHECKING:
    from pathlib import Path

KEY = "parts/0000000001/x/model-00000.safetensors"


def framed(text: bytes | str, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def header_of(**entries: object) -> bytes:
    return framed(json.dumps(entries))


GOOD = entry()
MALFORMED = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"\x08\0\0\0\0\0\0", id="seven bytes"),
    pytest.param(struct.pack("<Q", 0), id="a header of no bytes"),
    pytest.param(struct.pack("<Q", 1) + b"{", id="a header of one byte"),
    pytest.param(struct.pack("<Q", 3) + b"{}", id="a header a byte longer than the file"),
    pytest.param(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", id="a header over the limit"),
    pytest.param(struct.pack("<Q", 2**64 - 1) + b"{}", id="a header of 16 EiB"),
    pytest.param(struct.pack("<Q", 2**63) + b"{}", id="a header whose length is negative when signed"),
    pytest.param(framed("[]"), id="an array"),
    pytest.param(framed("null"), id="null"),
    pytest.param(framed('"a"'), id="a string"),
    pytest.param(framed("{}{}"), id="two objects"),
    pytest.param(framed("{} x"), id="something after it"),
    pytest.param(framed("{}\0\0\0\0"), id="padded with zeros"),
    pytest.param(framed(b'{"a\xff":' + json.dumps(GOOD).encode() + b"}"), id="a name that is not UTF-8"),
    pytest.param(framed(b"\xef\xbb\xbf{}"), id="a byte order mark"),
    pytest.param(framed('{"\\ud800":' + json.dumps(GOOD) + "}"), id="a lone surrogate"),
    pytest.param(framed('{"a":' * 100_000), id="deeply nested objects"),
    pytest.param(framed("[" * 100_000), id="deeply nested arrays"),
    pytest.param(framed('{"a":' + "[" * 50_000 + "]" * 50_000 + "}"), id="a deeply nested entry"),
    pytest.param(header_of(a=None), id="an entry that is null"),
    pytest.param(header_of(a=[]), id="an entry that is an array"),
    pytest.param(header_of(a={}), id="an entry without fields"),
    pytest.param(header_of(a={"dtype": "U8", "shape": [4]}), id="an entry without offsets"),
    pytest.param(header_of(a={"dtype": "U8", "data_offsets": [0, 4]}), id="an entry without a shape"),
    pytest.param(header_of(a={"shape": [4], "data_offsets": [0, 4]}), id="an entry without a dtype"),
    pytest.param(header_of(a=entry(dtype="U9")), id="an unknown dtype"),
    pytest.param(header_of(a=entry(dtype=8)), id="a dtype that is a number"),
    pytest.param(header_of(a=entry(shape=4)), id="a shape that is a number"),
    pytest.param(header_of(a=entry(shape="4")), id="a shape that is a string"),
    pytest.param(header_of(a=entry(shape=(4.0,))), id="a shape with a fraction"),
    pytest.param(header_of(a=entry(shape=("4",))), id="a shape of strings"),
    pytest.param(header_of(a=entry(shape=(-4,))), id="a negative dimension"),
    pytest.param(header_of(a=entry(shape=(-2, -2))), id="two negative dimensions"),
    pytest.param(header_of(a=entry(shape=(2**32, 2**32), offsets=(0, 0))), id="a product that wraps to zero"),
    pytest.param(header_of(a=entry(shape=(0, 2**64), offsets=(0, 0))), id="a dimension beyond 64 bits"),
    pytest.param(header_of(a=entry(shape=(10**40,))), id="a dimension of 41 digits"),
    pytest.param(header_of(a=entry(dtype="F4", shape=(3,), offsets=(0, 1))), id="half a byte"),
    pytest.param(header_of(a=entry(offsets=(-4, 0))), id="negative offsets"),
    pytest.param(header_of(a=entry(offsets=(4, 0))), id="offsets the wrong way round"),
    pytest.param(header_of(a=entry(offsets=(0, 3))), id="a byte too few"),
    pytest.param(header_of(a=entry(offsets=(0, 5))), id="a byte too many"),
    pytest.param(header_of(a=entry(offsets=(1, 5))), id="a hole at the beginning"),
    pytest.param(header_of(a=entry(offsets=(0, 4, 8))), id="three offsets"),
    pytest.param(header_of(a=entry(offsets=(4,))), id="one offset"),
    pytest.param(header_of(a=entry(offsets=(0, 4.0))), id="an offset with a fraction"),
    pytest.param(header_of(a=entry(offsets=(2**64, 2**64 + 4))), id="offsets beyond 64 bits"),
    pytest.param(header_of(a=entry(offsets=(2**63, 2**63 + 4))), id="offsets beyond 63 bits"),
    pytest.param(header_of(a=GOOD, b=GOOD), id="two tensors at one place"),
    pytest.param(header_of(a=GOOD, b=entry(offsets=(2, 6))), id="overlapping tensors"),
    pytest.param(header_of(a=GOOD, b=entry(offsets=(5, 9))), id="a hole between tensors"),
    pytest.param(header_of(a=GOOD, b=entry(shape=(0,), offsets=(2, 2))), id="an empty tensor inside another"),
    pytest.param(header_of(a=GOOD, b=entry(shape=(0,), offsets=(9, 9))), id="an empty tensor past the end"),
    pytest.param(header_of(**{"": GOOD}), id="an empty name"),
    pytest.param(header_of(**{"a\nb": GOOD}), id="a control character in a name"),
    pytest.param(header_of(**{"a" * 1025: GOOD}), id="a name over the limit"),
    pytest.param(header_of(a=entry(shape=(1,) * 65, offsets=(0, 1))), id="a rank over the limit"),
    pytest.param(header_of(__metadata__=None, a=GOOD), id="metadata that are null"),
    pytest.param(header_of(__metadata__=[], a=GOOD), id="metadata that are an array"),
    pytest.param(header_of(__metadata__={"a": 1}, a=GOOD), id="metadata with a number"),
    pytest.param(header_of(__metadata__={"a": None}, a=GOOD), id="metadata with null"),
    pytest.param(header_of(__metadata__={"a": {}}, a=GOOD), id="metadata with an object"),
    pytest.param(framed(f'{{"a":{json.dumps(GOOD)},"a":{json.dumps(GOOD)}}}'), id="a tensor twice, the same"),
    pytest.param(
        framed(f'{{"a":{json.dumps(GOOD)},"a":{json.dumps(entry(shape=(2,), offsets=(0, 2)))}}}'),
        id="a tensor twice, differently",
    ),
    pytest.param(framed('{"a":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'), id="a dtype twice"),
    pytest.param(framed('{"__metadata__":{},"__metadata__":{}}'), id="metadata twice"),
    pytest.param(framed('{"__metadata__":{"a":"b","a":"c"}}'), id="a metadata field twice"),
    pytest.param(framed('{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}'), id="a minus zero"),
    pytest.param(framed('{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}'), id="a leading zero"),
]


@pytest.mark.parametrize("data", MALFORMED)
def test_a_malformed_header_is_refused_with_its_key(data: bytes) -> None:
    with pytest.raises(CorruptObject) as caught:
        parse_header(data + bytes(16 if len(data) > 16 else 0), key=KEY)
    assert caught.value.key == KEY
    assert KEY in str(caught.value)


def test_every_cut_of_a_header_is_refused() -> None:
    data = build_header([("a", "U8", (4,)), ("b", "F32", (2,))], {"x": "y"})
    for end in range(len(data)):
        with pytest.raises(CorruptObject):
            parse_header(data[:end], key=KEY)
    assert parse_header(data, key=KEY).size == len(data)


def test_a_header_says_where_each_tensor_stands_in_the_order_of_the_file() -> None:
    tensors = {
        "z": ("F32", (2, 2), bytes(range(16))),
        "empty": ("BF16", (0, 3), b""),
        "a": ("U8", (3,), b"abc"),
        "scalar": ("F64", (), bytes(8)),
    }
    data = safetensors_file(tensors, {"format": "pt"})
    header = parse_header(data, key=KEY)
    assert header.metadata == {"format": "pt"}
    assert (header.size, header.file_size) == (len(data) - 27, len(data))
    assert header_size(data[:8], key=KEY) == header.size
    assert sorted(placed.spec.name for placed in header.tensors) == sorted(tensors)
    for placed in header.tensors:
        dtype, shape, content = tensors[placed.spec.name]
        assert (placed.spec.dtype, placed.spec.shape) == (dtype, shape)
        assert data[placed.start : placed.end] == content
    starts = [placed.start for placed in header.tensors]
    assert starts == sorted(starts)


def test_a_header_needs_no_metadata_and_no_padding() -> None:
    header = parse_header(framed('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'), key=KEY)
    assert header.metadata == {}
    assert [placed.spec.name for placed in header.tensors] == ["a"]
    assert parse_header(framed("{}"), key=KEY).tensors == ()
    assert parse_header(framed("{}      "), key=KEY).file_size == 16


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)), max_size=6),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
)
def test_a_header_that_was_built_is_aligned_and_parses_to_the_same(
    drawn: list[tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    metadata = {name: text for name, text in metadata.items() if (name + text).isprintable()}
    wanted = [
        (f"t{i}", dtype, (*sizes, 8) if DTYPES[dtype].bits % 8 else tuple(sizes))
        for i, (dtype, sizes) in enumerate(drawn)
    ]
    data = build_header(wanted, metadata)
    assert len(data) % 8 == 0
    header = parse_header(data, key=KEY)
    by_name = {placed.spec.name: placed.spec for placed in header.tensors}
    assert [(name, by_name[name].dtype, by_name[name].shape) for name, _, _ in wanted] == wanted
    assert header.metadata == metadata
    whole = data + bytes(header.file_size - header.size)
    names = [name for name, _ in safetensors.deserialize(whole)]
    assert sorted(names) == sorted(name for name, _, _ in wanted)


TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_files_that_the_library_saves_parse_for_every_dtype_it_saves(dtype: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2
    tensors = {
        "two.dims": raw.view(TORCH_DTYPES[dtype]).reshape(2, -1),
        "scalar": raw[:8].view(TORCH_DTYPES[dtype])[0].clone(),
        "empty": torch.empty(0, 4, dtype=TORCH_DTYPES[dtype]),
    }
    data = save(tensors, {"format": "pt"})
    header = parse_header(data, key=KEY)
    assert header.file_size == len(data)
    assert {placed.spec.name: (placed.spec.dtype, placed.spec.shape) for placed in header.tensors} == {
        name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    placed = next(placed for placed in header.tensors if placed.spec.name == "two.dims")
    assert data[placed.start : placed.end] == raw.numpy().tobytes()


def assert_the_library_agrees(data: bytes) -> bool:
    """Check that the library reads what our parser accepts, and alike; tell whether it was accepted."""
    try:
        header = parse_header(data, key=KEY)
    except CorruptObject:
        return False
    if header.file_size != len(data):
        return False
    found = dict(safetensors.deserialize(data))
    assert sorted(found) == sorted(placed.spec.name for placed in header.tensors)
    for placed in header.tensors:
        assert found[placed.spec.name]["dtype"] == placed.spec.dtype
        assert tuple(found[placed.spec.name]["shape"]) == placed.spec.shape
        assert bytes(found[placed.spec.name]["data"]) == data[placed.start : placed.end]
    return True


numbers = st.one_of(st.integers(-1, 9), st.sampled_from([2**32, 2**63, 2**64 - 1, 2**64, 1.0, None, "1"]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F4", "BF16", "F8_E8M0", "F6_E2M3", "C64", "F9", ""]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=1, max_size=3),
    }
)


@given(st.dictionaries(st.sampled_from(["a", "b", "é", ""]), entries, max_size=3), st.integers(0, 12))
def test_whatever_header_we_accept_the_library_accepts_alike(drawn: dict[str, object], size: int) -> None:
    assert_the_library_agrees(framed(json.dumps(drawn), bytes(range(size))))


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(-1, 255)), min_size=1, max_size=3),
)
def test_whatever_mutation_of_a_good_file_we_accept_the_library_accepts_alike(
    sizes: list[int], edits: list[tuple[int, int]]
) -> None:
    tensors = {f"t{i}": ("U8", (size,), bytes([i] * size)) for i, size in enumerate(sizes)}
    data = bytearray(safetensors_file(tensors, {"format": "pt"}))
    for place, value in edits:
        if value < 0 and len(data) > 1:
            del data[place % len(data)]
        else:
            data[place % len(data)] = value % 256
    assert_the_library_agrees(bytes(data))


def test_every_changed_byte_of_a_small_header_is_refused_or_read_as_the_library_reads_it() -> None:
    data = safetensors_file({"a": ("U8", (2,), b"xy"), "b": ("BF16", (1,), b"zz")})
    accepted = 0
    for place in range(len(data)):
        for value in b' 0123456789-+.eE"\\{}[],:abFU\x00\x7f\xff':
            changed = bytearray(data)
            changed[place] = value
            accepted += assert_the_library_agrees(bytes(changed))
    assert accepted > 100  # names and contents may be anything


def test_the_parser_takes_any_buffer(tmp_path: Path) -> None:
    data = safetensors_file({"a": ("U8", (4,), b"abcd")})
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    for buffer in (data, bytearray(data), memoryview(data), memoryview(np.memmap(path, np.uint8, "r"))):
        assert parse_header(buffer, key=KEY).file_size == len(data)
