"""A Hugging Face safetensors directory, open: tensors as views of mapped files, chunks as they are read.

Weights are one ``model.safetensors``, or the shards that an index names; everything else beside them that is not a
weight file (config, tokenizer, …) are the checkpoint's other files. Nothing is copied whole: tensors are views of the
map.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .container import Header, header_size, parse_header
from .errors import BaseMismatch, CheckpointError, CorruptObject
from .memory import mapped_file
from .places import Places
from .snapshot import CHUNK_BYTES, ChunkRun, Schema, TensorSpec, chunk_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .digest import Hasher
    from .snapshot import ChunkSpan, Digests

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Checkpoint", "Layout", "WeightFile", "is_safe_path", "open_checkpoint"]

_INDEX_SUFFIX = ".safetensors.index.json"
_WHOLE = "model.safetensors"
#: Weights in other formats, and weights that no index names: stale after the first update, so they are left behind.
_OTHER_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".pkl", ".tmp"}
)
#: So is what is larger, whatever its name: the other files are held in memory whole, and sent to every new host.
_MAX_OTHER_BYTES = 128 << 20
_MAX_INDEX_BYTES = 512 << 20
#: How many files a checkpoint has of which this is one.
_SHARD = re.compile(r"-[0-9]{5,}-of-([0-9]{5,9})\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file: its name in the directory, its header's bytes, and what they say."""

    name: str
    header_bytes: bytes
    header: Header


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint's tensors are spread over files. The same tensors in another layout are the same snapshot."""

    files: tuple[WeightFile, ...]

    def schema(self) -> Schema:
        """Return the schema of all tensors; raises ``CorruptObject`` if two files hold the same name."""
        return Schema(placed.spec for file in self.files for placed in file.header.tensors)


class _OpenFile:
    """One weight file, open: its descriptor, and its bytes as a map. What was taken of the map outlives it."""

    __slots__ = ("__weakref__", "content", "descriptor", "path")

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor).atexit = False
            found = os.fstat(self.descriptor).st_size
            if found != size:
                raise CheckpointError(
                    f"{path} is only half written: {found} bytes of {size}.",
                    key=str(path),
                    hint="Wait until it is saved whole, or save it again.",
                )
            self.content = mapped_file(self.descriptor, size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.", key=str(path)) from error


class Checkpoint:
    """An open checkpoint directory. Tensors are read-only views of memory-mapped files."""

    def __init__(self, directory: Path, layout: Layout, other_files: tuple[str, ...]) -> None:
        self.directory = directory
        self.layout = layout
        self.other_files = other_files
        try:
            self.schema = layout.schema()
        except CorruptObject as error:
            raise CheckpointError(f"The checkpoint {directory} cannot be used: {error}", key=str(directory)) from error
        self.places = Places([file.header for file in layout.files], self.schema)
        self._files = self._open_files()

    def moved(self, directory: Path) -> Checkpoint:
        """Open another directory that is known to have the same layout and the same other files."""
        other = copy(self)
        other.directory = directory
        other._files = other._open_files()  # noqa: SLF001 - one of this class
        return other

    def _open_files(self) -> list[_OpenFile]:
        return [_OpenFile(self.directory / file.name, file.header.file_size) for file in self.layout.files]

    def tensor(self, name: str) -> Bytes:
        """Return a tensor's bytes: uint8 of shape (nbytes,), a read-only view."""
        position = self.schema.position(name)
        file, start = self.places.tensor(position)
        return self._files[file].content[start : start + self.schema.tensors[position].nbytes]

    def chunk(self, spec: TensorSpec, chunk: int) -> Bytes:
        """Return one chunk's bytes: uint8, a read-only view."""
        start, end = spec.chunk_range(chunk)
        return self.tensor(spec.name)[start:end]

    def read(self, span: ChunkSpan, out: Bytes) -> None:
        """Copy the bytes of a span's chunks to their places in ``out`` (uint8).

        They are read, not taken from the map, where a bad block or a file that was cut meanwhile would end the process
        with a signal. Raises ``BaseMismatch`` then.
        """
        for file, offset, start, stop in self.places.stretches(span):
            found, why = self._read(file, offset, out[start:stop])
            if found != stop - start:
                missing = span.stops.searchsorted(start + found, side="right")  # whose bytes are the first ones missing
                raise self._unreadable(file, int(span.tensors[missing]), why)

    def _read(self, file: int, offset: int, out: Bytes) -> tuple[int, str]:
        """Read bytes of a file; returns how many there were, and why not more."""
        try:
            return os.preadv(self._files[file].descriptor, [out.data], offset), "it was cut"
        except OSError as error:
            return 0, str(error.strerror)

    def _unreadable(self, file: int, tensor: int, why: str) -> BaseMismatch:
        name, path = self.schema.tensors[tensor].name, self._files[file].path
        return BaseMismatch(f"{name!r} cannot be read from {path}: {why}.", tensors=(name,), key=name)

    def digests(
        self, hash_function: Hasher, *, workers: int = 1, progress: Callable[[int], object] | None = None
    ) -> Digests:
        """Hash every chunk; returns uint8 of shape (chunks, digest size) in schema order.

        Raises ``BaseMismatch`` when some cannot be read. ``progress`` is told the bytes hashed since the last call,
        from any thread.
        """
        table = np.empty((self.schema.chunks, hash_function.size), np.uint8)
        local = threading.local()

        def hash_batch(batch: list[ChunkRun]) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = np.empty(CHUNK_BYTES, np.uint8)
            for run in batch:
                position = self.schema.position(run.spec.name)
                file, offset = self.places.tensor(position)
                for chunk in range(run.first, run.end):
                    start, stop = run.spec.chunk_range(chunk)
                    data = local.buffer[: stop - start]
                    found, why = self._read(file, offset + start, data)
                    if found != data.size:
                        raise self._unreadable(file, position, why)
                    digest = hash_function.digest(data)
                    table[run.number + chunk - run.first] = np.frombuffer(digest, np.uint8)
            if progress is not None:
                progress(sum(run.nbytes for run in batch))

        with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
            for _ in pool.map(hash_batch, chunk_batches(self.schema)):
                pass
        return table

    def read_other_file(self, name: str) -> bytes:
        """Return the bytes of one of ``other_files``."""
        path = self.directory / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.", key=str(path)) from error

    def left_behind(self) -> tuple[str, ...]:
        """Return the names of the files that are neither weights of it nor ``other_files``, hidden ones left out."""
        ours = {file.name for file in self.layout.files}.union(self.other_files)
        return tuple(name for name, _ in _visible_files(self.directory) if name not in ours)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open a checkpoint directory; raises ``CheckpointError`` when it is missing, torn or not in the format."""
    root = Path(directory)
    if root.is_symlink():
        root = root.resolve()  # once: a receiver may swap its link between two files of it
    try:
        entries = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {root} cannot be opened: {error.strerror}.",
            key=str(root),
            hint="Give a directory with model.safetensors, or with shards and their index.",
        ) from error
    indexes = [name for name in entries if name.endswith(_INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{root} has several indexes: {', '.join(indexes)}.", key=str(root))
    weight_map = _read_index(root / indexes[0]) if indexes else {}
    names = sorted(set(weight_map.values())) if indexes else [_only_weight_file(root, entries)]
    files = tuple(_read_weight_file(root, name) for name in names)
    held = {placed.spec.name: file.name for file in files for placed in file.header.tensors}
    if not held:
        raise CheckpointError(f"{root} holds no tensors.", key=str(root), hint="Give a checkpoint with weights in it.")
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            index = root / indexes[0]
            raise CheckpointError(f"{index} says that {name} holds {tensor!r}; it does not.", key=str(index))
    return Checkpoint(root, Layout(files), tuple(_other_files(root, set(names))))


def _only_weight_file(root: Path, entries: list[str]) -> str:
    weights = [name for name in entries if name.endswith(".safetensors")]
    if _WHOLE in weights:
        return _WHOLE
    if len(weights) == 1:
        if (shard := _SHARD.search(weights[0])) and int(shard[1]) > 1:
            raise CheckpointError(
                f"{root} has one of {int(shard[1])} shards and no index.", key=str(root), hint="Save all of it again."
            )
        return weights[0]
    found = f"several safetensors files and no index: {', '.join(weights[:4])}" if weights else "no safetensors file"
    raise CheckpointError(
        f"{root} has {found}.", key=str(root), hint="Save it with an index (model.safetensors.index.json)."
    )


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} is too large for an index.", key=str(path))
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", key=str(path)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index: {error}.", key=str(path)) from error
    if unsafe := [name for name in weight_map.values() if "/" in name or not is_safe_path(name)]:
        raise CheckpointError(f"{path} names {unsafe[0]!r}, which is no file beside it.", key=str(path))
    return weight_map


def _read_weight_file(root: Path, name: str) -> WeightFile:
    path = root / name
    try:
        with path.open("rb") as stream:
            prefix = stream.read(8)
            data = prefix + stream.read(header_size(prefix, key=str(path)) - len(prefix))
        return WeightFile(name, data, parse_header(data, key=str(path)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", key=str(path)) from error
    except CorruptObject as error:
        raise CheckpointError(str(error), key=str(path), hint="Save the checkpoint again.") from error


def _visible_files(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not any(part.startswith(".") for part in name.split("/")) and path.is_file():
            yield name, path


def _other_files(root: Path, weights: set[str]) -> Iterator[str]:
    """Yield the relative names of all files that are neither weights nor hidden, in ascending order."""
    for name, path in _visible_files(root):
        if name in weights or path.suffix.lower() in _OTHER_WEIGHTS:  # an index may give weights any name
            continue
        if is_safe_path(name) and _is_small(path):
            yield name


def _is_small(path: Path) -> bool:
    try:
        return path.stat().st_size <= _MAX_OTHER_BYTES
    except OSError:  # taken away since it was listed
        return False


def is_safe_path(name: str) -> bool:
    """Tell whether a name from outside may be used as a path below a directory of ours."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return (
        size <= 1024
        and all(part and part[0] != "." and len(part.encode()) <= 255 for part in name.split("/"))
        and not any(ord(char) < 32 or char in '\\:*?"<>|\x7f' for char in name)
    )
