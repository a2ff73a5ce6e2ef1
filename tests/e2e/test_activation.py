"""Activations with real processes: engines killed in every state, and what becomes of requests that run."""

from __future__ import annotations

import http.server
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import training
from engines import holds, ready, save, serve

from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED
from tools.demo.serving import build

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"


class Between(http.server.ThreadingHTTPServer):
    """Passes calls on to an engine; ``at`` does something once, before or after one of them."""

    daemon_threads = True

    def __init__(self, url):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.engine = url
        self.at = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        self.client.close()


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._pass_on()

    def do_POST(self):
        self._pass_on()

    def _pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self._do("before")
            answer = self.server.client.request(self.command, self.path, content=body)
            self._do("after")
        except (httpx.HTTPError, ConnectionAbortedError):
            self.close_connection = True
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def _do(self, when):
        if something := self.server.at.pop((self.path, when), None):
            something()
            raise ConnectionAbortedError

    def log_message(self, *_):
        pass


MOMENTS = [(path, "after") for path in ("/pause", "/load", "/probe", "/resume")]
MOMENTS += [(path, "before") for path in ("/pause", "/load", "/confirm", "/probe", "/resume")] if THOROUGH else []


def test_an_engine_killed_in_any_state_is_loaded_and_confirmed_before_it_is_ready(stream, follow):
    process, url = serve(stream)
    try:
        with Between(url) as between:
            command, status = follow(between.url)
            ready(status, 1, command)
            for version, moment in enumerate(MOMENTS, start=2):
                seen = []

                def kill():
                    nonlocal process
                    process.kill()
                    process.wait()
                    seen.append(status()["ready"])  # noqa: B023 - called within the round
                    process, again = serve(stream, port=int(url.rpartition(":")[2]))
                    assert again == url
                    seen.append(status()["ready"])  # noqa: B023

                between.at[moment] = kill
                stream.publish()
                ready(status, version, command)
                assert seen == [False, False], moment
                info = httpx.get(f"{url}/info", trust_env=False).json()
                assert (info["version"], info["paused"]) == (stream.label(version), False)
                assert info["weights_digest"] == digest(stream, version), moment
    finally:
        process.kill()
        process.wait()


def fresh(stream, version):
    """Return an engine that was started on a version, and its model."""
    model = build(stream.base, "bf16")
    made = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
    made.prime(save(stream, version))
    return made, model


def digest(stream, version):
    return fresh(stream, version)[0].weights_digest()


class Asked:
    """A stream of tokens being read."""

    def __init__(self, url, pool, count):
        self.lines = []
        self.result = pool.submit(self._read, url, count)
        training.until(lambda: len(self.lines) > 4 or self.result.done(), what="tokens")

    def _read(self, url, count):
        body = {"prompt": "def ", "max_tokens": count}
        with httpx.stream("POST", f"{url}/generate", json=body, trust_env=False, timeout=120) as answer:
            for line in answer.iter_lines():
                self.lines.append(json.loads(line))
        return self.lines[-1]

    @property
    def tokens(self):
        return [line["token"] for line in self.lines if "token" in line]


@pytest.fixture
def served(stream):
    """An engine in this process with room for several streams."""
    model = build(stream.base, "bf16")
    made = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
    made.prime(stream.base)
    with serve_in_thread(EngineApp(made, model, streams=4)) as made.url, ThreadPoolExecutor(4) as made.pool:
        yield made


def test_waiting_lets_running_streams_end_and_holds_new_ones(stream, follow, served):
    command, status = follow(served.url, "--in-flight", "wait", "--drain-deadline", 120)
    ready(status, 1, command)
    running = [Asked(served.url, served.pool, 1200) for _ in range(2)]
    stream.publish()
    training.until(lambda: status()["activation"] == "draining", what="a drain")
    late = served.pool.submit(Asked, served.url, served.pool, 5)
    for one in running:
        assert one.result.result(60) == {
            "finish_reason": "length",
            "spans": [{"version": stream.label(1), "start": 0, "end": 1200}],
        }
    ready(status, 2, command)
    spans = late.result(60).result.result(60)["spans"]
    assert spans == [{"version": stream.label(2), "start": 0, "end": 5}]
    assert status()["stages"]["drain"] > 0


def test_aborting_ends_running_streams_with_a_word(stream, follow, served):
    command, status = follow(served.url, "--in-flight", "abort")
    ready(status, 1, command)
    running = [Asked(served.url, served.pool, 1_000_000) for _ in range(2)]
    stream.publish()
    for one in running:
        last = one.result.result(60)
        assert last["finish_reason"] == "abort"
        assert last["spans"] == [{"version": stream.label(1), "start": 0, "end": len(one.tokens)}]
    ready(status, 2, command)
    assert holds(served, 2)


def test_keeping_goes_on_under_new_weights_as_a_fresh_engine_would(stream, follow, served):
    command, status = follow(served.url, "--in-flight", "keep")
    ready(status, 1, command)
    running = [Asked(served.url, served.pool, 1500) for _ in range(2)]
    stream.publish()
    ready(status, 2, command)
    engine, model = fresh(stream, 2)
    for one in running:
        last = one.result.result(90)
        assert last["finish_reason"] == "length"
        old, new = last["spans"]
        assert (old["version"], old["start"], old["end"]) == (stream.label(1), 0, new["start"])
        assert (new["version"], new["end"]) == (stream.label(2), 1500)
        # Nothing that was computed under the old weights is used: it goes on as if it began there.
        switch = new["start"]
        generation = model.generate([*model.encode("def "), *one.tokens[:switch]], temperature=0.0, seed=0)
        with engine.forward() as weights:
            expected = [generation.step(weights.caches).token for _ in range(30)]
        assert one.tokens[switch : switch + 30] == expected


def test_giving_up_at_the_deadline_leaves_the_old_version_serving(stream, follow, served):
    command, status = follow(
        served.url, "--in-flight", "wait", "--drain-deadline", 0.1, "--at-deadline", "give-up", "--poll", 0.2
    )
    ready(status, 1, command)
    endless = Asked(served.url, served.pool, 1_000_000)
    stream.publish()
    training.until(lambda: (status()["error"] or {}).get("kind") == "drain-timeout")
    record = status()
    assert (record["serving"], record["ready"]) == (1, False)
    count = len(endless.lines)
    training.until(lambda: len(endless.lines) > count + 5, what="more tokens")
    served.pause("abort")  # an operator's doing
    assert endless.result.result(60)["finish_reason"] == "abort"
    ready(status, 2, command)
