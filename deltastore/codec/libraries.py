"""What kernels reach by address, without the interpreter: functions of zstd and xxh3, a clock, and memory.

A thread that asks for the interpreter a few times a chunk waits for those of the other threads. So a kernel compresses
and hashes by itself: it gets a function's address and its context as numbers, and calls it (an intrinsic: a function
that writes its own code). The addresses are those of the libraries inside the packages ``zstandard`` and ``xxhash``; as
arguments, not constants, they leave the compiled kernels fit for the cache on disk.
"""

from __future__ import annotations

import ctypes
import platform
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .lanes import jit, jit_step

try:
    import zstandard._cffi as cffi
except ImportError as error:
    raise ImportError("zstandard lacks its cffi part here: install its wheel, and cffi") from error

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
    #: A context, and the functions that are called with it.
    Handle = tuple[int, ...]

__all__ = [
    "CLOCK",
    "Compressor",
    "Decompressor",
    "compress",
    "decompress",
    "hash_address",
    "pointer",
    "read_clock",
    "write_digest",
]

_ZSTD, _FFI = cffi.lib, cffi.ffi
#: Typed as anything: inside kernels an intrinsic is called without the typing context that its definition takes.
_intrinsic: Any = intrinsic
#: The kind of clock, and the address of the function that reads one.
_MONOTONIC = time.CLOCK_MONOTONIC
CLOCK: int = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
#: A length that no frame has.
_NEVER = 1 << 62


def _address(pointer: Any) -> int:
    return int(_FFI.cast("uintptr_t", pointer))


def _function(name: str) -> int:
    return _address(_FFI.addressof(_ZSTD, name))


class Compressor:
    """A zstd context with its parameters: ``handle`` is good as long as this is. Not for several threads at once."""

    __slots__ = ("_context", "handle")

    def __init__(self, **parameters: int) -> None:
        self._context = _FFI.gc(_ZSTD.ZSTD_createCCtx(), _ZSTD.ZSTD_freeCCtx)
        if not self._context:
            raise MemoryError
        for name, value in parameters.items():
            result = _ZSTD.ZSTD_CCtx_setParameter(self._context, getattr(_ZSTD, f"ZSTD_c_{name}"), value)
            if _ZSTD.ZSTD_isError(result):
                raise ValueError(f"zstd does not take {name}={value}")
        self.handle: Handle = (_address(self._context), _function("ZSTD_compress2"))


class Decompressor:
    """A zstd context that reads: ``handle`` is good as long as this is. Not for several threads at once."""

    __slots__ = ("_context", "handle")

    def __init__(self) -> None:
        self._context = _FFI.gc(_ZSTD.ZSTD_createDCtx(), _ZSTD.ZSTD_freeDCtx)
        if not self._context:
            raise MemoryError
        names = ("ZSTD_getFrameContentSize", "ZSTD_findFrameCompressedSize", "ZSTD_decompressDCtx")
        self.handle: Handle = (_address(self._context), *map(_function, names))


@_intrinsic
def pointer(_typing: Any, _address: Any) -> Any:
    """Return a pointer to an address, of which ``numba.carray`` makes an array."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@_intrinsic
def _call(_typing: Any, _address: Any, arguments: Any) -> Any:
    """Call the C function at an address with some pointers and sizes; returns its 64-bit result, unsigned."""

    def generate(_context: Any, builder: Any, signature: Any, given: Any) -> Any:
        word = ir.IntType(64)
        words = [builder.extract_value(given[1], place) for place in range(signature.args[1].count)]
        function = builder.inttoptr(given[0], ir.FunctionType(word, [word] * len(words)).as_pointer())
        return builder.call(function, words)

    return types.uint64(types.intp, types.UniTuple(types.intp, len(arguments))), generate


@_intrinsic
def _call_for_two(_typing: Any, _address: Any, _data: Any, _size: Any) -> Any:
    """Call a C function of a pointer and a size that returns a struct of two 64-bit words."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.LiteralStructType([word, word]), [word, word])
        both = builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(both, i) for i in (0, 1)])

    return types.UniTuple(types.uint64, 2)(types.intp, types.intp, types.intp), generate


@jit_step
def compress(zstd: Handle, raw: Array, out: Array) -> int:
    """Compress ``raw`` into ``out`` (uint8 both); returns the frame's length, or one beyond any where it failed."""
    found: Any = _call(zstd[1], (zstd[0], out.ctypes.data, out.size, raw.ctypes.data, raw.size))
    failed = found > np.uint64(out.size)  # zstd's errors are the highest numbers
    return _NEVER if failed else np.int64(found)  # type: ignore[return-value]


@jit_step
def decompress(zstd: Handle, frame: Array, out: Array) -> bool:
    """Tell whether ``frame`` is one zstd frame that declares and holds ``out.size`` bytes, written to ``out`` then.

    Nothing is written outside ``out``, and no memory is asked for, whatever the frame claims.
    """
    size = np.uint64(out.size)
    if _call(zstd[1], (frame.ctypes.data, frame.size)) != size:
        return False
    if _call(zstd[2], (frame.ctypes.data, frame.size)) != np.uint64(frame.size):
        return False
    return _call(zstd[3], (zstd[0], out.ctypes.data, out.size, frame.ctypes.data, frame.size)) == size


@jit_step
def read_clock(clock: int, room: Array) -> int:
    """Return nanoseconds that pass steadily; ``room``: int64 (2,)."""
    _call(clock, (_MONOTONIC, room.ctypes.data))
    return 1_000_000_000 * room[0] + room[1]


@jit_step
def write_digest(xxh3: int, data: Array, out: Array) -> None:
    """Write the xxh3-128 of ``data`` (contiguous) to ``out`` (uint8, 16 bytes), the high half first."""
    low, high = _call_for_two(xxh3, data.ctypes.data, data.size * data.itemsize)
    for byte in range(8):
        shift = np.uint64(56 - 8 * byte)
        out[byte] = np.uint8((high >> shift) & np.uint64(255))
        out[8 + byte] = np.uint8((low >> shift) & np.uint64(255))


_write_digest = jit(write_digest.py_func)


def hash_address(name: str) -> int:
    """Return the address of a hash function that ``write_digest`` can call, or 0: then it is called from Python.

    How a struct of two words comes back is known for two kinds of processor.
    """
    return _XXH3 if name == "xxh3-128" else 0


def _find_xxh3() -> int:
    if platform.machine() not in {"x86_64", "aarch64"}:
        return 0
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]  # noqa: SLF001
        # Where there is a choice by processor, it is what the package itself calls.
        function = getattr(library, "XXH3_128bits_dispatch", None) or library.XXH3_128bits
    except (OSError, AttributeError):  # a build that keeps its names to itself
        return 0
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    sample, found = np.arange(1024, dtype=np.uint8), np.empty(16, np.uint8)
    _write_digest(address, sample, found)
    return address if found.tobytes() == xxhash.xxh3_128_digest(sample.data) else 0


_XXH3 = _find_xxh3()
