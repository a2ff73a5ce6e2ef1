"""Taking in one snapshot: every tensor checked against the schema, compared, encoded, in bounded memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from .codec import Encoding
from .errors import PublishError
from .snapshot import CHUNK_BYTES
from .tensors import is_tied_alias, is_tied_partner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .attempt import Attempt
    from .part import ChunkRow
    from .shadow import Run, Shadow
    from .snapshot import Digests, Schema
    from .tensors import TensorInput

__all__ = ["Intake"]

#: Work is handed to threads in batches of about this many bytes, however small the tensors are.
_BATCH_BYTES = 8 << 20
_RUN_CHUNKS = _BATCH_BYTES // CHUNK_BYTES


class Intake:
    """Feeds one snapshot's tensors through the shadow into an attempt. Use ``take``, then ``finish``."""

    def __init__(self, schema: Schema, shadow: Shadow, attempt: Attempt, *, workers: int) -> None:
        self.changed_elements = 0
        self.invertible = True
        self._schema = schema
        self._shadow = shadow
        self._attempt = attempt
        self._workers = workers
        self._digests: Digests = shadow.digests.copy()
        self._seen: set[str] = set()
        self._problems: list[tuple[str, str]] = []
        self._aliases: list[tuple[TensorInput, list[bytes]]] = []
        self._batch: list[Run] = []
        self._batch_bytes = 0
        self._running: deque[Future[list[ChunkRow]]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def take(self, tensors: Iterable[TensorInput], *, reusable: bool) -> None:
        """Encode tensors. Unless ``reusable``, each one is finished before the next is asked for."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="encode") as pool:
            self._pool = pool
            try:
                for tensor in tensors:
                    if self._admit(tensor):
                        self._encode(tensor)
                    if not reusable:
                        self._drain()
                self._drain()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _admit(self, tensor: TensorInput) -> bool:
        """Check one tensor against the schema; after the first problem only checks go on, so that all are named."""
        name = tensor.spec.name
        if name not in self._schema:
            if is_tied_alias(name):
                self._aliases.append((tensor, self._hash_alias(tensor)))
            else:
                self._problems.append((name, f"{name} is unknown"))
            return False
        wanted = self._schema[name]
        if name in self._seen:
            self._problems.append((name, f"{name} comes twice"))
        elif (wanted.dtype, wanted.shape) != (tensor.spec.dtype, tensor.spec.shape):
            found = f"{tensor.spec.dtype}{list(tensor.spec.shape)}"
            self._problems.append((name, f"{name} is {found} instead of {wanted.dtype}{list(wanted.shape)}"))
        self._seen.add(name)
        return not self._problems

    def _encode(self, tensor: TensorInput) -> None:
        spec = self._schema[tensor.spec.name]
        position = self._schema.position(spec.name)
        for first in range(0, spec.chunks, _RUN_CHUNKS):
            end = min(first + _RUN_CHUNKS, spec.chunks)
            self._batch.append((position, tensor.bytes, first, end))
            self._batch_bytes += spec.chunk_range(end - 1)[1] - first * CHUNK_BYTES
            if self._batch_bytes >= _BATCH_BYTES:
                self._submit()

    def _submit(self) -> None:
        if self._batch and self._pool is not None:
            self._running.append(self._pool.submit(self._shadow.encode, self._batch))
            self._batch, self._batch_bytes = [], 0
        while len(self._running) > 2 * self._workers:
            self._collect()

    def _drain(self) -> None:
        self._submit()
        while self._running:
            self._collect()

    def _collect(self) -> None:
        rows = self._running.popleft().result()
        for row in rows:
            number = int(self._schema.first_chunk[row.tensor]) + row.chunk
            self._digests[number] = np.frombuffer(row.new_digest, np.uint8)
            self.changed_elements += row.encoded.changed
            self.invertible &= row.encoded.encoding != Encoding.FULL
        self._attempt.add(rows)

    def _hash_alias(self, tensor: TensorInput) -> list[bytes]:
        return [
            self._shadow.hash.digest(np.ascontiguousarray(tensor.bytes(*tensor.spec.chunk_range(chunk))))
            for chunk in range(tensor.spec.chunks)
        ]

    def finish(self) -> Digests:
        """Return the new snapshot's chunk digests; raises ``PublishError`` naming everything that did not fit."""
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
