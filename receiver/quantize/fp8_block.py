"""float8 weights in 128 x 128 blocks, each with a float32 scale."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from deltastore.errors import EngineError
from receiver.quantize.base import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BLOCK",
    "DEFAULT_KEEP",
    "FP8_MAX",
    "Fp8Block",
    "dequantize_block",
    "expand_scale",
    "quantize_block",
]

BLOCK = 128
"""Elements along each side of a block."""

FP8_MAX = 448.0
"""The largest finite float8_e4m3fn."""

DEFAULT_KEEP = ("*embed*", "*norm*", "*lm_head*", "*router*", "*.gate.weight")
"""Two-dimensional weights that are not linear layers, or too sensitive to be rounded to 3 mantissa bits."""

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)


class Fp8Block:
    """float8_e4m3fn weights of the linear layers, 128 x 128 blocks, scale = amax / 448 in float32.

    ``x.weight`` of shape ``[n, k]`` becomes ``x.weight`` (float8_e4m3fn, ``[n, k]``) and
    ``x.weight_scale_inv`` (float32, ``[ceil(n / 128), ceil(k / 128)]``); the value is their product.
    Everything that is not a two-dimensional floating-point ``.weight``, or matches one of the patterns in
    ``keep``, is left alone.
    """

    name = "fp8_block"

    def __init__(self, *, keep: Sequence[str] | None = None) -> None:
        self.keep = DEFAULT_KEEP if keep is None else tuple(keep)

    def layout(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return the float8 weight and its scales, or the tensor's own type and shape if it is left alone."""
        if not self._applies(name, spec.dtype, len(spec.shape)):
            return {name: spec}
        rows, columns = spec.shape
        scales = (-(-rows // BLOCK), -(-columns // BLOCK))
        return {
            name: TensorSpec(torch.float8_e4m3fn, spec.shape),
            _scale_name(name): TensorSpec(torch.float32, scales),
        }

    def quantize(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantize one tensor; NaN or infinity in it is an ``EngineError`` naming it."""
        if not self._applies(name, tensor.dtype, tensor.dim()):
            return {name: tensor}
        if not bool(torch.isfinite(tensor).all()):
            raise EngineError(
                f"tensor {name} holds NaN or infinity and cannot be quantized to {self.name}",
                key=name,
                hint="look at the trainer's loss at this version, and go back to the version before.",
            )
        weight, scale = quantize_block(tensor)
        return {name: weight, _scale_name(name): scale}

    def _applies(self, name: str, dtype: torch.dtype, dims: int) -> bool:
        if dims != 2 or dtype not in _SOURCES or not name.endswith(".weight"):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.keep)


def quantize_block(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a finite ``[n, k]`` tensor to float8_e4m3fn by blocks; return weights and float32 scales.

    Works through one strip of 128 rows at a time: the float32 copy is of a strip, not of the tensor. Rounding
    is to nearest, ties to even. A block whose scale would be zero (all zeros, or so small that amax / 448
    vanishes in float32) has scale 1 and weights 0.
    """
    rows, columns = tensor.shape
    weight = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=tensor.device)
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    scale = torch.ones(grid, dtype=torch.float32, device=tensor.device)
    if tensor.numel() == 0:
        return weight, scale
    padding = grid[1] * BLOCK - columns
    # A tensor on the device, not a Python number: some devices multiply by the reciprocal of a number, and
    # then the same checkpoint would give other bits there than here.
    divisor = torch.full((grid[1],), FP8_MAX, dtype=torch.float32, device=tensor.device)
    for index in range(grid[0]):
        strip = tensor[index * BLOCK : (index + 1) * BLOCK].to(torch.float32)
        blocks = torch.nn.functional.pad(strip, (0, padding)).view(strip.shape[0], grid[1], BLOCK)
        ratio = blocks.abs().amax(dim=(0, 2)) / divisor
        ratio = torch.where(ratio > 0, ratio, 1.0)
        scale[index] = ratio
        # The clamp is for amax / scale rounding up past 448 (worst where the scale is subnormal): float8 has
        # no infinity, and a cast that does not saturate makes NaN of it.
        scaled = (blocks / ratio[None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
        strip_out = scaled.view(strip.shape[0], -1)[:, :columns].to(torch.float8_e4m3fn)
        weight[index * BLOCK : (index + 1) * BLOCK].copy_(strip_out)
    return weight, scale


def expand_scale(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Repeat block scales ``[ceil(n / 128), ceil(k / 128)]`` to one per element, ``[n, k]``."""
    wide = scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return wide.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def dequantize_block(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values ``[n, k]`` that float8 weights and their block scales stand for."""
    rows, columns = weight.shape
    return weight.to(torch.float32) * expand_scale(scale, (rows, columns))


def _scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.weight_scale_inv"
