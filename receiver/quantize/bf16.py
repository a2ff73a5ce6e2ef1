"""The scheme of an engine that serves the checkpoint as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from receiver.quantize.base import TensorSpec

__all__ = ["Bf16"]


class Bf16:
    """Leaves every tensor alone: a bf16 checkpoint is served in bf16.

    Tensors in another precision (a float32 router bias, say) keep it: casting them to the model's dtype would
    change the model without anyone noticing.
    """

    name = "bf16"

    def __init__(self, *, keep: Sequence[str] | None = None) -> None:
        del keep  # everything is kept

    def layout(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return the tensor's own type and shape."""
        return {name: spec}

    def quantize(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``tensor`` itself under its own name."""
        return {name: tensor}
