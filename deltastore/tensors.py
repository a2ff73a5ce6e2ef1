"""What a trainer hands to ``publish``, made uniform: names as the stream knows them, dtypes, shapes, raw bytes.

Understands torch tensors on any device, NumPy arrays and checkpoints, without importing torch itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .errors import CorruptObject, PublishError
from .memory import memory_at
from .snapshot import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .checkpoint import Checkpoint
    from .snapshot import Schema

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = [
    "DeviceBytes",
    "HostBytes",
    "TensorBytes",
    "TensorInput",
    "checkpoint_tensors",
    "is_tied_alias",
    "is_tied_partner",
    "named_tensors",
]

#: safetensors dtypes by the name that torch and NumPy (with ml_dtypes) give them.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}

#: Path components that wrappers (DDP, torch.compile, FSDP, activation checkpointing) put into names.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_TIED_ALIAS = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|output|decoder)\.weight$")
_TIED_PARTNER = re.compile(r"(^|\.)([a-z_]*embed[a-z_]*|wte)\.weight$")


class TensorBytes(Protocol):
    """The raw bytes of one tensor, a range at a time."""

    def __call__(self, start: int, end: int, /) -> Bytes:
        """Return bytes ``start`` to ``end`` in row-major order as uint8 on the CPU; may be a view."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """The bytes of a tensor that is not in the CPU's memory: a ``TensorBytes`` that also tells where they are.

    ``flat``: a torch tensor, uint8, one-dimensional; ``ready``: the CUDA event after which its bytes are valid, or
    ``None`` where there is no need to wait.
    """

    flat: Any
    ready: Any

    def __call__(self, start: int, end: int, /) -> Bytes:
        """Copy bytes ``start`` to ``end`` to the CPU."""
        if self.ready is not None:
            self.ready.synchronize()
        content: Bytes = self.flat[start:end].cpu().numpy()
        return content


class HostBytes(NamedTuple):
    """The bytes of a torch tensor that lie in the CPU's memory as they are: a ``TensorBytes`` that tells where."""

    name: str
    owner: Any
    address: int

    def __call__(self, start: int, end: int, /) -> Bytes:
        """Return a view of bytes ``start`` to ``end``; raises ``PublishError`` when the memory is another's by now.

        Torch's own way there takes ten times as long.
        """
        return memory_at(self.at(start), end - start, self.owner)

    def at(self, start: int) -> int:
        """Return the address of byte ``start``, good as long as this is; raises as a call does."""
        if self.owner.data_ptr() != self.address:
            raise PublishError(
                f"The memory of {self.name} was freed or replaced while it was published.",
                tensors=(self.name,),
                hint="Leave tensors alone until `publish` has returned.",
            )
        return self.address + start


class TensorInput(NamedTuple):
    """One tensor to publish: its name in the stream, what it is, and its bytes."""

    spec: TensorSpec
    bytes: TensorBytes


def named_tensors(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], schema: Schema) -> Iterator[TensorInput]:
    """Yield tensors one at a time under the stream's names; raises ``PublishError`` for a value that is no tensor."""
    pairs = _in_schema_order(tensors, schema) if isinstance(tensors, Mapping) else _each(tensors)
    plain = _Plain()
    for name, value in pairs:
        if not isinstance(name, str):
            raise PublishError(f"{name!r} is no tensor's name.", tensors=(str(name),))
        wanted = schema.get(name) or schema.get(_stream_name(name, schema))
        if wanted is not None and (content := plain.bytes(value, wanted)) is not None:
            yield TensorInput(wanted, content)
            continue
        try:
            yield _input(_stream_name(name, schema), value, schema)
        except CorruptObject as error:  # a name or shape outside the format's limits
            raise PublishError(str(error), tensors=(name,)) from error


def _in_schema_order(tensors: Mapping[str, Any], schema: Schema) -> Iterable[tuple[str, Any]]:
    """Return the pairs of a mapping in schema order, unknown names last.

    Then a part holds one stretch of chunks, and a receiver can begin before the last part is there.
    """

    def place(name: str) -> tuple[int, bytes]:
        known = _stream_name(name, schema)
        return (schema.position(known), b"") if known in schema else (len(schema), known.encode("utf-8", "replace"))

    pairs = list(tensors.items())
    try:
        positions = [schema.position(name) for name, _ in pairs]
    except (KeyError, TypeError):  # wrapped, unknown, or no name at all
        return sorted(pairs, key=lambda pair: place(str(pair[0])))
    return [pairs[number] for number in np.argsort(positions).tolist()]


class _Plain:
    """Recognises the commonest kind of tensor, as cheaply as can be: torch's own, contiguous in the CPU's memory."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        # The exact types: any other is a subclass, which may have no memory, or not all of it (a DTensor).
        self._types = () if torch is None else (torch.Tensor, torch.nn.Parameter)
        self._strided = None if torch is None else torch.strided
        # Without float4, which counts pairs, and complex64, which may be conjugated.
        self._dtypes = {
            getattr(torch, name): known
            for name, known in _DTYPES.items()
            if known not in {"F4", "C64"} and hasattr(torch, name)
        }

    def bytes(self, value: Any, wanted: TensorSpec) -> HostBytes | None:
        """Return the bytes of a tensor that is ``wanted``; ``None`` for whatever is special, or another one."""
        if type(value) not in self._types:
            return None
        try:
            if (
                self._dtypes.get(value.dtype) == wanted.dtype
                and value.shape == wanted.shape
                and _on_host(value)
                and value.layout is self._strided
                and value.is_contiguous()
                and not value.is_neg()
                and _is_all_there(value)
                and (address := value.data_ptr())
            ):
                return HostBytes(wanted.name, value, address)
        except RuntimeError:  # torch's word for what has no memory
            pass
        return None


def _each(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield pairs; raise ``PublishError`` for what is none."""
    if not isinstance(pairs, Iterable):
        raise PublishError(f"A {type(pairs).__name__} cannot be published.", hint="Give a state dict, or pairs.")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PublishError(f"{str(pair)[:80]!r} is no (name, tensor) pair.", hint="Give a state dict, or pairs.")
        yield pair[0], pair[1]


def checkpoint_tensors(checkpoint: Checkpoint) -> Iterator[TensorInput]:
    """Yield the tensors of a checkpoint directory."""
    for spec in checkpoint.schema:
        yield TensorInput(spec, _view(checkpoint.tensor(spec.name)))


def is_tied_alias(name: str) -> bool:
    """Tell whether a name is one that models tie to their input embedding."""
    return _TIED_ALIAS.search(name) is not None


def is_tied_partner(name: str) -> bool:
    """Tell whether a name is an input embedding's."""
    return _TIED_PARTNER.search(name) is not None and not is_tied_alias(name)


def _stream_name(name: str, schema: Schema) -> str:
    """Take wrappers' components out of a name, unless the stream knows it with them."""
    if name in schema:
        return name
    bare = ".".join(component for component in name.split(".") if component not in _WRAPPERS)
    # Aliases that the base lacks lose their wrappers too, so that they are recognised.
    return bare if bare in schema or is_tied_alias(bare) else name


def _view(data: Bytes) -> TensorBytes:
    return lambda start, end: data[start:end]


def _input(name: str, value: Any, schema: Schema) -> TensorInput:
    if isinstance(value, np.ndarray):
        dtype, shape = value.dtype.name, value.shape
        if value.dtype.byteorder == ">":
            raise PublishError(f"{name} is big-endian; a checkpoint is little-endian.", tensors=(name,))
        plain = value if dtype in _DTYPES and value.size else _EMPTY  # other dtypes are refused below
        content = _view(np.ascontiguousarray(plain).reshape(-1).view(np.uint8))
    elif hasattr(value, "full_tensor"):
        raise PublishError(
            f"{name} is sharded over ranks (a DTensor).",
            tensors=(name,),
            hint="Gather it first: publish (name, tensor.full_tensor()).",
        )
    elif hasattr(value, "detach") and hasattr(value, "data_ptr"):
        dtype, shape, content = _torch_bytes(name, value)
    else:
        raise PublishError(f"{name} is a {type(value).__name__}, not a tensor.", tensors=(name,))
    known = _DTYPES.get(dtype)
    if known is None:
        raise PublishError(f"{name} has the dtype {dtype}, which safetensors does not know.", tensors=(name,))
    if known == "F4" and shape:  # torch counts pairs, safetensors single values
        shape = (*shape[:-1], 2 * shape[-1])
    wanted = schema.get(name)
    if wanted is not None and (wanted.dtype, wanted.shape) == (known, shape):
        return TensorInput(wanted, content)
    try:
        spec = TensorSpec(name, known, tuple(int(size) for size in shape))
    except CorruptObject as error:
        raise PublishError(str(error), tensors=(name,)) from error
    return TensorInput(spec, content)


_EMPTY = np.empty(0, np.uint8)


def _torch_bytes(name: str, value: Any) -> tuple[str, tuple[int, ...], TensorBytes]:
    try:
        return _plain_bytes(name, value)
    except (RuntimeError, TypeError) as error:  # torch's words for what has no bytes
        raise PublishError(
            f"The bytes of {name} cannot be had: {error}", tensors=(name,), hint="Publish plain tensors."
        ) from error


def _plain_bytes(name: str, value: Any) -> tuple[str, tuple[int, ...], TensorBytes]:
    import torch  # noqa: PLC0415 - the caller has it already: it made the tensor

    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise PublishError(f"{name} has no plain memory ({value.layout}, {value.device}).", tensors=(name,))
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if not value.numel():
        return dtype, shape, _view(_EMPTY)
    flat = value.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    if flat.is_neg():
        flat = flat.resolve_neg()
    if not _is_all_there(flat):
        raise PublishError(
            f"{name} has no memory of its own: its storage was freed, or it stands for other tensors.",
            tensors=(name,),
            hint="Gather it first: sharded training keeps a parameter's memory only while it is used.",
        )
    # A view where memory is contiguous; a copy on the tensor's own device where it is not.
    flat = _flat(flat.contiguous())
    if _on_host(flat):
        return dtype, shape, _view(flat.numpy())
    # The trainer's own stream may still be writing; streams of other threads do not wait for it by themselves.
    ready = torch.cuda.current_stream(flat.device).record_event() if flat.device.type == "cuda" else None
    return dtype, shape, DeviceBytes(flat, ready)


def _is_all_there(value: Any) -> bool:
    """Tell whether a tensor that is not empty has memory for all of its elements.

    Sharded training frees a parameter's storage and leaves its shape: torch would read whatever lies there now.
    """
    if value.is_contiguous():
        reach = value.numel()
    else:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    end = (value.storage_offset() + reach) * value.element_size()
    return bool(end <= value.untyped_storage().nbytes() and value.data_ptr())


def _flat(value: Any) -> Any:
    """View a contiguous tensor's memory as uint8, in one dimension."""
    import torch  # noqa: PLC0415 - the caller has it already: it made the tensor

    return value.detach().reshape(-1).view(torch.uint8)


def _on_host(flat: Any) -> bool:
    return bool(flat.is_cpu)
