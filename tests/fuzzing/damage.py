"""Damage to valid objects, and random bytes. Seeded."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

from deltastore.digest import hasher

if TYPE_CHECKING:
    from collections.abc import Callable

XXH3 = hasher("xxh3-128")
#: Numbers at which lengths, counts and offsets go wrong.
NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 63, 127, 128, 254, 255, 256, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1)
LONG_NUMBERS = (*NUMBERS, 2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


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


def json_case(damage: Damage, valid: Callable[[Damage], bytes]) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        return damage.bytes(2000)
    if kind == 1:
        return json.dumps(damage.tree(json.loads(valid(damage)))).encode()
    return damage.damaged(valid(damage), valid(damage))


def resealed(line: bytes) -> bytes:
    return b"%b\n%b\n" % (line, XXH3.of(line).encode())


def record_case(damage: Damage, make: Callable[[Damage], bytes]) -> bytes:
    kind = damage.random.randrange(4)
    if kind == 0:
        return resealed(damage.bytes(1500)) if damage.random.random() < 0.7 else damage.bytes(3000)
    valid = make(damage)
    line = valid.split(b"\n")[0]
    if kind == 1:
        return resealed(damage.damaged(line, make(damage)))
    if kind == 2:
        return resealed(json.dumps(damage.tree(json.loads(line)), separators=(",", ":")).encode())
    return damage.damaged(valid, make(damage))
