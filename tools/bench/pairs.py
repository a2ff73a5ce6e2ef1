"""Two snapshots of the same tensors, as bytes: what every bench encodes, publishes and applies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltastore.container import build_header
from deltastore.materialize import sync_directory
from deltastore.snapshot import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Pair", "as_tensors", "repeated", "tensor_bytes", "write_checkpoint"]

_TORCH = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """The old and the new bytes of each tensor of ``schema``, by name; ``source`` says where they are from."""

    name: str
    source: str
    schema: Schema
    old: Mapping[str, Bytes]
    new: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of one snapshot."""
        return self.schema.nbytes

    def changed(self) -> float:
        """Return the share of elements that differ, as the codec counts them."""
        found = 0
        for spec in self.schema:
            old, new = (side[spec.name].view(f"<u{spec.width}") for side in (self.old, self.new))
            found += int(np.count_nonzero(old != new))
        return found / max(self.schema.elements, 1)

    @classmethod
    def of(cls, name: str, source: str, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Pair:
        """Make a pair of two state dicts on the CPU."""
        schema = Schema(TensorSpec(key, _NAMES[value.dtype], tuple(value.shape)) for key, value in old.items())
        sides = [{key: tensor_bytes(value) for key, value in side.items()} for side in (old, new)]
        return cls(name, source, schema, *sides)


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return a contiguous CPU tensor's own bytes, flat."""
    view: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return view


def as_tensors(schema: Schema, content: Mapping[str, Bytes]) -> dict[str, torch.Tensor]:
    """Return a state dict over the same memory."""
    return {
        spec.name: torch.from_numpy(content[spec.name]).view(_TORCH[spec.dtype]).reshape(spec.shape) for spec in schema
    }


def repeated(pair: Pair, nbytes: int) -> Pair:
    """Return a pair of about ``nbytes`` bytes a snapshot: the same memory under as many names as it takes."""
    copies = max(1, round(nbytes / pair.nbytes))
    specs, old, new = [], {}, {}
    for copy in range(copies):
        for spec in pair.schema:
            name = f"{copy:04d}.{spec.name}"
            specs.append(TensorSpec(name, spec.dtype, spec.shape))
            old[name], new[name] = pair.old[spec.name], pair.new[spec.name]
    return Pair(pair.name, pair.source, Schema(specs), old, new)


def write_checkpoint(directory: Path, schema: Schema, content: Mapping[str, Bytes], *, files: int = 1) -> Path:
    """Write a Hugging Face directory, durably: one file, or shards and their index, about ``files`` at the least."""
    directory.mkdir(parents=True)
    shards = _shards(schema, min(_SHARD_BYTES, -(-schema.nbytes // files)))
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = ",".join(f'"{spec.name}":"{name}"' for name, specs in zip(names, shards, strict=True) for spec in specs)
        (directory / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{index}}}}}')
    for name, specs in zip(names, shards, strict=True):
        with (directory / name).open("wb") as stream:
            stream.write(build_header([(spec.name, spec.dtype, spec.shape) for spec in specs], {"format": "pt"}))
            for spec in specs:
                stream.write(content[spec.name].data)
            stream.flush()
            os.fsync(stream.fileno())
    sync_directory(directory)
    return directory


def _shards(schema: Schema, shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in _by_alignment(schema):
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _by_alignment(schema: Schema) -> Iterable[TensorSpec]:
    """Wide elements first, as the safetensors library orders them: then every tensor is aligned."""
    return sorted(schema, key=lambda spec: -spec.width)
