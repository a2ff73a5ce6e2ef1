"""The gateway before a server that answers as vLLM or SGLang does: what clients see is what the engine said.

The stand-in's tokens depend on the weights that made them, and on all before: so they tell which version each is of.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import training

from deltastore.errors import DrainTimeout
from receiver.engines import make_engine
from receiver.engines.gated import GateClient, GatedEngine
from receiver.gateway.server import GatewayServer
from receiver.testing.completions import chat_prompt
from receiver.testing.engine_faults import AnswerFault, AnswerFaultKind, EngineFault, EngineFaultKind
from receiver.testing.engine_server import EngineServer
from receiver.testing.stand_in import expected_tokens

SECONDS = 60
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {COMPLETIONS: [5, 6, 7], CHAT: [{"role": "user", "content": "é"}]}
TOKENS = {COMPLETIONS: (5, 6, 7), CHAT: chat_prompt(PROMPT[CHAT])}
FIELDS = re.compile(
    rb',"weight_version_start":"[^"]+","weight_version_end":"[^"]+"(,"weight_version_spans":\[[^]]*\])?'
)
OWN = re.compile(rb'data: \{"object":"weight_version","choices":\[\]\}\n\n')
ERROR = re.compile(rb'data: \{"error":\{[^}]*"type":"gateway"[^}]*\}\}\n\n')
MADE_UP = re.compile(rb'"id": "[^"]+"|"created": \d+')


@pytest.fixture
def checkpoints(tmp_path):
    made = []
    for number in range(3):
        directory = tmp_path / f"v{number}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
        made.append(directory)
    return made


@pytest.fixture(params=["vllm", "sglang"])
def kind(request):
    return request.param


@pytest.fixture(params=[COMPLETIONS, CHAT])
def path(request):
    return request.param


@pytest.fixture
def server(checkpoints, kind):
    with EngineServer(checkpoints[0], kind=kind, seconds_per_token=0.002) as made:
        yield made


@pytest.fixture
def options():
    return {}


@pytest.fixture
def gateway(server, options):
    with GatewayServer(server.url, "127.0.0.1:0", control="127.0.0.1:0", **options) as made:
        training.until(lambda: made.gate.watching)
        yield made


@pytest.fixture
def engine(server, gateway, kind, checkpoints):
    """The engine as its receiver sees it, serving the first version."""
    made = GatedEngine(make_engine(kind, url=server.url), GateClient(gateway.control_url))
    update(made, checkpoints[0], "s/0")
    yield made
    made.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


def update(engine, checkpoint, label, in_flight="wait", timeout=SECONDS):
    engine.pause(in_flight, timeout=timeout)
    engine.load(checkpoint, version=label)
    engine.confirm(label)
    engine.resume()


def body(path, most=4, **more):
    asked = {"messages" if path == CHAT else "prompt": PROMPT[path], "max_tokens": most, "return_token_ids": True}
    return {"model": "m", **asked, **more}


def idle(server, gateway):
    training.until(lambda: gateway.gate.state.in_flight == 0 and server.engine.requests == 0, what="no request")


def ask(url, path, *, arrived=lambda data: None, **more):
    """Ask for an answer; return its status (``None`` where it never began), its bytes, and whether it broke off."""
    data = bytearray()
    status = None
    with httpx.Client(base_url=url, trust_env=False, timeout=SECONDS) as client:
        try:
            with client.stream("POST", path, json=body(path, **more)) as answer:
                status = answer.status_code
                arrived(data)
                for piece in answer.iter_raw():
                    data += piece
                    arrived(data)
        except httpx.TransportError:
            return SimpleNamespace(status=status, data=bytes(data), broke=True)
    return SimpleNamespace(status=status, data=bytes(data), broke=False)


def ask_and_fail(server, url, path, fault, *, stream):
    """Ask for an answer that fails in its middle, once all before that has arrived: a reset may overtake it."""
    here = threading.Event()
    events = 3 if stream else 0

    def arrived(data):
        if data.count(b"\n\n") >= events:
            here.set()

    server.add(AnswerFault(path=path, kind=fault, after=3, hook=lambda: here.wait(SECONDS)))
    answer = ask(url, path, arrived=arrived, most=6, stream=stream)
    assert (server.remaining, here.is_set()) == (0, True)
    return answer


def chunks(data):
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def tokens_of(told):
    return [token for chunk in told for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]


class Stream:
    """A stream that is read by a thread of its own; it ends when the test says so."""

    def __init__(self, pool, gateway, path, **more):
        self.data = b""
        self._changed = threading.Condition()
        self._read = pool.submit(self._run, gateway.url, path, body(path, 100_000, stream=True, **more))

    def _run(self, url, path, asked):
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=SECONDS) as client,
            client.stream("POST", path, json=asked) as answer,
        ):
            for piece in answer.iter_raw():
                with self._changed:
                    self.data += piece
                    self._changed.notify_all()

    def reach(self, more):
        """Wait for so many more events."""
        with self._changed:
            count = self.data.count(b"\n\n") + more
            assert self._changed.wait_for(lambda: self.data.count(b"\n\n") >= count, SECONDS)

    def finish(self, server):
        """Let it end soon; return its chunks."""
        for request in tuple(server.engine._requests):
            request.most_tokens = len(request.tokens) + 5
        self._read.result(SECONDS)
        return chunks(self.data)


def check(told, path, checkpoints):
    """Compare the tokens with those of the versions that they are said to be of; return the spans."""
    made, spans = tokens_of(told), told[-1]["weight_version_spans"]
    for span in spans:
        checkpoint = checkpoints[int(span["version"].removeprefix("s/"))]
        before, own = made[: span["start"]], made[span["start"] : span["end"]]
        wanted = expected_tokens(checkpoint, (*TOKENS[path], *before), len(own))
        assert own == [token.token for token in wanted], span
    assert spans[-1]["end"] == len(made)
    assert told[-1]["weight_version_start"] == spans[0]["version"]
    assert told[-1]["weight_version_end"] == spans[-1]["version"]
    assert len({chunk["id"] for chunk in told}) == 1
    return spans


# Versions


def test_a_stream_kept_over_two_updates_says_of_each_token_which_weights_made_it(
    server, gateway, engine, path, checkpoints, pool
):
    stream = Stream(pool, gateway, path)
    stream.reach(5)
    for version in (1, 2):
        update(engine, checkpoints[version], f"s/{version}", "keep")
        stream.reach(5)
    told = stream.finish(server)
    assert [span["version"] for span in check(told, path, checkpoints)] == ["s/0", "s/1", "s/2"]
    assert told[-1]["choices"][0]["finish_reason"] == "length"


def test_one_that_is_waited_for_or_ended_has_one_version(server, gateway, engine, path, checkpoints, pool):
    for version, in_flight in ((1, "wait"), (2, "abort")):
        stream = Stream(pool, gateway, path, stream_options={"include_usage": True})
        stream.reach(5)
        updating = pool.submit(update, engine, checkpoints[version], f"s/{version}", in_flight)
        if in_flight == "wait":
            training.until(lambda: gateway.gate.shut)
            told = stream.finish(server)
        updating.result(SECONDS)
        told = stream.finish(server)
        assert len(check(told, path, checkpoints)) == 1
        assert told[-1]["weight_version_end"] == f"s/{version - 1}"
        assert told[-1]["usage"]["completion_tokens"] == len(tokens_of(told))
        assert told[-2]["choices"][0]["finish_reason"] == {"wait": "length", "abort": "abort"}[in_flight]
        assert chunks(ask(gateway.url, path, stream=True).data)[-1]["weight_version_start"] == f"s/{version}"


def test_an_answer_that_is_no_stream_says_where_it_began_and_where_it_ended(
    server, gateway, engine, path, checkpoints, pool
):
    sent = pool.submit(ask, gateway.url, path, most=100_000)
    training.until(lambda: server.engine.started == 1)
    update(engine, checkpoints[1], "s/1", "keep")
    for request in tuple(server.engine._requests):
        request.most_tokens = len(request.tokens) + 5
    told = json.loads(sent.result(SECONDS).data)
    assert (told["weight_version_start"], told["weight_version_end"]) == ("s/0", "s/1")
    assert told["usage"]["completion_tokens"] == len(tokens_of([told]))


def test_sglangs_own_generate_has_spans_that_agree_with_its_own_versions(server, gateway, engine, kind, checkpoints):
    if kind != "sglang":
        pytest.skip("vLLM has another call of that kind")
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "stream": True}
    answer = httpx.post(f"{gateway.url}/generate", json=asked, trust_env=False, timeout=SECONDS)
    last = chunks(answer.content)[-1]
    assert last["weight_version_spans"] == [{"version": "s/0", "start": 0, "end": 4}]
    assert last["output_ids"] == [token.token for token in expected_tokens(checkpoints[0], (5, 6, 7), 4)]
    assert "s/0" in last["meta_info"]["weight_version"]


def test_a_version_that_is_not_served_is_refused_and_the_engine_is_not_asked(server, gateway, engine, path):
    asked = len(server.calls)
    for wanted in ({"min_version": 1}, {"exact_version": "t/0"}, {"exact_version": 1, "stream": True}):
        answer = httpx.post(gateway.url + path, json=body(path, **wanted), trust_env=False, timeout=SECONDS)
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert answer.json()["error"]["code"] == "version_not_served"
    assert len(server.calls) == asked
    assert ask(gateway.url, path, min_version=0, exact_version="s/0").status == 200
    assert {"min_version", "exact_version"}.isdisjoint(server.calls[-1].body)


# Nothing else changes


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_asked_and_what_is_answered_pass_as_they_are(server, gateway, engine, path, stream):
    more = {"n": 2, "logprobs": 1, "cache_salt": "mine", "unknown": [1, 2.0, {"é": None}], "stream": stream}
    if stream:
        more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    headers = {"X-Request-Id": "7", "Authorization": "Bearer x"}
    told = []
    for url in (server.url, gateway.url):
        answer = httpx.post(url + path, json=body(path, **more), headers=headers, trust_env=False, timeout=SECONDS)
        assert server.calls[-1].body == body(path, **more)
        assert {name: server.calls[-1].headers[name.lower()] for name in headers} == headers
        told.append(answer)
    direct, through = told
    assert MADE_UP.sub(b"", FIELDS.sub(b"", through.content)) == MADE_UP.sub(b"", direct.content)
    assert through.headers["content-type"] == direct.headers["content-type"]
    if stream:
        last = chunks(through.content)[-1]
        assert last["usage"]["completion_tokens"] == 8
        assert [(span["choice"], span["end"]) for span in last["weight_version_spans"]] == [(0, 4), (1, 4)]


def test_the_first_chunk_arrives_while_the_engine_holds_the_rest(server, gateway, engine, path, pool):
    go_on = threading.Event()
    hold = AnswerFault(path=path, kind=AnswerFaultKind.PAUSE_HERE, after=1, hook=lambda: go_on.wait(SECONDS))
    server.add(hold)
    with (
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=SECONDS) as client,
        client.stream("POST", path, json=body(path, stream=True)) as answer,
    ):
        pieces = answer.iter_raw()
        first = b""
        while b"\n\n" not in first:
            first += next(pieces)
        assert not go_on.is_set()
        go_on.set()
        rest = b"".join(pieces)
    assert first.count(b"\n\n") == 1
    assert rest.endswith(b"data: [DONE]\n\n")


def test_other_paths_and_methods_are_answered_as_the_engine_answers_them(server, gateway, engine, kind):
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("HEAD", "/health"),
        ("GET", "/get_model_info"),
        ("GET", "/v1/completions"),
        ("GET", "/nowhere"),
        ("POST", "/v1/embeddings"),
    ):
        direct, through = (
            httpx.request(method, url + path, trust_env=False, timeout=SECONDS) for url in (server.url, gateway.url)
        )
        assert (through.status_code, through.content) == (direct.status_code, direct.content), path
        for name in ("content-type", "content-length"):
            assert through.headers[name] == direct.headers[name]


@pytest.mark.parametrize("options", [{"salt": True}])
@pytest.mark.parametrize("kind", ["vllm"])
def test_a_salted_prefix_cache_needs_no_flush(server, gateway, engine, path, checkpoints):
    for version in (0, 1):
        if version:
            engine.pause("wait", timeout=SECONDS)
            engine.load(checkpoints[1], version="s/1", keep_kv=True)
            engine.confirm("s/1")
            engine.resume()
        for salt in (None, "mine"):
            told = json.loads(ask(gateway.url, path, cache_salt=salt).data)
            wanted = expected_tokens(checkpoints[version], TOKENS[path], 4)
            assert tokens_of([told]) == [token.token for token in wanted]


# What fails


ANSWERS = [kind for kind in AnswerFaultKind if kind not in (AnswerFaultKind.HANG, AnswerFaultKind.DIE)]
REFUSALS = {
    EngineFaultKind.BAD_REQUEST: 400,
    EngineFaultKind.TOO_MANY_REQUESTS: 429,
    EngineFaultKind.INTERNAL_ERROR: 500,
    EngineFaultKind.GARBAGE: 200,
}


def check_same(direct, through):
    """The client sees what it would have seen without the gateway, but for the fields, and an error more."""
    assert (through.status, through.broke) == (direct.status, direct.broke)
    plain = ERROR.sub(b"", OWN.sub(b"", FIELDS.sub(b"", through.data)))
    plain, said = (MADE_UP.sub(b"", data) for data in (plain, direct.data))
    # What has come of an object that breaks off is no use to anybody.
    assert plain == said or (direct.broke and not through.data)
    if direct.broke and through.data:
        assert json.loads(through.data.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "engine_failed"
    versions = set(re.findall(rb'"s/\d+"', through.data))
    assert versions <= {b'"s/0"'}
    return versions


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_in_its_middle_fails_for_the_client_as_well(
    server, gateway, engine, path, checkpoints, stream
):
    for fault in ANSWERS:
        direct, through = (ask_and_fail(server, url, path, fault, stream=stream) for url in (server.url, gateway.url))
        versions = check_same(direct, through)
        # A stream tells the version, but where there is no place for it; an object where it is whole.
        good = {AnswerFaultKind.PAUSE_HERE, AnswerFaultKind.ERROR_EVENT}
        assert bool(versions) == (fault in good or (stream and fault is not AnswerFaultKind.END_EARLY)), fault
        idle(server, gateway)
        assert ask(gateway.url, path).status == 200
    # Nothing is left that an update would have to wait for.
    update(engine, checkpoints[1], "s/1")
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/1"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_a_call_or_breaks_it_off_does_so_for_the_client(
    server, gateway, engine, path, checkpoints, stream
):
    for fault, status in REFUSALS.items():
        told = []
        for url in (server.url, gateway.url):
            server.add(EngineFault(path=path, kind=fault))
            told.append(httpx.post(url + path, json=body(path, stream=stream), trust_env=False, timeout=SECONDS))
        direct, through = told
        assert (through.status_code, through.content) == (status, direct.content)
        for name in ("content-type", "content-length", "retry-after"):
            assert through.headers.get(name) == direct.headers.get(name)
    for fault in (EngineFaultKind.RESET, EngineFaultKind.LOSE_ANSWER):
        server.add(EngineFault(path=path, kind=fault))
        answer = ask(gateway.url, path, stream=stream)
        assert (answer.status, json.loads(answer.data)["error"]["code"]) == (502, "engine_failed")
    idle(server, gateway)
    update(engine, checkpoints[1], "s/1")
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/1"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_in_the_middle_shuts_the_gate_and_is_loaded_anew(
    server, gateway, engine, path, checkpoints, stream
):
    answer = ask_and_fail(server, gateway.url, path, AnswerFaultKind.DIE, stream=stream)
    assert (answer.status, answer.broke) == (200, True)
    assert b'"length"' not in answer.data
    training.until(lambda: gateway.gate.shut)
    idle(server, gateway)
    server.restart()
    training.until(lambda: gateway.gate.watching)
    update(engine, checkpoints[1], "s/1")
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/1"


def send(url, path, **more):
    """Send a request by a connection of its own, which is returned; nobody reads it."""
    content = json.dumps(body(path, **more)).encode()
    connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_in_the_engine(server, gateway, engine, path, stream):
    with send(gateway.url, path, most=100_000, stream=stream) as connection:
        training.until(lambda: server.engine.started == 1)
        if stream:
            assert connection.recv(1)
        assert gateway.gate.state.in_flight == 1
    idle(server, gateway)


def test_a_client_that_leaves_an_engine_that_hangs_ends_its_request_too(server, gateway, engine, path):
    for fault in (
        EngineFault(path=path, kind=EngineFaultKind.HANG),
        AnswerFault(path=path, kind=AnswerFaultKind.HANG, after=2),
        AnswerFault(path=path, kind=AnswerFaultKind.HANG),
    ):
        met = threading.Event()
        server.add(type(fault)(**{name: getattr(fault, name) for name in fault.__slots__} | {"hook": met.set}))
        with send(gateway.url, path, stream=isinstance(fault, AnswerFault) and fault.after > 0):
            assert met.wait(SECONDS)
            assert gateway.gate.state.in_flight == 1
        idle(server, gateway)


def test_a_request_that_the_engine_never_answers_holds_up_no_update_beyond_its_deadline(
    server, gateway, engine, path, checkpoints, pool
):
    met = threading.Event()
    server.add(EngineFault(path=path, kind=EngineFaultKind.HANG, hook=met.set))
    sent = pool.submit(ask, gateway.url, path, stream=True)
    assert met.wait(SECONDS)
    with pytest.raises(DrainTimeout, match="1 requests have not ended"):
        update(engine, checkpoints[1], "s/1", "wait", timeout=0.2)
    # Others are served meanwhile. An update that keeps what runs need not wait for it, and one that ends it does that.
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/0"
    update(engine, checkpoints[1], "s/1", "keep")
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/1"
    assert gateway.gate.state.in_flight == 1
    update(engine, checkpoints[2], "s/2", "abort")
    answer = sent.result(SECONDS)
    assert (answer.status, json.loads(answer.data)["error"]["code"]) == (503, "weights_updated")
    idle(server, gateway)
    assert json.loads(ask(gateway.url, path).data)["weight_version_start"] == "s/2"
