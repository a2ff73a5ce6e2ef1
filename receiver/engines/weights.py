"""Weights as files and as bytes: a safetensors directory read a tensor at a time, and digests of a module."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from deltastore.errors import EngineError
from receiver.quantize import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["CheckpointReader", "WeightsDigest", "all_finite"]

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_FINITE_STRIP = 1 << 24  # elements looked at in one go: a mask of 16 MiB, whatever the tensor's size


class CheckpointReader:
    """The tensors of a Hugging Face safetensors directory, through memory maps.

    A context manager. All files are opened on entry and stay open, so that what ``specs`` tells and what
    ``tensor`` returns are of the same files even if the directory's name comes to mean another one.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._given = checkpoint
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.specs: dict[str, TensorSpec] = {}
        """Every tensor's type and shape, by name."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except (OSError, ValueError, SafetensorError) as error:
            self._stack.close()
            raise _unreadable(self._given, str(error)) from error
        except EngineError:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, backed by the map where the library can; it is not to be written."""
        try:
            return cast("torch.Tensor", self._files[name].get_tensor(name))
        except (OSError, ValueError, SafetensorError) as error:
            raise _unreadable(self._given, f"{name}: {error}") from error

    def _open(self) -> None:
        # Resolved once: the name may be a link that another process swaps.
        root = self._given.resolve(strict=True)
        index = root / INDEX
        weight_map = _read_weight_map(index) if index.exists() else None
        files = sorted(root.glob("*.safetensors")) if weight_map is None else _shards(root, weight_map)
        if not files:
            raise _unreadable(self._given, "it holds no safetensors files")
        for path in files:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                self._add(name, handle)
        if weight_map is not None and (absent := sorted(set(weight_map) - set(self.specs))):
            raise _unreadable(self._given, f"the index lists {absent[0]}, which no file holds")

    def _add(self, name: str, handle: Any) -> None:
        if name in self._files:
            raise _unreadable(self._given, f"two files hold {name}")
        header = handle.get_slice(name)
        stored = header.get_dtype()
        if stored not in _DTYPES:
            raise _unreadable(self._given, f"{name} is of type {stored}, which this release cannot load")
        self._files[name] = handle
        self.specs[name] = TensorSpec(_DTYPES[stored], tuple(header.get_shape()))


def _read_weight_map(index: Path) -> Mapping[str, str]:
    weight_map = json.loads(index.read_bytes())
    weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index.name} has no weight_map of names to file names")
    return weight_map


def _shards(root: Path, weight_map: Mapping[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    for name in names:
        # An index comes from outside; a name in it must not lead out of the directory.
        if "/" in name or "\\" in name or name in {"", ".", ".."}:
            raise ValueError(f"the index names {name!r}, which is not a plain file name")
    return [root / name for name in names]


def _unreadable(checkpoint: Path, why: str) -> EngineError:
    return EngineError(
        f"checkpoint {checkpoint} cannot be loaded: {why}",
        key=str(checkpoint),
        hint="`receiver verify --checkpoint` on it.",
    )


class WeightsDigest:
    """Digests a fixed set of tensors where they lie: xxh3-128 over their bytes in the order of their names.

    Tensors on the CPU are read in place (about 28 GB/s on one core); others are copied over first.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = [tensors[name] for name in sorted(tensors)]
        self._addresses: list[int] = []
        self._bytes: list[memoryview] = []

    def __call__(self) -> str:
        """Return 32 lower-case hexadecimal digits for the bytes as they are now."""
        digest = xxhash.xxh3_128()
        # Views are made once, as long as nobody gives a tensor another storage.
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            self._bytes = [_view(tensor) for tensor in self._tensors if tensor.device.type == "cpu"]
            self._addresses = addresses
        on_cpu = iter(self._bytes)
        for tensor in self._tensors:
            digest.update(next(on_cpu) if tensor.device.type == "cpu" else _view(tensor.cpu()))
        return digest.hexdigest()


def _view(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def all_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity; integers always are."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype in {torch.float8_e4m3fn, torch.float8_e5m2}:
        # Few operators know these types. All-ones exponents are NaN or infinity in e5m2 (0x7c and up
        # without the sign); in e4m3fn only 0x7f is.
        limit = 0x7F if flat.dtype is torch.float8_e4m3fn else 0x7C
        codes = flat.view(torch.uint8)
        return all(bool(((strip & 0x7F) < limit).all()) for strip in _strips(codes))
    if not flat.is_floating_point():
        return True
    return all(bool(torch.isfinite(strip).all()) for strip in _strips(flat))


def _strips(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _FINITE_STRIP):
        yield flat[start : start + _FINITE_STRIP]
