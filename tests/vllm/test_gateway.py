"""The gateway before a real vLLM: nothing but the fields is added, and its salts are taken."""

from __future__ import annotations

import itertools
import json
import re

import httpx
import pytest
import training
from tiny_llama import END
from vllm_server import CONTEXT, Ending

from receiver.engines import make_engine
from receiver.engines.gated import GateClient, GatedEngine
from receiver.gateway.server import GatewayServer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
PROMPTS = {
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "t5 t6 t7"}]},
}
FIELDS = re.compile(r',"weight_version_start":"[^"]+","weight_version_end":"[^"]+"(,"weight_version_spans":\[[^]]*\])?')
MADE_UP = re.compile(r'"id":"[^"]+"|"created":\d+')
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def server(start_vllm, versions):
    with start_vllm(versions[0], "--chat-template", TEMPLATE) as server:
        yield server


@pytest.fixture
def gateway(server):
    with GatewayServer(server.url, "127.0.0.1:0", control="127.0.0.1:0", salt=True) as made:
        training.until(lambda: made.gate.watching)
        yield made


@pytest.fixture
def engine(server, gateway, versions):
    made = GatedEngine(make_engine("vllm", url=server.url), GateClient(gateway.control_url))
    update(made, versions[0], "s/0")
    yield made
    made.close()


def update(engine, checkpoint, label, in_flight="wait"):
    engine.pause(in_flight, timeout=120)
    engine.load(checkpoint, version=label)
    engine.confirm(label)
    assert engine.probe() is not None
    engine.resume()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROMPTS)
def test_an_answer_is_as_it_is_without_the_gateway(server, gateway, engine, path, stream):
    body = {"model": "m", "max_tokens": 6, "n": 2, "seed": 7, "ignore_eos": True, **PROMPTS[path]}
    body |= {"stream": True, "stream_options": USAGE} if stream else {}
    direct, through = (
        httpx.post(url + path, json=body, trust_env=False, timeout=120) for url in (server.url, gateway.url)
    )
    assert (direct.status_code, through.status_code) == (200, 200), through.text
    if not stream:
        assert MADE_UP.sub("", FIELDS.sub("", through.text)) == MADE_UP.sub("", direct.text)
        assert through.json()["weight_version_start"] == "s/0"
        return
    assert through.text.endswith("data: [DONE]\n\n")
    # How many tokens come in one chunk is a matter of time.
    assert texts(chunks(FIELDS.sub("", through.text))) == texts(chunks(direct.text))
    last = chunks(through.text)[-1]
    assert last["usage"] == chunks(direct.text)[-1]["usage"]
    assert [(span["choice"], span["end"]) for span in last["weight_version_spans"]] == [(0, 6), (1, 6)]


def chunks(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def texts(told):
    """Return what was said of each choice, and why it ended; all chunks are of one answer."""
    assert len({chunk["id"] for chunk in told}) == 1
    said = {0: "", 1: ""}
    for chunk in told:
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            said[choice["index"]] += text + f" <{choice['finish_reason']}>" * bool(choice["finish_reason"])
    return said


def test_a_stream_kept_over_an_update_has_both_versions(gateway, engine, versions, tmp_path):
    ending = Ending(tmp_path)
    body = {"model": "m", "max_tokens": CONTEXT - 3, "ignore_eos": True, "stream": True, **PROMPTS["/v1/completions"]}
    body |= {"vllm_xargs": ending.arguments, "stop_token_ids": [END]}
    body["return_token_ids"] = True  # several tokens may come in one chunk
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, trust_env=False, timeout=120) as answer:
        lines = answer.iter_lines()
        seen = [*itertools.islice(lines, 20)]
        update(engine, versions[1], "s/1", "keep")
        seen += [*itertools.islice(lines, 20)]
        ending.tell()
        seen += list(lines)
    told = chunks("\n\n".join(line for line in seen if line))
    assert [span["version"] for span in told[-1]["weight_version_spans"]] == ["s/0", "s/1"]
    tokens = [token for chunk in told for choice in chunk["choices"] for token in choice["token_ids"]]
    assert told[-1]["weight_version_spans"][-1]["end"] == len(tokens)
