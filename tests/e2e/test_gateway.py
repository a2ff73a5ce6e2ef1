"""Gateway, receiver and engine as they run: what clients see, and what is left when one of them is killed."""

from __future__ import annotations

import json
import signal
import socket
from types import SimpleNamespace

import httpx
import pytest
import training
from engines import Stream

from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED
from tools.demo.serving import build


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path)


@pytest.fixture
def engine(tmp_path, stream):
    model = build(tmp_path / "base", "bf16")
    made = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
    made.prime(tmp_path / "base")
    with serve_in_thread(EngineApp(made, model, streams=2)) as made.url:
        yield made


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture
def start(commands, tmp_path, engine):
    listen, control, status = free_ports(3)

    def gateway():
        words = ["--engine-url", engine.url, "--listen", f"127.0.0.1:{listen}", "--control", f"127.0.0.1:{control}"]
        command = commands.start(
            "receiver", "gateway", *words, "--receiver-url", f"http://127.0.0.1:{status}", "--hold", 100
        )
        training.until(lambda: "Listening on" in command.err or command.ends_within(0), what="a gateway")
        return command

    def receiver():
        words = ["--store", tmp_path / "store", "--checkpoint", tmp_path / "live", "--base", tmp_path / "base"]
        words += ["--engine", "torch", "--engine-url", engine.url, "--gateway-url", f"http://127.0.0.1:{control}"]
        return commands.start("receiver", "run", *words, "--listen", f"127.0.0.1:{status}", "--poll", 0.1)

    def ask(**body):
        told = {"prompt": "x", "max_tokens": 3, **body}
        return httpx.post(f"http://127.0.0.1:{listen}/generate", json=told, trust_env=False, timeout=120)

    def ready():
        return httpx.get(f"http://127.0.0.1:{status}/status", trust_env=False, timeout=10).json()["ready"]

    yield SimpleNamespace(gateway=gateway, receiver=receiver, ask=ask, ready=ready)
    commands.end_all()


def version_of(answer):
    assert answer.status_code == 200, answer.text
    told = json.loads(answer.text.splitlines()[-1])
    (span,) = told["weight_version_spans"]
    assert (span["start"], span["end"]) == (0, 3)
    assert {json.loads(line)["version"] for line in answer.text.splitlines()[:3]} == {span["version"]}
    return int(span["version"].rpartition("/")[2])


def test_clients_see_versions_and_no_death_of_anybody_mixes_them(start, stream, engine):
    gateway, receiver = start.gateway(), start.receiver()
    # It waits at the shut gate until the first version is confirmed.
    assert version_of(start.ask()) == 1
    stream.publish()
    assert version_of(start.ask(min_version=1)) in (1, 2)
    training.until(lambda: start.ask(min_version=2).status_code == 200, seconds=60)
    assert version_of(start.ask(min_version=2)) == 2
    assert start.ask(exact_version=1).status_code == 409

    # A gateway that is killed opens again by itself.
    gateway.send(signal.SIGKILL)
    gateway.end()
    gateway = start.gateway()
    assert version_of(start.ask()) == 2

    # A receiver that looked while it was gone loads again; one killed in the middle of that would leave the gate shut.
    training.until(start.ready, seconds=60)
    # One that is killed while there is no receiver stays shut until there is one.
    receiver.send(signal.SIGKILL)
    receiver.end()
    assert version_of(start.ask()) == 2
    gateway.send(signal.SIGKILL)
    gateway.end()
    gateway = start.gateway()
    stream.publish()
    receiver = start.receiver()
    assert version_of(start.ask()) == 3
    for command in (receiver, gateway):
        command.send(signal.SIGTERM)
        assert command.end(15).code == 0, command.err
