"""Byte streams inside an encoded chunk: nothing, raw bytes, one zstd frame, or zeros apart from the rest. Pure.

A stream is a method byte, the stored length as u32le, and the stored bytes (docs/format.md, section 4.1). Its raw
length is known to the reader before it starts, so nothing is ever decompressed past what the chunk itself allows.

Zeros apart: the high byte of a difference is mostly zero, at random places. zstd spends most of its time on short
runs there and still codes them badly; one bit a byte, and the bytes that are not zero, are both faster and smaller.
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

ZERO, RAW, ZSTD, APART = 0, 1, 2, 3

_HEAD = struct.Struct("<BI")
#: Shorter streams are stored raw: a zstd frame's own header would eat the gain.
_WORTH_COMPRESSING = 32
#: A longer stream is stored raw if a sample of its bytes is this random, in bits a byte, and a piece of this many from
#: its middle comes to no less than this share.
_RANDOM_FROM = 16 << 10
_RANDOM_BITS = 7.7
_RANDOM_SHARE = 0.97
_TRIED = 32 << 10
_SAMPLE = 4096
#: Level 1 with a table of 256 places, for matches of seven bytes and more. What repeats at all in these streams repeats
#: at length; short matches are chance, and their looking up and writing down costs more than literals do. Higher levels
#: take several times as long, and make the streams no smaller. The window is a chunk.
_ZSTD = zstandard.ZstdCompressionParameters.from_level(
    1, window_log=21, hash_log=8, min_match=7, write_checksum=False, write_content_size=True
)
_NO_FLAGS = np.empty(0, np.uint8)
_NO_FLAGS.flags.writeable = False


class StreamWriter:
    """Compresses streams one after another. Not for several threads at once."""

    __slots__ = ("_compressor",)

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)

    def append(
        self, pieces: list[bytes], raw: Bytes, *, sifted: tuple[int, Bytes] | None = None, bits: float = 0.0
    ) -> None:
        """Append the stream of ``raw`` (uint8, one-dimensional, contiguous) to ``pieces`` in a short form.

        ``sifted``: what ``sift`` makes of it, the number of its zeros and what it has apart, where that was done;
        ``bits``: its order-0 entropy in bits a byte, where that is known.
        """
        if sifted is None:
            apart = np.empty(raw.size + (raw.size + 7) // 8, np.uint8)
            zeros = kernels.sift(raw, apart)
        else:
            zeros, apart = sifted
        if not kernels.worth_apart(raw.size, zeros):
            self._append_whole(pieces, raw, zeros, bits)
            return
        values = (raw.size + 7) // 8
        inner: list[bytes] = []
        self._append_whole(inner, apart[:values], 0)
        self._append_whole(inner, apart[values : values + raw.size - zeros], 0)
        pieces += (_HEAD.pack(APART, sum(map(len, inner))), *inner)

    def append_runs(self, pieces: list[bytes], raw: Bytes) -> None:
        """Do what ``append`` does for a stream whose zeros come in long runs, at which zstd is good."""
        self._append_whole(pieces, raw, kernels.count_zeros(raw))

    def _append_whole(self, pieces: list[bytes], raw: Bytes, zeros: int, bits: float = 0.0) -> None:
        if zeros == raw.size:
            pieces.append(_HEAD.pack(ZERO, 0))
            return
        if raw.size >= _WORTH_COMPRESSING and bits < _RANDOM_BITS and not self._looks_random(raw):
            frame = self._compressor.compress(raw.data)
            if len(frame) < raw.size:
                pieces += (_HEAD.pack(ZSTD, len(frame)), frame)
                return
        pieces += (_HEAD.pack(RAW, raw.size), raw.tobytes())

    def _looks_random(self, raw: Bytes) -> bool:
        """Tell whether a long stream is not worth an attempt: neither its bytes nor their order show a pattern."""
        if raw.size < _RANDOM_FROM or kernels.sample_bits(raw, _SAMPLE) < _RANDOM_BITS:
            return False
        middle = raw[raw.size // 2 :][:_TRIED]
        return len(self._compressor.compress(middle.data)) > _RANDOM_SHARE * middle.size


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
        flags, values = self._next_halves(raw_size)
        if not flags.size:
            return values
        raw = np.empty(raw_size, np.uint8)
        kernels.join_planes(raw, ((flags, values),))
        raw.flags.writeable = False
        return raw

    def _next_stored(self) -> tuple[int, memoryview]:
        """Return the method and the stored bytes of the next stream."""
        method, stored_size = _HEAD.unpack(self.take(_HEAD.size))
        return method, self.take(stored_size)

    def _next_halves(self, raw_size: int) -> tuple[Bytes, Bytes]:
        """Return the next stream as flags and values, both read-only; no flags where it is whole."""
        method, stored = self._next_stored()
        if method != APART or not raw_size:
            return _NO_FLAGS, self._whole(method, stored, raw_size)
        inner = StreamReader(stored, self._decompressor)
        flags = inner._next_whole((raw_size + 7) // 8)
        values = inner._next_whole(kernels.count_flags(flags, raw_size))
        inner.finish()
        return flags, values

    def _next_whole(self, raw_size: int) -> Bytes:
        return self._whole(*self._next_stored(), raw_size)

    def _whole(self, method: int, stored: memoryview, raw_size: int) -> Bytes:
        stored_size = len(stored)
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

    def next_planes(self, planes: int, size: int) -> tuple[tuple[Bytes, Bytes], ...]:
        """Return the next ``planes`` streams of ``size`` bytes each: flags and values, as kernels join them."""
        return tuple([self._next_halves(size) for _ in range(planes)])

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
