"""A receiver and a real engine over HTTP: killed and restarted, either of them, at awkward moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch
import training

from deltastore import Writer, open_store
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED, CausalLM, ModelConfig, save_checkpoint
from tools.demo.serving import build

ROOT = Path(__file__).resolve().parents[2]

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


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path)


@pytest.fixture
def follow(commands, stream):
    def start(engine_url):
        words = ["receiver", "run", "--store", stream.url, "--checkpoint", stream.live, "--base", stream.base]
        command = commands.start(
            *words, "--listen", "127.0.0.1:0", "--poll", 0.05, "--engine", "torch", "--engine-url", engine_url
        )
        training.until(lambda: "Listening on" in command.err or command.ends_within(0))
        url = command.err.partition("Listening on ")[2].partition("\n")[0].rstrip(".")
        return command, lambda: httpx.get(f"{url}/status", trust_env=False, timeout=10).json()

    yield start
    commands.end_all()


@pytest.fixture
def engine(stream):
    """The engine in this process, served from a thread."""
    model = build(stream.base, "bf16")
    made = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
    made.prime(stream.base)
    made.app = EngineApp(made, model, streams=2)
    with serve_in_thread(made.app) as made.url:
        yield made


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


def test_it_loads_each_version_refuses_a_broken_one_and_goes_on(stream, follow, engine):
    command, status = follow(engine.url)
    ready(status, 1, command)
    assert holds(engine, 1)
    stream.publish()
    ready(status, 2, command)
    assert holds(engine, 2)
    stream.poison()
    training.until(lambda: (status()["last_activation"] or {}).get("outcome") == "rolled-back")
    training.until(lambda: status()["serving"] == 2)
    record = status()
    assert not record["ready"]
    assert record["error"]["kind"] == "engine"
    assert record["target"] == 3
    assert (holds(engine, 2), engine.info().version, engine.info().paused) == (True, stream.label(2), False)
    assert training.differences(training.load(stream.live), training.load(save(stream, 2))) == []
    stream.publish()
    ready(status, 4, command)
    assert holds(engine, 4)
    assert status()["error"] is None
    command.send(signal.SIGTERM)
    assert command.end(10).code == 0


@pytest.mark.parametrize("moment", ["load", "confirm", "resume"])
def test_a_daemon_killed_between_pause_and_resume_is_made_good_by_the_next_one(
    stream, follow, engine, moment, monkeypatch
):
    arrived, go = threading.Event(), threading.Event()
    original = getattr(engine, moment)

    def held(*arguments, **options):
        arrived.set()
        assert go.wait(30)
        return original(*arguments, **options)

    monkeypatch.setattr(engine, moment, held)
    command, _ = follow(engine.url)
    assert arrived.wait(30)
    command.send(signal.SIGKILL)
    assert command.end().code == -signal.SIGKILL
    monkeypatch.setattr(engine, moment, original)
    assert engine.info().paused
    go.set()
    command, status = follow(engine.url)
    ready(status, 1, command)
    assert (holds(engine, 1), engine.info().paused) == (True, False)


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


def test_an_engine_killed_and_started_again_is_loaded_before_it_is_ready(stream, follow):
    process, url = serve(stream)
    try:
        command, status = follow(url)
        ready(status, 1, command)
        process.kill()
        process.wait()
        training.until(lambda: status()["error"] is not None)
        record = status()
        assert (record["ready"], record["serving"], record["error"]["kind"]) == (False, None, "engine")
        stream.publish()
        process, again = serve(stream, port=int(url.rpartition(":")[2]))
        assert again == url
        ready(status, 2, command)
        info = httpx.get(f"{url}/info", trust_env=False).json()
        assert (info["version"], info["paused"]) == (stream.label(2), False)
    finally:
        process.kill()
        process.wait()
