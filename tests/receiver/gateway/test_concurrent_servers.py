"""Many answers through the gateway before a server like vLLM or SGLang, across updates: whose tokens they are shows."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections import Counter

import httpx
import pytest
import training

from deltastore.errors import DrainTimeout
from receiver.engines import make_engine
from receiver.engines.gated import GateClient, GatedEngine
from receiver.gateway.server import GatewayServer
from receiver.testing.engine_server import EngineServer
from receiver.testing.stand_in import expected_tokens

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
CLIENTS = 200 if THOROUGH else 50
UPDATES = 20 if THOROUGH else 8
TOKENS = 12


@pytest.fixture
def checkpoints(tmp_path):
    made = []
    for number in range(UPDATES + 1):
        directory = tmp_path / f"v{number}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
        made.append(directory)
    return made


def update(engine, checkpoint, label, in_flight):
    try:
        engine.pause(in_flight, timeout=0.05 if in_flight == "wait" else 60)
    except DrainTimeout:
        engine.pause("keep", timeout=60)
    engine.load(checkpoint, version=label)
    engine.confirm(label)
    engine.resume()


async def ask(client, number, done, seen, whole):
    """Ask again and again until there are no more updates, for streams and for whole answers in turn."""
    turn = number
    while not done.is_set():
        turn += 1
        asked = {"prompt": [number], "max_tokens": TOKENS, "return_token_ids": True, "stream": turn % 3 > 0}
        answer = await client.post("/v1/completions", json=asked)
        text = answer.text
        told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
        assert answer.status_code == 200 or told[0]["error"]["code"] == "weights_updated", text
        if answer.status_code == 200:
            seen.append((number, told))
            whole[told[-1]["weight_version_end"]] += reason(told) == "length"


def reason(told):
    found = [choice["finish_reason"] for one in told for choice in one.get("choices") or ()]
    return (found and found[-1]) or told[-1]["error"]["code"]


def check(number, told, checkpoints):
    """Compare an answer's tokens with those that the versions make which it says that it is of; returns these."""
    made = [token for one in told for choice in one.get("choices") or () for token in choice["token_ids"]]
    last = told[-1]
    first, end = (int(last[f"weight_version_{name}"].removeprefix("s/")) for name in ("start", "end"))
    if "weight_version_spans" in last:
        spans = [(int(span["version"].removeprefix("s/")), span["end"]) for span in last["weight_version_spans"]]
    else:
        spans = [(first, len(made))] if first == end else []  # a whole answer does not say where it changed
    at = 0
    for version, until in spans:
        wanted = expected_tokens(checkpoints[version], (number, *made[:at]), until - at)
        assert made[at:until] == [token.token for token in wanted]
        at = until
    assert at == len(made) or not spans
    return [version for version, _ in spans] or [first, end]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_token_of_many_answers_across_updates_has_its_version(kind, checkpoints):
    seen: list = []
    whole: Counter[str] = Counter()
    done = threading.Event()
    order = random.Random(11)

    async def clients(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as client:
            await asyncio.gather(*(ask(client, number, done, seen, whole) for number in range(CLIENTS)))

    with (
        EngineServer(checkpoints[0], kind=kind, seconds_per_token=0.01) as server,
        GatewayServer(server.url, "127.0.0.1:0", control="127.0.0.1:0") as gateway,
    ):
        training.until(lambda: gateway.gate.watching)
        engine = GatedEngine(make_engine(kind, url=server.url), GateClient(gateway.control_url))
        update(engine, checkpoints[0], "s/0", "wait")
        asking = threading.Thread(target=lambda: asyncio.run(clients(gateway.url)))
        asking.start()
        modes = []
        try:
            for version in range(1, UPDATES + 1):
                # Something is in the engine: else there would be nothing to keep.
                training.until(lambda: server.engine.started or not asking.is_alive())
                modes.append(("keep", "wait", "abort", order.choice(("keep", "wait", "abort")))[version % 4])
                update(engine, checkpoints[version], f"s/{version}", modes[-1])
                while whole[f"s/{version}"] < CLIENTS // 10 and asking.is_alive():
                    done.wait(0.005)
        finally:
            done.set()
            asking.join(120)
            engine.close()
        assert not asking.is_alive()
        assert (gateway.gate.state.in_flight, server.engine.requests) == (0, 0)
    made = [check(number, told, checkpoints) for number, told in seen]
    assert {version for versions in made for version in versions} >= {*range(1, UPDATES + 1)}
    reasons = Counter(reason(told) for _, told in seen)
    assert set(reasons) <= {"length", "abort", "weights_updated"}
    # Those that are in flight when requests are aborted, and no others, end early.
    assert len(seen) - reasons["length"] <= CLIENTS * modes.count("abort")
    assert any(len(set(versions)) > 1 for versions in made)
