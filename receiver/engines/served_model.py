"""What the engine server asks of a model: its module, and one token a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["Generation", "ServedModel", "Token"]


class Token(NamedTuple):
    """One generated token and the natural logarithm of its probability."""

    token: int
    logprob: float


class Generation(Protocol):
    """One sequence being generated."""

    def step(self, caches: object) -> Token:
        """Run one forward pass and return the next token.

        ``caches`` compares equal from one pass to the next as long as what was computed then holds: when it is
        another one, the weights are others, and everything has to be computed anew.
        """
        ...


class ServedModel(Protocol):
    """What a factory returns: a module and how it generates."""

    @property
    def module(self) -> torch.nn.Module:
        """The module whose weights the engine replaces."""
        ...

    @property
    def mapping(self) -> Mapping[str, str | tuple[str, ...]]:
        """Checkpoint names that are not the module's own, as ``TorchModuleEngine`` takes them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def generate(self, prompt: Sequence[int], *, temperature: float, seed: int) -> Generation:
        """Start a sequence; no forward pass yet."""
        ...

    def probe(self) -> torch.Tensor:
        """Run a fixed prompt and return its logits."""
        ...
