"""A stream of a tiny model, engines that serve it, and what tests ask of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import training

from deltastore import Writer, open_store
from tools.demo.model import CausalLM, ModelConfig, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]

TINY = ModelConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
)


def weights(seed):
    state = CausalLM(TINY).initialise(seed).state_dict()
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


class Stream:
    """A store of the tiny model's weights."""

    def __init__(self, root):
        self.root, self.url, self.live = root, root / "store", root / "live"
        self.base = root / "base"
        save_checkpoint(self.base, TINY, weights(0))
        self.versions = 0
        self.publish()

    def publish(self):
        self.versions += 1
        with Writer(self.url, base=self.base if self.versions == 1 else None) as writer:
            writer.publish(weights(self.versions)).result()

    def label(self, version):
        """Return what an engine calls a version."""
        return f"{open_store(self.url).stream_id}/{version}"

    def poison(self):
        """Publish weights that no engine accepts."""
        self.versions += 1
        broken = weights(self.versions)
        broken["model.norm.weight"].view(-1)[3] = float("nan")
        with Writer(self.url) as writer:
            writer.publish(broken).result()


def save(stream, version):
    """Write a version as a checkpoint of its own."""
    save_checkpoint(stream.root / f"version{version}", TINY, weights(version))
    return stream.root / f"version{version}"


def holds(engine, version):
    """Tell whether the module's own weights are exactly those of a version."""
    found = dict(engine._weights)
    wanted = weights(version)
    return all(torch.equal(found[name], wanted[name]) for name in found if name in wanted)


def ready(status, version, command):
    def there():
        assert not command.ends_within(0), command.err
        record = status()
        return record["ready"] and record["serving"] == version

    training.until(there, what=f"version {version}")


def serve(stream, port=0):
    """Start an engine as a process of its own; returns it and its address."""
    file = stream.root / "ready.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "receiver.engines.serve", "--model", "tools.demo.serving:build", "--threads", "1"]
    command += ["--checkpoint", str(stream.base), "--port", str(port), "--ready-file", str(file)]
    with (stream.root / "engine.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log)

    def started():
        assert process.poll() is None, (stream.root / "engine.log").read_text()
        return file.exists()

    try:
        training.until(started, seconds=60, what="an engine")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, json.loads(file.read_bytes())["url"]
