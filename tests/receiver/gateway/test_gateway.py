"""The gateway between a client and an engine whose every answer the test says."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import training

from deltastore.errors import EngineError, UsageError
from receiver.engines.gated import GateClient
from receiver.gateway.server import GatewayServer

SECONDS = 20
DONE = b"data: [DONE]\n\n"


def chunk(text, finish=None):
    told = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def last(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")][-1]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(20) as made:
        yield made


def post(client, body=None, path="/v1/completions", **options):
    return client.post(path, json={"prompt": "x"} if body is None else body, **options)


def stream(client, body=None, path="/v1/completions"):
    """Read a stream to its end; returns the status and the text."""
    with client.stream("POST", path, json=body or {"prompt": "x", "stream": True}) as answer:
        return answer.status_code, "".join(answer.iter_text())


def running(gate, count):
    training.until(lambda: gate.state().in_flight == count, what=f"{count} requests running")


def held(gateway, count):
    training.until(lambda: gateway.gate.held == count, what=f"{count} requests held")


def metrics(gateway):
    text = httpx.get(f"{gateway.control_url}/metrics", trust_env=False).text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def open_for(gate, label):
    gate.open(label, doubts=gate.state().doubts)


# Passing through


def test_an_answer_gets_the_version_and_nothing_else_changes(engine, opened, client, pool):
    body = b'{"prompt":  "x", "n": 1.0}'
    sent = pool.submit(client.post, "/v1/completions?a=%2F&b", content=body, headers={"X-Mine": "1", "TE": "trailers"})
    call = engine.call()
    assert (call.method, call.target, call.body) == ("POST", b"/v1/completions?a=%2F&b", body)
    assert call.headers["x-mine"] == "1"
    assert "te" not in call.headers
    assert call.headers["accept-encoding"] == "identity"
    assert call.headers["user-agent"].startswith("python-httpx")
    call.answer(b'{"id": 1,  "choices": []}\n', x_engine="7", connection="x-hop", x_hop="1", keep_alive="5")
    answer = sent.result(SECONDS)
    fields = b',"weight_version_start":"s/1","weight_version_end":"s/1"'
    assert answer.content == b'{"id": 1,  "choices": []' + fields + b"}\n"
    assert answer.headers["x-weight-version"] == "s/1"
    assert answer.headers["x-engine"] == "7"
    assert {"x-hop", "keep-alive"}.isdisjoint(answer.headers)
    assert len(answer.headers.get_list("date")) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
def test_other_calls_are_passed_on_as_they_are_and_wait_for_the_gate_too(engine, gateway, gate, client, pool, path):
    sent = pool.submit(client.post, path, json={"min_version": 9})
    held(gateway, 1)
    open_for(gate, "s/1")
    call = engine.call()
    assert json.loads(call.body) == {"min_version": 9}
    call.answer(b'{"a": 1}')
    answer = sent.result(SECONDS)
    assert (answer.content, answer.headers["content-length"]) == (b'{"a": 1}', "8")
    assert answer.headers["x-weight-version"] == "s/1"


def test_reading_needs_no_open_gate(engine, gate, client, pool):
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("HEAD", "/health"), ("OPTIONS", "/v1/x")):
        sent = pool.submit(client.request, method, path)
        call = engine.call()
        assert (call.method, call.target) == (method, path.encode())
        call.answer(b'{"data": 1}' if method != "HEAD" else b"", status=203)
        answer = sent.result(SECONDS)
        assert (answer.status_code, answer.text) == (203, '{"data": 1}' if method != "HEAD" else "")
        assert "x-weight-version" not in answer.headers


CONTROLS = [
    "/pause",
    "/resume",
    "/load",
    "/collective_rpc",
    "/%70ause",
    "//pause/",
    "/v1/../pause",
    "/v1/load_lora_adapter",
    "/update_weights_from_disk",
    "/flush_cache",
    "/reset_prefix_cache",
    "/weight_checker",
    "/sleep",
    "/RESUME",
    "/pull_weights",
    "/release_memory_occupation",
]


def test_nobody_comes_by_here_to_the_engines_controls(gateway, opened, engine):
    for path in CONTROLS:
        for method in ("POST", "GET"):
            with socket.create_connection(("127.0.0.1", httpx.URL(gateway.url).port)) as connection:
                connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
                assert connection.recv(100).startswith(b"HTTP/1.1 403 "), path
    assert engine.calls.empty()


def test_a_stream_passes_at_once_piece_by_piece(engine, opened, client):
    with ThreadPoolExecutor(1) as pool:
        arrived: list[bytes] = []
        told = threading.Semaphore(0)

        def read():
            with client.stream("POST", "/v1/completions", json={}) as answer:
                for data in answer.iter_raw():
                    arrived.append(data)
                    told.release()

        reading = pool.submit(read)
        call = engine.call()
        call.begin("text/event-stream")
        for text in ("a", "b"):
            call.send(chunk(text))
            assert told.acquire(timeout=SECONDS)
            assert arrived[-1] == chunk(text)
        call.send(chunk("", "stop") + DONE)
        call.end()
        reading.result(SECONDS)
        assert last(b"".join(arrived).decode())["weight_version_spans"] == [{"version": "s/1", "start": 0, "end": 2}]
        assert arrived[-1].endswith(DONE)


def test_errors_of_the_engine_pass_as_they_are(engine, opened, client, pool):
    sent = pool.submit(post, client)
    engine.call().answer(b'{"error": 1}', status=400)
    answer = sent.result(SECONDS)
    assert (answer.status_code, answer.content) == (400, b'{"error": 1}')
    assert answer.headers["x-weight-version"] == "s/1"


@pytest.mark.parametrize("options", [{"most_body": 1000}])
def test_a_body_too_large_is_refused_and_one_in_pieces_too(engine, opened, client, pool):
    answer = client.post("/v1/completions", content=b"x" * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert client.post("/v1/completions", content=iter([b"x" * 600] * 2)).status_code == 413
    sent = pool.submit(client.post, "/v1/completions", content=b"x" * 1000)
    engine.call().answer(b"{}")
    assert sent.result(SECONDS).json()["weight_version_start"] == "s/1"


@pytest.mark.parametrize("options", [{"salt": True}])
def test_the_prefix_cache_is_salted_by_version(engine, opened, client, pool):
    salts = []
    for version in (1, 1, 2):
        open_for(opened, f"s/{version}")
        sent = pool.submit(post, client, {"prompt": "x", "cache_salt": "mine"})
        call = engine.call()
        salts.append(json.loads(call.body)["cache_salt"])
        call.answer(b"{}")
        sent.result(SECONDS)
    assert salts[0] == salts[1] != salts[2]
    sent = pool.submit(post, client, path="/generate")
    call = engine.call()
    assert json.loads(call.body) == {"prompt": "x"}
    call.answer(b"{}")
    sent.result(SECONDS)


# What may answer


def test_a_version_that_is_not_served_is_refused_with_when_to_come_back(engine, opened, client, pool, gateway):
    for body in ({"min_version": 2}, {"exact_version": "s/0"}, {"min_version": "t/1"}):
        answer = post(client, {"prompt": "x", **body})
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert answer.json()["error"]["code"] == "version_not_served"
        assert answer.headers["x-weight-version"] == "s/1"
    assert post(client, headers={"X-Min-Version": "2"}).status_code == 409
    assert post(client, {"min_version": -1}).status_code == 400
    assert metrics(gateway)['gateway_refused_total{reason="version_not_served"}'] == 4
    sent = pool.submit(post, client, {"prompt": "x", "min_version": "s/1", "exact_version": 1})
    call = engine.call()
    assert json.loads(call.body) == {"prompt": "x"}
    call.answer(b"{}")
    assert sent.result(SECONDS).status_code == 200


def test_one_that_waits_for_an_update_is_asked_for_its_version_afterwards(engine, opened, gateway, client, pool):
    opened.shut()
    wants, stale = (pool.submit(post, client, {name: 2}) for name in ("min_version", "exact_version"))
    old = pool.submit(post, client, {"exact_version": 1})
    held(gateway, 3)
    open_for(opened, "s/2")
    for _ in range(2):
        engine.call().answer(b"{}")
    for sent in (wants, stale):
        assert sent.result(SECONDS).json()["weight_version_start"] == "s/2"
    assert old.result(SECONDS).status_code == 409


# The gate


@pytest.mark.parametrize("options", [{"hold": 0.1}])
def test_while_the_gate_is_shut_requests_wait_and_then_are_told_to_come_back(opened, client, gateway, engine, pool):
    opened.shut()
    answer = post(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "held"
    assert httpx.get(f"{gateway.control_url}/readyz", trust_env=False).status_code == 503
    open_for(opened, "s/1")
    assert httpx.get(f"{gateway.control_url}/readyz", trust_env=False).status_code == 200
    assert gateway.gate.held == 0
    assert engine.calls.empty()
    assert metrics(gateway)["gateway_shut_seconds_count"] == 2


def test_shutting_waits_for_those_that_run_but_not_longer_than_it_is_told(engine, opened, client, pool):
    sent = pool.submit(post, client)
    call = engine.call()
    started = time.monotonic()
    assert opened.shut(deadline=0.2).in_flight == 1
    assert 0.2 <= time.monotonic() - started < 5
    drained = pool.submit(opened.shut, deadline=SECONDS)
    call.answer(b"{}")
    assert drained.result(SECONDS).in_flight == 0
    assert sent.result(SECONDS).json()["weight_version_end"] == "s/1"


def test_those_that_are_cut_are_told(engine, opened, client, pool):
    answers = [pool.submit(stream, client, {"n": n}) for n in range(3)]
    calls = sorted((engine.call() for _ in answers), key=lambda call: json.loads(call.body)["n"])
    calls[0].begin("text/event-stream")
    calls[0].send(chunk("a"))
    calls[1].begin("application/x-ndjson")
    calls[1].send(b'{"token": 7}\n{"tok')
    training.until(lambda: opened.state().in_flight == 3)
    assert opened.shut(cut=True, deadline=0.2).in_flight == 0
    assert all(call.left.wait(SECONDS) for call in calls)
    status, text = answers[0].result(SECONDS)
    assert (status, last(text)["error"]["code"]) == (200, "weights_updated")
    assert last(text)["weight_version_spans"] == [{"version": "s/1", "start": 0, "end": 1}]
    assert json.loads(answers[1].result(SECONDS)[1].splitlines()[-1])["error"]["code"] == "weights_updated"
    assert answers[2].result(SECONDS)[0] == 503


def test_a_stream_that_is_kept_over_an_update_says_which_tokens_are_whose(engine, opened, client, pool, gateway):
    arrived: list[str] = []

    def read():
        with client.stream("POST", "/v1/completions", json={}) as answer:
            for line in answer.iter_lines():
                arrived.append(line)  # noqa: PERF402 - the test looks at it meanwhile

    reading = pool.submit(read)
    call = engine.call()
    call.begin("text/event-stream")
    call.send(chunk("a") + chunk("b"))
    opened.shut()
    call.send(chunk("c"))  # was on its way
    training.until(lambda: '"c"' in "".join(arrived))
    opened.settle("s/2")
    call.send(chunk("d"))
    open_for(opened, "s/2")
    call.send(chunk("e", "stop") + DONE)
    call.end()
    reading.result(SECONDS)
    told = last("\n".join(arrived))
    assert (told["weight_version_start"], told["weight_version_end"]) == ("s/1", "s/2")
    assert told["weight_version_spans"] == [
        {"version": "s/1", "start": 0, "end": 3},
        {"version": "s/2", "start": 3, "end": 5},
    ]
    training.until(lambda: metrics(gateway)["gateway_over_updates_total"] == 1)


def test_what_unconfirmed_weights_made_is_kept_back_and_thrown_away_if_they_are_refused(engine, opened, client, pool):
    arrived = []
    told = threading.Semaphore(0)

    def read():
        with client.stream("POST", "/v1/completions", json={}) as answer:
            for line in answer.iter_lines():
                arrived.append(line)
                told.release()

    reading = pool.submit(read)
    ended = pool.submit(post, client)
    one, other = engine.call(), engine.call()
    call, whole = (one, other) if json.loads(one.body) == {} else (other, one)
    call.begin("text/event-stream")
    call.send(chunk("old"))
    assert told.acquire(timeout=SECONDS)
    opened.shut()
    opened.settle("s/2")
    call.send(chunk("wrong"))
    whole.answer(b'{"text": "wrong"}')  # an answer that came whole meanwhile
    running(opened, 1)
    opened.settle("s/1")
    open_for(opened, "s/1")
    reading.result(SECONDS)
    assert "wrong" not in "".join(arrived)
    assert last("\n".join(arrived))["error"]["code"] == "weights_updated"
    assert call.left.wait(SECONDS)
    assert ended.result(SECONDS).status_code == 503


def test_one_that_takes_only_a_version_is_not_kept_over_another(engine, opened, client, pool):
    exact, free = (pool.submit(post, client, body) for body in ({"exact_version": 1}, {"free": 1}))
    calls = [engine.call(), engine.call()]
    opened.shut()
    opened.settle("s/2")
    running(opened, 1)
    open_for(opened, "s/2")
    for call in calls:
        call.answer(b"{}")
    assert exact.result(SECONDS).status_code == 503
    told = free.result(SECONDS).json()
    assert (told["weight_version_start"], told["weight_version_end"]) == ("s/1", "s/2")


def test_an_engine_that_goes_on_although_it_was_paused_is_not_settled(engine, opened, client, pool, monkeypatch):
    monkeypatch.setattr("receiver.gateway.gate._SETTLE_SECONDS", 0.3)
    answer = pool.submit(stream, client)
    call = engine.call()
    call.begin("text/event-stream")
    opened.shut()
    settling = pool.submit(opened.settle, "s/2")
    while not settling.done():
        call.send(b": ping\n\n")
        time.sleep(0.01)
    with pytest.raises(EngineError, match="its answers go on"):
        settling.result()
    open_for(opened, "s/1")
    with pytest.raises(EngineError, match="gate is open"):
        opened.settle("s/2")
    call.end()
    answer.result(SECONDS)


def test_a_reader_that_is_slow_holds_up_no_update_and_gets_it_all(engine, opened, gateway, pool):
    port = httpx.URL(gateway.url).port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        call = engine.call()
        call.begin("text/event-stream")
        block = chunk("x" * 100_000)
        for _ in range(200):
            call.send(block)
        call.send(chunk("", "stop") + DONE)
        call.end()
        # More than the gateway takes while nobody reads and the gate is open.
        time.sleep(0.3)
        assert opened.state().in_flight == 1
        assert opened.shut(deadline=SECONDS).in_flight == 0
        open_for(opened, "s/2")
        received = b""
        while b'"weight_version_end":"s/1"' not in received[-2000:]:
            data = connection.recv(1 << 20)
            assert data
            received += data
        assert received.count(b"x" * 100) >= 200


def test_a_client_that_leaves_ends_its_request_in_the_engine(engine, opened, gateway):
    port = httpx.URL(gateway.url).port
    for begun in (False, True):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            call = engine.call()
            if begun:
                call.begin("text/event-stream")
                call.send(chunk("a"))
                assert connection.recv(10)
        assert call.left.wait(SECONDS)
    running(opened, 0)
    training.until(lambda: metrics(gateway)["gateway_left_total"] == 2)


def test_a_client_that_leaves_while_it_waits_never_reaches_the_engine(engine, gate, gateway):
    with httpx.Client(base_url=gateway.url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={}, timeout=0.3)
    held(gateway, 0)
    open_for(gate, "s/1")
    assert engine.calls.empty()
    training.until(lambda: metrics(gateway)["gateway_left_total"] == 1)


def test_an_engine_that_breaks_off_ends_in_an_error_and_a_broken_connection_and_not_in_a_wait(
    engine, opened, client, pool
):
    answers = [pool.submit(until_it_breaks, client, {"n": n}) for n in range(4)]
    calls = sorted((engine.call() for _ in answers), key=lambda call: json.loads(call.body)["n"])
    calls[0].begin("text/event-stream")
    calls[0].send(chunk("a"))
    calls[1].begin("application/x-ndjson")
    calls[1].send(b'{"token": 1}\n{"tok')
    calls[2].begin("application/json")
    calls[2].send(b'{"a": [1,')
    for call in calls:
        call.die()
    status, text, broke = answers[0].result(SECONDS)
    assert (status, last(text)["error"]["code"], broke) == (200, "engine_failed", True)
    assert "[DONE]" not in text
    status, text, broke = answers[1].result(SECONDS)
    assert (status, json.loads(text.splitlines()[-1])["error"]["code"], broke) == (200, "engine_failed", True)
    assert answers[2].result(SECONDS) == (200, "", True)
    status, text, broke = answers[3].result(SECONDS)
    assert (status in (500, 502), broke) == (True, False)
    running(opened, 0)


def until_it_breaks(client, body):
    """Read an answer; returns the status, what came, and whether it broke off."""
    text = ""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        try:
            for piece in answer.iter_text():
                text += piece
        except httpx.RemoteProtocolError:
            return answer.status_code, text, True
    return answer.status_code, text, False


def test_what_an_engine_compresses_all_the_same_passes_as_it_is(engine, opened, client, pool):
    sent = pool.submit(post, client)
    data = gzip.compress(b'{"a": 1}')
    engine.call().answer(data, content_encoding="gzip")
    answer = sent.result(SECONDS)
    assert (answer.json(), answer.headers["content-length"]) == ({"a": 1}, str(len(data)))
    assert answer.headers["x-weight-version"] == "s/1"


def test_what_a_client_takes_compressed_is_asked_for_only_where_nothing_is_added(engine, opened, client, pool):
    for path, asked in (("/v1/chat/completions", "identity"), ("/v1/embeddings", "br;q=1, gzip")):
        sent = pool.submit(client.post, path, json={}, headers={"Accept-Encoding": "br;q=1, gzip"})
        call = engine.call()
        assert call.headers["accept-encoding"] == asked
        call.answer(b"{}")
        sent.result(SECONDS)


def timers(local, remote):
    """Return the kernel's timer of each open connection from or to a port: 01 sends again, 02 keeps alive."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [(int(row[1][-4:], 16), int(row[2][-4:], 16), row[5][:2]) for row in rows if row[3] == "01"]
    return [timer for near, far, timer in ports if local in (None, near) and remote in (None, far)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's timers are shown there")
def test_on_both_sides_of_a_request_the_kernel_asks_whether_the_host_is_still_there(
    engine, opened, gateway, client, pool
):
    """Nothing may be said for as long as an engine thinks, and a host that is gone says nothing either."""
    sent = pool.submit(post, client)
    call = engine.call()
    to_engine, to_client = httpx.URL(engine.url).port, httpx.URL(gateway.url).port
    # One to the engine is only watched.
    training.until(lambda: timers(None, to_engine) == ["02"] * 2)
    training.until(lambda: timers(to_client, None) == ["02"])
    call.answer(b"{}")
    sent.result(SECONDS)


# The engine's life, and the gateway's


def test_an_engine_that_ends_shuts_the_gate_until_the_receiver_has_looked(engine, opened, gateway):
    before = opened.state()
    engine.__exit__(None, None, None)
    training.until(lambda: opened.state().shut)
    after = opened.state()
    assert after.doubts == before.doubts + 1
    assert not after.watching
    for doubts in (before.doubts, after.doubts):
        with pytest.raises(EngineError, match="lost the engine"):
            opened.open("s/1", doubts=doubts)


def test_an_engine_out_of_reach_is_a_bad_gateway():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with GatewayServer(f"http://127.0.0.1:{port}", "127.0.0.1:0", control="127.0.0.1:0") as made:
        answer = httpx.get(f"{made.url}/v1/models", trust_env=False, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_unreachable")


def test_a_gateway_that_starts_wakes_the_receiver(engine):
    with type(engine)() as receiver:
        made = GatewayServer(
            engine.url, "127.0.0.1:0", control="127.0.0.1:0", receiver=receiver.url, control_token="t" * 8
        )
        with made:
            call = receiver.call()
            assert (call.method, call.target) == ("POST", b"/wake")
            assert call.headers["authorization"] == "Bearer tttttttt"
            call.answer(b"{}")


ORDERS = {
    "no JSON": ("/gate/open", b"{"),
    "no version": ("/gate/open", b"{}"),
    "an odd label": ("/gate/settle", b'{"version": "a b"}'),
    "a long label": ("/gate/settle", json.dumps({"version": "x" * 257}).encode()),
    "a negative time": ("/gate/shut", b'{"deadline": -1}'),
    "unknown": ("/gate/shut", b'{"soon": true}'),
    "too long": ("/gate/shut", b" " * 2000),
}


def test_what_is_no_order_changes_nothing(gateway, opened):
    for name, (path, body) in ORDERS.items():
        answer = httpx.post(gateway.control_url + path, content=body, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "usage"), name
        assert not opened.state().shut


def test_web_pages_give_no_orders(gateway, opened):
    answer = httpx.post(f"{gateway.control_url}/gate/shut", headers={"Origin": "http://x"}, trust_env=False)
    assert answer.status_code == 400
    assert not opened.state().shut


def test_both_addresses_ask_for_their_tokens(engine):
    tokens = {"token": "client", "control_token": "receiver"}
    with GatewayServer(engine.url, "127.0.0.1:0", control="127.0.0.1:0", **tokens) as made:
        assert httpx.get(f"{made.url}/v1/models", trust_env=False).status_code == 401
        for name in tokens.values():
            client = GateClient(made.control_url, token=name)
            if name == "client":
                with pytest.raises(EngineError, match="needs a token"):
                    client.state()
            else:
                assert client.state().shut
            client.close()


@pytest.mark.parametrize(
    ("engine_url", "listen", "control"),
    [
        ("ftp://x", "127.0.0.1:0", "127.0.0.1:0"),
        ("http://", "127.0.0.1:0", "127.0.0.1:0"),
        ("http://127.0.0.1:1", "0.0.0.0:0", "127.0.0.1:0"),
        ("http://127.0.0.1:1", "127.0.0.1:0", "0.0.0.0:0"),
        ("http://127.0.0.1:1", "127.0.0.1:0", "nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused(engine_url, listen, control):
    with pytest.raises(UsageError):
        GatewayServer(engine_url, listen, control=control)
