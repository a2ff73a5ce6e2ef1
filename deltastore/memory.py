"""Memory that begins where a cache line does, somebody else's memory, files as memory, and how large the cache is."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["ALIGNMENT", "address_of", "aligned_copy", "aligned_memory", "last_cache_bytes", "mapped_file", "memory_at"]

#: Bytes of a cache line.
ALIGNMENT = 64
#: Where Linux tells of one core's caches, a directory each.
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_library = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _library.mmap, _library.munmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def aligned_memory(nbytes: int) -> Bytes:
    """Return uint8 memory of ``nbytes`` bytes, not set to anything: NumPy's own begins 16 bytes into a line."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + nbytes]


def aligned_copy(data: Bytes) -> Bytes:
    """Return a copy of uint8 ``data`` that begins a cache line."""
    copy = aligned_memory(data.size)
    copy[:] = data
    return copy


def address_of(data: Bytes) -> int:
    """Return where the first byte lies."""
    address: int = data.__array_interface__["data"][0]
    return address


class _Memory:
    """Memory at an address, as NumPy asks for it: read-only, and in use as long as an array has it."""

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(self, address: int, size: int, owner: object = None) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}
        self.owner = owner


def memory_at(address: int, nbytes: int, owner: object) -> Bytes:
    """Return ``nbytes`` bytes at ``address``, which are there as long as ``owner`` is, as read-only uint8."""
    return np.asarray(_Memory(address, nbytes, owner))


def mapped_file(descriptor: int, size: int) -> Bytes:
    """Map a file of ``size`` bytes, at least one, as read-only uint8; raises ``OSError``.

    The map does without the descriptor: Python's own and NumPy's each keep one, and a plan of a thousand steps has a
    thousand files mapped at once.
    """
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = _Memory(address, size)
    weakref.finalize(memory, _munmap, address, size).atexit = False
    return np.asarray(memory)


def last_cache_bytes(caches: Path = _CACHES) -> int | None:
    """Return how large the last cache before the memory is, of which cores may share one; ``None`` if nobody tells."""
    try:
        sizes = [(path / "size").read_text().strip() for path in caches.glob("index*")]
    except OSError:
        return None
    return max((int(size[:-1]) << 10 for size in sizes if size[:-1].isdecimal() and size[-1] == "K"), default=None)
