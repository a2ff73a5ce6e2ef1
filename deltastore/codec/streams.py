"""Byte streams inside an encoded chunk: nothing, raw bytes, or one zstd frame. Pure.

A stream is a method byte, the stored length as u32le, and the stored bytes (docs/format.md, section 4.1). Its raw
length is known to the reader before it starts, so nothing is ever decompressed past what the chunk itself allows.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from . import kernels
from .encoding import DamagedChunk

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["StreamReader", "StreamWriter"]

ZERO, RAW, ZSTD = 0, 1, 2

_HEAD = struct.Struct("<BI")
#: Shorter streams are stored raw: a zstd frame's own header would eat the gain.
_WORTH_COMPRESSING = 32


class StreamWriter:
    """Compresses streams one after another at one zstd level. Not for several threads at once."""

    __slots__ = ("_compressor",)

    def __init__(self, zstd_level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=zstd_level, write_checksum=False, write_content_size=True)

    def append(self, pieces: list[bytes], raw: Bytes) -> None:
        """Append the stream of ``raw`` (uint8, one-dimensional, contiguous) to ``pieces`` in its shortest form."""
        if kernels.is_zero(raw):
            pieces.append(_HEAD.pack(ZERO, 0))
            return
        if raw.size >= _WORTH_COMPRESSING:
            frame = self._compressor.compress(raw.data)
            if len(frame) < raw.size:
                pieces += (_HEAD.pack(ZSTD, len(frame)), frame)
                return
        pieces += (_HEAD.pack(RAW, raw.size), raw.tobytes())


class StreamReader:
    """Reads streams one after another out of one chunk's payload. Every length is checked before use."""

    __slots__ = ("_decompressor", "_payload", "_position")

    def __init__(self, payload: memoryview, decompressor: zstandard.ZstdDecompressor) -> None:
        self._payload = payload
        self._position = 0
        self._decompressor = decompressor

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes of the payload; raises ``DamagedChunk`` past its end."""
        end = self._position + size
        if end > len(self._payload):
            raise DamagedChunk("it ends too early")
        piece = self._payload[self._position : end]
        self._position = end
        return piece

    def next(self, raw_size: int) -> Bytes:
        """Return the next stream as read-only uint8 of exactly ``raw_size`` bytes; raises ``DamagedChunk``."""
        method, stored_size = _HEAD.unpack(self.take(_HEAD.size))
        stored = self.take(stored_size)
        if method == ZERO and stored_size == 0:
            raw = np.zeros(raw_size, np.uint8)
        elif method == RAW and stored_size == raw_size:
            raw = np.frombuffer(stored, np.uint8)
        elif method == ZSTD and raw_size:
            raw = np.frombuffer(self._inflate(stored, raw_size), np.uint8)
        else:
            raise DamagedChunk(f"a stream has method {method} and {stored_size} bytes for {raw_size}")
        raw.flags.writeable = False
        return raw

    def _inflate(self, frame: memoryview, raw_size: int) -> bytes:
        # The declared size is checked first: the library allocates what the frame declares, whatever limit it is given.
        try:
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != raw_size:
                raise DamagedChunk(f"a zstd frame declares {declared} bytes instead of {raw_size}")
            raw = self._decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedChunk(f"a zstd frame is damaged ({error})") from error
        if len(raw) != raw_size:
            raise DamagedChunk(f"a zstd frame holds {len(raw)} bytes instead of {raw_size}")
        return raw

    def finish(self) -> None:
        """Raise ``DamagedChunk`` if payload is left over."""
        if self._position != len(self._payload):
            raise DamagedChunk(f"{len(self._payload) - self._position} bytes are left over")
