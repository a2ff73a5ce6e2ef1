"""What the tests of caches share: keys, bytes, and a store that counts what is asked of it."""

from __future__ import annotations

import threading

from deltastore.errors import CorruptObject, ObjectNotFound


def part(number: int) -> str:
    """Return a key whose object may be kept."""
    return f"parts/{number:010d}/{number:032x}/model-00000.safetensors"


def content(number: int, size: int = 1000) -> bytes:
    """Return an object's bytes, which tell its number."""
    return (number.to_bytes(4, "little") * (size // 4 + 1))[:size]


class CountingStore:
    """Objects in memory, and the keys of all reads."""

    url = "counting://"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.reads: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.entered = threading.Semaphore(0)
        self.error: Exception | None = None

    def read(self, key: str, *, limit: int) -> bytes:
        self.reads.append(key)
        self.entered.release()
        assert self.held.wait(30)
        if self.error is not None:
            raise self.error
        if key not in self.objects:
            raise ObjectNotFound(f"there is no {key}", key=key)
        if len(self.objects[key]) > limit:
            raise CorruptObject(f"{key} is too large", key=key)
        return self.objects[key]

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data)

    def create(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data)

    def list(self, prefix: str):
        return iter(())

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)
