"""Parts, schemas and the headers of checkpoints."""

from __future__ import annotations

import json
import struct

import reference

from deltastore.codec import EncodedChunk, Encoding
from deltastore.container import parse_header
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, UnsupportedFormat
from deltastore.part import ChunkRow, PartIdentity, build_part, parse_part
from deltastore.snapshot import CHUNK_BYTES, DTYPES, Schema, TensorSpec

from .damage import Damage, json_case
from .decoder import Decoder, memory_within, refused

XXH3 = hasher("xxh3-128")
SCHEMA = Schema(
    [
        TensorSpec("a", "U8", (2 * CHUNK_BYTES + 5,)),
        TensorSpec("b", "BF16", (0,)),
        TensorSpec("c", "F32", (4,)),
        TensorSpec("d", "F64", (CHUNK_BYTES // 4,)),
    ]
)
IDENTITY = PartIdentity("1" * 32, 7, "2" * 32, "model")


def _valid_part(damage: Damage) -> bytes:
    chance = damage.random
    places = [(0, 0), (0, 1), (0, 2), (2, 0), (3, 0), (3, 1)]
    rows = [
        ChunkRow(
            tensor,
            chunk,
            EncodedChunk(Encoding(chance.randint(1, 4)), chance.randint(1, 9), chance.randbytes(chance.randint(0, 60))),
            chance.randbytes(16),
            chance.randbytes(16),
        )
        for tensor, chunk in chance.sample(places, chance.randint(0, 6))
    ]
    return build_part(rows, IDENTITY, digest_size=16)


def _with_header(damage: Damage, data: bytes) -> bytes:
    """Return a safetensors file with its header damaged as JSON, and its length field made to fit."""
    end = 8 + int.from_bytes(data[:8], "little")
    if damage.random.random() < 0.6:
        text = json.dumps(damage.tree(json.loads(data[8:end]))).encode()
    else:
        text = damage.damaged(data[8:end], data)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _part_case(damage: Damage) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        return damage.bytes(3000)
    valid = _valid_part(damage)
    if kind == 1:
        return _with_header(damage, valid)
    if kind == 2:  # only numbers of the table: behind the header
        end = 8 + int.from_bytes(valid[:8], "little")
        changed = bytearray(valid)
        for _ in range(damage.random.randint(1, 3)):
            # Four columns of u32 come first, of up to six rows.
            at = end + 4 * damage.random.randrange(24)
            if at + 4 <= len(valid):
                struct.pack_into("<I", changed, at, damage.random.choice((0, 1, 2, 3, damage.number(32))))
        return bytes(changed)
    return damage.damaged(valid, _valid_part(damage))


def _attempt_part(data: bytes) -> bool:
    try:
        with memory_within(200 * len(data) + (512 << 10)):
            part = parse_part(data, IDENTITY, SCHEMA, XXH3, key="the part")
    except CorruptObject as error:
        return refused(error)
    rows = list(zip(part.tensor.tolist(), part.chunk.tolist(), strict=True))
    assert rows == sorted(set(rows))
    assert all(chunk < SCHEMA.tensors[tensor].chunks for tensor, chunk in rows)
    assert part.numbers.tolist() == [int(SCHEMA.first_chunk[tensor]) + chunk for tensor, chunk in rows]
    assert set(part.encoding.tolist()) <= {1, 2, 3, 4}
    assert part.old_digests.shape == part.new_digests.shape == (len(rows), 16)
    # Whatever its header's spelling and order of columns: the same rows in our own are the same part.
    again = build_part(
        [
            ChunkRow(
                tensor,
                chunk,
                EncodedChunk(Encoding(int(part.encoding[i])), int(part.changed[i]), bytes(part.chunk_payload(i))),
                part.old_digests[i].tobytes(),
                part.new_digests[i].tobytes(),
            )
            for i, (tensor, chunk) in enumerate(rows)
        ],
        IDENTITY,
        digest_size=16,
    )
    assert len(again) - int.from_bytes(again[:8], "little") == len(data) - int.from_bytes(data[:8], "little")
    return True


def _valid_schema(damage: Damage) -> bytes:
    chance = damage.random
    names = chance.sample(["a", "b.weight", "é", "layers.0.x", "z" * 40, "\U0001f600"], chance.randint(0, 6))
    shapes: list[tuple[int, ...]] = [(), (0,), (2, 3, 4), (CHUNK_BYTES,), (8,) * 5]
    dtypes = [name for name, dtype in DTYPES.items() if dtype.bits >= 8]
    return Schema(TensorSpec(name, chance.choice(dtypes), chance.choice(shapes)) for name in names).to_json()


def _attempt_schema(data: bytes) -> bool:
    try:
        with memory_within(200 * len(data) + (512 << 10)):
            schema = Schema.from_json(data, key="the schema")
    except (CorruptObject, UnsupportedFormat) as error:
        return refused(error)
    assert Schema.from_json(schema.to_json(), key="again") == schema
    rows = json.loads(data)["tensors"]
    assert [[spec.name, spec.dtype, [*spec.shape], spec.width] for spec in schema] == rows
    return True


def _header_case(damage: Damage) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        text = damage.bytes(2000)
        return struct.pack("<Q", len(text) if damage.random.random() < 0.7 else damage.number(64)) + text
    tensors = {
        name: (dtype, shape, bytes(size))
        for name, dtype, shape, size in (
            ("w", "BF16", (3, 5), 30),
            ("é", "F32", (), 4),
            ("empty", "U8", (0, 2), 0),
            ("i", "I64", (2,), 16),
        )
        if damage.random.random() < 0.8
    }
    valid = reference.safetensors_file(tensors, damage.random.choice((None, {}, {"format": "pt"})))
    return _with_header(damage, valid) if kind <= 2 else damage.damaged(valid, valid)


def _attempt_header(data: bytes) -> bool:
    try:
        with memory_within(200 * len(data) + (512 << 10)):
            header = parse_header(data, key="the file")
    except CorruptObject as error:
        return refused(error)
    entries = json.loads(data[8 : header.size])
    metadata = entries.pop("__metadata__", {})
    assert dict(header.metadata) == metadata
    found = {
        placed.spec.name: {
            "dtype": placed.spec.dtype,
            "shape": [*placed.spec.shape],
            "data_offsets": [placed.start - header.size, placed.end - header.size],
        }
        for placed in header.tensors
    }
    assert found == entries
    position = header.size
    for placed in header.tensors:
        assert placed.start == position
        position = placed.end
    assert position == header.file_size
    return True


DECODERS = (
    Decoder("part", _part_case, len, _attempt_part),
    Decoder("schema", lambda damage: json_case(damage, _valid_schema), len, _attempt_schema),
    Decoder("header", _header_case, len, _attempt_header),
)
