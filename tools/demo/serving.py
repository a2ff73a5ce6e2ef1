"""The demonstration's model as the engine server wants it: text in, one token a forward pass out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from receiver.engines.served_model import Token
from tools.demo.model import BOS, TIED, CausalLM, KVCache, load_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["DemoModel", "Generation", "build"]

_PROBE = "def probe(self):\n    return "


class Generation:
    """One sequence being written; its keys and values belong to one set of weights, and go with them."""

    def __init__(self, model: CausalLM, prompt: Sequence[int], *, temperature: float, seed: int) -> None:
        self._model = model
        self._tokens = list(prompt)
        self._temperature = temperature
        self._random = torch.Generator().manual_seed(seed)
        self._caches: object = None
        self._cache: KVCache | None = None

    def step(self, caches: object) -> Token:
        """Run one forward pass, with what was cached in the last one if ``caches`` says so, and sample.

        The log-probability is that of the sampled token at temperature 1.
        """
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._forward(caches), dim=-1)
            if self._temperature > 0:
                odds = torch.softmax(logprobs / self._temperature, dim=-1)
                token = int(torch.multinomial(odds, 1, generator=self._random))
            else:
                token = int(logprobs.argmax())
        self._tokens.append(token)
        return Token(token, float(logprobs[token]))

    def _forward(self, caches: object) -> torch.Tensor:
        """Return float32 logits ``[vocab]`` of the next token."""
        limit = self._model.config.max_position_embeddings
        cache = self._cache
        if cache is None or caches != self._caches or cache.length >= limit:
            # Old keys and values under new weights would be a mixture that no model ever was.
            cache = self._cache = KVCache(self._model.config, torch.bfloat16)
            self._caches = caches
            fresh = self._tokens if len(self._tokens) < limit else self._tokens[-(limit // 2) :]
        else:
            fresh = self._tokens[-1:]
        logits: torch.Tensor = self._model(torch.tensor([fresh]), cache)
        return logits[0, -1]


class DemoModel:
    """A served model: the module, how its checkpoint maps to it, and how it generates."""

    def __init__(self, module: CausalLM) -> None:
        self.module = module
        self.mapping = TIED

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``: the one before every text, then its UTF-8 bytes."""
        return [BOS, *text.encode()]

    def generate(self, prompt: Sequence[int], *, temperature: float, seed: int) -> Generation:
        """Start a sequence after ``prompt``; at temperature 0 the likeliest token is taken."""
        return Generation(self.module, prompt, temperature=temperature, seed=seed)

    def probe(self) -> torch.Tensor:
        """Return the logits ``[1, length, vocab]`` of a fixed prompt."""
        logits: torch.Tensor = self.module(torch.tensor([self.encode(_PROBE)]))
        return logits


def build(checkpoint: Path, scheme: str) -> DemoModel:
    """Build the model whose sizes ``checkpoint`` tells, for ``scheme``; the server loads its weights."""
    return DemoModel(CausalLM.for_serving(load_config(checkpoint), scheme=scheme))
