from __future__ import annotations

import itertools
import json
import math
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deltastore.errors import EngineError, UsageError
from receiver.engines import engine_names, make_engine
from receiver.engines.base import EngineInfo
from receiver.engines.none import NoEngine
from receiver.engines.serve import EngineApp, main, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from receiver.engines.torch_server import Timeouts, TorchServerEngine
from tools.demo.model import TIED
from tools.demo.serving import build


@pytest.fixture
def engine_app(tiny_checkpoints):
    model = build(tiny_checkpoints[0], "bf16")
    engine = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
    engine.prime(tiny_checkpoints[0])
    return EngineApp(engine, model, streams=2)


@pytest.fixture
def server(engine_app):
    with (
        serve_in_thread(engine_app) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
    ):
        yield client


@pytest.fixture
def engine(server):
    engine = make_engine("torch", url=str(server.base_url))
    yield engine
    engine.close()


def generate(client, **body):
    with client.stream("POST", "/generate", json=body) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
        lines = [json.loads(line) for line in answer.text.splitlines()]
    if "error" not in lines[-1]:
        last = lines.pop()
        assert last["finish_reason"] == "length"
        assert last["spans"] == spans(lines)
    return lines


def spans(lines):
    """Return which version made which of a stream's tokens, in runs."""
    runs = [(version, len(list(group))) for version, group in itertools.groupby(line["version"] for line in lines)]
    ends = list(itertools.accumulate(count for _, count in runs))
    return [
        {"version": version, "start": end - count, "end": end} for (version, count), end in zip(runs, ends, strict=True)
    ]


def test_health_and_info(server, tiny_checkpoints):
    assert server.get("/health").json() == {"status": "ok"}
    info = server.get("/info").json()
    assert set(info) == {"incarnation", "version", "paused", "weights_digest", "tokens_total", "first_token_seconds"}
    assert (info["version"], info["paused"], info["tokens_total"]) == (None, False, 0)


def test_every_token_carries_its_version_and_two_digests(server, engine, tiny_checkpoints):
    before = generate(server, prompt="import ", max_tokens=5)
    engine.pause()
    engine.load(tiny_checkpoints[1], version="4")
    engine.confirm("4")
    engine.resume()
    after = generate(server, prompt="import ", max_tokens=5)
    info = server.get("/info").json()
    assert [line["index"] for line in after] == list(range(5))
    for lines, version in ((before, None), (after, "4")):
        assert {line["version"] for line in lines} == {version}
        assert len({line["digest_before"] for line in lines} | {line["digest_after"] for line in lines}) == 1
    assert after[0]["digest_before"] == info["weights_digest"] != before[0]["digest_before"]
    assert info["tokens_total"] == 10
    logprob = struct.unpack(">f", bytes.fromhex(after[0]["logprob"]))[0]
    assert -20 < logprob < 0


def test_after_an_activation_it_answers_as_a_fresh_engine_does(server, engine, tiny_checkpoints):
    engine.pause()
    engine.load(tiny_checkpoints[1], version="4")
    engine.resume()
    model = build(tiny_checkpoints[1], "bf16")
    fresh = TorchModuleEngine(model.module, mapping=TIED)
    fresh.prime(tiny_checkpoints[1])
    generation = model.generate(model.encode("class "), temperature=0.0, seed=0)
    want = []
    for _ in range(12):
        with fresh.forward() as weights:
            token = generation.step(weights.caches)
        want.append((token.token, struct.pack(">f", token.logprob).hex()))
    got = generate(server, prompt="class ", max_tokens=12)
    assert [(line["token"], line["logprob"]) for line in got] == want


def test_a_seed_repeats_a_sampled_text_and_another_does_not(server):
    one, same, other = (
        [line["token"] for line in generate(server, tokens=[256, 9], max_tokens=12, temperature=1.0, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_streams_held_by_a_pause_do_not_keep_a_resume_out(server, engine):
    with ThreadPoolExecutor(6) as pool:
        engine.pause()
        # More than the server generates at once.
        streams = [pool.submit(generate, server, prompt="x", max_tokens=3) for _ in range(6)]
        assert engine.info().paused
        assert not any(stream.done() for stream in streams)
        engine.resume()
        assert [len(stream.result(timeout=30)) for stream in streams] == [3] * 6


def test_a_listener_that_leaves_ends_its_stream(server, engine_app):
    with server.stream("POST", "/generate", json={"prompt": "x", "max_tokens": 1_000_000}) as answer:
        next(answer.iter_lines())
    # Both threads that generate are needed, and free.
    with ThreadPoolExecutor(2) as pool:
        assert [len(lines) for lines in pool.map(lambda _: generate(server, prompt="x", max_tokens=2), range(2))]


def test_a_listener_that_does_not_read_holds_up_no_pause(server, engine):
    with server.stream("POST", "/generate", json={"prompt": "x", "max_tokens": 1_000_000}) as answer:
        assert answer.status_code == 200
        for _ in range(20):
            engine.pause("keep")
            engine.resume()


BAD = {
    "no JSON": ("/load", "{", "not what this call takes"),
    "another type": ("/load", {"checkpoint": 7, "version": "1"}, "not what this call takes"),
    "unknown field": ("/confirm", {"version": "1", "more": 1}, "not what this call takes"),
    "missing field": ("/load", {"version": "1"}, "not what this call takes"),
    "relative path": ("/load", {"checkpoint": "ckpt", "version": "1"}, "not an absolute path"),
    "no such path": ("/load", {"checkpoint": "/nonexistent/ckpt", "version": "1"}, "cannot be loaded"),
    "no prompt": ("/generate", {"max_tokens": 3}, "takes a prompt or tokens"),
    "both prompts": ("/generate", {"prompt": "a", "tokens": [1]}, "takes a prompt or tokens"),
    "no tokens wanted": ("/generate", {"prompt": "a", "max_tokens": 0}, "max_tokens is 1 or more"),
    "a seed too big": ("/generate", {"prompt": "a", "seed": 1 << 63}, "seed below"),
    "too much": ("/generate", "x" * (1 << 21), "over 1 MiB"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_call_that_makes_no_sense_is_answered_with_400(server, engine, case):
    path, body, message = BAD[case]
    engine.pause()
    answer = server.post(path, content=body if isinstance(body, str) else json.dumps(body))
    assert answer.status_code == 400
    assert set(answer.json()) == {"kind", "message", "key", "hint"}
    assert message in answer.json()["message"]
    assert answer.json()["hint"]


def test_what_the_engine_refuses_is_answered_with_409(server, tiny_checkpoints):
    answer = server.post("/load", json={"checkpoint": str(tiny_checkpoints[0]), "version": "1"})
    assert answer.status_code == 409
    assert answer.json()["kind"] == "engine"
    assert "not paused" in answer.json()["message"]


@pytest.mark.parametrize("tokens", [[], [100_000], [-1]])
def test_a_forward_pass_that_fails_ends_the_stream_with_an_error(server, tokens):
    lines = generate(server, tokens=tokens, max_tokens=3)
    assert [set(line) for line in lines] == [{"error"}]
    assert lines[0]["error"]["kind"] == "engine"
    assert len(generate(server, prompt="x", max_tokens=2)) == 2


def test_the_process_serves_requantizes_and_ends_on_sigterm(tiny_checkpoints, tmp_path, engine_server):
    with engine_server(tiny_checkpoints[0], tmp_path / "ready.json", scheme="fp8_block") as process:
        ready = json.loads((tmp_path / "ready.json").read_bytes())
        assert ready == {"url": process.url, "pid": process.process.pid}
        assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]
        engine = make_engine("torch", url=process.url)
        first = engine.info()
        engine.pause()
        engine.load(tiny_checkpoints[1], version="1")
        engine.confirm("1")
        assert engine.info() == EngineInfo(first.incarnation, "1", paused=True)
        model = build(tiny_checkpoints[1], "fp8_block")
        fresh = TorchModuleEngine(model.module, scheme="fp8_block", mapping=TIED)
        fresh.prime(tiny_checkpoints[1])
        with (
            httpx.Client(base_url=process.url, trust_env=False, timeout=30) as client,
            client.stream("POST", "/generate", json={"prompt": "x"}) as held,
        ):
            assert client.get("/info").json()["weights_digest"] == fresh.weights_digest()
            # Paused, and with a stream that waits for a resume which never comes.
            assert process.end() == 0
            assert "shutting down" in held.read().decode()
        with pytest.raises(EngineError, match="nothing answers") as caught:
            engine.info()
        assert "receiver.engines.serve" in caught.value.hint
        engine.close()


@pytest.mark.parametrize(
    ("model", "scheme", "message"),
    [
        ("no.such.module:build", "bf16", "no model factory"),
        ("tools.demo.serving:absent", "bf16", "no model factory"),
        ("tools.demo.serving:build", "int3", "no quantization scheme"),
    ],
)
def test_a_server_that_cannot_start_says_why(capsys, tiny_checkpoints, model, scheme, message):
    arguments = ["--model", model, "--checkpoint", str(tiny_checkpoints[0]), "--scheme", scheme]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Try: " in said


def answering(answer) -> TorchServerEngine:
    return TorchServerEngine("http://127.0.0.1:1/", transport=httpx.MockTransport(answer))


def timing_out(request):
    raise httpx.ReadTimeout("slow", request=request)


ANSWERS = {
    "no JSON": (lambda _: httpx.Response(200, text="<html>"), "failed"),
    "no object": (lambda _: httpx.Response(200, json=[1]), "not an object"),
    "another service": (lambda _: httpx.Response(200, json={"ok": True}), "without incarnation"),
    "odd version": (
        lambda _: httpx.Response(200, json={"incarnation": "a", "version": 3, "paused": False}),
        "without incarnation",
    ),
    "an error without a message": (lambda _: httpx.Response(500, json={}), "HTTP status 500"),
    "no answer in time": (timing_out, "no answer to /info within"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_any_odd_answer_is_an_engine_error_with_a_hint(case):
    answer, message = ANSWERS[case]
    with pytest.raises(EngineError, match=message) as caught:
        answering(answer).info()
    assert caught.value.hint


def test_the_confirmed_version_has_to_be_the_one_asked_for():
    with pytest.raises(EngineError, match="confirmed version '1' instead of '2'"):
        answering(lambda _: httpx.Response(200, json={"version": "1"})).confirm("2")


def test_a_closed_adapter_raises_engine_errors_too():
    engine = answering(lambda _: httpx.Response(200, json={}))
    engine.close()
    with pytest.raises(EngineError):
        engine.resume()


def test_the_environments_proxies_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        engine = TorchServerEngine(url, timeouts=Timeouts(request=5))
        asked = pool.submit(engine.info)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1024).startswith(b"GET /info ")
            connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}")
        with pytest.raises(EngineError, match="HTTP status 503"):
            asked.result(timeout=10)
        engine.close()


def test_engines_are_made_by_name():
    assert engine_names() == ("command", "none", "sglang", "torch", "vllm")
    assert isinstance(make_engine("none"), NoEngine)
    engine = make_engine("torch", url="http://127.0.0.1:1", options={"load-timeout": "7.5"})
    assert isinstance(engine, TorchServerEngine)
    assert math.isclose(engine._timeouts.load, 7.5)
    engine.close()


@pytest.mark.parametrize(
    ("name", "url", "options", "message"),
    [
        ("tensor9000", None, {}, "no engine is named"),
        ("none", "http://127.0.0.1:1", {}, "has no URL"),
        ("none", None, {"a": "b"}, "has no option"),
        ("torch", None, {}, "needs a URL"),
        ("torch", "ftp://x", {}, "is not HTTP"),
        ("torch", "http://127.0.0.1:1", {"retries": "3"}, "has no option 'retries'"),
        ("torch", "http://127.0.0.1:1", {"load-timeout": "soon"}, "not a number of seconds"),
        ("torch", "http://127.0.0.1:1", {"load-timeout": "-1"}, "not a number of seconds"),
    ],
)
def test_an_engine_that_makes_no_sense_is_a_usage_error(name, url, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        make_engine(name, url=url, options=options)
    assert caught.value.hint
