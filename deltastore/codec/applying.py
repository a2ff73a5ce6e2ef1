"""Applying encoded chunks, one or many at once, and proving what they lead to. Pure.

All chunks that share a buffer are decoded and hashed in one call, each as it is done, without the interpreter: threads
that apply chunks side by side do not wait for each other between them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from deltastore.digest import DEFAULT_HASH, hasher
from deltastore.memory import address_of

from .context import CONTEXTUAL_WIDTH, apply_contextual, contextual_scratch
from .encoding import DamagedChunk, Encoding
from .kernels import ELEMENTS, add_zigzag
from .lanes import jit, jit_inline
from .libraries import CLOCK, Decompressor, hash_address, pointer, read_clock, write_digest
from .problems import BACKWARDS, CHANGES, ENCODING, LEFT_OVER, PROBLEMS, WIDTH
from .streams import apply_changes, read_values, reading_scratch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.digest import Hasher

    from .libraries import Handle

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["ChunkDecoder", "Chunks", "Steps", "Wrong", "warm_up_applying"]

_SPARSE, _DENSE, _FULL, _CONTEXTUAL = map(int, (Encoding.SPARSE, Encoding.DENSE, Encoding.FULL, Encoding.CONTEXTUAL))
#: What kernels answer besides problems: all is well; a chunk has another digest; a step is contextual.
_NOTHING, _DIGEST, _IN_CONTEXT = 0, 1, 2
#: The columns of what was spent.
_DECODE_NS, _DECODED_BYTES, _VERIFY_NS, _VERIFIED_BYTES = range(4)
_XXH3_BYTES = 16
#: The length of a gap stream of one byte.
_ONE_GAP = (1).to_bytes(4, "little")
#: The number of an only chunk, and where it begins.
_FIRST = np.zeros(1, np.int64)
_NO_DIGESTS = np.empty((0, _XXH3_BYTES), np.uint8)
_KINDS = {width: np.empty(0, kind) for width, kind in ELEMENTS.items()}


class Chunks(NamedTuple):
    """Chunks that share a buffer, in ascending order. Each field has one int64 a chunk.

    ``numbers``; where each begins and ends in the buffer: ``starts``, ``stops``; and its elements' ``widths`` in bytes.
    """

    numbers: Numbers
    starts: Numbers
    stops: Numbers
    widths: Numbers


class Steps(NamedTuple):
    """Encoded chunks to apply, in ascending order of their numbers; those of one chunk one after the other.

    ``numbers``: int64 (steps,), the chunks'; ``words``: uint32 (steps, 3), a row of ``payloads``, the encoding, and the
    number of changed elements; ``starts``, ``stops``: int64 (steps,), where the chunk lies in that payload.
    ``payloads``: int64 (payloads, 3), an address, a size in bytes, and 1 where its steps are to be taken back. Somebody
    keeps payloads where they are.
    """

    numbers: Numbers
    words: Array
    starts: Numbers
    stops: Numbers
    payloads: Array

    def cut(self, first: int, end: int | None = None) -> Steps:
        """Return the steps from ``first`` to before ``end``."""
        mine = slice(first, end)
        return Steps(self.numbers[mine], self.words[mine], self.starts[mine], self.stops[mine], self.payloads)


class Wrong(NamedTuple):
    """What is wrong: with which chunk of the buffer, and with which step, or ``None`` where the digest is wrong."""

    chunk: int
    step: int | None
    problem: str


@jit_inline
def _payload_of(steps: Steps, step: int) -> Array:
    whole = steps.payloads[steps.words[step, 0]]
    return carray(pointer(whole[0]), (whole[1],), np.uint8)[steps.starts[step] : steps.stops[step]]


@jit_inline
def _apply(elements: Array, steps: Steps, step: int, scratch: Array, zstd: Handle) -> int:
    """Apply a step to a chunk; returns 0, or what is wrong: ``elements`` are then undefined.

    A contextual one is left to ``_apply_in_context``.
    """
    payload, inverse = _payload_of(steps, step), steps.payloads[steps.words[step, 0], 2] != 0
    encoding, changed = steps.words[step, 1], np.int64(steps.words[step, 2])
    place: Any = np.int64(0)
    if not 1 <= changed <= elements.size:
        return CHANGES
    if encoding == _SPARSE:
        place = apply_changes(payload, place, elements, changed, inverse, scratch, zstd)
    elif encoding == _FULL and inverse:
        return BACKWARDS
    elif encoding in (_DENSE, _FULL):
        values = elements if encoding == _FULL else np.empty_like(elements)
        place = read_values(payload, place, values, scratch, zstd)
        if place >= 0 and encoding == _DENSE:
            add_zigzag(elements, values, inverse)
    else:
        return _IN_CONTEXT if encoding == _CONTEXTUAL else ENCODING
    if place < 0:
        return place
    return _NOTHING if place == payload.size else LEFT_OVER


@jit
def _apply_in_context(elements: Array, steps: Steps, step: int, scratch: Array, zstd: Handle) -> int:
    """Apply a contextual step to a chunk (uint16), as ``_apply`` does, which has looked at it before."""
    payload, inverse = _payload_of(steps, step), steps.payloads[steps.words[step, 0], 2] != 0
    place = apply_contextual(payload, 0, elements, np.int64(steps.words[step, 2]), inverse, scratch, zstd)
    if place < 0:
        return place
    return _NOTHING if place == payload.size else LEFT_OVER


@jit
def _build(
    out: Array,
    chunks: Chunks,
    steps: Steps,
    digests: Array,
    kind: Array,
    scratch: Array,
    zstd: Handle,
    xxh3: int,
    clock: int,
    spent: Array,
) -> tuple[int, int, int]:
    """Build the chunks of one element width, that of ``kind``; returns how far it came: chunk, step, and problem.

    Linear in the bytes of chunks and streams. ``digests``: uint8 (all chunks, 16), what xxh3-128 has to give, where
    ``xxh3`` is its address; ``spent``: as for ``ChunkDecoder.build``.
    """
    found, room = np.empty(_XXH3_BYTES, np.uint8), np.empty(2, np.int64)
    step = 0
    before = read_clock(clock, room)
    for chunk in range(chunks.numbers.size):
        number, end = chunks.numbers[chunk], step
        while end < steps.numbers.size and steps.numbers[end] == number:
            end += 1
        if chunks.widths[chunk] == kind.itemsize:
            elements = out[chunks.starts[chunk] : chunks.stops[chunk]].view(kind.dtype)
            for mine in range(step, end):
                problem = _apply(elements, steps, mine, scratch, zstd)
                if problem != _NOTHING:
                    return chunk, mine, problem
                spent[_DECODED_BYTES] += steps.stops[mine] - steps.starts[mine]
            if xxh3:
                decoded = read_clock(clock, room)
                write_digest(xxh3, elements, found)
                for byte in range(found.size):
                    if found[byte] != digests[number, byte]:
                        return chunk, end, _DIGEST
                verified = read_clock(clock, room)
                spent[_DECODE_NS] += decoded - before
                spent[_VERIFY_NS] += verified - decoded
                spent[_VERIFIED_BYTES] += elements.nbytes
                before = verified
        step = end
    spent[_DECODE_NS] += read_clock(clock, room) - before
    return chunks.numbers.size, step, _NOTHING


class ChunkDecoder:
    """Applies encoded chunks and proves what they lead to. Keeps scratch memory of a few chunks: one decoder a thread.

    ``hash_function``: that of the digests that ``build`` is given, xxh3-128 unless told otherwise.
    """

    __slots__ = ("_decompressor", "_digest", "_scratch", "_xxh3")

    def __init__(self, hash_function: Hasher | None = None) -> None:
        self._decompressor = Decompressor()
        found = hash_function or hasher(DEFAULT_HASH)
        self._digest, self._xxh3 = found.digest, hash_address(found.name)
        self._scratch = np.empty(0, np.uint8)

    def apply(
        self, out: Bytes, encoding: int, changed: int, payload: memoryview, *, width: int, inverse: bool = False
    ) -> None:
        """Turn the old bytes of a chunk in ``out`` (writable uint8) into the new ones, in place; back if ``inverse``.

        ``encoding`` and ``changed`` are as a part has them: uint8 and uint32. Raises ``DamagedChunk`` when the payload
        breaks the format or does not fit; ``out`` is then undefined.
        """
        data = np.frombuffer(payload, np.uint8)
        words = np.array([[0, encoding, changed]], np.uint32)
        steps = Steps(_FIRST, words, _FIRST, np.array([data.size]), np.array([[address_of(data), data.size, inverse]]))
        chunks = Chunks(_FIRST, _FIRST, np.array([out.size]), np.array([width]))
        _, _, problem = self._run(out, chunks, steps, _NO_DIGESTS, 0, width, np.zeros(4, np.int64))
        if problem:
            raise DamagedChunk(PROBLEMS[problem])

    def build(self, out: Bytes, chunks: Chunks, steps: Steps, digests: Bytes, spent: Numbers) -> Wrong | None:
        """Apply steps to the old bytes of chunks in ``out``, and compare the new ones with their digests.

        ``digests``: uint8 (all chunks, digest size), a row for each number. ``spent``: int64 (4,), to which is added
        what it took: nanoseconds of decoding, bytes as they are stored, nanoseconds of hashing, and bytes hashed.
        Returns what is wrong first, if anything is; ``out`` is then undefined.
        """
        for width in sorted(set(chunks.widths.tolist())):
            chunk, step, problem = self._run(out, chunks, steps, digests, self._xxh3, width, spent)
            if problem == _DIGEST:
                return _other_digest(chunk)
            if problem:
                return Wrong(chunk, step, PROBLEMS[problem])
        return None if self._xxh3 else self._verify(out, chunks, digests, spent)

    def _run(
        self, out: Bytes, chunks: Chunks, steps: Steps, digests: Bytes, xxh3: int, width: int, spent: Numbers
    ) -> tuple[int, int, int]:
        """Build the chunks of one element width; returns the first wrong one, its step and its problem, or no problem.

        A contextual step interrupts the kernel: few need that one, which takes long to compile.
        """
        elements = out.size // width  # of all chunks: one has no more
        zstd = self._decompressor.handle
        tools = (_KINDS[width], self._room(reading_scratch(elements + elements // 255)), zstd, xxh3, CLOCK, spent)
        chunk, step, problem = _build(out, chunks, steps, digests, *tools)
        while problem == _IN_CONTEXT and width == CONTEXTUAL_WIDTH:
            began = time.perf_counter_ns()
            mine = out[chunks.starts[chunk] : chunks.stops[chunk]].view(np.uint16)
            problem = _apply_in_context(mine, steps, step, self._room(contextual_scratch(mine.size)), zstd)
            spent[_DECODE_NS] += time.perf_counter_ns() - began
            spent[_DECODED_BYTES] += steps.stops[step] - steps.starts[step]
            if problem == _NOTHING:
                rest = Chunks(*(column[chunk:] for column in chunks))
                chunks_done, steps_done, problem = _build(out, rest, steps.cut(step + 1), digests, *tools)
                chunk, step = chunk + chunks_done, step + 1 + steps_done
        return chunk, step, WIDTH if problem == _IN_CONTEXT else problem

    def _room(self, size: int) -> Bytes:
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch

    def _verify(self, out: Bytes, chunks: Chunks, digests: Bytes, spent: Numbers) -> Wrong | None:
        """Compare digests that kernels cannot make."""
        began = time.perf_counter_ns()
        columns = (column.tolist() for column in (chunks.numbers, chunks.starts, chunks.stops))
        for chunk, (number, start, stop) in enumerate(zip(*columns, strict=True)):
            if self._digest(out[start:stop].data) != digests[number].tobytes():
                return _other_digest(chunk)
            spent[_VERIFIED_BYTES] += stop - start
        spent[_VERIFY_NS] += time.perf_counter_ns() - began
        return None


def _other_digest(chunk: int) -> Wrong:
    return Wrong(chunk, None, "it has another digest")


def warm_up_applying(widths: Iterable[int]) -> None:
    """Load or compile the kernels that apply chunks of these element widths, so that the first one does not wait."""
    decoder = ChunkDecoder()
    for width in sorted(set(widths)):
        # A chunk of one change: streams of nothing but zeros.
        payload = memoryview(_ONE_GAP + bytes(5) * (2 + width))
        decoder.apply(np.zeros(64 * width, np.uint8), Encoding.SPARSE, 1, payload, width=width)
