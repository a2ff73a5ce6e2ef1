"""Snapshots like those of a training run, and what tests ask of directories that hold them.

Bytes are judged by the safetensors library and torch alone, never by the code under test.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Snapshot = dict[str, torch.Tensor]

OTHER_FILES = {
    "config.json": b'{"architectures": ["Tiny"], "hidden_size": 64}\n',
    "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE"}}\n',
    "tokenizer/merges.txt": b"#version: 0.2\na b\n",
    "empty.txt": b"",
}


def base_snapshot(seed: int = 0) -> Snapshot:
    """Return about 4 MiB in every kind of dtype that a stream meets."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    special = normal(64)
    special[:6] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42])
    return {
        "model.embed_tokens.weight": (normal(600, 128) * 0.02).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": (normal(1200, 512) * 0.02).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": (normal(512, 1200) * 0.02).bfloat16(),
        "model.layers.0.router.bias": special,
        "model.layers.0.norm.weight": torch.ones(128, dtype=torch.float32),
        "model.layers.1.experts.weight": normal(640, 700).to(torch.float8_e4m3fn),
        "model.layers.1.experts.weight_scale_inv": normal(5, 6),
        "model.layers.1.qweight": torch.randint(-(2**31), 2**31 - 1, (128, 96), generator=generator, dtype=torch.int32),
        "model.layers.1.mask": torch.rand(1001, generator=generator) > 0.5,
        "model.layers.1.half": normal(33, 7).half(),
        "model.steps": torch.tensor(0.5),
        "model.unused": torch.empty(0, 64, dtype=torch.bfloat16),
        "model.ids": torch.arange(77, dtype=torch.int64),
    }


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def step(before: Snapshot, number: int, *, seed: int = 0) -> Snapshot:
    """Return the snapshot after ``before``: mostly sparse changes; now and then dense, none, or everything."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    if number % 6 == 3:
        return after  # an optimizer step that rounds to nothing
    generator = torch.Generator().manual_seed(1000 * seed + number)
    for name, tensor in after.items():
        if not tensor.numel():
            continue
        data = flat(tensor)
        if number % 6 == 5 and name.endswith("up_proj.weight"):
            data[:] = torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8)
        elif tensor.dtype in {torch.bfloat16, torch.float16}:
            where = torch.rand(tensor.numel(), generator=generator) < (0.4 if number % 6 == 4 else 0.02)
            bits = data.view(torch.int16)
            bits[where] += torch.randint(0, 2, bits[where].shape, generator=generator, dtype=torch.int16) * 2 - 1
        elif tensor.dtype == torch.bool:
            flipped = int(torch.randint(0, tensor.numel(), (1,), generator=generator))
            data[flipped] ^= 1
        elif tensor.dtype == torch.float32:
            finite = torch.isfinite(tensor)
            tensor[finite] += torch.randn(tensor[finite].shape, generator=generator) * 1e-3
        else:
            where = torch.rand(data.shape, generator=generator) < 0.01
            data[where] ^= torch.randint(0, 256, data[where].shape, generator=generator, dtype=torch.uint8)
    return after


def chain(length: int, *, seed: int = 0) -> list[Snapshot]:
    """Return ``length`` snapshots, the base first."""
    snapshots = [base_snapshot(seed)]
    while len(snapshots) < length:
        snapshots.append(step(snapshots[-1], len(snapshots), seed=seed))
    return snapshots


def save(directory: Path, snapshot: Snapshot, *, shards: int = 1, others: bool = True, order: int = 0) -> Path:
    """Write a checkpoint directory: one file, or shards and their index; ``order`` deals the tensors differently."""
    directory.mkdir(parents=True)
    names = sorted(snapshot)
    random.Random(order).shuffle(names)
    if shards == 1:
        save_file(snapshot, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: snapshot[name] for name in names[number::shards]}
            save_file(part, directory / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, data in OTHER_FILES.items() if others else ():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def load(directory: Path) -> Snapshot:
    """Read every tensor of every safetensors file in a directory."""
    snapshot = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in snapshot
                snapshot[name] = file.get_tensor(name)
    return snapshot


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """Name what is not bit-identical."""
    names = sorted(set(one) ^ set(other))
    for name in sorted(set(one) & set(other)):
        left, right = one[name], other[name]
        if (left.dtype, left.shape) != (right.dtype, right.shape) or not torch.equal(flat(left), flat(right)):
            names.append(name)
    return names


def assert_holds(directory: Path, snapshot: Snapshot, *, others: bool = True) -> None:
    """Fail unless a directory is a complete checkpoint that holds exactly these bits."""
    assert differences(load(directory), snapshot) == []
    if others:
        for name, data in OTHER_FILES.items():
            assert (directory / name).read_bytes() == data


def tree(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a directory, and where its links lead."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink()).encode()
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def small_snapshot(seed: int = 0, *, elements: int = 64) -> Snapshot:
    """Return a few hundred bytes in three tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(elements, generator=generator).bfloat16(),
        "b.weight": torch.randn(elements // 2, 2, generator=generator),
        "c.bias": torch.randint(0, 256, (elements,), generator=generator, dtype=torch.uint8),
    }


def until(condition: Callable[[], object], *, seconds: float = 60.0, what: str = "it") -> None:
    """Look again and again until ``condition`` holds: for another process's progress, which cannot be waited on."""
    import time  # noqa: PLC0415 - only here

    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)
