"""A stream of a tiny model, receivers that follow it, and an engine in this process."""

from __future__ import annotations

import httpx
import pytest
import torch
import training
from engines import Stream

from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED
from tools.demo.serving import build


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A tiny model's threads only wait for each other, for very long where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path)


@pytest.fixture
def follow(commands, stream):
    def start(engine_url, *options):
        words = ["receiver", "run", "--store", stream.url, "--checkpoint", stream.live, "--base", stream.base]
        command = commands.start(
            *words, "--listen", "127.0.0.1:0", "--poll", 0.05, "--engine", "torch", "--engine-url", engine_url, *options
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
