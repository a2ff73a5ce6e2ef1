"""Chunks of every encoding, against the plain-Python decoder of ``reference``."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import reference
import zstandard
from reference import APART, CONTEXTUAL, DENSE, FULL, RAW, SPARSE, ZSTD

from deltastore.codec import DamagedChunk, Encoding
from deltastore.codec.applying import ChunkDecoder
from deltastore.codec.chunk import ChunkEncoder

if TYPE_CHECKING:
    from .damage import Damage

from .decoder import Decoder, memory_within

GUARD = 64


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
    with memory_within(24 * (len(chunk.start) + len(chunk.payload)) + (512 << 10)):
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


def _chunks(encoding: int) -> Decoder:
    name = f"chunk, {Encoding(encoding).name.lower()}"
    return Decoder(name, lambda damage: _chunk_case(damage, encoding), lambda case: len(case.payload), _attempt_chunk)


DECODERS = tuple(_chunks(encoding) for encoding in (SPARSE, DENSE, FULL, CONTEXTUAL))
