"""The two codecs side by side, in one process and on the same bytes: this project's, and the yardstick.

Encoding starts from arrays in memory and ends with all that is stored, digests included; ours also leaves the old
bytes the new ones, as a writer's shadow needs them next, and goes from one snapshot to the other and back in turn.
Applying goes from or into files in the page cache, as many as threads: ours reads the old bytes from one file, checks
the new digest, and writes to another file; the yardstick changes mapped files in place, and checks afterwards.
"""

from __future__ import annotations

import os
import threading
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from deltastore.checkpoint import open_checkpoint
from deltastore.codec import Encoding
from deltastore.digest import hasher
from deltastore.interop.xor import XorDecoder, XorDelta, XorEncoder, checksum
from deltastore.manifest import MODEL
from deltastore.materialize import write_all
from deltastore.part import ChunkRow, PartIdentity, build_part, parse_part
from deltastore.patch import Patch, build, seal
from deltastore.replay import in_turn
from deltastore.shadow import Shadow
from deltastore.shares import Shares, encoding_bytes
from deltastore.snapshot import snapshot_id
from deltastore.tensors import named_tensors

from .pairs import as_tensors, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deltastore.shadow import Run
    from deltastore.snapshot import ChunkSpan, Digests, TensorSpec

    from .crew import Crew
    from .pairs import Pair

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Content = Mapping[str, Bytes]

__all__ = ["Files", "Ours", "Yardstick"]

_Item = TypeVar("_Item")

_IDENTITY = PartIdentity("0" * 32, 1, "0" * 32, MODEL)


class Files:
    """Two checkpoint directories with the old bytes, in the page cache: ``source`` is read, ``target`` written.

    Each of about ``files`` files. ``patched``: whether what is patched in place holds the new bytes now.
    """

    def __init__(self, directory: Path, pair: Pair, *, files: int = 1) -> None:
        self.source = write_checkpoint(directory / "source", pair.schema, pair.old, files=files)
        self.target = write_checkpoint(directory / "target", pair.schema, pair.old, files=files)
        self.patched = False

    def is_new(self, pair: Pair) -> bool:
        """Whether the target holds the new bytes."""
        return self._holds(pair, pair.new)

    def is_in_place(self, pair: Pair) -> bool:
        """Whether the target, patched in place, holds what it ought to by now."""
        return self._holds(pair, pair.new if self.patched else pair.old)

    def _holds(self, pair: Pair, content: Content) -> bool:
        found = open_checkpoint(self.target)
        return all(np.array_equal(found.tensor(spec.name), content[spec.name]) for spec in pair.schema)


def _shared_out(items: Iterable[tuple[_Item, int]], shares: Shares) -> list[list[_Item]]:
    """Cut items and their bytes into what threads are handed at a time."""
    cut: list[list[_Item]] = [[]]
    filled = 0
    for item, size in items:
        cut[-1].append(item)
        filled += size
        if filled >= shares.size:
            shares.take(filled)
            cut.append([])
            filled = 0
    return cut


class Ours:
    """This project's codec at one level: encodes in a writer's shadow, applies as the receiver does."""

    def __init__(self, pair: Pair, level: str, crew: Crew) -> None:
        self.pair = pair
        self._crew = crew
        self._hash = hasher("xxh3-128")
        self._rows: list[ChunkRow] = []
        self.stored_bytes = 0
        self._shadow = Shadow(pair.schema, self._hash, level=level)
        for spec in pair.schema:
            for chunk in range(spec.chunks):
                start, stop = spec.chunk_range(chunk)
                self._shadow.chunk(spec, chunk)[:] = pair.old[spec.name][start:stop]
        self._ways = [(pair.new, self._digests(pair.old)), (pair.old, self._digests(pair.new))]
        self._before = self._ways[0][1]
        self._shadow.digests = self._before
        self._cut(1.0)
        self.encode()
        self.encode()
        self._cut(self.stored_bytes / pair.nbytes)

    def _cut(self, come_to: float) -> None:
        """Cut both snapshots as a writer does that expects this of them when they are encoded."""
        most = encoding_bytes(come_to, workers=self._crew.threads)
        self._shares = [self._runs(given, most) for given, _ in self._ways]

    def _digests(self, content: Any) -> Digests:
        table = np.zeros((self.pair.schema.chunks, self._hash.size), np.uint8)
        for spec in self.pair.schema:
            for chunk in range(spec.chunks):
                piece = content[spec.name][slice(*spec.chunk_range(chunk))]
                number = self.pair.schema.chunk_number(spec.name, chunk)
                table[number] = np.frombuffer(self._hash.digest(np.ascontiguousarray(piece)), np.uint8)
        return table

    def _runs(self, content: Any, most: int) -> list[list[Run]]:
        """Return what threads are handed at a time: consecutive chunks of a tensor together."""
        schema = self.pair.schema
        states = {given.spec.name: given for given in named_tensors(as_tensors(schema, content), schema)}
        sizes = [
            ((position, chunk), stop - start)
            for position, spec in enumerate(schema)
            for chunk in range(spec.chunks)
            for start, stop in [spec.chunk_range(chunk)]
        ]
        shares = []
        for share in _shared_out(sizes, Shares(self.pair.nbytes, workers=self._crew.threads, most=most)):
            runs: list[Run] = []
            for position, chunks in groupby(share, key=itemgetter(0)):
                numbers = [chunk for _, chunk in chunks]
                given = states[schema.tensors[position].name].bytes
                runs.append((position, given, numbers[0], numbers[-1] + 1))
            shares.append(runs)
        return shares

    def encode(self) -> None:
        """Encode the whole pair, one way or the other."""
        results = self._crew.map(self._encode_share, self._shares[0])
        rows = [row for rows in results for row in rows]
        if self._ways[0][0] is self.pair.new:
            self._rows = rows
            self.stored_bytes = sum(len(row.encoded.payload) for row in rows)
        self._ways.reverse()
        self._shares.reverse()
        self._shadow.advance(list, self._ways[0][1], workers=1)

    def _encode_share(self, share: list[Run]) -> list[ChunkRow]:
        rows = self._shadow.encode(share)
        given, schema = self._ways[0][0], self.pair.schema
        for row in rows:
            if row.encoded.encoding == Encoding.FULL:  # a writer's shadow follows these after the commit
                spec = schema.tensors[row.tensor]
                np.copyto(self._shadow.chunk(spec, row.chunk), given[spec.name][slice(*spec.chunk_range(row.chunk))])
        return rows

    def prepare(self) -> None:
        """Make of what was encoded the part that a receiver has fetched and verified."""
        schema = self.pair.schema
        data = build_part(self._rows, _IDENTITY, digest_size=self._hash.size)
        self._part = parse_part(data, _IDENTITY, schema, self._hash, key="part")
        self._after = snapshot_id(schema, self._digests(self.pair.new), self._hash)

    def apply(self, files: Files) -> None:
        """Build the new bytes in ``files.target`` from the old ones in ``files.source``."""
        source, target = open_checkpoint(files.source), open_checkpoint(files.target)
        descriptors = [os.open(files.target / file.name, os.O_WRONLY) for file in target.layout.files]

        def write(span: ChunkSpan, data: Bytes) -> None:
            for file, offset, start, stop in target.places.stretches(span):
                write_all(descriptors[file], data[start:stop], offset)

        schema, threads = self.pair.schema, self._crew.threads
        fronts = min(threads, len(target.layout.files))
        bounds = [schema.chunks * front // fronts for front in range(fronts + 1)]
        after, shares = self._before.copy(), Shares(schema.nbytes, workers=threads)
        batches = []
        for low, high in pairwise(bounds):
            patch = Patch(schema, self._hash, before=self._before, after=after, window=range(low, high))
            patch.add_delta([self._part])
            batches.append(patch.batches(shares, everything=True))
        build(in_turn(batches), source.read, write, workers=threads, places=target.places)
        seal(schema, self._hash, after, self._after, key=None)
        for descriptor in descriptors:
            os.close(descriptor)


class Yardstick:
    """XOR, zstd-1 and xxh3-128 over whole tensors, patched in place: what is in use elsewhere."""

    def __init__(self, pair: Pair, crew: Crew) -> None:
        self.pair = pair
        self._crew = crew
        self._shares = _shared_out(
            [(spec, spec.nbytes) for spec in pair.schema], Shares(pair.nbytes, workers=crew.threads)
        )
        self._local = threading.local()
        self._deltas: list[XorDelta] = []
        self._old_checksums: list[str] = []
        self.stored_bytes = 0

    def encode(self) -> None:
        """Encode the whole pair."""
        results = self._crew.map(self._encode_share, self._shares)
        self._deltas = [delta for deltas in results for delta in deltas]
        self.stored_bytes = sum(len(delta.frame) for delta in self._deltas)

    def _encode_share(self, share: list[TensorSpec]) -> list[XorDelta]:
        if not hasattr(self._local, "encoder"):
            self._local.encoder = XorEncoder()
        old, new = self.pair.old, self.pair.new
        return [self._local.encoder.encode(old[spec.name], new[spec.name]) for spec in share]

    def prepare(self) -> None:
        """Note the checksums of the old bytes: the way back, so that every round has something to do."""
        self._old_checksums = [checksum(self.pair.old[spec.name]) for spec in self.pair.schema]

    def apply(self, files: Files) -> None:
        """Patch ``files.target`` in place; every other call takes it back to the old bytes."""
        checkpoint = open_checkpoint(files.target)
        places: dict[str, tuple[Bytes, int, int]] = {}
        for file in checkpoint.layout.files:
            mapped = np.asarray(np.memmap(files.target / file.name, np.uint8, "r+"))
            places |= {placed.spec.name: (mapped, placed.start, placed.end) for placed in file.header.tensors}

        def patch(share: list[TensorSpec]) -> None:
            if not hasattr(self._local, "decoder"):
                self._local.decoder = XorDecoder()
            for spec in share:
                number = self.pair.schema.position(spec.name)
                delta, (mapped, start, end) = self._deltas[number], places[spec.name]
                wanted = self._old_checksums[number] if files.patched else delta.checksum
                self._local.decoder.apply(mapped[start:end], delta.frame, wanted, name=spec.name)

        self._crew.map(patch, self._shares)
        files.patched = not files.patched
