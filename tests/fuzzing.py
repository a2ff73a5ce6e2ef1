"""Random and damaged bytes through every decoder: an error of ours, or a correct result.

``python tests/fuzzing.py --bytes N --seed S`` feeds at least N bytes to each decoder (``make fuzz``). One case in four
is random bytes; the others are valid objects that were damaged: bits flipped, cut, spliced, numbers replaced, and the
digests made to fit again, so that what stands behind them is reached too.

What holds for every case: nothing outside the output or the input is written, or read with any effect; memory stays
within a small multiple of what the input and the output declare; and what is accepted is what the plain-Python decoder
of ``reference`` makes of the same bytes (chunks), or follows from the bytes by the format's own rules (the others).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import reference
import zstandard
from reference import APART, CONTEXTUAL, DENSE, FULL, RAW, SPARSE, ZSTD

from deltastore.codec import DamagedChunk, EncodedChunk, Encoding
from deltastore.codec.chunk import ChunkDecoder, ChunkEncoder
from deltastore.container import parse_header
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, UnsupportedFormat
from deltastore.manifest import (
    Component,
    LatestHint,
    Manifest,
    ObjectRef,
    PartRef,
    StreamRecord,
    encode_latest,
    encode_manifest,
    parse_latest,
    parse_manifest,
    part_key,
)
from deltastore.part import ChunkRow, PartIdentity, build_part, parse_part
from deltastore.record import MAX_VERSION, encode_record
from deltastore.retention import Retention, encode_retention, parse_retention, ranges, ranges_problem
from deltastore.route import Route, encode_route, parse_route, route_part_key
from deltastore.snapshot import CHUNK_BYTES, DTYPES, Schema, TensorSpec
from deltastore.tags import Tag, parse_tag

if TYPE_CHECKING:
    from collections.abc import Callable

XXH3 = hasher("xxh3-128")
GUARD = 64
#: Numbers at which lengths, counts and offsets go wrong.
NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 63, 127, 128, 254, 255, 256, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1)
LONG_NUMBERS = (*NUMBERS, 2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


# Damage.


class Damage:
    """Changes bytes in the ways that storage, networks and adversaries do. Seeded."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def bytes(self, most: int) -> bytes:
        """Return up to ``most`` random bytes; now and then many zeros among them, so that lengths come out small."""
        data = self.random.randbytes(self.random.randint(0, most))
        if self.random.random() < 0.5:
            share = self.random.random()
            data = bytes(byte if self.random.random() < share else 0 for byte in data)
        return data

    def damaged(self, data: bytes, other: bytes) -> bytes:
        """Return ``data`` with one to four pieces of damage; ``other`` is a second object to take pieces from."""
        found = bytearray(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            self._damage(found, other)
        return bytes(found)

    def _damage(self, data: bytearray, other: bytes) -> None:
        chance, at = self.random, self.random.randrange(len(data) + 1)
        size = min(chance.choice((1, 1, 2, 4, 8, 30, 300)), len(data) - at)
        kind = chance.randrange(8)
        if kind <= 1:
            for _ in range(chance.choice((1, 1, 2, 8))):
                if data:
                    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size]
        elif kind == 5:
            start = chance.randrange(len(other) + 1)
            data[at : at + chance.choice((0, size))] = other[start : start + 40]
        elif kind == 6:
            data[at : at + size] = chance.randbytes(size)
        else:
            form = chance.choice(("<B", "<H", "<I", "<Q"))
            width = struct.calcsize(form)
            if len(data) >= width:
                struct.pack_into(form, data, chance.randrange(len(data) - width + 1), self.number(8 * width))

    def number(self, bits: int) -> int:
        """Return a number at the edge of something."""
        number = self.random.choice(LONG_NUMBERS) + self.random.choice((-1, 0, 0, 1))
        return number % (1 << bits)

    def tree(self, node: Any) -> Any:
        """Return a JSON value with something in it replaced, taken away, or doubled."""
        chance = self.random
        if isinstance(node, dict) and node and chance.random() < 0.85:
            name = chance.choice(list(node))
            kind = chance.randrange(8)
            changed = dict(node)
            if kind == 0:
                del changed[name]
            elif kind == 1:
                changed[chance.choice(("", "x", name + "x", "__metadata__", "format"))] = changed[name]
            else:
                changed[name] = self.tree(node[name])
            return changed
        if isinstance(node, list) and node and chance.random() < 0.85:
            place = chance.randrange(len(node))
            kind = chance.randrange(6)
            if kind == 0:
                return node[:place] + node[place + 1 :]
            if kind == 1:
                return [*node, node[place]]
            if kind == 2:
                return chance.sample(node, len(node))
            return [*node[:place], self.tree(node[place]), *node[place + 1 :]]
        return self._leaf(node)

    def _leaf(self, node: Any) -> Any:
        chance = self.random
        kind = chance.randrange(6)
        if kind == 0 and isinstance(node, int):
            return node + chance.choice((-1, 1, 8, 2**32, -(2**32)))
        if kind <= 2 and isinstance(node, str) and node:
            text = list(node)
            text[chance.randrange(len(text))] = chance.choice("0aZ/.:-\n\x00é\U0001f600")
            return "".join(text)
        return chance.choice(
            (None, True, 0, -1, 1.5, 1e400, chance.choice(LONG_NUMBERS), "", "x" * 600, [], {}, [[]], [2**62] * 3)
        )


# Decoders.


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder: how cases for it are made from damage, and how one is tried (True: accepted)."""

    name: str
    case: Callable[[Damage], Any]
    size: Callable[[Any], int]
    attempt: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A payload with all that a chunk decoder is told of it."""

    start: bytes
    encoding: int
    changed: int
    payload: bytes
    width: int
    inverse: bool


def _valid_chunk(damage: Damage, encoding: int) -> Chunk:
    """Make a chunk of up to a few hundred elements, by the reference or by the encoder."""
    width = 2 if encoding == CONTEXTUAL else damage.random.choice((1, 2, 4, 8))
    rng = np.random.default_rng(damage.random.getrandbits(32))
    size = damage.random.choice((1, 8, 33, 120, 600))
    elements = rng.integers(0, 256, size * width, np.uint8).view(f"<u{width}")
    if width == 2:
        elements = ((elements & 0x807F) | rng.choice([118, 119, 120, 121], size) << 7).astype("<u2")
    new = elements.copy()
    chosen = rng.random(size) < damage.random.choice((0.02, 0.2, 0.7))
    chosen[damage.random.randrange(size)] = True
    new[chosen] += rng.choice(np.array([1, 2, 200]), int(chosen.sum())).astype(elements.dtype)
    old_bytes, new_bytes = elements.tobytes(), new.tobytes()
    method = damage.random.choice((None, RAW, ZSTD, APART))
    encoded = ChunkEncoder("max" if encoding == CONTEXTUAL else "fast").change(
        elements.view(np.uint8), new.view(np.uint8), width=width
    )
    if encoded is not None and encoded.encoding == encoding:
        changed, payload = encoded.changed, encoded.payload
    elif encoding == CONTEXTUAL:
        inverted = set(range(damage.random.choice((0, 120, 256))))
        changed, payload = reference.encode_contextual(
            old_bytes, new_bytes, inverted, damage.random.randrange(4), method
        )
    else:
        changed, payload = reference.encode(old_bytes, new_bytes, width, encoding, method)
    inverse = damage.random.random() < 0.4
    return Chunk(new_bytes if inverse else old_bytes, encoding, changed, payload, width, inverse)


def _framed(damage: Damage, chunk: Chunk) -> bytes:
    """Return random streams of the lengths that a chunk of this kind has: past the framing, into the kernels."""
    elements, changed, chance = len(chunk.start) // chunk.width, chunk.changed, damage.random
    head, streams = b"", [chance.randbytes(elements) for _ in range(chunk.width)]
    if chunk.encoding in {SPARSE, CONTEXTUAL}:
        streams = [chance.randbytes(size) for size in ((changed + 7) // 8, *[changed] * chunk.width)]
    if chunk.encoding == SPARSE:
        largest = chance.choice((0, 1, 4, 255))
        gaps = bytes(min(byte, largest) for byte in chance.randbytes(changed + chance.randint(0, elements // 255)))
        head, streams = struct.pack("<I", len(gaps)), [gaps, *streams]
    elif chunk.encoding == CONTEXTUAL:
        head, first = _random_contexts(damage, elements, changed)
        streams = [*first, *streams]
    return head + b"".join(_random_stream(damage, stream) for stream in streams)


def _random_contexts(damage: Damage, elements: int, changed: int) -> tuple[bytes, list[bytes]]:
    """Return a contextual chunk's head and its streams up to the crossings' classes: whole codes of any numbers."""
    chance = damage.random
    classes = [chance.choice((118, 119, 120, 121)) for _ in range(3)]
    counts = [changed - changed // 2, changed // 2, 0]
    table = [[0] * 256, [0] * 256, [0] * 256]
    for c, count in zip(classes, counts, strict=True):
        table[0][c] += count
        if chance.random() < 0.3:
            table[1][c], table[2][c] = chance.randint(0, 4), 32
        table[2][c] |= chance.choice((0, 1, 3, 20))
    if chance.random() < 0.3:
        table[chance.randrange(3)][chance.randrange(256)] = damage.number(32)
    most = chance.choice((0, 2, 2, elements))
    bits = ""
    for c in range(256):
        events = min(table[1][c] if table[2][c] & 32 else table[0][c], elements)
        bits += reference.rice([chance.randint(0, most) for _ in range(events)], min(table[2][c] & 31, 20))
    crossed, k = chance.randint(0, changed + 1) if chance.random() < 0.7 else 0, chance.choice((0, 2, 20))
    crossings = reference.bits_to_bytes(reference.rice([chance.randint(0, 2) for _ in range(crossed)], k))
    positions = reference.bits_to_bytes(bits)
    numbers = b"".join(reference.planes([number for row in table for number in row], 4))
    head = struct.pack("<IIIB", len(positions), crossed, len(crossings), k)
    return head, [numbers, positions, crossings, bytes(chance.choice(classes) for _ in range(crossed))]


def _random_stream(damage: Damage, raw: bytes) -> bytes:
    """Store a stream in one of the three ways; now and then as a frame that lies about its length."""
    if damage.random.random() < 0.97 or not raw:
        return reference.stored_stream(raw, damage.random.choice((None, RAW, ZSTD, APART)))
    frame = reference.zstd_frame(raw)
    blocks = frame[zstandard.frame_header_size(frame) :]
    declared = damage.random.choice((len(raw) - 1, len(raw) + 1, 1 << 24, damage.number(64)))
    # Magic, descriptor (an 8-byte content size, not one segment), window descriptor, content size.
    forged = struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 0x58, declared) + blocks
    return struct.pack("<BI", ZSTD, len(forged)) + forged


def _chunk_case(damage: Damage, encoding: int) -> Chunk:
    valid = _valid_chunk(damage, encoding)
    changed, told, chance = valid.changed, encoding, damage.random
    kind = chance.randrange(8)
    if kind <= 1:
        payload = damage.bytes(2000)
    elif kind <= 3:
        payload = _framed(damage, valid)
    elif kind == 4:
        payload, changed = valid.payload, damage.number(32)
        told = chance.choice((encoding, *range(6), 255))
    else:
        payload = damage.damaged(valid.payload, _valid_chunk(damage, encoding).payload)
    return Chunk(valid.start, told, changed, payload, valid.width, valid.inverse)


def _decode_between(chunk: Chunk, fill: int) -> bytes | None:
    """Decode with both the payload and the output in the middle of a field of ``fill``."""
    payload = np.full(len(chunk.payload) + 2 * GUARD, fill, np.uint8)
    payload[GUARD : GUARD + len(chunk.payload)] = np.frombuffer(chunk.payload, np.uint8)
    buffer = np.full(len(chunk.start) + 2 * GUARD, fill, np.uint8)
    out = buffer[GUARD : GUARD + len(chunk.start)]
    out[:] = np.frombuffer(chunk.start, np.uint8)
    given = memoryview(payload)[GUARD : GUARD + len(chunk.payload)].toreadonly()
    accepted = True
    try:
        ChunkDecoder().apply(out, chunk.encoding, chunk.changed, given, width=chunk.width, inverse=chunk.inverse)
    except DamagedChunk:
        accepted = False
    assert given.tobytes() == chunk.payload
    for field in (buffer, payload):
        assert (field[:GUARD] == fill).all()
        assert (field[-GUARD:] == fill).all()
    return out.tobytes() if accepted else None


def _attempt_chunk(chunk: Chunk) -> bool:
    with _memory_within(24 * (len(chunk.start) + len(chunk.payload)) + (512 << 10)):
        found = _decode_between(chunk, 0x00)
    # The same with other bytes around it: what lies outside has no say.
    assert _decode_between(chunk, 0xFF) == found
    try:
        expected = reference.decode(
            chunk.start, chunk.encoding, chunk.changed, chunk.payload, chunk.width, back=chunk.inverse
        )
    except (reference.DamagedError, zstandard.ZstdError):
        expected = None
    assert found == expected
    return found is not None


def _refused(error: CorruptObject | UnsupportedFormat) -> bool:
    """Whatever is refused is named."""
    assert error.key is not None
    return False


def _chunks(encoding: int) -> Decoder:
    name = f"chunk, {Encoding(encoding).name.lower()}"
    return Decoder(name, lambda damage: _chunk_case(damage, encoding), lambda case: len(case.payload), _attempt_chunk)


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
        with _memory_within(200 * len(data) + (512 << 10)):
            part = parse_part(data, IDENTITY, SCHEMA, XXH3, key="the part")
    except CorruptObject as error:
        return _refused(error)
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


def _valid_manifest(damage: Damage) -> bytes:
    chance = damage.random
    attempt, digest = "3" * 32, XXH3.of(b"x")
    version = chance.choice((0, 7))
    reference_to = lambda name: ObjectRef(part_key(version, attempt, name), 1000, digest)  # noqa: E731 - a maker
    parts = tuple(
        PartRef(part_key(version, attempt, f"model-{i:05d}.safetensors"), 99, digest, 3, 3 * i, 3 * i + 2)
        for i in range(2)
    )
    component = Component(digest, 4096, 2048, 17, parts, version > 0, None if version else reference_to("t"))
    manifest = Manifest(
        format=1,
        stream_id="1" * 32,
        version=version,
        kind="delta" if version else "base",
        commit_id="2" * 32,
        attempt_id=attempt,
        writer_epoch=1,
        created_at="2026-01-02T03:04:05.678Z",
        components={"model": component},
        parent_version=version - 1 if version else None,
        parent_commit_id="4" * 32 if version else None,
        parent_snapshot_id=digest if version else None,
        step=chance.choice((None, -1, 10)),
        metadata={"loss": 0.5, "note": "é", "n": 3, "none": None, "true": True},
        stream=None if version else StreamRecord("xxh3-128", CHUNK_BYTES, {"model": reference_to("s")}),
    )
    return encode_manifest(manifest, hash_function=XXH3)


def _resealed(line: bytes) -> bytes:
    return b"%b\n%b\n" % (line, XXH3.of(line).encode())


def _record_case(damage: Damage, make: Callable[[Damage], bytes]) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        return _resealed(damage.bytes(1500)) if damage.random.random() < 0.7 else damage.bytes(3000)
    valid = make(damage)
    line = valid.split(b"\n")[0]
    if kind == 1:
        return _resealed(damage.damaged(line, make(damage)))
    if kind == 2:
        return _resealed(json.dumps(damage.tree(json.loads(line)), separators=(",", ":")).encode())
    return damage.damaged(valid, make(damage))


def _valid_route(damage: Damage) -> bytes:
    start = damage.random.choice((None, 0, 3))
    attempt, digest = "3" * 32, XXH3.of(b"x")
    parts = tuple(
        PartRef(route_part_key(start)(7, attempt, f"model-{i:05d}.safetensors"), 99, digest, 3, 3 * i, 3 * i + 2)
        for i in range(damage.random.randrange(3))
    )
    route = Route(
        format=1,
        stream_id="1" * 32,
        attempt_id=attempt,
        kind="anchor" if start is None else "skip",
        version=7,
        created_at="2026-01-02T03:04:05.678Z",
        commit_id="2" * 32,
        snapshot_id=digest,
        start=start,
        start_commit_id=None if start is None else "4" * 32,
        parts=parts,
        changed_elements=17,
        invertible=start is not None,
    )
    return encode_route(route, hash_function=XXH3)


def _attempt_route(data: bytes) -> bool:
    try:
        with _memory_within(200 * len(data) + (512 << 10)):
            route = parse_route(data, version=7, attempt_id="3" * 32)
    except (CorruptObject, UnsupportedFormat) as error:
        return _refused(error)
    again = parse_route(encode_route(route, hash_function=XXH3), version=7, attempt_id="3" * 32)
    assert again == route
    assert (route.kind == "skip") == (route.start is not None)
    prefix = route_part_key(route.start)(7, "3" * 32, "model-")
    assert all(part.key.startswith(prefix) for part in route.parts)
    return True


def _some_ranges(damage: Damage, last: int) -> tuple[tuple[int, int], ...]:
    return ranges(damage.random.sample(range(last + 1), damage.random.randrange(last + 1)))


def _valid_retention(damage: Damage) -> bytes:
    record = Retention(
        format=1,
        stream_id="1" * 32,
        created_at="2026-01-02T03:04:05.678Z",
        number=7,
        until=12,
        kept=ranges([12, *damage.random.sample(range(12), 4)]),
        deltas=_some_ranges(damage, 12),
        routes=tuple(f"{number:032x}" for number in range(damage.random.randrange(4))),
    )
    return encode_retention(record, hash_function=XXH3)


def _attempt_retention(data: bytes) -> bool:
    def parse(data: bytes) -> Retention:
        return parse_retention(data, number=7, stream_id="1" * 32, hash_name=XXH3.name)

    try:
        with _memory_within(200 * len(data) + (512 << 10)):
            record = parse(data)
    except (CorruptObject, UnsupportedFormat) as error:
        return _refused(error)
    assert parse(encode_retention(record, hash_function=XXH3)) == record
    assert record.keeps(record.until)
    assert ranges_problem(record.kept) is None
    assert ranges_problem(record.deltas) is None
    assert list(record.routes) == sorted(set(record.routes))
    return True


def _valid_tag(damage: Damage) -> bytes:
    tag = Tag(
        format=1,
        stream_id="1" * 32,
        name="best",
        version=damage.random.choice((0, 7, MAX_VERSION)),
        commit_id="2" * 32,
        created_at="2026-01-02T03:04:05.678Z",
        deltas=_some_ranges(damage, 7),
        routes=tuple(f"{number:032x}" for number in range(damage.random.randrange(4))),
    )
    return encode_record(tag, hash_function=XXH3, kind="tag")


def _attempt_tag(data: bytes) -> bool:
    def parse(data: bytes) -> Tag:
        return parse_tag(data, name="best", stream_id="1" * 32, hash_name=XXH3.name)

    try:
        with _memory_within(200 * len(data) + (512 << 10)):
            tag = parse(data)
    except (CorruptObject, UnsupportedFormat) as error:
        return _refused(error)
    assert parse(encode_record(tag, hash_function=XXH3, kind="tag")) == tag
    assert tag.name == "best"
    assert ranges_problem(tag.deltas) is None
    return True


def _attempt_manifest(data: bytes) -> bool:
    accepted = []
    for version in (0, 7):
        try:
            with _memory_within(200 * len(data) + (512 << 10)):
                manifest = parse_manifest(data, version=version)
        except (CorruptObject, UnsupportedFormat) as error:
            _refused(error)
            continue
        accepted.append(manifest)
        assert manifest.version == version
        line, seal = data.split(b"\n")[:2]
        assert seal.decode() == XXH3.of(line)
        assert parse_manifest(encode_manifest(manifest, hash_function=XXH3), version=version) == manifest
        # Nothing was made up: every digest and key stands in the line.
        for component in manifest.components.values():
            for part in component.parts:
                assert part.key in json.dumps(json.loads(line))
    assert len(accepted) <= 1
    return bool(accepted)


def _valid_schema(damage: Damage) -> bytes:
    chance = damage.random
    names = chance.sample(["a", "b.weight", "é", "layers.0.x", "z" * 40, "\U0001f600"], chance.randint(0, 6))
    shapes: list[tuple[int, ...]] = [(), (0,), (2, 3, 4), (CHUNK_BYTES,), (8,) * 5]
    dtypes = [name for name, dtype in DTYPES.items() if dtype.bits >= 8]
    return Schema(TensorSpec(name, chance.choice(dtypes), chance.choice(shapes)) for name in names).to_json()


def _json_case(damage: Damage, valid: Callable[[Damage], bytes]) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        return damage.bytes(2000)
    if kind == 1:
        return json.dumps(damage.tree(json.loads(valid(damage)))).encode()
    return damage.damaged(valid(damage), valid(damage))


def _attempt_schema(data: bytes) -> bool:
    try:
        with _memory_within(200 * len(data) + (512 << 10)):
            schema = Schema.from_json(data, key="the schema")
    except (CorruptObject, UnsupportedFormat) as error:
        return _refused(error)
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
        with _memory_within(200 * len(data) + (512 << 10)):
            header = parse_header(data, key="the file")
    except CorruptObject as error:
        return _refused(error)
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


def _attempt_latest(data: bytes) -> bool:
    with _memory_within(200 * len(data) + (512 << 10)):
        hint = parse_latest(data)
    if hint is None:
        return False
    record = json.loads(data)
    assert hint == LatestHint(record["stream_id"], record["version"])
    assert 0 <= hint.version <= MAX_VERSION
    return True


def _valid_latest(damage: Damage) -> bytes:
    return encode_latest(LatestHint("1" * 32, damage.random.choice((0, 5, MAX_VERSION))))


DECODERS = (
    *(_chunks(encoding) for encoding in (SPARSE, DENSE, FULL, CONTEXTUAL)),
    Decoder("part", _part_case, len, _attempt_part),
    Decoder("manifest", lambda damage: _record_case(damage, _valid_manifest), len, _attempt_manifest),
    Decoder("retention", lambda damage: _record_case(damage, _valid_retention), len, _attempt_retention),
    Decoder("tag", lambda damage: _record_case(damage, _valid_tag), len, _attempt_tag),
    Decoder("route", lambda damage: _record_case(damage, _valid_route), len, _attempt_route),
    Decoder("schema", lambda damage: _json_case(damage, _valid_schema), len, _attempt_schema),
    Decoder("header", _header_case, len, _attempt_header),
    Decoder("latest", lambda damage: _json_case(damage, _valid_latest), len, _attempt_latest),
)


# Memory.


class _TooMuchMemory(Exception):
    pass


class _memory_within:  # noqa: N801 - reads as the statement that it is
    """Fail if more than ``limit`` bytes are taken at once inside; counts only while tracemalloc traces."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._before = 0

    def __enter__(self) -> None:
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]

    def __exit__(self, *_: object) -> None:
        if tracemalloc.is_tracing():
            taken = tracemalloc.get_traced_memory()[1] - self._before
            if taken > self._limit:
                raise _TooMuchMemory(f"{taken} bytes taken, {self._limit} allowed")


# A run.


@dataclass(slots=True)
class Outcome:
    """What one decoder was fed, and what became of it."""

    name: str
    cases: int = 0
    fed: int = 0
    accepted: int = 0
    seconds: float = 0.0


def fuzz(decoder: Decoder, wanted: int, *, seed: int) -> Outcome:
    """Feed at least ``wanted`` bytes to one decoder; raises on the first case that is not as it must be."""
    outcome = Outcome(decoder.name)
    started = time.perf_counter()
    while outcome.fed < wanted:
        # A seed a case: a failure names the one that it needs.
        number = seed * 10**9 + outcome.cases
        case = decoder.case(Damage(number))
        try:
            try:
                accepted = decoder.attempt(case)
            except _TooMuchMemory:
                accepted = decoder.attempt(case)  # the first call of a kernel compiles it
        except Exception as error:
            raise AssertionError(f"{decoder.name}, seed {number}: {error!r} for {case!r}") from error
        outcome.cases += 1
        outcome.fed += decoder.size(case)
        outcome.accepted += accepted
    outcome.seconds = time.perf_counter() - started
    return outcome


def peak_memory() -> int:
    """Return the process's largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Fuzz every decoder and print what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10_000_000, help="bytes for each decoder")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="only decoders whose name contains this")
    options = parser.parse_args()
    decoders = [decoder for decoder in DECODERS if options.only in decoder.name]
    for decoder in decoders:
        fuzz(decoder, 20_000, seed=0)  # compiles kernels, fills caches
    tracemalloc.start()
    print(f"seed {options.seed}; {options.bytes:,} bytes for each of {len(decoders)} decoders")
    before, total = peak_memory(), 0
    for decoder in decoders:
        outcome = fuzz(decoder, options.bytes, seed=options.seed)
        total += outcome.fed
        print(
            f"{outcome.name:18} {outcome.fed:12,} bytes {outcome.cases:9,} cases"
            f" {outcome.accepted / outcome.cases:7.2%} accepted {outcome.seconds:7.1f} s",
            flush=True,
        )
    print(f"{total:,} bytes: errors of ours or correct results; memory grew by {(peak_memory() - before) >> 20} MiB")


if __name__ == "__main__":
    main()
