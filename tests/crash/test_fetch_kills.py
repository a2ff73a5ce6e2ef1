"""A receiver killed while a large part is on its way: what had arrived of it is not fetched again."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
import torch
import training
from safetensors.torch import save_file

from deltastore import Writer, open_store

MODEL_BYTES = 6 << 20
#: Bytes a second: the part takes about two seconds, in pieces of a twentieth of a second.
RATE = 3_000_000


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A store whose version 1 is one large part; and that version's checkpoint."""
    root = tmp_path_factory.mktemp("large")
    data = np.random.default_rng(3).integers(0, 256, (2, MODEL_BYTES), np.uint8)
    for name, row in zip(("base", "new"), data, strict=True):
        (root / name).mkdir()
        save_file({"weight": torch.from_numpy(row)}, root / name / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltastore.attempt._FIRST_PART_BYTES", 64 << 20)
        patch.setattr("deltastore.attempt._PART_BYTES", 64 << 20)
        with Writer(root / "store", base=root / "base", upload_base=False) as writer:
            writer.publish(training.load(root / "new")).result()
    (part,) = open_store(root / "store").manifest(1).model.parts
    return root, part.size


def arrived(live) -> int:
    parts = live.with_name(f"{live.name}.slots") / "parts"
    return sum(path.stat().st_size for path in parts.iterdir()) if parts.exists() else 0


def test_kills_while_a_large_part_is_on_its_way(large, commands, tmp_path, rounds):
    root, size = large
    draw = random.Random(6)
    base = ["receiver", "once", "--store", root / "store", "--base", root / "base", "--json"]
    for number in range(rounds(2, 10)):
        live = tmp_path / f"live{number}"
        words = [*base, "--checkpoint", live, "--max-bandwidth", RATE]
        here = 0
        for _ in range(3):
            command = commands.start(*words)
            training.until(lambda live=live, before=here: arrived(live) > before, what="more of the part")
            if not command.ends_within(draw.uniform(0, 0.3)):
                command.send(signal.SIGKILL)
            assert command.end().code == -signal.SIGKILL
            assert arrived(live) > here
            here = arrived(live)
        assert here < size
        ended = commands.run(*words).ok()
        assert ended.json["last_update"]["fetched_bytes"] == size - here
        assert ended.seconds > 0.9 * (size - here) / RATE
        assert arrived(live) == 0
        assert training.differences(training.load(live), training.load(root / "new")) == []


def test_parts_of_a_target_given_up_are_removed(large, commands, tmp_path):
    root, _ = large
    live = tmp_path / "live"
    words = ["receiver", "once", "--store", root / "store", "--base", root / "base", "--checkpoint", live]
    command = commands.start(*words, "--max-bandwidth", 100_000)
    training.until(lambda: arrived(live) > 0)
    command.send(signal.SIGKILL)
    command.end()
    commands.run(*words, "--target", 0).ok()
    assert arrived(live) == 0
