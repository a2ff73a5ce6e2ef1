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
    from .settings import Settings

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["limits", "limits_section"]

_PIECE = 8 << 20
_LOCAL = threading.local()


@numba.njit(nogil=True, cache=True)
def _read_both(one: Any, other: Any) -> Any:
    """Read two arrays of uint64 and keep one number of them: nothing but the loads, and an XOR and an OR a word."""
    found = np.uint64(0)
    for i in range(one.size):
        found |= one[i] ^ other[i]
    return found


def limits(settings: Settings) -> dict[str, float]:
    """Return GB/s, on one thread except where told.

    ``memcpy`` counts the bytes copied; ``two_stream_read`` the bytes of one of two arrays that are read side by side,
    as a comparison does; ``xxh3`` the bytes hashed; ``file_copy`` those read from one file in the page cache, hashed,
    and written to another, a chunk at a time: what applying does but for the change itself; ``disk_write`` the bytes
    written in order and made durable. Those with ``_all`` are of one thread a core together.
    """
    size = 32 << 20 if settings.quick else 256 << 20
    one, other = np.full(size, 1, np.uint8), np.full(size, 2, np.uint8)
    words = one.view(np.uint64), other.view(np.uint64)
    threads = max(settings.threads)
    shares = [slice(start, start + _PIECE) for start in range(0, size, _PIECE)]
    with Crew(threads) as crew, ExitStack() as stack:
        pairs = [_file_pair(settings.directory, one[: size // threads], stack) for _ in range(threads)]
        chunks = [(start, pair) for start in range(0, size // threads - CHUNK_BYTES + 1, CHUNK_BYTES) for pair in pairs]
        found = medians(
            {
                "memcpy": lambda: np.copyto(one, other),
                "memcpy_all": lambda: crew.map(lambda share: np.copyto(one[share], other[share]), shares),
                "two_stream_read": lambda: _read_both(*words),
                "two_stream_read_all": lambda: crew.map(lambda share: _read_both(*_of(words, share)), shares),
                "xxh3": lambda: xxh3_128_digest(one.data),
                "file_copy": lambda: [_copy_chunk(chunk) for chunk in chunks],
                "file_copy_all": lambda: crew.map(_copy_chunk, chunks),
                "disk_write": lambda: _write(settings.directory / "limit", one),
            },
            rounds=settings.rounds,
        )
        copied = len(chunks) * CHUNK_BYTES
    sizes = {"file_copy": copied, "file_copy_all": copied}
    return {name: gigabytes(sizes.get(name, size), elapsed) for name, elapsed in found.items()}


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
