"""The stand-in tells mixed weights and stale caches apart, and the server in front of it fails as it is told to."""

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
from training import until

from receiver.testing import engine_http
from receiver.testing.completions import chat_prompt
from receiver.testing.engine_faults import AnswerFault, AnswerFaultKind, EngineFault, EngineFaultKind
from receiver.testing.engine_server import EngineServer
from receiver.testing.stand_in import StandIn, expected_tokens
from receiver.testing.streams import CompletionStream, complete

ROOT = Path(__file__).resolve().parents[3]
PROMPT = (5, 6, 7)


@pytest.fixture
def checkpoints(tmp_path):
    made = []
    for number in (0, 1):
        directory = tmp_path / f"v{number}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
        made.append(directory)
    return made


@pytest.fixture
def server(checkpoints):
    with EngineServer(checkpoints[0], kind="vllm") as server:
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


def tokens(made):
    return [token.token for token in made]


def reload(client, checkpoint):
    return client.post(
        "/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    )


def test_a_completion_is_what_a_fresh_engine_makes(server, checkpoints):
    wanted = expected_tokens(checkpoints[0], PROMPT, 20)
    assert complete(server.url, PROMPT, 20) == (tokens(wanted), [token.logprob for token in wanted])
    stream = CompletionStream(server.url, PROMPT, most_tokens=20)
    assert stream.outcome() == "length"
    assert (stream.tokens, stream.logprobs) == (tokens(wanted), [token.logprob for token in wanted])


def test_a_load_without_a_pause_shows_in_the_tokens(checkpoints):
    engine = StandIn(checkpoints[0], seconds_per_token=0)
    stream = engine.stream(PROMPT, 100)
    seen = [next(stream).token for _ in range(3)]
    engine.load(checkpoints[1])
    seen += [token.token for token in stream]
    old, new = (tokens(expected_tokens(checkpoint, PROMPT, 100)) for checkpoint in checkpoints)
    assert seen[:3] == old[:3]
    fresh = tokens(expected_tokens(checkpoints[1], [*PROMPT, *seen[:3]], 97))
    assert seen[3:] not in (old[3:], new[3:], fresh)


@pytest.mark.parametrize("flush", [True, False])
def test_a_kept_request_goes_on_with_new_weights_on_its_old_cache_unless_flushed(server, client, checkpoints, flush):
    stream = CompletionStream(server.url, PROMPT, most_tokens=400)
    assert stream.reach(5)
    client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    reload(client, checkpoints[1])
    if flush:
        answer = client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        assert answer.json() == {"success": True}
    else:
        assert client.post("/reset_prefix_cache").json() == {"success": False}
    held = len(server.engine._requests[0].tokens)
    client.post("/resume")
    assert stream.outcome() == "length"
    assert stream.tokens[:held] == tokens(expected_tokens(checkpoints[0], PROMPT, held))
    rest = tokens(expected_tokens(checkpoints[1], [*PROMPT, *stream.tokens[:held]], 400 - held))
    assert (stream.tokens[held:] == rest) == flush


def test_a_prefix_cached_before_an_update_shows_unless_it_is_dropped(server, client, checkpoints):
    wanted = tokens(expected_tokens(checkpoints[1], PROMPT, 8))
    complete(server.url, PROMPT, 8)
    client.post("/pause", params={"clear_cache": "false"})
    reload(client, checkpoints[1])
    client.post("/resume")
    assert complete(server.url, PROMPT, 8)[0] != wanted
    client.post("/pause", params={"clear_cache": "true"})
    client.post("/resume")
    assert complete(server.url, PROMPT, 8)[0] == wanted


def test_waiting_lets_what_runs_end_and_holds_what_is_new(server, client):
    old = CompletionStream(server.url, PROMPT, most_tokens=300)
    assert old.reach(1)
    answers = []
    pausing = threading.Thread(target=lambda: answers.append(client.post("/pause", params={"mode": "wait"}).json()))
    pausing.start()
    assert old.outcome() == "length"
    pausing.join()
    assert answers == [{"status": "paused"}]
    new = CompletionStream(server.url, PROMPT, most_tokens=3)
    assert not new.reach(1, timeout=0.05)
    client.post("/resume")
    assert new.outcome() == "length"


def test_aborted_requests_are_told_so(server, client):
    stream = CompletionStream(server.url, PROMPT, most_tokens=100_000)
    assert stream.reach(3)
    client.post("/pause", params={"mode": "abort"})
    assert stream.outcome() == "abort"


def test_a_load_that_stops_half_way_kills_at_the_next_forward_pass(server, client, checkpoints):
    server.add(EngineFault(path="/collective_rpc", kind=EngineFaultKind.HALF_LOAD))
    assert reload(client, checkpoints[1]).status_code == 500
    assert client.get("/health").status_code == 200
    with pytest.raises(httpx.TransportError):
        complete(server.url, PROMPT, 3)
    assert server.engine.dead


def test_a_sick_reload_says_that_it_succeeded(checkpoints):
    with EngineServer(checkpoints[0], kind="vllm", sick_after_reload=True) as server:
        assert None not in complete(server.url, PROMPT, 3)[1]
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert reload(client, checkpoints[0]).json() == {"results": [None]}
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            complete(server.url, PROMPT, 3)
        stream = CompletionStream(server.url, PROMPT, most_tokens=3)
        assert stream.outcome() == "length"
        assert stream.logprobs == [None] * 3


def test_a_death_breaks_streams_and_a_restart_is_another_engine(server, client):
    first = client.get("/metrics").text
    client.post("/update_weight_version", json={"new_version": "s/1"})
    stream = CompletionStream(server.url, PROMPT, most_tokens=100_000)
    assert stream.reach(1)
    server.die()
    assert stream.outcome() == "broken"
    with pytest.raises(httpx.TransportError):
        client.get("/health")
    server.restart()
    assert client.get("/weight_info").json() == {"weight_version": "default"}
    assert client.get("/metrics").text != first


HANGS = (EngineFaultKind.HANG, EngineFaultKind.HANG_AFTER)
BROKEN = (EngineFaultKind.RESET, EngineFaultKind.LOSE_ANSWER, *HANGS)


@pytest.mark.parametrize("kind", [*EngineFaultKind])
def test_each_fault_fails_one_call_in_its_way(server, client, kind):
    server.add(EngineFault(path="/pause", kind=kind))
    try:
        answer = client.post("/pause", timeout=0.3 if kind in HANGS else 30)
    except httpx.TransportError:
        answer = None
    until(lambda: server.remaining == 0)
    assert (answer is None) == (kind in {*BROKEN, EngineFaultKind.DIE, EngineFaultKind.DIE_AFTER})
    done = kind in {
        EngineFaultKind.LOSE_ANSWER,
        EngineFaultKind.HANG_AFTER,
        EngineFaultKind.CLOSE_IDLE,
        EngineFaultKind.DIE_AFTER,
        EngineFaultKind.PAUSE_HERE,
        EngineFaultKind.HALF_LOAD,
    }
    until(lambda: (server.engine.running != "all") == done)
    assert server.engine.dead == (kind in {EngineFaultKind.DIE, EngineFaultKind.DIE_AFTER})
    assert [(call.method, call.path) for call in server.calls] == [("POST", "/pause")]


def test_a_dead_engine_answers_nothing_on_connections_that_are_yet_to_break(server, client, monkeypatch):
    client.get("/health")
    with monkeypatch.context() as patch:
        patch.setattr(engine_http, "_reset", lambda connection: None)
        server.die()
    with pytest.raises(httpx.TransportError):
        client.get("/health")


def test_sglang_flushes_only_what_nothing_runs_on(checkpoints):
    with (
        EngineServer(checkpoints[0], kind="sglang") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):
        stream = CompletionStream(server.url, PROMPT, most_tokens=100_000)
        assert stream.reach(2)
        assert client.get("/get_load").json()[0]["num_reqs"] == 1
        client.post("/pause_generation", json={"mode": "in_place"})
        assert client.post("/flush_cache").status_code == 400
        client.post("/pause_generation", json={"mode": "retract"})
        assert client.post("/flush_cache").status_code == 200
        update = {"model_path": str(checkpoints[1]), "weight_version": "s/1", "flush_cache": False}
        assert client.post("/update_weights_from_disk", json=update).json()["success"]
        assert client.get("/get_model_info").json()["weight_version"] == "s/1"
        held = len(server.engine._requests[0].tokens)
        client.post("/continue_generation", json={})
        assert stream.reach(held + 10)
        rest = tokens(expected_tokens(checkpoints[1], [*PROMPT, *stream.tokens[:held]], 10))
        assert stream.tokens[held : held + 10] == rest
        client.post("/pause_generation", json={"mode": "abort"})
        assert stream.outcome() == "abort"
        answer = client.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
        assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_as_a_process_it_says_where_it_is_and_dies_of_sigkill(checkpoints, tmp_path):
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "receiver.testing.engine_server", "--kind", "vllm", "--lifetime", "60"]
    command += ["--checkpoint", str(checkpoints[0]), "--ready-file", str(ready)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline().startswith("serving on http://127.0.0.1:")
        told = json.loads(ready.read_bytes())
        assert told["pid"] == process.pid
        assert complete(told["url"], PROMPT, 3)[0] == tokens(expected_tokens(checkpoints[0], PROMPT, 3))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        process.stderr.close()


CHAT = [{"role": "user", "content": "x"}]


def events(answer):
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_chat_is_answered_as_openais_clients_take_it(checkpoints, kind):
    wanted = tokens(expected_tokens(checkpoints[0], chat_prompt(CHAT), 3))
    text = "".join(f" t{token}" for token in wanted)
    body = {"messages": CHAT, "max_completion_tokens": 3, "n": 2, "return_token_ids": True, "logprobs": True}
    with (
        EngineServer(checkpoints[0], kind=kind) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        whole = client.post("/v1/chat/completions", json=body).json()
        assert whole["object"] == "chat.completion"
        assert [choice["message"]["content"] for choice in whole["choices"]] == [text] * 2
        prompt = len(chat_prompt(CHAT))
        assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": options})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed)
    assert len({chunk["id"] for chunk in chunks} - {whole["id"]}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        choices = [chunk["choices"][0] for chunk in own]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert [token for choice in choices for token in choice.get("token_ids") or ()] == wanted
        assert own[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": [{"role": "user"}]},
        {"messages": CHAT, "n": -1},
        {"messages": CHAT, "stream_options": {"include_usage": True}},
        {"messages": CHAT, "cache_salt": ""},
        {"messages": CHAT, "cache_salt": "s/1"},
        {"messages": CHAT, "cache_salt": "x" * 129},
    ],
)
def test_what_vllm_refuses_is_refused(client, body):
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)


def test_a_salt_keeps_cached_prefixes_apart(server, client, checkpoints):
    old, new = (tokens(expected_tokens(checkpoint, PROMPT, 8)) for checkpoint in checkpoints)

    def ask(salt):
        body = {"prompt": list(PROMPT), "max_tokens": 8, "return_token_ids": True, "cache_salt": salt}
        return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

    assert ask("a") == old
    client.post("/pause", params={"clear_cache": "false"})
    reload(client, checkpoints[1])
    client.post("/resume")
    assert ask("a") not in (old, new)
    assert ask("b") == new


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [*AnswerFaultKind])
def test_each_fault_of_an_answer_fails_one_in_its_middle(server, client, kind, stream):
    met = threading.Event()
    server.add(AnswerFault(path="/v1/completions", kind=kind, after=2, hook=met.set))
    body = {"prompt": "x", "max_tokens": 4, "stream": stream}
    data, error = b"", None
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_raw():
                data += piece
                if kind is AnswerFaultKind.HANG:
                    assert met.wait(30)
                    break  # or else it would not end
    except httpx.TransportError as caught:
        error = caught
    assert met.wait(30)
    breaks = {AnswerFaultKind.CLOSE, AnswerFaultKind.RESET, AnswerFaultKind.DIE}
    assert (error is not None) == (kind in breaks)
    well = {AnswerFaultKind.PAUSE_HERE} if stream else {AnswerFaultKind.PAUSE_HERE, AnswerFaultKind.ERROR_EVENT}
    if stream:
        assert (b'"length"' in data) == (kind in well | {AnswerFaultKind.BROKEN})
        assert (b'"error"' in data) == (kind is AnswerFaultKind.ERROR_EVENT)
        assert (b"[DONE]" in data) == (kind in well | {AnswerFaultKind.BROKEN, AnswerFaultKind.ERROR_EVENT})
    elif kind in well:
        assert json.loads(data)["usage"]["completion_tokens"] == 4
    else:
        with pytest.raises(ValueError, match=r"."):
            json.loads(data)
    assert server.engine.dead == (kind is AnswerFaultKind.DIE)
    until(lambda: server.engine.requests == 0)


def test_methods_and_paths_that_are_not_there(client):
    assert client.head("/health").status_code == 405
    assert client.get("/v1/completions").json() == {"detail": "Method Not Allowed"}
    assert client.get("/nowhere").status_code == 404
