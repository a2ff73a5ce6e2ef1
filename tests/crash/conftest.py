from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import deltastore.attempt
from deltastore import Writer, open_checkpoint, open_store
from deltastore.digest import hasher
from deltastore.snapshot import snapshot_id

if TYPE_CHECKING:
    from pathlib import Path


def rounds(few: int, many: int) -> int:
    """Return how often to repeat: few times by default, many with DELTASTORE_THOROUGH=1."""
    return many if os.environ.get("DELTASTORE_THOROUGH") == "1" else few


def held(directory: Path) -> str:
    """Hash everything in a checkpoint directory: its snapshot id."""
    checkpoint = open_checkpoint(directory)
    function = hasher("xxh3-128")
    return snapshot_id(checkpoint.schema, checkpoint.digests(function, workers=2), function)


@dataclass
class Big:
    """A stream of three versions, big enough that a patch takes a while; checkpoints of all of them."""

    store: str
    checkpoints: list[Path]
    ids: list[str]


TENSORS = 24
TENSOR_BYTES = 4 << 20


def big_snapshots() -> list[dict[str, torch.Tensor]]:
    """Return three snapshots of 96 MiB, mostly zeros, with sparse changes in every chunk."""
    generator = torch.Generator().manual_seed(5)
    base = {
        f"layers.{number:02d}.weight": torch.zeros(TENSOR_BYTES // 2, dtype=torch.bfloat16) for number in range(TENSORS)
    }
    versions = [base]
    for _ in range(2):
        after = {}
        for name, tensor in versions[-1].items():
            bits = tensor.clone().view(torch.int16)
            where = torch.randint(0, bits.numel(), (2000,), generator=generator)
            bits[where] += 1 + torch.randint(0, 9, where.shape, generator=generator, dtype=torch.int16)
            after[name] = bits.view(torch.bfloat16)
        versions.append(after)
    return versions


@pytest.fixture(scope="session")
def big(tmp_path_factory) -> Big:
    root = tmp_path_factory.mktemp("big")
    snapshots = big_snapshots()
    checkpoints = []
    for number, snapshot in enumerate(snapshots):
        directory = root / f"checkpoint{number}"
        directory.mkdir()
        save_file(snapshot, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")
        checkpoints.append(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltastore.attempt, "_PART_BYTES", 8 << 10)  # many parts, so that kills fall between them
        with Writer(root / "store", base=checkpoints[0]) as writer:
            for directory in checkpoints[1:]:
                writer.publish(open_checkpoint(directory)).result()
    history = open_store(root / "store").log()
    ids = [manifest.snapshot_id for manifest in history]
    assert all(len(manifest.model.parts) > 5 for manifest in history[1:])
    assert [held(directory) for directory in checkpoints] == ids
    return Big(str(root / "store"), checkpoints, ids)


@pytest.fixture(name="held")
def held_fixture():
    return held


@pytest.fixture(name="rounds")
def rounds_fixture():
    return rounds


@pytest.fixture
def stride() -> int:
    """How far to go from one instant to the next: every third one by default, each with DELTASTORE_THOROUGH=1."""
    return rounds(3, 1)
