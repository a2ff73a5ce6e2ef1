"""Made-up snapshots: the step of an optimizer on float32 master weights, rounded to what is served. Deterministic.

Weights are normal with deviation 0.02. A step has the shape that AdamW gives it: at most ``learning rate``, mostly a
third of it, whatever the weight. So small weights, whose neighbours are near, change far more often than large ones,
as they do in training. The learning rate is found by bisection so that the wanted share of elements changes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from receiver.quantize.fp8_block import quantize_block

from .pairs import Pair

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, torch.Tensor]
    Rounding = Callable[[torch.Tensor], State]

__all__ = ["DENSITIES", "KINDS", "make_pair", "unchanged_pair"]

DENSITIES = (0.001, 0.01, 0.02, 0.1, 0.5, 1.0)
"""Shares of elements to change; 1.0 stands for a learning rate as big as the weights (f32: a tenth)."""

_COLUMNS = 2048
_TENSOR_BYTES = 8 << 20
_SAMPLE_ROWS = 256
_DEVIATION = 0.02
_INT4_SCALE = 3 * _DEVIATION / 7
_NVFP4_GROUP = 16
_NVFP4_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def _bf16(master: torch.Tensor) -> State:
    return {"weight": master.bfloat16()}


def _f32(master: torch.Tensor) -> State:
    return {"weight": master.clone()}


def _fp8(master: torch.Tensor) -> State:
    """Blocks of 128 x 128 whose scales follow their largest weight."""
    weight, scale = quantize_block(master)
    return {"weight": weight, "weight_scale_inv": scale}


def _int4(master: torch.Tensor) -> State:
    """Eight weights in an int32, at a scale that stays."""
    codes = (master / _INT4_SCALE).round().clamp(-8, 7).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4)
    packed = (codes.view(master.shape[0], -1, 8) << shifts).sum(dim=-1)
    return {"qweight": packed.to(torch.int32)}


def _nvfp4(master: torch.Tensor) -> State:
    """Two e2m1 weights in a byte, a float8 scale for every 16."""
    groups = master.view(master.shape[0], -1, _NVFP4_GROUP)
    scale = (groups.abs().amax(dim=-1) / 6).to(torch.float8_e4m3fn)
    wide = scale.to(torch.float32).clamp(min=2.0**-9)[..., None]
    codes = torch.bucketize(groups.abs() / wide, _NVFP4_BOUNDS).to(torch.uint8) | ((groups < 0).to(torch.uint8) << 3)
    pairs = codes.view(master.shape[0], -1, 2)
    return {"weight": pairs[..., 0] | (pairs[..., 1] << 4), "weight_scale": scale}


#: How master weights are rounded, and about how many bits a weight takes.
KINDS: dict[str, tuple[Rounding, int]] = {
    "bf16": (_bf16, 16),
    "bf16 uniform": (_bf16, 16),
    "f32": (_f32, 32),
    "fp8": (_fp8, 8),
    "int4": (_int4, 4),
    "nvfp4": (_nvfp4, 4),
}


def make_pair(kind: str, density: float, nbytes: int) -> Pair:
    """Make about ``nbytes`` bytes in tensors of 8 MiB (or less, to have two) of which ``density`` changed."""
    rounding, bits = KINDS[kind]
    step = _step(kind, density)
    tensor_bytes = min(_TENSOR_BYTES, max(nbytes // 2, 1 << 16))
    rows = max(128, tensor_bytes * 8 // bits // _COLUMNS // 128 * 128)
    old: State = {}
    new: State = {}
    for number in range(max(1, nbytes // (rows * _COLUMNS * bits // 8))):
        generator = torch.Generator().manual_seed(number)
        master = _master(rows, generator)
        for side, weights in ((old, master), (new, step(master, generator))):
            for suffix, tensor in rounding(weights).items():
                side[f"model.layers.{number}.{suffix}"] = tensor
        if kind == "bf16 uniform":
            key = f"model.layers.{number}.weight"
            new[key] = _nudge(old[key], density, generator)
    return Pair.of(f"{kind} {density:.1%}", "synthetic", old, new)


def unchanged_pair(nbytes: int) -> Pair:
    """Make bf16 tensors that did not change, in memory of their own."""
    pair = make_pair("bf16", 0.01, nbytes)
    same = {name: data.copy() for name, data in pair.old.items()}
    return Pair("bf16 unchanged", "synthetic", pair.schema, pair.old, same)


def _master(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, _COLUMNS, generator=generator) * _DEVIATION


def _direction(master: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw AdamW's ratio of moments: within -1 and 1, a third in deviation."""
    return (torch.randn(master.shape, generator=generator) * 0.3).clamp_(-1, 1)


def _step(kind: str, density: float) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    if kind == "f32":
        # Every float32 weight feels every step; at lower densities only some get one (unused experts, rare tokens).
        rate = _DEVIATION / 10 if density >= 1 else 1e-6
        return lambda master, generator: torch.where(
            torch.rand(master.shape, generator=generator) < density,
            master + rate * _direction(master, generator),
            master,
        )
    rate = _DEVIATION if density >= 1 else _learning_rate(KINDS[kind][0], density)
    return lambda master, generator: master + rate * _direction(master, generator)


def _learning_rate(rounding: Rounding, density: float) -> float:
    generator = torch.Generator().manual_seed(0)
    master = _master(_SAMPLE_ROWS, generator)
    direction = _direction(master, generator)
    before = rounding(master)
    low, high = 1e-9, 1.0
    for _ in range(24):
        middle = math.sqrt(low * high)
        pair = Pair.of("", "", before, rounding(master + middle * direction))
        if pair.changed() < density:
            low = middle
        else:
            high = middle
    return high


def _nudge(weights: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """Move bf16 weights at random places to a neighbour."""
    bits = weights.view(torch.int16).clone()
    chosen = torch.rand(bits.shape, generator=generator) < density
    bits += chosen * (2 * torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) - 1)
    return bits.view(torch.bfloat16)
