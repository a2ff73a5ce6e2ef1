"""Servers that answer with anything at all: an ``EngineError``, never what ends the receiver in a pause."""

from __future__ import annotations

import json
import random

import httpx
import pytest

from deltastore.errors import EngineError
from receiver.engines.gated import GateClient, GatedEngine
from receiver.engines.none import NoEngine
from receiver.engines.sglang import SglangEngine, SglangOptions
from receiver.engines.torch_server import Timeouts, TorchServerEngine
from receiver.engines.vllm import VllmEngine, VllmOptions

#: Answers of servers that are well, of which parts are replaced.
WELL = {
    "/weight_info": {"weight_version": "s/1"},
    "/is_paused": {"is_paused": True},
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/collective_rpc": {"results": [{"label": "s/1", "logprobs": [-1.0, -2.0], "tokens": [1, 2]}]},
    "/v1/completions": {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0, -2.0]}}]},
    "/v1/models": {"data": [{"id": "m"}]},
    "/get_model_info": {"weight_version": "s/1 paused"},
    "/get_load": [{"num_reqs": 0}],
    "/update_weights_from_disk": {"success": True},
    "/generate": {"meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]}},
    "/info": {"incarnation": "i", "version": "s/1", "paused": True, "first_token_seconds": 1.0},
    "/confirm": {"version": "s/1"},
    "/probe": {"logprobs": ["-0x1p0"], "tokens": [1]},
}
ODD = (None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", "s/1", [], [[]], {}, {"error": [1]}, [None])
BODIES = (b"[" * 100_000, b'{"error":' * 100_000, b"\xff\xfe{}", b"1" * 5000, b"")


def replaced(chance, answer):
    if chance.random() < 0.15:
        return chance.choice(ODD)
    if isinstance(answer, dict):
        return {name: replaced(chance, value) for name, value in answer.items()}
    return [replaced(chance, value) for value in answer] if isinstance(answer, list) else answer


def odd_server(seed):
    chance = random.Random(seed)

    def answer(request):
        status = chance.choice([200] * 12 + [204, 307, 404, 500])
        if chance.random() < 0.1:
            return httpx.Response(status, content=chance.choice(BODIES), headers={"location": "/elsewhere"})
        told = replaced(chance, WELL.get(request.url.path, {}))
        return httpx.Response(status, content=json.dumps(told).encode())

    return httpx.MockTransport(answer)


class Endless(httpx.SyncByteStream):
    """A body that never ends."""

    def __init__(self, piece):
        self.piece = piece

    def __iter__(self):
        while True:
            yield self.piece


@pytest.mark.parametrize("piece", [b" ", b" " * (1 << 20)])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "torch", "gateway"])
def test_an_answer_that_does_not_end_is_no_answer(kind, piece, monkeypatch):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless(piece)))
    slow = len(piece) == 1
    seconds = 0.2 if slow else 1e6
    monkeypatch.setattr("receiver.engines.gated._ANSWER_SECONDS", seconds)
    engines = {
        "vllm": lambda: VllmEngine("http://h", options=VllmOptions(request_timeout=seconds), transport=transport),
        "sglang": lambda: SglangEngine("http://h", options=SglangOptions(request_timeout=seconds), transport=transport),
        "torch": lambda: TorchServerEngine("http://h", timeouts=Timeouts(request=seconds), transport=transport),
        "gateway": lambda: GatedEngine(NoEngine(), GateClient("http://h", patience=0.0, transport=transport)),
    }
    with pytest.raises(EngineError, match="no answer" if slow else "over 67108864 bytes"):
        engines[kind]().info()


ADAPTERS = {
    "vllm": lambda transport: VllmEngine("http://h", transport=transport),
    "vllm-extension": lambda transport: VllmEngine(
        "http://h", options=VllmOptions(extension=True), transport=transport
    ),
    "sglang": lambda transport: SglangEngine("http://h", transport=transport),
    "torch": lambda transport: TorchServerEngine("http://h", transport=transport),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_answer_is_more_than_an_engines_error(tmp_path, monkeypatch, adapter):
    monkeypatch.setattr("receiver.engines.vllm._FLUSH_PAUSE", 0.0)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    refused = 0
    for seed in range(60):
        engine = ADAPTERS[adapter](odd_server(seed))
        for call in (
            engine.info,
            lambda engine=engine: engine.pause("keep"),
            lambda engine=engine: engine.pause("wait", timeout=0.0),
            lambda engine=engine: engine.load(tmp_path, version="s/1"),
            lambda engine=engine: engine.confirm("s/1"),
            engine.probe,
            engine.resume,
        ):
            try:
                call()
            except EngineError:
                refused += 1
        engine.close()
    assert refused > 60
