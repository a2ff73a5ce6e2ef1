"""The yardstick's whole pipelines: publish to a directory as others do, and patch a mapped checkpoint in place.

The layout is that of SGLang, Miles and slime: ``weight_v000001/`` with shards of zstd frames, checksums in their
metadata, and an index written last. Shards end at 64 MiB, and everything is made durable before the index is.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.checkpoint import open_checkpoint
from deltastore.container import build_header, header_size, parse_header
from deltastore.interop.xor import XorDecoder, XorDelta, XorEncoder
from deltastore.materialize import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from deltastore.snapshot import Schema, TensorSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["YardstickReceiver", "YardstickWriter"]

_SHARD_BYTES = 64 << 20
_INDEX = "model.safetensors.index.json"


class YardstickWriter:
    """Publishes XOR deltas of whole tensors. Keeps a copy of the last published bytes."""

    def __init__(self, root: Path, schema: Schema, base: Mapping[str, Bytes], *, threads: int) -> None:
        self._root = root
        self._schema = schema
        self._shadow = {spec.name: base[spec.name].copy() for spec in schema}
        self._threads = threads
        self._local = threading.local()
        self._version = 0
        self._pool = ThreadPoolExecutor(threads)

    def publish(self, state: Mapping[str, Bytes]) -> tuple[Path, int]:
        """Publish one snapshot; returns its directory and the bytes stored."""
        self._version += 1
        directory = self._root / f"weight_v{self._version:06d}"
        directory.mkdir(parents=True)

        def encode(spec: TensorSpec) -> tuple[TensorSpec, XorDelta]:
            if not hasattr(self._local, "encoder"):
                self._local.encoder = XorEncoder()
            return spec, self._local.encoder.encode(self._shadow[spec.name], state[spec.name])

        encoded = self._pool.map(encode, self._schema) if self._threads > 1 else map(encode, self._schema)
        drafts = [_write_shard(directory, number, shard) for number, shard in enumerate(_shards(encoded))]
        stored = sum(path.stat().st_size for path, _ in drafts)
        self._finish(directory, drafts)
        for spec in self._schema:
            np.copyto(self._shadow[spec.name], state[spec.name])
        return directory, stored

    def _finish(self, directory: Path, drafts: list[tuple[Path, list[str]]]) -> None:
        weight_map: dict[str, str] = {}
        for number, (draft, names) in enumerate(drafts):
            path = directory / f"model-{number:05d}-of-{len(drafts):05d}.safetensors"
            draft.rename(path)
            weight_map |= dict.fromkeys(names, path.name)
        metadata = {
            "version": f"{self._version:06d}",
            "base_version": f"{self._version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
        _write_durably(directory / f"{_INDEX}.draft", [index])
        (directory / f"{_INDEX}.draft").rename(directory / _INDEX)
        sync_directory(directory)

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown()


def _shards(encoded: Iterable[tuple[TensorSpec, XorDelta]]) -> Iterator[list[tuple[TensorSpec, XorDelta]]]:
    shard: list[tuple[TensorSpec, XorDelta]] = []
    filled = 0
    for spec, delta in encoded:
        if shard and filled + len(delta.frame) > _SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append((spec, delta))
        filled += len(delta.frame)
    if shard:
        yield shard


def _write_shard(directory: Path, number: int, shard: list[tuple[TensorSpec, XorDelta]]) -> tuple[Path, list[str]]:
    header = build_header(
        [(spec.name, "U8", (len(delta.frame),)) for spec, delta in shard],
        {spec.name: delta.checksum for spec, delta in shard},
    )
    path = directory / f"shard-{number}.draft"
    _write_durably(path, [header, *(delta.frame for _, delta in shard)])
    return path, [spec.name for spec, _ in shard]


def _write_durably(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as stream:
        stream.writelines(pieces)
        stream.flush()
        os.fsync(stream.fileno())


class YardstickReceiver:
    """Keeps one checkpoint directory, patched in place through a map."""

    def __init__(self, checkpoint: Path, *, threads: int) -> None:
        self._checkpoint = checkpoint
        self._threads = threads
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads)

    def patch(self, version: Path) -> None:
        """Apply one version's directory, and make the result durable."""
        layout = open_checkpoint(self._checkpoint).layout
        maps = {file.name: np.memmap(self._checkpoint / file.name, np.uint8, "r+") for file in layout.files}
        targets = {
            placed.spec.name: np.asarray(maps[file.name])[placed.start : placed.end]
            for file in layout.files
            for placed in file.header.tensors
        }
        weight_map = json.loads((version / _INDEX).read_bytes())["weight_map"]
        for name in sorted(set(weight_map.values())):
            data = memoryview((version / name).read_bytes())
            header = parse_header(data[: header_size(data[:8], key=name)], key=name)

            def apply(placed: Any, data: memoryview = data, checksums: Mapping[str, str] = header.metadata) -> None:
                if not hasattr(self._local, "decoder"):
                    self._local.decoder = XorDecoder()
                tensor = placed.spec.name
                frame = data[placed.start : placed.end]
                self._local.decoder.apply(targets[tensor], frame, checksums[tensor], name=tensor)

            if self._threads > 1:
                list(self._pool.map(apply, header.tensors))
            else:
                for placed in header.tensors:
                    apply(placed)
        for mapped in maps.values():
            mapped.flush()

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown()
