"""The steps under the kernels: comparing 64 elements at once, and walking the bits of the answer.

Each is one vector instruction or two in LLVM's own terms (an intrinsic: a function that writes its own code). Where
those do not compile, or ``DELTASTORE_PLAIN_KERNELS=1`` asks for it, loops with the same results stand in for them.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "LANES",
    "at",
    "changed_lanes",
    "count_bits",
    "equal_bytes",
    "fetch_kept",
    "fetch_once",
    "jit",
    "jit_inline",
    "jit_step",
    "keep_lanes",
    "lowest_bit",
    "vectors_compile",
]

#: Elements compared at once.
LANES = 64
#: An index, said not to be negative. One that may be costs four instructions more: it could count from the end.
at: Any = np.uint64

#: How many bytes before they are compared lanes are asked for: the processor itself does not ask beyond a page.
_AHEAD = 768
_LINE = 64
#: LLVM's words for how long what is asked for stays in the caches: not at all, and long.
_ONCE, _KEPT = 0, 3

_ASKED_FOR_PLAIN = os.environ.get("DELTASTORE_PLAIN_KERNELS") == "1"

jit_step: Any = numba.njit(nogil=True)
#: For what a kernel consists of: compiled as a part of it only, which takes a third less time and memory.
jit_inline: Any = numba.njit(nogil=True, inline="always")


def jit(function: Any) -> Any:
    """Compile a kernel, and keep it in numba's cache on disk where there is a place for one."""
    if not _ASKED_FOR_PLAIN:
        try:
            return _forgiving(numba.njit(nogil=True, cache=True)(function))
        except RuntimeError:  # a user without a home, a package that is read-only: compiled anew in each process
            pass
    return jit_step(function)


def _sources() -> bytes:
    """Return the digest of all modules that kernels are made of."""
    found = hashlib.blake2b()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.digest()


def _forgiving(kernel: Any) -> Any:
    """Let a cache that cannot be read or written, for a full disk or a torn file, cost time and nothing else.

    Nor is it believed once any module here is another one: numba looks at the kernel's own file only, but a kernel has
    those of other modules compiled into it.
    """
    cache = kernel._cache  # noqa: SLF001 - numba has no other hook
    index = cache._cache_file  # noqa: SLF001
    index._source_stamp = (index._source_stamp, _SOURCES)  # noqa: SLF001
    load, save = cache.load_overload, cache.save_overload

    def try_load(*words: Any) -> Any:
        try:
            return load(*words)
        except Exception:  # noqa: BLE001 - of a torn file, unpickling may raise anything
            return None

    def try_save(*words: Any) -> None:
        with suppress(Exception):
            save(*words)

    cache.load_overload, cache.save_overload = try_load, try_save
    return kernel


_SOURCES = _sources()

#: Typed as anything: inside kernels an intrinsic is called without the typing context that its definition takes.
_intrinsic: Any = intrinsic


@_intrinsic
def vector_changed_lanes(_typing: Any, old: Any, new: Any, start: Any) -> Any:
    """Compare 64 elements of two arrays from ``start``: a uint64 whose bit ``i`` is set where element ``i`` differs.

    One vector compare in LLVM's own terms, so that each machine uses the widest registers it has; numba's loop
    vectoriser does not find this form by itself.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), LANES)

        def load(kind: Any, value: Any) -> Any:
            data = context.make_array(kind)(context, builder, value).data
            lanes = builder.load(builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer()))
            lanes.align = 1  # tensors in a mapped file start anywhere
            return lanes

        old_lanes = load(signature.args[0], arguments[0])
        new_lanes = load(signature.args[1], arguments[1])
        return builder.bitcast(builder.icmp_unsigned("!=", old_lanes, new_lanes), ir.IntType(LANES))

    return types.uint64(old, new, start), generate


@_intrinsic
def vector_equal_bytes(_typing: Any, raw: Any, start: Any, _wanted: Any) -> Any:
    """Compare 64 bytes of a uint8 array from ``start`` with one value.

    A uint64 whose bit ``i`` is set where byte ``i`` is ``wanted``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), LANES)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer()))
        found.align = 1
        wanted = builder.trunc(arguments[2], ir.IntType(8))
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), wanted, ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        everywhere = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), places)
        return builder.bitcast(builder.icmp_unsigned("==", found, everywhere), ir.IntType(LANES))

    return types.uint64(raw, start, types.intp), generate


@_intrinsic
def vector_keep_lanes(_typing: Any, values: Any, out: Any, start: Any) -> Any:
    """Copy 64 elements of an array from ``start`` to the same place in another one: one load, one store."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), LANES)

        def place(kind: Any, value: Any) -> Any:
            data = context.make_array(kind)(context, builder, value).data
            return builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())

        lanes = builder.load(place(signature.args[0], arguments[0]))
        lanes.align = 1
        builder.store(lanes, place(signature.args[1], arguments[1]), align=1)
        return context.get_dummy_value()

    return types.none(values, out, start), generate


def _fetching(locality: int) -> Any:
    """Return a step that asks the memory for those 64 elements of an array that are some way ahead of ``start``."""

    def fetch(_typing: Any, values: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = ir.IntType(32)
            place = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
            prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            first = builder.bitcast(builder.gep(data, [arguments[1]]), place)
            words = [ir.Constant(number, word) for word in (0, locality, 1)]  # to read, for how long, as data
            for line in range(0, LANES * signature.args[0].dtype.bitwidth // 8, _LINE):
                ahead = builder.gep(first, [ir.Constant(ir.IntType(64), _AHEAD + line)])  # what is no memory is ignored
                builder.call(prefetch, [ahead, *words])
            return context.get_dummy_value()

        return types.none(values, start), generate

    return _intrinsic(fetch)


#: For what is read again soon, and for what is not: that leaves the caches to the rest.
vector_fetch_kept: Any = _fetching(_KEPT)
vector_fetch_once: Any = _fetching(_ONCE)


@jit_step
def plain_fetch(values: Array, start: int) -> None:
    """Leave it to the processor."""


@jit_step
def plain_keep_lanes(values: Array, out: Array, start: int) -> None:
    """Do what ``vector_keep_lanes`` does, an element at a time."""
    for lane in range(LANES):
        out[start + lane] = values[start + lane]


@jit_step
def plain_changed_lanes(old: Array, new: Array, start: int) -> Any:
    """Do what ``vector_changed_lanes`` does, an element at a time."""
    mask = np.uint64(0)
    for lane in range(LANES):
        mask = np.uint64(mask | (np.uint64(old[start + lane] != new[start + lane]) << np.uint64(lane)))
    return mask


@jit_step
def plain_equal_bytes(raw: Array, start: int, wanted: int) -> Any:
    """Do what ``vector_equal_bytes`` does, a byte at a time."""
    mask = np.uint64(0)
    for lane in range(LANES):
        mask = np.uint64(mask | (np.uint64(raw[start + lane] == wanted) << np.uint64(lane)))
    return mask


@jit
def _try_vectors(values: Array) -> Any:
    """Use all vector steps on a uint16 array of 64 elements."""
    kept = np.empty(LANES, np.uint16)
    vector_fetch_kept(values, 0)
    vector_fetch_once(values, 0)
    vector_keep_lanes(values, kept, 0)
    return vector_changed_lanes(values, kept, 0) + vector_equal_bytes(kept.view(np.uint8), 0, 0)


def vectors_compile() -> bool:
    """Tell whether this machine's LLVM takes the vector steps."""
    sample = np.zeros(LANES, np.uint16)
    sample.flags.writeable = False
    try:
        _try_vectors(sample)
    except (NumbaError, RuntimeError):  # numba's own words, and those of LLVM's verifier and code generator
        return False
    return True


changed_lanes: Any
keep_lanes: Any
equal_bytes: Any
fetch_kept: Any
fetch_once: Any
if _ASKED_FOR_PLAIN or not vectors_compile():
    changed_lanes, keep_lanes, equal_bytes = plain_changed_lanes, plain_keep_lanes, plain_equal_bytes
    fetch_kept = fetch_once = plain_fetch
else:
    changed_lanes, keep_lanes, equal_bytes = vector_changed_lanes, vector_keep_lanes, vector_equal_bytes
    fetch_kept, fetch_once = vector_fetch_kept, vector_fetch_once


@_intrinsic
def lowest_bit(_typing: Any, mask: Any) -> Any:
    """Return the number of the lowest set bit of an unsigned mask; of zero, the mask's width."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return number if number.type.width == 64 else builder.zext(number, ir.IntType(64))

    return types.intp(mask), generate


@_intrinsic
def count_bits(_typing: Any, mask: Any) -> Any:
    """Return how many bits of an unsigned mask are set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = builder.ctpop(arguments[0])
        return number if number.type.width == 64 else builder.zext(number, ir.IntType(64))

    return types.intp(mask), generate
