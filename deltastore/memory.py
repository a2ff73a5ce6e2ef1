"""Memory that begins where a cache line does."""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["ALIGNMENT", "aligned_memory"]

#: Bytes of a cache line.
ALIGNMENT = 64


def aligned_memory(nbytes: int) -> Bytes:
    """Return uint8 memory of ``nbytes`` bytes, not set to anything: NumPy's own begins 16 bytes into a line."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + nbytes]
