"""Taking in one snapshot: every tensor checked against the schema, compared, encoded, in bounded memory."""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from .codec import Encoding
from .errors import PublishError
from .memory import ALIGNMENT, address_of
from .shadow import Tiny
from .shares import AHEAD, Shares, encoding_bytes
from .snapshot import CHUNK_BYTES
from .tensors import DeviceBytes, HostBytes, is_tied_alias, is_tied_partner

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import ThreadPoolExecutor

    from .attempt import Attempt
    from .part import ChunkRow
    from .shadow import Run, Shadow
    from .snapshot import Digests, Schema
    from .tensors import TensorBytes, TensorInput

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Intake"]

#: Digests of encoded chunks that wait for their place in the table: many at once take less of the interpreter's time,
#: which the threads that encode need too.
_NEW_DIGESTS = 4096
#: A batch has at most so many tiny tensors, and so many bytes of them.
_TINY_TENSORS = 2048
_TINY_BYTES = 1 << 20

#: The C library's, called with the GIL: to let go of it for a few bytes costs far more than they do.
_copy = ctypes.PyDLL(None).memmove
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = ctypes.c_void_p


class _Batch:
    """Work for one thread: runs of chunks, and copies of tiny tensors."""

    __slots__ = ("_address", "_end", "nbytes", "runs", "tiny")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.tiny: Tiny | None = None
        self.nbytes = 0
        self._address = self._end = 0

    def copy(self, position: int, content: TensorBytes, size: int) -> None:
        """Take a tiny tensor's bytes: it may change from now on."""
        if self.tiny is None:
            self.tiny = Tiny([], [], np.empty(_TINY_BYTES, np.uint8))
            self._address = address_of(self.tiny.data)
        start = self._end
        self._end = start + -(-size // ALIGNMENT) * ALIGNMENT
        if type(content) is HostBytes:
            _copy(self._address + start, content.address, size)
        else:
            self.tiny.data[start : start + size] = content(0, size)
        self.tiny.positions.append(position)
        self.tiny.starts.append(start)
        self.nbytes += size

    def has_room(self, size: int) -> bool:
        """Tell whether a tiny tensor of so many bytes can be taken."""
        return self.tiny is None or (
            self._end + size + ALIGNMENT <= _TINY_BYTES and len(self.tiny.positions) < _TINY_TENSORS
        )


def _encode(encoding: Future[list[ChunkRow]], shadow: Shadow, batch: _Batch) -> None:
    """Encode a batch, unless it was cancelled."""
    if not encoding.set_running_or_notify_cancel():
        return
    try:
        encoding.set_result(shadow.encode(batch.runs, batch.tiny))
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        encoding.set_exception(error)
        del encoding  # else it and the error would hold each other, and with them the caller's tensors


class Intake:
    """Feeds one snapshot's tensors through the shadow into an attempt. Use ``take``, then ``finish``.

    ``pool``: the ``workers`` threads that encode. They outlive the snapshot, since each keeps scratch memory.
    """

    def __init__(
        self, schema: Schema, shadow: Shadow, attempt: Attempt, *, pool: ThreadPoolExecutor, workers: int
    ) -> None:
        self.changed_elements = 0
        self.invertible = True
        self._schema = schema
        self._shadow = shadow
        self._attempt = attempt
        self._pool = pool
        self._workers = workers
        self._digests: Digests = shadow.digests.copy()
        self._new_digests: list[tuple[int, int, bytes]] = []
        self._tiny = shadow.tiny.tolist()
        self._seen: set[str] = set()
        self._problems: list[tuple[str, str]] = []
        self._aliases: list[tuple[TensorInput, list[bytes]]] = []
        self._batch = _Batch()
        self._shares = Shares(schema.nbytes, workers=workers, most=encoding_bytes(1.0, workers=workers))
        #: Encodings, and the bytes of their batches.
        self._running: deque[tuple[Future[list[ChunkRow]], int]] = deque()
        self._collected_bytes = 0
        self._encoded_bytes = 0

    def take(self, tensors: Iterable[TensorInput], *, reusable: bool) -> None:
        """Encode tensors. Unless ``reusable``, nothing of one is read any more once the next is asked for."""
        try:
            for tensor in tensors:
                if not self._admit(tensor):
                    continue
                if not reusable:
                    self._shares = Shares(tensor.spec.nbytes, workers=self._workers, most=self._shares.most)
                if self._add(tensor) and not reusable:
                    self._drain()
            self._drain()
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        """Begin no other encoding and wait for those that run: nothing is read any more afterwards."""
        wait([encoding for encoding, _ in self._running if not encoding.cancel()])

    def leave(self) -> None:
        """Hand the attempt what an interrupted ``take`` encoded last, so that all of it can be taken back."""
        self._stop()
        while self._running:
            encoded, _ = self._running.popleft()
            if not encoded.cancelled() and encoded.exception() is None:
                self._attempt.keep(encoded.result())

    def _admit(self, tensor: TensorInput) -> bool:
        """Check one tensor against the schema; after the first problem only checks go on, so that all are named."""
        spec = tensor.spec
        name = spec.name
        wanted = self._schema.get(name)
        if wanted is None:
            if is_tied_alias(name):
                self._aliases.append((tensor, self._hash_alias(tensor)))
            else:
                self._problems.append((name, f"{name} is unknown"))
            return False
        if name in self._seen:
            self._problems.append((name, f"{name} comes twice"))
        elif spec is not wanted and (wanted.dtype, wanted.shape) != (spec.dtype, spec.shape):
            found = f"{spec.dtype}{list(spec.shape)}"
            self._problems.append((name, f"{name} is {found} instead of {wanted.dtype}{list(wanted.shape)}"))
        self._seen.add(name)
        return not self._problems

    def _add(self, tensor: TensorInput) -> bool:
        """Put a tensor into the batch; tells whether its own memory will still be read."""
        position = self._schema.position(tensor.spec.name)
        if self._tiny[position] and type(tensor.bytes) is not DeviceBytes:
            if not self._batch.has_room(tensor.spec.nbytes):
                self._submit()
            self._batch.copy(position, tensor.bytes, tensor.spec.nbytes)
            return False
        spec = self._schema.tensors[position]
        first = 0
        while first < spec.chunks:
            room = self._shares.size - self._batch.nbytes
            end = min(first + max(-(-room // CHUNK_BYTES), 1), spec.chunks)
            self._batch.runs.append((position, tensor.bytes, first, end))
            self._batch.nbytes += spec.chunk_range(end - 1)[1] - first * CHUNK_BYTES
            if self._batch.nbytes >= self._shares.size:
                self._submit()
            first = end
        return True

    def _submit(self) -> None:
        if self._batch.nbytes:
            # Known before a thread has it: an interrupt that comes between would leave it running with nobody waiting.
            encoding: Future[list[ChunkRow]] = Future()
            self._running.append((encoding, self._batch.nbytes))
            self._pool.submit(_encode, encoding, self._shadow, self._batch)
            self._shares.take(self._batch.nbytes)
            self._batch = _Batch()
        while len(self._running) > self._workers + AHEAD:
            self._collect()

    def _drain(self) -> None:
        self._submit()
        while self._running:
            self._collect()

    def _collect(self) -> None:
        encoding, nbytes = self._running[0]
        rows = encoding.result()
        encoded_bytes = sum(len(row.encoded.payload) for row in rows)
        self._shares.most = encoding_bytes(encoded_bytes / nbytes, workers=self._workers)
        self._collected_bytes += nbytes
        self._encoded_bytes += encoded_bytes
        left = self._schema.nbytes - self._collected_bytes
        expected = left * self._encoded_bytes / self._collected_bytes
        self._running.popleft()
        self._attempt.add(rows, expected=expected)
        for row in rows:
            self._new_digests.append((row.tensor, row.chunk, row.new_digest))
            self.changed_elements += row.encoded.changed
            self.invertible &= row.encoded.encoding != Encoding.FULL
        if len(self._new_digests) >= _NEW_DIGESTS:
            self._note_digests()

    def _note_digests(self) -> None:
        """Write what is new into the table of digests."""
        if not self._new_digests:
            return
        tensors, chunks, digests = zip(*self._new_digests, strict=True)
        self._new_digests = []
        numbers = self._schema.first_chunk[list(tensors)] + np.array(chunks, np.int64)
        self._digests[numbers] = np.frombuffer(b"".join(digests), np.uint8).reshape(len(numbers), -1)

    def _hash_alias(self, tensor: TensorInput) -> list[bytes]:
        return [
            self._shadow.hash.digest(np.ascontiguousarray(tensor.bytes(*tensor.spec.chunk_range(chunk))))
            for chunk in range(tensor.spec.chunks)
        ]

    def finish(self) -> Digests:
        """Return the new snapshot's chunk digests; raises ``PublishError`` naming everything that did not fit."""
        self._note_digests()
        self._problems += [
            (spec.name, f"{spec.name} is missing") for spec in self._schema if spec.name not in self._seen
        ]
        if not self._problems:
            self._problems += [problem for alias in self._aliases if (problem := self._alias_problem(*alias))]
        if self._problems:
            lines = [line for _, line in self._problems]
            more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise PublishError(
                f"The tensors are not the stream's: {'; '.join(lines[:5])}{more}.",
                tensors=tuple(name for name, _ in self._problems),
                hint="Publish every tensor of the base, under its name, with its dtype and shape.",
            )
        return self._digests

    def _alias_problem(self, tensor: TensorInput, digests: list[bytes]) -> tuple[str, str] | None:
        """Say what is wrong with a tied alias that the base lacks: it must equal its partner, which stands for both."""
        name, spec = tensor.spec.name, tensor.spec
        partners = [
            partner
            for partner in self._schema
            if is_tied_partner(partner.name) and (partner.dtype, partner.shape) == (spec.dtype, spec.shape)
        ]
        if not partners:
            return name, f"{name} is unknown"
        for partner in partners:
            first = self._schema.chunk_number(partner.name, 0)
            if self._digests[first : first + partner.chunks].tobytes() == b"".join(digests):
                return None
        return name, f"{name} is tied to {partners[0].name}, but their values differ"
