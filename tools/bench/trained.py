"""Real snapshots: a model is trained in earnest, then takes the small steps of RL. Cached."""

from __future__ import annotations

from dataclasses import astuple
from hashlib import sha256
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from tools.demo.model import TIED, ModelConfig
from tools.demo.train import Trainer

from .pairs import Pair

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from .settings import Settings

__all__ = ["LEARNING_RATES", "trained_pairs"]

LEARNING_RATES = (1e-6, 2e-6, 3e-6)

_FULL = (ModelConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16), 60, 12)
_QUICK = (ModelConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=2), 8, 3)
_EDITION = 1


def trained_pairs(settings: Settings) -> list[Pair]:
    """Return the snapshots before and after one step at each learning rate, training the model if none are cached."""
    config, pretrain, settle = _QUICK if settings.quick else _FULL
    key = sha256(repr((_EDITION, astuple(config), pretrain, settle, LEARNING_RATES)).encode()).hexdigest()[:16]
    home = settings.cache / f"trained-{key}"
    if not (home / "done").exists():
        _train(home, config, pretrain, settle)
    return [
        Pair.of(
            f"trained {rate:.0e}", "trained", load_file(_path(home, rate, "old")), load_file(_path(home, rate, "new"))
        )
        for rate in LEARNING_RATES
    ]


def _path(home: Path, rate: float, side: str) -> Path:
    return home / f"{rate:.0e}-{side}.safetensors"


def _train(home: Path, config: ModelConfig, pretrain: int, settle: int) -> None:
    """Pretrain, then ``settle`` steps at each rate before the one that is kept, so that the moments are its own."""
    home.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config)
    trainer.pretrain(pretrain)
    for rate in LEARNING_RATES:
        trainer.set_learning_rate(rate)
        for _ in range(settle):
            trainer.step()
        save_file(_kept(trainer.snapshot()), _path(home, rate, "old"))
        trainer.step()
        save_file(_kept(trainer.snapshot()), _path(home, rate, "new"))
    (home / "done").touch()


def _kept(snapshot: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in snapshot.items() if name not in TIED}
