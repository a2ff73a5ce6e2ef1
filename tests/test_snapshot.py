from __future__ import annotations

import json
import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from deltastore.digest import HASHES, hasher
from deltastore.errors import CorruptObject, DeltastoreError, UnsupportedFormat
from deltastore.snapshot import CHUNK_BYTES, DTYPES, Schema, TensorSpec, snapshot_id, tensor_digests

KEY = "parts/0000000000/x/model-schema.json"

# The table of section 2.1: bits an element, width.
TABLE = {
    "F64": (64, 8),
    "F32": (32, 4),
    "C64": (64, 4),
    "F16": (16, 2),
    "BF16": (16, 2),
    "F8_E4M3": (8, 1),
    "F8_E5M2": (8, 1),
    "F8_E4M3FNUZ": (8, 1),
    "F8_E5M2FNUZ": (8, 1),
    "F8_E8M0": (8, 1),
    "F6_E2M3": (6, 1),
    "F6_E3M2": (6, 1),
    "F4": (4, 1),
    "BOOL": (8, 1),
    "U8": (8, 1),
    "I8": (8, 1),
    "I16": (16, 1),
    "U16": (16, 1),
    "I32": (32, 1),
    "U32": (32, 1),
    "I64": (64, 1),
    "U64": (64, 1),
}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def schema_of(tensors: Tensors) -> Schema:
    return Schema(TensorSpec(name, dtype, shape) for name, (dtype, shape, _) in tensors.items())


def table_of(tensors: Tensors, hash_name: str = "xxh3-128") -> np.ndarray:
    rows = [leaf for name in sorted(tensors, key=str.encode) for leaf in reference.leaves(tensors[name][2], hash_name)]
    size = hasher(hash_name).size
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), size)


def id_of(tensors: Tensors, hash_name: str = "xxh3-128") -> str:
    return snapshot_id(schema_of(tensors), table_of(tensors, hash_name), hasher(hash_name))


def test_the_dtypes_are_those_of_the_format_with_their_bits_and_widths() -> None:
    assert {name: (dtype.bits, dtype.width) for name, dtype in DTYPES.items()} == TABLE


def test_the_chunk_grid_is_a_mebibyte() -> None:
    assert CHUNK_BYTES == 1_048_576


@pytest.mark.parametrize("hash_name", sorted(HASHES))
@pytest.mark.parametrize("dtype", sorted(TABLE))
def test_the_hash_tree_is_that_of_the_format_for_every_dtype(dtype: str, hash_name: str) -> None:
    bits, _ = TABLE[dtype]
    rng = np.random.default_rng(bits)
    tensors: Tensors = {
        "layers.0.weight": (dtype, (4, 6), rng.bytes(4 * 6 * bits // 8)),
        "layers.0.empty": (dtype, (0, 3), b""),
        "layers.0.one": (dtype, (8,), rng.bytes(bits)),
    }
    if bits % 8 == 0:
        tensors["layers.0.scalar"] = (dtype, (), rng.bytes(bits // 8))
    assert id_of(tensors, hash_name) == reference.snapshot_id(tensors, hash_name)
    nodes = tensor_digests(schema_of(tensors), table_of(tensors, hash_name), hasher(hash_name))
    for name, node in zip(sorted(tensors), nodes, strict=True):
        wanted_dtype, shape, data = tensors[name]
        leaves = reference.leaves(data, hash_name)
        assert node == reference.tensor_node(name, wanted_dtype, shape, leaves, hash_name)


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 7]
)
def test_tensors_are_cut_at_the_chunk_grid(size: int) -> None:
    spec = TensorSpec("w", "U8", (size,))
    ranges = [spec.chunk_range(chunk) for chunk in range(spec.chunks)]
    expected = [(start, min(start + 1_048_576, size)) for start in range(0, size, 1_048_576)]
    assert ranges == expected
    data = np.random.default_rng(1).bytes(size)
    tensors: Tensors = {"v": ("U8", (3,), b"abc"), "w": ("U8", (size,), data)}
    assert id_of(tensors) == reference.snapshot_id(tensors)


def test_no_tensor_at_all_has_an_id_of_its_own() -> None:
    assert id_of({}) == reference.snapshot_id({})


def test_names_dtypes_shapes_and_every_byte_count_and_nothing_else_does() -> None:
    base: Tensors = {"a": ("F32", (2, 3), bytes(24)), "b": ("U8", (4,), b"1234"), "e": ("U8", (0,), b"")}
    others: list[Tensors] = [
        {**base, "a": ("F32", (3, 2), bytes(24))},
        {**base, "a": ("F32", (6,), bytes(24))},
        {**base, "a": ("F32", (1, 2, 3), bytes(24))},
        {**base, "a": ("I32", (2, 3), bytes(24))},
        {**base, "a": ("C64", (1, 3), bytes(24))},
        {**base, "a": ("F32", (2, 3), bytes(23) + b"\x01")},
        {**base, "b": ("U8", (4,), b"1235")},
        {**base, "b": ("I8", (4,), b"1234")},
        {**base, "e": ("U8", (0, 1), b"")},
        {"a": base["a"], "b": base["b"]},
        {"a": base["a"], "b": base["b"], "f": base["e"]},
        {"a": base["a"], "bb": base["b"], "e": base["e"]},
    ]
    ids = [id_of(tensors) for tensors in (base, *others)]
    assert len(set(ids)) == len(ids)
    assert id_of(dict(reversed(base.items()))) == ids[0]


def test_the_element_width_is_no_part_of_the_id() -> None:
    table = np.zeros((1, 16), np.uint8)
    one, two = (Schema([TensorSpec("a", "BF16", (4,), width)]) for width in (1, 2))
    assert snapshot_id(one, table, hasher("xxh3-128")) == snapshot_id(two, table, hasher("xxh3-128"))


def test_tensors_stand_in_the_order_of_their_names_utf8_bytes() -> None:
    # By UTF-16 code units the last two would change places; by locale the first ones would.
    names = ["B", "Z", "_", "a", "a.1", "a.10", "a.2", "ab", "z", "é", "中", "\uffee", "\U0001f600"]
    schema = Schema(TensorSpec(name, "U8", (1,)) for name in reversed(names))
    assert [spec.name for spec in schema] == sorted(names, key=lambda name: name.encode())
    assert [spec.name for spec in schema] == names
    assert [schema.position(name) for name in names] == list(range(len(names)))


def test_chunks_are_numbered_through_the_schema_and_empty_tensors_take_none() -> None:
    schema = Schema(
        [
            TensorSpec("c", "U8", (1,)),
            TensorSpec("a", "U8", (CHUNK_BYTES + 1,)),
            TensorSpec("b", "U8", (0,)),
            TensorSpec("d", "F64", (CHUNK_BYTES // 4,)),
        ]
    )
    assert schema.first_chunk.tolist() == [0, 2, 2, 3, 5]
    assert (schema.chunks, schema.nbytes) == (5, CHUNK_BYTES + 1 + 1 + 2 * CHUNK_BYTES)
    assert schema.elements == CHUNK_BYTES + 1 + 1 + CHUNK_BYTES // 4
    assert schema.chunk_number("d", 1) == 4
    assert "a" in schema
    assert "x" not in schema
    with pytest.raises(KeyError):
        schema.position("x")


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("BF16", (50_000, 65_536), 6_553_600_000),
        ("U8", (5 << 30,), 5 << 30),
        ("U8", ((1 << 32) + 1,), (1 << 32) + 1),
        ("F32", (1 << 32,), 1 << 34),
        ("F4", (1 << 20, 1 << 20), 1 << 39),
        ("F64", (1 << 44, 2), 1 << 48),
        ("U8", (1 << 48,), 1 << 48),
        ("F4", (1 << 49,), 1 << 48),
        ("U8", (0, 1 << 60), 0),
    ],
)
def test_tensors_beyond_four_gibibytes_wrap_nowhere(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    spec = TensorSpec("m", dtype, shape)
    assert spec.nbytes == nbytes
    assert spec.chunks == math.ceil(nbytes / (1 << 20))
    schema = Schema([TensorSpec("a", "U8", (7,)), spec, TensorSpec("z", "U8", (1,))])
    assert schema.first_chunk.tolist() == [0, 1, 1 + spec.chunks, 2 + spec.chunks]
    if spec.chunks:
        last = spec.chunks - 1
        start, end = spec.chunk_range(last)
        assert (start, end) == (last << 20, nbytes)
        assert schema.chunk_number("m", last) == spec.chunks
    assert Schema.from_json(schema.to_json(), key=KEY) == schema


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "width"),
    [
        pytest.param("", "U8", (1,), 0, id="an empty name"),
        pytest.param("n" * 1025, "U8", (1,), 0, id="a long name"),
        pytest.param("é" * 513, "U8", (1,), 0, id="a name of too many bytes"),
        pytest.param("a\nb", "U8", (1,), 0, id="a line break in a name"),
        pytest.param("a\0b", "U8", (1,), 0, id="a zero in a name"),
        pytest.param("a\x7fb", "U8", (1,), 0, id="a delete in a name"),
        pytest.param("\ud800", "U8", (1,), 0, id="a lone surrogate"),
        pytest.param("a", "U128", (1,), 0, id="an unknown dtype"),
        pytest.param("a", "f32", (1,), 0, id="a dtype in lower case"),
        pytest.param("a", "U8", (1,) * 65, 0, id="a rank of 65"),
        pytest.param("a", "U8", (-1,), 0, id="a negative dimension"),
        pytest.param("a", "U8", (-1, -1), 0, id="two negative dimensions"),
        pytest.param("a", "U8", ((1 << 48) + 1,), 0, id="a byte over the limit"),
        pytest.param("a", "F64", (1 << 46,), 0, id="twice the limit"),
        pytest.param("a", "U8", (1 << 40, 1 << 40), 0, id="a product beyond 64 bits"),
        pytest.param("a", "U8", (1 << 32, 1 << 32), 0, id="a product that wraps to zero"),
        pytest.param("a", "U8", (0, 1 << 64), 0, id="a dimension beyond 64 bits"),
        pytest.param("a", "F4", (3,), 0, id="half a byte of F4"),
        pytest.param("a", "F4", (), 0, id="a scalar of F4"),
        pytest.param("a", "F6_E2M3", (2,), 0, id="12 bits of F6"),
        pytest.param("a", "F6_E3M2", (5, 1), 0, id="30 bits of F6"),
        pytest.param("a", "U8", (4,), 3, id="a width of 3"),
        pytest.param("a", "U8", (16,), 16, id="a width of 16"),
        pytest.param("a", "U8", (16,), -1, id="a negative width"),
        pytest.param("a", "U8", (6,), 4, id="a width that does not divide the bytes"),
        pytest.param("a", "BF16", (1,), 4, id="a width over the bytes"),
    ],
)
def test_tensors_outside_the_limits_are_refused(name: str, dtype: str, shape: tuple[int, ...], width: int) -> None:
    with pytest.raises(CorruptObject):
        TensorSpec(name, dtype, shape, width)


def test_tensors_at_the_limits_are_accepted() -> None:
    assert TensorSpec("n" * 1024, "U8", (1,) * 64).nbytes == 1
    assert TensorSpec("é" * 512, "F4", (2,)).nbytes == 1
    assert TensorSpec("a", "F6_E2M3", (4,)).nbytes == 3
    assert TensorSpec("a b/c:d", "F4", (2, 3)).nbytes == 3


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(CorruptObject, match="twice"):
        Schema([TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (2,))])


def test_the_schema_is_written_as_the_format_says() -> None:
    schema = Schema([TensorSpec("w", "BF16", (8,)), TensorSpec("é", "F32", ()), TensorSpec('a"b', "U8", (0, 2))])
    expected = '{"format":1,"tensors":[["a\\"b","U8",[0,2],1],["w","BF16",[8],2],["é","F32",[],4]]}'
    assert schema.to_json() == expected.encode()
    assert Schema.from_json(expected.encode(), key=KEY) == schema


ROW = '["a","U8",[4],1]'
REFUSED = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"{}", id="no fields"),
    pytest.param(b"null", id="null"),
    pytest.param(b"[]", id="an array"),
    pytest.param(b'{"format":1}', id="no tensors"),
    pytest.param(b'{"tensors":[]}', id="no format"),
    pytest.param(b'{"format":1,"tensors":{}}', id="tensors as an object"),
    pytest.param(b'{"format":"1","tensors":[]}', id="a format in quotes"),
    pytest.param(b'{"format":1.0,"tensors":[]}', id="a format with a fraction"),
    pytest.param(b'{"format":true,"tensors":[]}', id="a format that is true"),
    pytest.param(b'{"format":1,"tensors":[]} x', id="something after it"),
    pytest.param(b'{"format":1,"tensors":[]}{}', id="two of them"),
    pytest.param(b'{"format":1,"tensors":[]', id="cut short"),
    pytest.param(b'\xef\xbb\xbf{"format":1,"tensors":[]}', id="a byte order mark"),
    pytest.param(f'{{"format":1,"tensors":[{ROW},{ROW}]}}'.encode(), id="a name twice"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4]]]}', id="no width"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4],1,1]]}', id="a field too many"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4],0]]}', id="a width of 0"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4],3]]}', id="a width of 3"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4],8]]}', id="a width that does not divide"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4],NaN]]}', id="a width of NaN"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[4.5],1]]}', id="half an element"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[-4],1]]}', id="a negative dimension"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[1e3],1]]}', id="an exponent"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[NaN],1]]}', id="a dimension of NaN"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[Infinity],1]]}', id="an infinite dimension"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[%d],1]]}' % 10**30, id="a dimension of 31 digits"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",[' + b"9" * 5000 + b"],1]]}", id="5000 digits"),
    pytest.param(b'{"format":1,"tensors":[["a","U8",4,1]]}', id="a shape that is no array"),
    pytest.param(b'{"format":1,"tensors":[["a","X8",[4],1]]}', id="an unknown dtype"),
    pytest.param(b'{"format":1,"tensors":[["","U8",[4],1]]}', id="an empty name"),
    pytest.param(b'{"format":1,"tensors":[["a\\u0000","U8",[4],1]]}', id="a control character"),
    pytest.param(b'{"format":1,"tensors":[["a\xff","U8",[4],1]]}', id="a name that is not UTF-8"),
    pytest.param(b'{"format":1,"tensors":[["\\ud800","U8",[4],1]]}', id="a lone surrogate"),
    pytest.param(b'{"format":1,"tensors":[["b","U8",[4],1],["a","U8",[4],1]]}', id="names out of order"),
    pytest.param(b'{"format":1,"tensors":' + b"[" * 100_000, id="deep nesting"),
    pytest.param(b"\x00" * 64, id="zeros"),
]


@pytest.mark.parametrize("data", REFUSED)
def test_a_schema_that_is_not_strictly_one_is_refused_with_its_key(data: bytes) -> None:
    with pytest.raises(CorruptObject) as caught:
        Schema.from_json(data, key=KEY)
    assert caught.value.key == KEY
    assert KEY in str(caught.value)


@pytest.mark.parametrize("number", [0, 2, -1, 10**6])
def test_a_schema_of_another_format_is_unsupported(number: int) -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        Schema.from_json(b'{"format":%d,"tensors":[]}' % number, key=KEY)
    assert caught.value.key == KEY


def test_every_cut_of_a_schema_is_refused() -> None:
    data = Schema([TensorSpec("a", "U8", (4,)), TensorSpec("b", "F32", (2, 2))]).to_json()
    for end in range(len(data)):
        with pytest.raises(CorruptObject):
            Schema.from_json(data[:end], key=KEY)


def test_a_reader_uses_the_width_of_the_schema() -> None:
    schema = Schema.from_json(b'{"format":1,"tensors":[["a","I64",[4],8],["b","BF16",[4],1]]}', key=KEY)
    assert [(spec.width, spec.elements) for spec in schema] == [(8, 4), (1, 8)]


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@given(
    st.dictionaries(
        names, st.tuples(st.sampled_from(sorted(TABLE)), st.lists(st.integers(0, 3), max_size=4)), max_size=8
    )
)
def test_any_schema_is_read_as_it_was_written(drawn: dict[str, tuple[str, list[int]]]) -> None:
    specs = []
    for name, (dtype, sizes) in drawn.items():
        shape = (8, *sizes) if TABLE[dtype][0] < 8 else tuple(sizes)
        specs.append(TensorSpec(name, dtype, shape))
    schema = Schema(specs)
    text = schema.to_json()
    assert Schema.from_json(text, key=KEY) == schema
    rows = [[spec.name, spec.dtype, list(spec.shape), TABLE[spec.dtype][1]] for spec in schema]
    assert json.loads(text) == {"format": 1, "tensors": rows}


@given(st.binary(max_size=200))
def test_random_bytes_are_no_schema(data: bytes) -> None:
    with pytest.raises(DeltastoreError):
        Schema.from_json(data, key=KEY)


@pytest.mark.parametrize("shape", [(0, 16), (2, 16), (1, 15), (1, 32), (16,)])
def test_a_digest_table_that_does_not_fit_the_schema_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptObject, match="does not fit"):
        snapshot_id(Schema([TensorSpec("a", "U8", (4,))]), np.zeros(shape, np.uint8), hasher("xxh3-128"))


def test_differences_name_every_tensor_that_is_missing_unknown_or_another() -> None:
    schema = Schema([TensorSpec("a", "U8", (1,)), TensorSpec("b", "U8", (1,)), TensorSpec("c", "U8", (1,))])
    other = Schema([TensorSpec("b", "I8", (1,)), TensorSpec("c", "U8", (2,)), TensorSpec("d", "U8", (1,))])
    assert schema.differences(schema) == []
    lines = schema.differences(other)
    assert lines == [
        "a is missing",
        "b is I8[1] instead of U8[1]",
        "c is U8[2] instead of U8[1]",
        "d is unknown",
    ]


@pytest.mark.parametrize("hash_name", sorted(HASHES))
def test_the_hashes_are_those_of_the_libraries_and_digests_are_spelled_in_hex(hash_name: str) -> None:
    function = hasher(hash_name)
    for data in (b"", b"abc", bytes(100_000)):
        expected = reference.HASHES[hash_name](data)
        kinds = (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8))
        assert {function.digest(kind) for kind in kinds} == {expected}
        assert len(expected) == function.size
        assert function.of(data) == f"{hash_name}:{expected.hex()}"


@pytest.mark.parametrize("name", ["", "xxh3", "XXH3-128", "md5", "blake2"])
def test_an_unknown_hash_is_unsupported(name: str) -> None:
    with pytest.raises(UnsupportedFormat):
        hasher(name)
