"""The worked example of docs/format.md: the page, the package and the reference say the same bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import reference

from deltastore.codec import Encoding
from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder
from deltastore.digest import hasher
from deltastore.part import ChunkRow, PartIdentity, build_part, parse_part
from deltastore.snapshot import Schema, TensorSpec, snapshot_id, tensor_digests

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
XXH3 = hasher("xxh3-128")
SCHEMA = Schema([TensorSpec("w", "BF16", (8,))])
IDENTITY = PartIdentity("1" * 32, 1, "2" * 32, "model")
KEY = "parts/0000000001/2/model-00000.safetensors"


@pytest.fixture(scope="module")
def example() -> str:
    """Return the text of the section."""
    _, found, text = PAGE.read_text(encoding="utf-8").partition("\n## 14 Worked example\n")
    assert found
    return text


def hex_of(text: str) -> bytes:
    """Return the bytes that stand in hex at the start of each line; what follows two spaces explains them."""
    return b"".join(bytes.fromhex(line.strip().partition("  ")[0]) for line in text.splitlines())


def field(text: str, name: str, number: int = 0) -> str:
    """Return what the page says behind a name; ``number`` counts the name's occurrences."""
    return re.findall(rf"^    {name} +(\S.*)$", text, re.MULTILINE)[number].strip()


def blocks(text: str) -> list[str]:
    """Return the indented blocks of the section, in order."""
    found = re.findall(r"(?:^    .*\n)+", text + "\n", re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


@pytest.fixture(scope="module")
def old(example: str) -> bytes:
    return hex_of(field(example, "old bytes"))


@pytest.fixture(scope="module")
def new(example: str) -> bytes:
    return hex_of(field(example, "new bytes"))


@pytest.fixture(scope="module")
def payload(example: str) -> bytes:
    """Return the encoded chunk as the page lists it, stream by stream."""
    return hex_of(next(block for block in blocks(example) if "the gap stream has" in block))


def test_the_values_are_those_that_the_text_tells(old: bytes, new: bytes) -> None:
    assert len(old) == len(new) == 16
    before, after = np.frombuffer(old, "<u2").tolist(), np.frombuffer(new, "<u2").tolist()
    changes = {i: (one, other) for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}
    assert changes == {1: (0x3F80, 0x3F81), 6: (0x3F80, 0x3F7F)}
    assert 0x8000 in before  # the negative zero
    assert 0x7FC0 in before  # the NaN


def test_the_schema_is_that_of_the_page(example: str) -> None:
    assert SCHEMA.to_json().decode() == field(example, "schema")


def test_leaves_nodes_and_ids_are_those_of_the_page(example: str, old: bytes, new: bytes) -> None:
    for number, data in enumerate((old, new)):
        leaf, node = (bytes.fromhex(field(example, name, number)) for name in ("leaf", "tensor"))
        name = field(example, "snapshot_id", number)
        assert reference.leaves(data) == [leaf]
        assert reference.tensor_node("w", "BF16", (8,), [leaf]) == node
        assert reference.snapshot_id({"w": ("BF16", (8,), data)}) == name
        table = np.frombuffer(leaf, np.uint8).reshape(1, 16)
        assert XXH3.digest(data) == leaf
        assert tensor_digests(SCHEMA, table, XXH3) == [node]
        assert snapshot_id(SCHEMA, table, XXH3) == name


def test_the_chunk_of_the_page_leads_from_the_old_bytes_to_the_new_and_back(
    old: bytes, new: bytes, payload: bytes
) -> None:
    assert len(payload) == 27
    assert reference.decode(old, reference.SPARSE, 2, payload, 2) == new
    assert reference.decode(new, reference.SPARSE, 2, payload, 2, back=True) == old
    for start, end, inverse in ((old, new, False), (new, old, True)):
        out = np.frombuffer(start, np.uint8).copy()
        ChunkDecoder().apply(out, Encoding.SPARSE, 2, memoryview(payload), width=2, inverse=inverse)
        assert out.tobytes() == end


@pytest.mark.parametrize("level", ["fast", "max"])
def test_the_package_and_the_reference_encode_the_chunk_of_the_page(
    old: bytes, new: bytes, payload: bytes, level: str
) -> None:
    encoded = ChunkEncoder(level).change(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8), width=2)
    assert encoded is not None
    assert (encoded.encoding, encoded.changed, encoded.payload) == (Encoding.SPARSE, 2, payload)
    assert reference.encode(old, new, 2, reference.SPARSE) == (2, payload)


@pytest.fixture(scope="module")
def part(example: str) -> bytes:
    """Return the part as the page lists it: the length field, the header without line breaks, the data."""
    header = next(block for block in blocks(example) if "header length" in block)
    length, _, text = header.partition("\n")
    json_text = "".join(text.splitlines())
    data = next(block for block in blocks(example) if "new digest" in block)
    size = int.from_bytes(hex_of(length), "little")
    assert f"header length: {size}" in header
    return hex_of(length) + json_text.encode().ljust(size) + hex_of(data)


def test_the_part_is_byte_for_byte_that_of_the_page(example: str, part: bytes, old: bytes, new: bytes) -> None:
    encoded = ChunkEncoder().change(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8), width=2)
    assert encoded is not None
    row = ChunkRow(0, 0, encoded, XXH3.digest(old), XXH3.digest(new))
    built = build_part([row], IDENTITY, digest_size=16)
    assert built == part
    assert f"in a part of {len(built)} bytes" in example
    assert f"The header of {8 + int.from_bytes(built[:8], 'little')} bytes" in example


def test_the_part_of_the_page_is_read(part: bytes, old: bytes, new: bytes, payload: bytes) -> None:
    parsed = parse_part(part, IDENTITY, SCHEMA, XXH3, key=KEY)
    assert (parsed.numbers.tolist(), parsed.encoding.tolist(), parsed.changed.tolist()) == ([0], [1], [2])
    assert bytes(parsed.chunk_payload(0)) == payload
    assert parsed.old_digests.tobytes() == XXH3.digest(old)
    assert parsed.new_digests.tobytes() == XXH3.digest(new)
