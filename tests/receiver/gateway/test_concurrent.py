"""Many streams through the gateway before a real engine across many updates: each token's version is right.

The engine says of each token which version made it, and what the weights' digest was on both sides of the forward pass;
the gateway does not look at that. Both have to agree, and no answer may be lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections import Counter

import httpx
import pytest
import torch
from safetensors.torch import save_file

from deltastore.errors import DrainTimeout
from receiver.engines.gated import GateClient, GatedEngine
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.served_model import Token
from receiver.engines.torch_module import TorchModuleEngine
from receiver.engines.torch_server import TorchServerEngine
from receiver.gateway.server import GatewayServer

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
STREAMS = 200
UPDATES = 60 if THOROUGH else 20
TOKENS = 10


class _Generation:
    def __init__(self, model, prompt):
        self._model, self._last = model, prompt[-1]

    def step(self, weights):
        time.sleep(0.002)  # what a pass takes elsewhere than in this interpreter: streams advance side by side
        with torch.inference_mode():
            logits = self._model.module.weight[self._last % 16]
            self._last = int(logits.argmax())
            return Token(self._last, float(torch.log_softmax(logits, 0)[self._last]))


class Model:
    """The least that is a model: the next token is a look at a table."""

    def __init__(self):
        self.mapping = {}
        self.module = torch.nn.Linear(16, 16, bias=False)

    def encode(self, text):
        return list(text.encode()) or [0]

    def generate(self, prompt, *, temperature, seed):
        return _Generation(self, prompt)

    def probe(self):
        return self.module.weight.detach()[None]


def checkpoint(root, version):
    directory = root / str(version)
    directory.mkdir()
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(version))
    save_file({"weight": weight}, directory / "model.safetensors")
    return directory


@pytest.fixture
def checkpoints(tmp_path):
    return [checkpoint(tmp_path, version) for version in range(UPDATES + 1)]


@pytest.fixture
def server(checkpoints):
    model = Model()
    engine = TorchModuleEngine(model.module, probe=model.probe)
    engine.prime(checkpoints[0])
    with serve_in_thread(EngineApp(engine, model, streams=STREAMS)) as url:
        yield url


async def _ask(client, number, done, seen, whole):
    """Ask again and again until there are no more updates; notes each answer."""
    while not done.is_set():
        async with client.stream("POST", "/generate", json={"tokens": [number], "max_tokens": TOKENS}) as answer:
            lines = [json.loads(line) async for line in answer.aiter_lines()]
            # A 503 is one that was aborted before the engine had begun with it.
            assert answer.status_code == 200 or lines[0]["error"]["code"] == "weights_updated", lines
            if answer.status_code == 200:
                seen.append(lines)
                whole[lines[-1]["weight_version_end"]] += lines[-2:][0].get("finish_reason") == "length"


def _check(lines):
    """Compare what the engine says of each token with what the gateway says; returns the versions and the reason."""
    told = lines[-1]
    tokens = [line for line in lines if "token" in line]
    if "error" in told:  # the gateway gave the rest up
        assert told["error"]["code"] == "weights_updated"
        reason = "cut"
    else:
        assert len(lines) == len(tokens) + 2
        reason = lines[-2]["finish_reason"]
        assert reason == "abort" or len(tokens) == TOKENS
    assert [line["index"] for line in tokens] == list(range(len(tokens)))
    for line in tokens:
        assert line["digest_before"] == line["digest_after"]
    versions = [line["version"] for line in tokens]
    spans = told["weight_version_spans"]
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == versions
    assert told["weight_version_end"] == (versions[-1] if versions else told["weight_version_start"])
    return versions, reason


def _update(engine, directory, label, in_flight):
    try:
        engine.pause(in_flight, timeout=0.05 if in_flight == "wait" else None)
    except DrainTimeout:
        engine.pause("keep")
    assert engine.info().paused
    engine.load(directory, version=label)
    engine.confirm(label)
    assert engine.probe() is not None
    engine.resume()
    assert not engine.info().paused


def test_each_token_of_200_streams_across_20_updates_has_its_version(server, checkpoints):
    seen: list = []
    whole: Counter[str] = Counter()
    done = threading.Event()
    order = random.Random(7)

    async def clients(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as client:
            await asyncio.gather(*(_ask(client, number, done, seen, whole) for number in range(STREAMS)))

    with GatewayServer(server, "127.0.0.1:0", control="127.0.0.1:0") as gateway:
        engine = GatedEngine(TorchServerEngine(server), GateClient(gateway.control_url))
        _update(engine, checkpoints[0], "stream/0", "wait")
        asking = threading.Thread(target=lambda: asyncio.run(clients(gateway.url)))
        asking.start()
        modes = []
        try:
            for version in range(1, UPDATES + 1):
                mode = order.choice(("wait", "abort", "keep"))
                modes.append(mode)
                _update(engine, checkpoints[version], f"stream/{version}", mode)
                while whole[f"stream/{version}"] < STREAMS // 10 and asking.is_alive():
                    done.wait(0.005)
        finally:
            done.set()
            asking.join(60)
            engine.close()
    assert not asking.is_alive()
    checked = [_check(lines) for lines in seen]
    made = Counter(version for versions, _ in checked for version in versions)
    assert len(seen) >= STREAMS
    assert len(made) >= UPDATES
    reasons = Counter(reason for _, reason in checked)
    assert set(reasons) <= {"length", "abort", "cut"}
    assert set(modes) == {"wait", "abort", "keep"}
    over = sum(len(set(versions)) > 1 for versions, _ in checked)
    assert over
    assert reasons["length"] > STREAMS
    # Those in flight when requests are aborted, and no others, end early.
    assert reasons["abort"] + reasons["cut"] <= STREAMS * modes.count("abort")
