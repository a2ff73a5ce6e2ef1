"""The demonstration's trainer: a model learns Python's own library, then takes the small steps of RL."""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tools.demo.model import BOS, TIED, CausalLM, ModelConfig, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepReport", "Trainer", "changed_elements", "read_corpus"]

_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step: its number within its phase (from 1), loss in nats a byte, and time in seconds."""

    step: int
    loss: float
    seconds: float


def read_corpus(limit: int = 4 << 20) -> bytes:
    """Return up to ``limit`` bytes of Python's standard library, in the order of the file names."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "test" not in path.parent.name and "packages" not in path.parent.name:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Trainer:
    """Float32 master weights, AdamW, and bf16 snapshots of them; the same seeds give the same weights.

    Two phases: ``pretrain`` at an ordinary learning rate, until samples look somewhat like code; then
    ``step``, each at ``learning_rate`` (1e-6 to 3e-6), with advantages as a policy-gradient step has them.
    """

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        learning_rate: float = 2e-6,
        corpus: bytes | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.config = config or ModelConfig()
        self.model = CausalLM(self.config).initialise(seed)
        text = corpus if corpus is not None else read_corpus()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._random = torch.Generator().manual_seed(seed + 1)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=_BETAS, weight_decay=0.0)
        self._learning_rate = learning_rate
        self._steps = 0

    def pretrain(
        self,
        steps: int = 120,
        *,
        learning_rate: float = 1.5e-3,
        batch: int = 4,
        length: int = 96,
        progress: Callable[[StepReport], None] | None = None,
    ) -> float:
        """Take ``steps`` ordinary steps (warm-up, then falling to a tenth); return the last loss.

        ``batch`` sequences of ``length`` bytes each. The defaults take under half a minute on one core.
        """
        warm_up = max(1, steps // 10)
        loss = torch.zeros(())
        for number in range(1, steps + 1):
            begun = time.perf_counter()
            falling = 1 - 0.9 * max(0, number - warm_up) / max(1, steps - warm_up)
            self._set_rate(learning_rate * min(number / warm_up, falling))
            loss = self._losses(batch, length).mean()
            self._advance(loss)
            if progress is not None:
                progress(StepReport(number, loss.item(), time.perf_counter() - begun))
        self._set_rate(self._learning_rate)
        return loss.item()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Take the steps to come at another learning rate."""
        self._learning_rate = learning_rate
        self._set_rate(learning_rate)

    def step(self, *, batch: int = 4, length: int = 96) -> StepReport:
        """Take one step as RL post-training does.

        Every sequence has an advantage (a standard normal, centred over the batch) that its log-likelihood is
        weighted with: some are made likelier and some less, and the net drift is small.
        """
        begun = time.perf_counter()
        losses = self._losses(batch, length).mean(dim=1)
        advantage = torch.randn(batch, generator=self._random)
        self._advance(((advantage - advantage.mean()) * losses).mean())
        self._steps += 1
        return StepReport(self._steps, losses.mean().item(), time.perf_counter() - begun)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the weights rounded to bf16, under all the names a Hugging Face state dict has.

        Nothing in it changes later. ``lm_head.weight`` is the embedding itself.
        """
        state = self.model.state_dict()
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if name not in TIED}
        return {name: rounded[TIED.get(name, name)] for name in state}

    def save_checkpoint(self, directory: Path) -> None:
        """Write the current snapshot as a Hugging Face directory."""
        save_checkpoint(directory, self.config, self.snapshot())

    def _losses(self, batch: int, length: int) -> torch.Tensor:
        """Return the loss of every byte, ``[batch, length]``, of sequences drawn from the text."""
        starts = torch.randint(0, len(self._text) - length, (batch, 1), generator=self._random)
        wanted = self._text[starts + torch.arange(length)].to(torch.int64)
        given = functional.pad(wanted[:, :-1], (1, 0), value=BOS)
        logits: torch.Tensor = self.model(given)
        return functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")

    def _advance(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def _set_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate


def changed_elements(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Count the bf16 elements whose bits differ, and all of them; tied names count once."""
    changed = total = 0
    for name, old in before.items():
        if name not in TIED:
            changed += int((old.view(torch.int16) != after[name].view(torch.int16)).sum())
            total += old.numel()
    return changed, total
