"""What the machine itself can do, measured in the same run: no codec can be faster than these."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from xxhash import xxh3_128_digest

from deltastore.materialize import write_all
from deltastore.memory import aligned_memory
from deltastore.snapshot import CHUNK_BYTES

from .crew import Crew
from .report import Column, Section, rate, text
from .timing import gigabytes, medians

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from .settings import Settings

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Machine", "limits", "limits_section"]

_PIECE = 8 << 20
_LOCAL = threading.local()


@numba.njit(nogil=True, cache=True)
def _read_both(one: Any, other: Any) -> Any:
    """Read two arrays of uint64 and keep one number of them: nothing but the loads, and an XOR and an OR a word."""
    found = np.uint64(0)
    for i in range(one.size):
        found |= one[i] ^ other[i]
    return found


class Machine:
    """What the machine can do, as calls by name: to be measured alone, or in turn with what they bound.

    On one thread, but those with ``_all``, on one a core. ``memcpy`` copies; ``two_stream_read`` reads two arrays side
    by side, as a comparison does, and counts the bytes of one; ``xxh3`` hashes; ``file_copy`` reads from one file in
    the page cache, hashes, and writes to another, a chunk at a time: what applying does but for the change itself;
    ``disk_write`` writes in order and waits for the disk.
    """

    def __init__(self, settings: Settings) -> None:
        size = 32 << 20 if settings.quick else 256 << 20
        one, other = np.full(size, 1, np.uint8), np.full(size, 2, np.uint8)
        words = one.view(np.uint64), other.view(np.uint64)
        threads = max(settings.threads)
        shares = [slice(start, start + _PIECE) for start in range(0, size, _PIECE)]
        self._rounds = settings.rounds
        self._open = ExitStack()
        crew = self._open.enter_context(Crew(threads))
        pairs = [_file_pair(settings.directory, one[: size // threads], self._open) for _ in range(threads)]
        chunks = [(start, pair) for start in range(0, size // threads - CHUNK_BYTES + 1, CHUNK_BYTES) for pair in pairs]
        copied = len(chunks) * CHUNK_BYTES
        self.calls: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(one, other),
            "memcpy_all": lambda: crew.map(lambda share: np.copyto(one[share], other[share]), shares),
            "two_stream_read": lambda: _read_both(*words),
            "two_stream_read_all": lambda: crew.map(lambda share: _read_both(*_of(words, share)), shares),
            "xxh3": lambda: xxh3_128_digest(one.data),
            "file_copy": lambda: [_copy_chunk(chunk) for chunk in chunks],
            "file_copy_all": lambda: crew.map(_copy_chunk, chunks),
            "disk_write": lambda: _write(settings.directory / "limit", one),
        }
        self._sizes = {name: copied if name.startswith("file_copy") else size for name in self.calls}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def gbps(self, name: str, elapsed: float) -> float:
        """Return the rate of a call that took so many seconds, in GB/s."""
        return gigabytes(self._sizes[name], elapsed)

    def measure(self) -> dict[str, float]:
        """Return GB/s of each call."""
        return {name: self.gbps(name, elapsed) for name, elapsed in medians(self.calls, rounds=self._rounds).items()}


def limits(settings: Settings) -> dict[str, float]:
    """Return GB/s of everything that a ``Machine`` can do."""
    with Machine(settings) as machine:
        return machine.measure()


def _file_pair(directory: Path, data: Bytes, stack: ExitStack) -> tuple[int, int]:
    """Return two files with this content, to read the one and write the other; both go with ``stack``."""
    pair = []
    for _ in range(2):
        descriptor, path = tempfile.mkstemp(dir=directory)
        stack.callback(os.close, descriptor)
        Path(path).unlink()
        write_all(descriptor, data, 0)
        pair.append(descriptor)
    return pair[0], pair[1]


def _copy_chunk(job: tuple[int, tuple[int, int]]) -> None:
    offset, (source, target) = job
    if not hasattr(_LOCAL, "buffer"):
        _LOCAL.buffer = aligned_memory(CHUNK_BYTES)
    os.preadv(source, [_LOCAL.buffer.data], offset)
    xxh3_128_digest(_LOCAL.buffer.data)
    write_all(target, _LOCAL.buffer, offset)


def _of(words: tuple[Any, Any], share: slice) -> tuple[Any, Any]:
    """Return the words of a slice of bytes."""
    part = slice(share.start // 8, share.stop // 8)
    return words[0][part], words[1][part]


def _write(path: Path, data: np.ndarray[Any, Any]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for start in range(0, data.size, _PIECE):
            write_all(descriptor, data[start : start + _PIECE], start)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def limits_section(found: dict[str, float]) -> Section:
    """Return the table of the limits."""
    columns = (Column("limit of the machine", "limit", text), Column("GB/s", "gbps", rate))
    rows = [{"limit": name, "gbps": value} for name, value in found.items()]
    return Section("limits", "Physical limits", columns, rows)
