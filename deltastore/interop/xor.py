"""The XOR codec that other weight-synchronisation systems use: XOR, zstd and xxh3-128 of one whole tensor. Pure.

A tensor's change is ``new ^ old`` of all its bytes in one zstd frame of level 1 whose header says how many bytes it
holds, and the xxh3-128 of the tensor's whole new bytes as lower-case hexadecimal. A delta leads both ways, but its
checksum only to the new bytes. There is no chunk grid: what cannot be applied is a whole tensor.

It reads and writes the layouts of those systems, and is what ``tools.bench`` measures this project's own codec by. So
it is written to be fast: no copy is made but the XOR itself and the frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from xxhash import xxh3_128_hexdigest

from deltastore.errors import CorruptObject

if TYPE_CHECKING:
    from deltastore.storage.base import Buffer

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["ZSTD_LEVEL", "XorDecoder", "XorDelta", "XorEncoder", "checksum"]

ZSTD_LEVEL = 1
"""The zstd level that those systems write with. Frames of any level can be read."""


@dataclass(frozen=True, slots=True)
class XorDelta:
    """One tensor's change: a zstd frame of ``new ^ old``, and the checksum of the whole new bytes."""

    frame: bytes
    checksum: str


def checksum(data: Bytes) -> str:
    """Return the xxh3-128 of a tensor's bytes (contiguous) as lower-case hexadecimal."""
    return xxh3_128_hexdigest(data.data)


class XorEncoder:
    """Encodes tensors one after another. Keeps scratch memory of the largest one: one encoder a thread."""

    __slots__ = ("_compressor", "_scratch")

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)
        self._scratch = np.empty(0, np.uint8)

    def encode(self, old: Bytes, new: Bytes) -> XorDelta:
        """Encode the change between two versions of a tensor: contiguous uint8 of the same length.

        Unchanged tensors are encoded too; whether to leave them out is the layout's business. Raises ``ValueError``
        for arrays that are no two versions of one tensor.
        """
        if old.shape != new.shape or old.ndim != 1:
            raise ValueError(f"a tensor of shape {old.shape} cannot become one of {new.shape}: give flat bytes")
        if self._scratch.size < new.size:
            self._scratch = np.empty(new.size, np.uint8)
        difference = self._scratch[: new.size]
        np.bitwise_xor(old, new, out=difference)
        return XorDelta(self._compressor.compress(difference.data), checksum(new))


class XorDecoder:
    """Applies deltas to tensors in place. One decoder a thread."""

    __slots__ = ("_decompressor",)

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()

    def apply(self, target: Bytes, frame: Buffer, expected: str, *, name: str) -> None:
        """Turn the old bytes of a tensor in ``target`` (writable, flat uint8) into the new ones, in place.

        ``expected`` is the checksum of the new bytes, ``name`` what errors call the tensor. Raises ``CorruptObject``
        when the frame is damaged or of another size, and when the result has another checksum: the frame is wrong
        then, or ``target`` did not hold the old bytes. ``target`` is as before after any of them.
        """
        difference = self.difference(frame, target.size, name=name)
        np.bitwise_xor(target, difference, out=target)
        found = checksum(target)
        if found != expected:
            np.bitwise_xor(target, difference, out=target)
            raise CorruptObject(
                f"The change of {name!r} leads to the checksum {found} instead of {expected}.",
                key=name,
                hint="It belongs to another base, or is damaged: start again from a full checkpoint.",
            )

    def difference(self, frame: Buffer, size: int, *, name: str) -> Bytes:
        """Return ``new ^ old`` (read-only uint8) of a tensor of ``size`` bytes.

        Raises ``CorruptObject`` before anything is decompressed unless the frame declares that very size.
        """
        try:
            # First of all: the library allocates what a frame declares, whatever limit it is given.
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != size:
                said = "no size" if declared == zstandard.CONTENTSIZE_UNKNOWN else f"{declared} bytes"
                raise _damaged(name, f"its zstd frame declares {said} instead of {size} bytes")
            raw = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _damaged(name, f"its zstd frame cannot be read ({error})") from error
        if len(raw) != size:
            raise _damaged(name, f"its zstd frame holds {len(raw)} bytes instead of {size}")
        return np.frombuffer(raw, np.uint8)


def _damaged(name: str, reason: str) -> CorruptObject:
    return CorruptObject(f"The change of {name!r} is damaged: {reason}.", key=name, hint="Fetch it again.")
