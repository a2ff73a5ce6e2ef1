"""The codec and the hash tree as docs/format.md says them, in plain Python; nothing of the package is used.

Everything here works on ``bytes`` and ``int``. ``DamagedError`` is raised where the page says MUST.
"""

from __future__ import annotations

import struct
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

SPARSE, DENSE, FULL, CONTEXTUAL = 1, 2, 3, 4
ZERO, RAW, ZSTD, APART = 0, 1, 2, 3
CHUNK = 2_097_152

HASHES = {"xxh3-128": xxhash.xxh3_128_digest, "blake3": lambda data: blake3.blake3(data).digest()}


class DamagedError(Exception):
    pass


# Section 3: elements and changes.


def values(data: bytes, width: int) -> list[int]:
    return [int(value) for value in np.frombuffer(data, f"<u{width}")]


def data_of(numbers: list[int], width: int) -> bytes:
    return b"".join(number.to_bytes(width, "little") for number in numbers)


def signed_change(old: int, new: int, width: int) -> int:
    modulus = 1 << (8 * width)
    change = (new - old) % modulus
    return change - modulus if change >= modulus // 2 else change


# Section 4: gaps, signs, magnitudes, zigzag, planes.


def gap_stream(positions: list[int]) -> bytes:
    stream = bytearray()
    following = 0
    for position in positions:
        skipped = position - following
        stream += b"\xff" * (skipped // 255)
        stream.append(skipped % 255)
        following = position + 1
    return bytes(stream)


def gap_positions(stream: bytes, elements: int, changed: int) -> list[int]:
    positions = []
    position = 0
    unfinished = False
    for byte in stream:
        position += byte
        unfinished = byte == 255
        if not unfinished:
            positions.append(position)
            position += 1
    if unfinished or len(positions) != changed or (positions and positions[-1] >= elements):
        raise DamagedError("gaps")
    return positions


def sign_stream(changes: list[int]) -> bytes:
    stream = bytearray((len(changes) + 7) // 8)
    for i, change in enumerate(changes):
        if change < 0:
            stream[i // 8] |= 1 << (i % 8)
    return bytes(stream)


def zigzag(change: int) -> int:
    return 2 * change if change >= 0 else -2 * change - 1


def unzigzag(value: int) -> int:
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


def planes(numbers: list[int], width: int) -> list[bytes]:
    data = data_of(numbers, width)
    return [data[plane::width] for plane in range(width)]


def joined(parts: list[bytes]) -> list[int]:
    return [int.from_bytes(bytes(column), "little") for column in zip(*parts, strict=True)]


# Section 4.1: streams.


def zstd_frame(raw: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)


def stored_stream(raw: bytes, method: int | None = None) -> bytes:
    if method is None or not raw:
        method = RAW if any(raw) else ZERO
    if method == APART:
        flags = sum(1 << i for i, byte in enumerate(raw) if byte).to_bytes((len(raw) + 7) // 8, "little")
        stored = stored_stream(flags) + stored_stream(bytes(byte for byte in raw if byte))
        return struct.pack("<BI", method, len(stored)) + stored
    stored = {ZERO: b"", RAW: raw, ZSTD: zstd_frame(raw) if method == ZSTD else b""}[method]
    return struct.pack("<BI", method, len(stored)) + stored


class Streams:
    """Reads streams one after another out of a payload."""

    def __init__(self, payload: bytes) -> None:
        self.left = bytes(payload)

    def take(self, size: int) -> bytes:
        if size > len(self.left):
            raise DamagedError("too short")
        piece, self.left = self.left[:size], self.left[size:]
        return piece

    def next(self, raw_size: int, *, inside: bool = False) -> bytes:
        method, size = struct.unpack("<BI", self.take(5))
        stored = self.take(size)
        if method == APART and raw_size and not inside:
            inner = Streams(stored)
            flags = int.from_bytes(inner.next((raw_size + 7) // 8, inside=True), "little") & ((1 << raw_size) - 1)
            values = inner.next(flags.bit_count(), inside=True)
            if inner.left:
                raise DamagedError("left over")
            left = list(values)
            return bytes(left.pop(0) if flags >> i & 1 else 0 for i in range(raw_size))
        if method == ZERO and size == 0:
            return bytes(raw_size)
        if method == RAW and size == raw_size:
            return stored
        if method == ZSTD and raw_size and zstandard.frame_content_size(stored) == raw_size:
            raw = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
            if len(raw) == raw_size:
                return raw
        raise DamagedError("stream")


# Section 4.2: contexts.


def class_of(value: int) -> int:
    return (value >> 7) & 255


def rice(numbers: list[int], k: int) -> str:
    """Bits in stream order, as a string of 0 and 1."""
    return "".join("0" * (v >> k) + "1" + "".join(str(v >> place & 1) for place in range(k)) for v in numbers)


def bits_to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def rice_numbers(data: bytes, runs: list[tuple[int, int]], limit: int) -> list[list[int]]:
    bits = "".join(f"{byte:08b}"[::-1] for byte in data)
    at = 0
    found = []
    for count, k in runs:
        numbers = []
        for _ in range(count):
            one = bits.find("1", at)
            if one < 0 or one + 1 + k > len(bits):
                raise DamagedError("positions end")
            number = (one - at << k) | sum(int(bits[one + 1 + place]) << place for place in range(k))
            if number > limit:
                raise DamagedError("position")
            numbers.append(number)
            at = one + 1 + k
        found.append(numbers)
    if (at + 7) // 8 != len(data):
        raise DamagedError("positions left over")
    return found


def distances(events: list[int]) -> list[int]:
    return [event - before - 1 for event, before in zip(events, [-1, *events], strict=False)]


def encode_contextual(
    old: bytes, new: bytes, inverted: set[int], k: int, method: int | None = None
) -> tuple[int, bytes]:
    """Any choice a writer may make: which classes are inverted, and one k for all."""
    before, after = values(old, 2), values(new, 2)
    members = {c: [i for i, value in enumerate(before) if class_of(value) == c] for c in range(256)}
    table = [[0] * 256, [0] * 256, [0] * 256]
    bits, changes = "", []
    for c, places in members.items():
        moved = [rank for rank, i in enumerate(places) if before[i] != after[i]]
        still = [rank for rank, i in enumerate(places) if before[i] == after[i]]
        changes += [signed_change(before[places[rank]], after[places[rank]], 2) for rank in moved]
        table[0][c] = len(moved)
        if c in inverted:
            table[1][c] = len(still)
        table[2][c] = k + 32 * (c in inverted)
        bits += rice(distances(still if c in inverted else moved), k)
    crossed = [i for i in range(len(before)) if class_of(before[i]) != class_of(after[i])]
    positions, crossings = bits_to_bytes(bits), bits_to_bytes(rice(distances(crossed), k))
    magnitudes = planes([abs(change) - 1 for change in changes], 2)
    numbers = b"".join(planes([number for row in table for number in row], 4))
    streams = [positions, crossings, bytes(class_of(before[i]) for i in crossed), sign_stream(changes), *magnitudes]
    head = struct.pack("<IIIB", len(positions), len(crossed), len(crossings), k)
    table_stream = stored_stream(numbers, ZSTD if any(numbers) else None)
    return len(changes), head + table_stream + b"".join(stored_stream(stream, method) for stream in streams)


def read_table(streams: Streams, elements: int, changed: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return the changed elements, the inversion, and (events, k) of each class."""
    raw = streams.next(3072)
    numbers = joined([raw[768 * place : 768 * place + 768] for place in range(4)])
    moved, still, modes = numbers[:256], numbers[256:512], numbers[512:]
    inverted = [mode >> 5 & 1 for mode in modes]
    events = [still[c] if inverted[c] else moved[c] for c in range(256)]
    if max(modes) > 63 or max(mode & 31 for mode in modes) > 20:
        raise DamagedError("modes")
    if sum(events) > elements or sum(moved) != changed:
        raise DamagedError("counts")
    return moved, inverted, [(events[c], modes[c] & 31) for c in range(256)]


def decode_contextual(before: list[int], changed: int, streams: Streams, *, back: bool) -> list[int]:
    positions_size, crossings, crossing_size, crossing_k = struct.unpack("<IIIB", streams.take(13))
    room = 4 * len(before) + 16  # 22 bits an element: the rest would be left over
    if crossing_k > 20 or crossings > changed or max(positions_size, crossing_size) > room:
        raise DamagedError("head")
    moved, inverted, runs = read_table(streams, len(before), changed)
    gaps = rice_numbers(streams.next(positions_size), runs, len(before))
    (crossing_gaps,) = rice_numbers(streams.next(crossing_size), [(crossings, crossing_k)], len(before))
    crossing_classes = streams.next(crossings)
    signs = streams.next((changed + 7) // 8)
    magnitudes = joined([streams.next(changed) for _ in range(2)])
    old_class = {}
    place = -1
    for gap, c in zip(crossing_gaps, crossing_classes, strict=True):
        place += gap + 1
        if place >= len(before):
            raise DamagedError("crossing")
        old_class[place] = c
    ranks: list[set[int]] = [set() for _ in range(256)]
    for c in range(256):
        rank = -1
        for gap in gaps[c]:
            rank += gap + 1
            ranks[c].add(rank)
    first = [sum(moved[:c]) for c in range(256)]
    seen, used = [0] * 256, [0] * 256
    result = list(before)
    for i, value in enumerate(before):
        c = old_class.get(i, class_of(value)) if back else class_of(value)
        happens = seen[c] in ranks[c]
        seen[c] += 1
        if happens == bool(inverted[c]):
            continue
        if used[c] >= moved[c]:
            raise DamagedError("too many changes")
        j = first[c] + used[c]
        used[c] += 1
        difference = (-1 if signs[j // 8] >> (j % 8) & 1 else 1) * (magnitudes[j] + 1)
        result[i] = (value + (-difference if back else difference)) % 65536
    if used != moved or any(ranks[c] and max(ranks[c]) >= seen[c] for c in range(256)):
        raise DamagedError("changes left over")
    return result


# Section 4: whole chunks.


def changed_positions(old: bytes, new: bytes, width: int) -> list[int]:
    pairs = zip(values(old, width), values(new, width), strict=True)
    return [i for i, (before, after) in enumerate(pairs) if before != after]


def chosen_encoding(old: bytes, new: bytes, width: int, level: str = "fast") -> int | None:
    """Section 4: the writer chooses from counts."""
    elements = len(new) // width
    changed = len(changed_positions(old, new, width))
    if not changed:
        return None
    if level == "max" and width == 2 and changed >= 256 and 2 * changed <= elements:
        return CONTEXTUAL
    if 4 * changed <= elements:
        return SPARSE
    eighth = (1 << (8 * width)) // 8
    pairs = zip(values(old, width), values(new, width), strict=True)
    far = sum(abs(signed_change(before, after, width)) > eighth for before, after in pairs)
    return FULL if 4 * far > elements else DENSE


def encode(old: bytes, new: bytes, width: int, encoding: int, method: int | None = None) -> tuple[int, bytes]:
    """Return the number of changed elements and the payload."""
    before, after = values(old, width), values(new, width)
    positions = changed_positions(old, new, width)
    if encoding == SPARSE:
        changes = [signed_change(before[i], after[i], width) for i in positions]
        gaps = gap_stream(positions)
        magnitudes = planes([abs(change) - 1 for change in changes], width)
        streams = [gaps, sign_stream(changes), *magnitudes]
        head = struct.pack("<I", len(gaps))
    else:
        numbers = after
        if encoding == DENSE:
            pairs = zip(before, after, strict=True)
            numbers = [zigzag(signed_change(old_value, new_value, width)) for old_value, new_value in pairs]
        streams = planes(numbers, width)
        head = b""
    return len(positions), head + b"".join(stored_stream(stream, method) for stream in streams)


def decode(old: bytes, encoding: int, changed: int, payload: bytes, width: int, *, back: bool = False) -> bytes:
    """Return the new bytes of a chunk, or with ``back`` the old ones from the new."""
    modulus = 1 << (8 * width)
    before = values(old, width)
    way = -1 if back else 1
    if not 1 <= changed <= len(before):
        raise DamagedError("changed")
    streams = Streams(payload)
    if encoding == SPARSE:
        (size,) = struct.unpack("<I", streams.take(4))
        if not changed <= size <= changed + len(before) // 255:
            raise DamagedError("gap stream")
        positions = gap_positions(streams.next(size), len(before), changed)
        signs = streams.next((changed + 7) // 8)
        magnitudes = joined([streams.next(changed) for _ in range(width)])
        for i, (position, magnitude) in enumerate(zip(positions, magnitudes, strict=True)):
            sign = -1 if signs[i // 8] >> (i % 8) & 1 else 1
            before[position] = (before[position] + way * sign * (magnitude + 1)) % modulus
        result = before
    elif encoding == DENSE:
        coded = joined([streams.next(len(before)) for _ in range(width)])
        pairs = zip(before, coded, strict=True)
        result = [(value + way * unzigzag(difference)) % modulus for value, difference in pairs]
    elif encoding == CONTEXTUAL and width == 2:
        result = decode_contextual(before, changed, streams, back=back)
    elif encoding == FULL and not back:
        result = joined([streams.next(len(before)) for _ in range(width)])
    else:
        raise DamagedError("encoding")
    if streams.left:
        raise DamagedError("left over")
    return data_of(result, width)


# Section 2.3: the hash tree.


def leaves(data: bytes, hash_name: str = "xxh3-128") -> list[bytes]:
    return [HASHES[hash_name](data[start : start + CHUNK]) for start in range(0, len(data), CHUNK)]


def tensor_node(
    name: str, dtype: str, shape: tuple[int, ...], tensor_leaves: list[bytes], hash_name: str = "xxh3-128"
) -> bytes:
    message = b"deltastore/tensor/1\x00"
    message += struct.pack("<I", len(name.encode())) + name.encode()
    message += struct.pack("<B", len(dtype)) + dtype.encode("ascii")
    message += struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
    message += struct.pack("<Q", len(tensor_leaves)) + b"".join(tensor_leaves)
    return HASHES[hash_name](message)


def snapshot_id(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], hash_name: str = "xxh3-128") -> str:
    """Return the id of a snapshot given as name: (dtype, shape, bytes)."""
    nodes = b"".join(
        tensor_node(name, dtype, shape, leaves(data, hash_name), hash_name)
        for name, (dtype, shape, data) in sorted(tensors.items(), key=lambda item: item[0].encode())
    )
    root = HASHES[hash_name](b"deltastore/snapshot/1\x00" + struct.pack("<Q", len(tensors)) + nodes)
    return f"{hash_name}:{root.hex()}"


def safetensors_file(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], metadata: Any = None) -> bytes:
    """Build a safetensors file by hand, its tensors back to back in the order given."""
    import json  # noqa: PLC0415 - only this helper speaks JSON

    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
