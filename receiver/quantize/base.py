"""What a quantization scheme is, and the table of schemes known by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Scheme", "SchemeFactory", "TensorSpec", "make_scheme", "register_scheme", "scheme_names"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a safetensors header says of a tensor: its element type and shape (elements along each axis)."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class Scheme(Protocol):
    """Turns one checkpoint tensor into the engine's tensors; pure, and no larger in memory than the tensor.

    The result depends on the tensor's bytes alone, so a requantized update equals a fresh quantization.
    """

    @property
    def name(self) -> str:
        """The name scripts and command lines know the scheme by."""
        ...

    def layout(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Tell what ``quantize`` would return for such a tensor, without any data."""
        ...

    def quantize(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the engine's tensors for checkpoint tensor ``name``, keyed by their names.

        A tensor that the scheme leaves alone is returned as it is (the same object, not a copy). Raises
        ``EngineError`` naming the tensor when its values cannot be represented.
        """
        ...


class SchemeFactory(Protocol):
    """Builds a scheme; ``keep`` are glob patterns of names to leave in checkpoint precision, or ``None``."""

    def __call__(self, *, keep: Sequence[str] | None = None) -> Scheme:
        """Build the scheme."""
        ...


# As "module:attribute", so that naming a scheme costs no import of torch.
_BUILT_IN = {
    "bf16": "receiver.quantize.bf16:Bf16",
    "fp8_block": "receiver.quantize.fp8_block:Fp8Block",
}
_registered: dict[str, SchemeFactory] = {}


def scheme_names() -> tuple[str, ...]:
    """Return the names ``make_scheme`` knows, sorted."""
    return tuple(sorted({*_BUILT_IN, *_registered}))


def register_scheme(name: str, factory: SchemeFactory) -> None:
    """Make ``factory`` known as ``name``; a name that is taken is a ``UsageError``."""
    if name in scheme_names():
        raise UsageError(f"a scheme named {name!r} already exists", key=name, hint="another name.")
    _registered[name] = factory


def make_scheme(name: str, *, keep: Sequence[str] | None = None) -> Scheme:
    """Build the scheme called ``name``.

    ``keep`` replaces the scheme's own glob patterns of tensors to leave in checkpoint precision.
    """
    if name in _registered:
        return _registered[name](keep=keep)
    if name not in _BUILT_IN:
        known = ", ".join(scheme_names())
        raise UsageError(f"no quantization scheme is named {name!r}", key=name, hint=f"one of {known}.")
    module, _, attribute = _BUILT_IN[name].partition(":")
    factory = cast("SchemeFactory", getattr(import_module(module), attribute))
    return factory(keep=keep)
