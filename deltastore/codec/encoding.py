"""The words of the codec: encodings, levels, and an encoded chunk. Light: imports no kernels."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["LEVELS", "DamagedChunk", "EncodedChunk", "Encoding"]

#: ``max`` codes 16-bit changes in the context of the old values; nothing else differs.
LEVELS = ("fast", "max")


class Encoding(IntEnum):
    """How a chunk's change is stored; the numbers are those of the format."""

    SPARSE = 1
    DENSE = 2
    FULL = 3
    CONTEXTUAL = 4


class EncodedChunk(NamedTuple):
    """One chunk's change: how it is stored, how many elements changed, and the stored bytes.

    A tuple, since there is one for each of perhaps a hundred thousand tiny tensors.
    """

    encoding: Encoding
    changed: int
    payload: bytes


class DamagedChunk(Exception):
    """An encoded chunk breaks the format. Carries a sentence about what is wrong."""
