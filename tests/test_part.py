from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from deltastore.codec import EncodedChunk, Encoding
from deltastore.digest import hasher
from deltastore.errors import CorruptObject
from deltastore.part import ChunkRow, Part, PartIdentity, build_part, parse_part, table_size
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec

XXH3 = hasher("xxh3-128")
KEY = "parts/0000000007/x/model-00000.safetensors"
IDENTITY = PartIdentity("1" * 32, 7, "2" * 32, "model")
SCHEMA = Schema(
    [
        TensorSpec("a", "U8", (2 * CHUNK_BYTES + 5,)),
        TensorSpec("b", "BF16", (0,)),
        TensorSpec("c", "F32", (4,)),
        TensorSpec("d", "F64", (CHUNK_BYTES // 4,)),
    ]
)
COLUMNS = ["tensor", "chunk", "changed", "length", "encoding", "old_digest", "new_digest"]


def row(tensor: int, chunk: int, payload: bytes = b"payload", encoding: int = 1, changed: int = 1) -> ChunkRow:
    old, new = (bytes([tensor, chunk, which] * 6)[:16] for which in (1, 2))
    return ChunkRow(tensor, chunk, EncodedChunk(Encoding(encoding), changed, payload), old, new)


ROWS = [row(0, 0, b"first"), row(0, 2, b"", 2, 5), row(2, 0, b"third!", 3, 4), row(3, 1, b"x" * 40, 1, 9)]


def parse(data: bytes, identity: PartIdentity = IDENTITY, schema: Schema = SCHEMA) -> Part:
    return parse_part(data, identity, schema, XXH3, key=KEY)


def refused(data: bytes, identity: PartIdentity = IDENTITY, schema: Schema = SCHEMA) -> None:
    with pytest.raises(CorruptObject) as caught:
        parse(data, identity, schema)
    assert caught.value.key == KEY
    assert KEY in str(caught.value)


def columns_of(rows: list[ChunkRow]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the tensors of a part as section 5 says, made without the package."""
    count = len(rows)

    def numbers(values: list[int]) -> tuple[str, tuple[int, ...], bytes]:
        return "U32", (count,), struct.pack(f"<{count}I", *values)

    payload = b"".join(each.encoded.payload for each in rows)
    return {
        "tensor": numbers([each.tensor for each in rows]),
        "chunk": numbers([each.chunk for each in rows]),
        "changed": numbers([each.encoded.changed for each in rows]),
        "length": numbers([len(each.encoded.payload) for each in rows]),
        "encoding": ("U8", (count,), bytes(int(each.encoded.encoding) for each in rows)),
        "old_digest": ("U8", (count, 16), b"".join(each.old_digest or bytes(16) for each in rows)),
        "new_digest": ("U8", (count, 16), b"".join(each.new_digest for each in rows)),
        "payload": ("U8", (len(payload),), payload),
    }


METADATA = {
    "format": "deltastore.part/1",
    "stream_id": "1" * 32,
    "version": "7",
    "attempt_id": "2" * 32,
    "component": "model",
}


def part_file(rows: list[ChunkRow] = ROWS, metadata: Any = METADATA, **columns: Any) -> bytes:
    tensors = {**columns_of(rows), **columns}
    return reference.safetensors_file({name: t for name, t in tensors.items() if t is not None}, metadata)


def test_a_part_is_byte_for_byte_what_the_format_says() -> None:
    assert build_part(ROWS, IDENTITY, digest_size=16) == part_file()


def test_rows_may_come_in_any_order_and_are_written_in_ascending_order() -> None:
    assert build_part(ROWS[::-1], IDENTITY, digest_size=16) == part_file()
    assert build_part([ROWS[2], ROWS[0], ROWS[3], ROWS[1]], IDENTITY, digest_size=16) == part_file()


def test_a_part_is_read_as_it_was_written() -> None:
    part = parse(part_file())
    assert len(part) == 4
    assert part.key == KEY
    assert part.tensor.tolist() == [0, 0, 2, 3]
    assert part.chunk.tolist() == [0, 2, 0, 1]
    assert part.numbers.tolist() == [0, 2, 3, 5]
    assert part.encoding.tolist() == [1, 2, 3, 1]
    assert part.changed.tolist() == [1, 5, 4, 9]
    assert [bytes(part.chunk_payload(i)) for i in range(4)] == [each.encoded.payload for each in ROWS]
    assert [digest.tobytes() for digest in part.old_digests] == [each.old_digest for each in ROWS]
    assert [digest.tobytes() for digest in part.new_digests] == [each.new_digest for each in ROWS]


def test_the_columns_of_a_part_are_read_only_views() -> None:
    data = bytearray(part_file())
    part = parse(data)
    for column in (part.tensor, part.chunk, part.changed, part.encoding, part.old_digests, part.new_digests):
        assert not column.flags.writeable
        assert not column.flags.owndata
    buffer = np.frombuffer(data, np.uint8)
    assert np.shares_memory(np.frombuffer(part.payload, np.uint8), buffer)


def test_an_anchor_row_has_an_old_digest_of_zeros() -> None:
    anchor = row(0, 0, b"x", 3)._replace(old_digest=b"")
    part = parse(build_part([anchor], IDENTITY, digest_size=16))
    assert part.old_digests.tobytes() == bytes(16)


def test_an_empty_part_is_read_as_it_was_written() -> None:
    data = build_part([], IDENTITY, digest_size=16)
    assert data == part_file([])
    assert len(parse(data)) == 0


def test_the_safetensors_library_reads_a_part() -> None:
    tensors = dict(deserialize(build_part(ROWS, IDENTITY, digest_size=16)))
    assert sorted(tensors) == sorted([*COLUMNS, "payload"])
    assert tensors["new_digest"]["shape"] == [4, 16]


def test_blake3_digests_take_32_bytes() -> None:
    wide = [each._replace(old_digest=bytes(32), new_digest=bytes(range(32))) for each in ROWS]
    data = build_part(wide, IDENTITY, digest_size=32)
    part = parse_part(data, IDENTITY, SCHEMA, hasher("blake3"), key=KEY)
    assert part.new_digests.shape == (4, 32)
    refused(data)
    with pytest.raises(CorruptObject):
        parse_part(part_file(), IDENTITY, SCHEMA, hasher("blake3"), key=KEY)


@pytest.mark.parametrize(
    "identity",
    [
        dataclasses.replace(IDENTITY, stream_id="3" * 32),
        dataclasses.replace(IDENTITY, version=6),
        dataclasses.replace(IDENTITY, version=70),
        dataclasses.replace(IDENTITY, attempt_id="3" * 32),
        dataclasses.replace(IDENTITY, component="files"),
    ],
)
def test_a_part_of_another_identity_is_refused(identity: PartIdentity) -> None:
    refused(part_file(), identity)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {**METADATA, "later": "1"},
        {name: text for name, text in METADATA.items() if name != "format"},
        {name: text for name, text in METADATA.items() if name != "component"},
        {**METADATA, "format": "deltastore.part/2"},
        {**METADATA, "format": "deltastore.digests/1"},
        {**METADATA, "version": "07"},
        {**METADATA, "version": " 7"},
        {**METADATA, "stream_id": "1" * 31},
    ],
)
def test_metadata_that_are_not_exactly_those_of_the_part_are_refused(metadata: Any) -> None:
    refused(part_file(metadata=metadata))


@pytest.mark.parametrize("column", [*COLUMNS, "payload"])
def test_a_missing_column_is_refused(column: str) -> None:
    refused(part_file(**{column: None}))


@pytest.mark.parametrize("column", [*COLUMNS, "payload"])
def test_a_column_of_another_dtype_or_shape_is_refused(column: str) -> None:
    dtype, shape, data = columns_of(ROWS)[column]
    refused(part_file(**{column: ("I32" if dtype == "U32" else "I8", shape, data)}))
    refused(part_file(**{column: (dtype, (*shape, 1), data)}))
    refused(part_file(**{column: (dtype, (1, *shape), data)}))
    size = len(data) // shape[0]
    refused(part_file(**{column: (dtype, (shape[0] - 1, *shape[1:]), data[size:])}))
    refused(part_file(**{column: (dtype, (shape[0] + 1, *shape[1:]), data + data[:size])}))
    refused(part_file(**{column: ("U8", (), b"\x01")}))
    refused(part_file(**{column: ("U8", (0,), b"")}))


def test_a_column_too_many_is_refused() -> None:
    refused(part_file(more=("U8", (3,), b"abc")))


@pytest.mark.parametrize(
    ("tensor", "chunk"),
    [(4, 0), (5, 0), (2**31, 0), (2**32 - 1, 0), (0, 3), (0, 2**31), (0, 2**32 - 1), (1, 0), (2, 1), (3, 2)],
)
def test_a_tensor_or_chunk_that_the_schema_does_not_have_is_refused(tensor: int, chunk: int) -> None:
    refused(part_file([row(0, 0), ROWS[3]._replace(tensor=tensor, chunk=chunk)]))


def test_rows_out_of_order_or_twice_are_refused() -> None:
    a, b, c, d = ROWS
    for rows in ([b, a], [a, a], [a, c, b], [a, b, d, c], [c, c, d], [a, b, b]):
        refused(part_file(rows))


@pytest.mark.parametrize("encoding", [0, 5, 255])
def test_an_unknown_encoding_is_refused(encoding: int) -> None:
    for place in range(4):
        codes = bytearray([1, 2, 3, 1])
        codes[place] = encoding
        refused(part_file(encoding=("U8", (4,), bytes(codes))))


@pytest.mark.parametrize(
    "lengths",
    [(5, 0, 6, 41), (5, 0, 6, 39), (0, 0, 0, 0), (2**32 - 1, 0, 0, 0), (2**32 - 1,) * 4, (2**31,) * 4],
)
def test_lengths_that_do_not_make_the_payload_are_refused(lengths: tuple[int, ...]) -> None:
    refused(part_file(length=("U32", (4,), struct.pack("<4I", *lengths))))


def test_a_part_cut_anywhere_or_followed_by_anything_is_refused() -> None:
    data = part_file()
    for end in range(len(data)):
        refused(data[:end])
    refused(data + b"\0")
    refused(data + data)


def as_content(part: Part) -> list[tuple[Any, ...]]:
    return [
        (
            int(part.tensor[i]),
            int(part.chunk[i]),
            int(part.encoding[i]),
            int(part.changed[i]),
            part.old_digests[i].tobytes(),
            part.new_digests[i].tobytes(),
            bytes(part.chunk_payload(i)),
        )
        for i in range(len(part))
    ]


def test_every_flipped_bit_of_a_part_is_refused_or_changes_what_is_read() -> None:
    data = part_file(ROWS[:3])
    content = as_content(parse(data))
    unseen = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            found = as_content(parse(bytes(damaged)))
        except CorruptObject:
            continue
        unseen += found == content
    # White space for white space in the header's padding; the object's digest sees even that.
    assert unseen <= 8


@given(
    st.lists(
        st.tuples(st.sampled_from([(0, 0), (0, 1), (0, 2), (2, 0), (3, 0), (3, 1)]), st.binary(max_size=30)),
        max_size=6,
        unique_by=lambda item: item[0],
    ),
    st.integers(1, 3),
)
def test_any_rows_are_read_as_they_were_written(drawn: list[tuple[tuple[int, int], bytes]], encoding: int) -> None:
    rows = [row(tensor, chunk, payload, encoding) for (tensor, chunk), payload in drawn]
    data = build_part(rows, IDENTITY, digest_size=16)
    ordered = sorted(rows, key=lambda each: (each.tensor, each.chunk))
    assert data == part_file(ordered)
    assert [content[-1] for content in as_content(parse(data))] == [each.encoded.payload for each in ordered]


@given(st.binary(max_size=300))
def test_random_bytes_are_no_part(data: bytes) -> None:
    refused(data)


@given(st.data())
def test_a_random_table_is_refused_or_names_chunks_of_the_schema_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    number = st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1))

    def column() -> tuple[str, tuple[int], bytes]:
        return "U32", (count,), struct.pack(f"<{count}I", *(data.draw(number) for _ in range(count)))

    try:
        part = parse(part_file(ROWS[:count], tensor=column(), chunk=column(), length=column()))
    except CorruptObject:
        return
    assert all(0 <= number < SCHEMA.chunks for number in part.numbers)
    assert sorted(set(part.numbers.tolist())) == part.numbers.tolist()


def test_a_part_of_many_rows_costs_arrays_and_no_objects() -> None:
    schema = Schema([TensorSpec("w", "U8", (CHUNK_BYTES * 100_000,))])
    count = 100_000
    columns = {
        "tensor": ("U32", (count,), bytes(4 * count)),
        "chunk": ("U32", (count,), np.arange(count, dtype="<u4").tobytes()),
        "changed": ("U32", (count,), np.ones(count, "<u4").tobytes()),
        "length": ("U32", (count,), bytes(4 * count)),
        "encoding": ("U8", (count,), b"\x01" * count),
        "old_digest": ("U8", (count, 16), bytes(16 * count)),
        "new_digest": ("U8", (count, 16), bytes(16 * count)),
        "payload": ("U8", (0,), b""),
    }
    part = parse(reference.safetensors_file(columns, METADATA), schema=schema)
    assert len(part) == count
    fields = [getattr(part, field.name) for field in dataclasses.fields(part)]
    assert all(isinstance(value, (str, int, np.ndarray, memoryview)) for value in fields)


def test_a_chunk_is_found_in_the_object_from_its_first_bytes_alone() -> None:
    data = build_part(ROWS, IDENTITY, digest_size=16)
    size = table_size(data[:2000], key=KEY)
    table = parse_part(data[:size], IDENTITY, SCHEMA, XXH3, key=KEY, table_only=True)
    whole = parse(data)
    assert (table.numbers == whole.numbers).all()
    assert (table.new_digests == whole.new_digests).all()
    for row in range(len(table)):
        start, end = table.chunk_range(row)
        assert data[start:end] == bytes(whole.chunk_payload(row))
        assert (start, end) == whole.chunk_range(row)
    assert end == len(data)
    for wrong in (data[: size - 1], data[: size + 1], data):
        with pytest.raises(CorruptObject):
            parse_part(wrong, IDENTITY, SCHEMA, XXH3, key=KEY, table_only=True)
    with pytest.raises(CorruptObject):
        table_size(
            reference.safetensors_file({"payload": ("U8", (0,), b""), "x": ("U8", (1,), b"x")}, METADATA), key=KEY
        )


def test_the_header_of_a_part_is_valid_json_padded_with_spaces() -> None:
    data = build_part(ROWS, IDENTITY, digest_size=16)
    (size,) = struct.unpack_from("<Q", data)
    assert size % 8 == 0
    assert json.loads(data[8 : 8 + size])["__metadata__"] == METADATA
