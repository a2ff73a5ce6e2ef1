"""An engine seen through its gateway: the contract, and the order in which gate and engine are told."""

from __future__ import annotations

import socket

import httpx
import pytest
import training

from deltastore.errors import DrainTimeout, EngineError, UsageError
from receiver.engines.base import EngineInfo, Probe
from receiver.engines.gated import GateClient, GatedEngine, behind_gateway
from receiver.gateway.server import GatewayServer
from receiver.http_server import HttpServer

SECONDS = 20


class Inner:
    """An engine that notes what it is told; ``probes_paused`` as the test says."""

    def __init__(self, *, probes_paused=False):
        self.probes_paused = probes_paused
        self.told = []
        self.incarnation, self.version, self.paused = "one", None, False
        self.fails = None

    def restart(self):
        self.incarnation, self.version, self.paused = "two", None, False

    def _tell(self, what):
        self.told.append(what)
        if self.fails == what.split()[0]:
            raise EngineError(f"{what} failed")

    def info(self):
        return EngineInfo(self.incarnation, self.version, self.paused)

    def pause(self, in_flight="wait", *, timeout=None):
        self._tell(f"pause {in_flight}")
        self.paused = True

    def load(self, checkpoint, *, version, keep_kv=False):
        if not self.paused:
            raise EngineError("not paused")
        self.version = None
        self._tell(f"load {version}")
        self.version = version

    def confirm(self, version):
        self._tell("confirm")

    def probe(self):
        assert self.probes_paused or not self.paused
        self._tell("probe")
        return Probe((-1.0,))

    def resume(self):
        self._tell("resume")
        self.paused = False

    def close(self):
        pass


class _Silent(HttpServer):
    def _app(self):
        async def app(scope, receive, send):
            await receive()
            if scope["path"] == "/hang":
                await receive()  # until the client leaves
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        return app


@pytest.fixture
def listening():
    with _Silent("127.0.0.1:0", token=None, token_name="", name="engine") as made:
        yield made


@pytest.fixture
def gateway(listening):
    with GatewayServer(listening.url, "127.0.0.1:0", control="127.0.0.1:0", hold=0.1) as made:
        training.until(lambda: made.gate.watching)
        yield made


@pytest.fixture
def inner():
    return Inner()


@pytest.fixture
def engine(inner, gateway):
    made = GatedEngine(inner, GateClient(gateway.control_url, patience=0.1))
    yield made
    made.close()


def activate(engine, version, *, in_flight="wait"):
    engine.pause(in_flight)
    engine.load("/x", version=version)
    engine.confirm(version)
    probe = engine.probe()
    engine.resume()
    return probe


def status(gateway):
    return httpx.post(f"{gateway.url}/v1/completions", json={}, trust_env=False).status_code


def test_an_engine_that_cannot_be_probed_paused_is_probed_behind_the_shut_gate(engine, inner, gateway):
    seen = []
    inner.probe = lambda: seen.append((gateway.gate.shut, inner.paused, status(gateway))) or Probe((-1.0,))
    assert engine.probes_paused
    assert activate(engine, "s/1") == Probe((-1.0,))
    assert seen == [(True, False, 503)]
    assert inner.told == ["pause wait", "load s/1", "confirm", "resume", "pause abort", "resume"]
    assert (gateway.gate.shut, gateway.gate.version, status(gateway)) == (False, "s/1", 200)
    assert engine.info() == EngineInfo("one", "s/1", paused=False)


def test_a_probe_that_fails_leaves_it_paused_and_the_gate_shut(engine, inner, gateway):
    activate(engine, "s/1")
    engine.pause("keep")
    engine.load("/x", version="s/2")
    inner.fails = "probe"
    with pytest.raises(EngineError):
        engine.probe()
    assert (inner.paused, gateway.gate.shut) == (True, True)
    inner.fails = None
    engine.load("/x", version="s/1")
    assert engine.probe()
    engine.resume()
    assert (gateway.gate.version, gateway.gate.shut) == ("s/1", False)
    assert inner.told.count("pause keep") == 3


def test_an_engine_that_can_be_probed_paused_stays_paused(engine, inner):
    inner.probes_paused = True
    activate(engine, "s/1")
    assert inner.told == ["pause wait", "load s/1", "confirm", "probe", "resume"]


def test_while_it_serves_it_is_probed_as_it_is(engine, inner, gateway):
    activate(engine, "s/1")
    assert engine.probe() == Probe((-1.0,))
    assert not gateway.gate.shut
    inner.paused = True
    assert engine.probe() is None


def test_a_pause_that_fails_leaves_the_gate_to_the_next_look(engine, inner, gateway):
    activate(engine, "s/1")
    inner.fails = "pause"
    with pytest.raises(EngineError):
        engine.pause("keep")
    assert gateway.gate.shut
    engine.resume()
    assert not engine.info().paused
    assert not gateway.gate.shut


def test_requests_that_do_not_end_in_time_open_the_gate_again(engine, inner, gateway, monkeypatch):
    activate(engine, "s/1")
    with socket.create_connection(("127.0.0.1", httpx.URL(gateway.url).port)) as connection:
        connection.sendall(b"POST /hang HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        training.until(lambda: gateway.gate.state.in_flight == 1)
        with pytest.raises(DrainTimeout):
            engine.pause("wait", timeout=0.1)
        assert not gateway.gate.shut
        assert inner.told[-1] == "resume"
        assert not engine.info().paused
        # Another way with them, as an operator may have it.
        engine.pause("keep")
        assert (gateway.gate.shut, gateway.gate.state.in_flight, inner.paused) == (True, 1, True)
        engine.load("/x", version="s/2")
        engine.resume()
        assert gateway.gate.state.in_flight == 1
        monkeypatch.setattr("receiver.engines.gated._ABORT_SECONDS", 0.1)
        engine.pause("abort")
        assert gateway.gate.state.in_flight == 0
        assert connection.recv(20).startswith(b"HTTP/1.1 503 ")


def test_an_engine_of_unknown_weights_counts_as_paused_until_it_is_activated(engine, inner, gateway):
    assert engine.info() == EngineInfo("one", None, paused=True)
    assert status(gateway) == 503
    inner.version = "s/1"  # of another receiver, that is gone
    assert engine.info().paused
    activate(engine, "s/1")
    assert not engine.info().paused


def test_a_gateway_that_lost_the_engine_from_sight_opens_for_the_same_one_only(engine, inner, gateway):
    activate(engine, "s/1")
    gateway.gate.doubt()
    gateway.gate.watching = True
    assert not engine.info().paused
    assert not gateway.gate.shut
    gateway.gate.doubt()
    gateway.gate.watching = True
    inner.restart()
    assert engine.info() == EngineInfo("two", None, paused=True)
    assert gateway.gate.shut
    activate(engine, "s/1")
    assert not gateway.gate.shut


def test_an_engine_that_restarted_while_the_gate_is_open_shuts_it(engine, inner, gateway):
    activate(engine, "s/1")
    inner.restart()
    assert engine.info().paused
    assert gateway.gate.shut


def test_an_engine_lost_between_load_and_resume_stays_behind_the_gate(engine, inner, gateway):
    engine.pause()
    engine.load("/x", version="s/1")
    gateway.gate.doubt()
    gateway.gate.watching = True
    engine.resume()
    assert gateway.gate.shut
    # The same engine after all, as a look shows.
    assert not engine.info().paused
    assert not gateway.gate.shut


def test_an_engine_that_serves_something_else_after_the_resume_stays_behind_the_gate(engine, inner, gateway):
    engine.pause()
    engine.load("/x", version="s/1")
    inner.restart()
    with pytest.raises(EngineError, match="does not serve what"):
        engine.resume()
    assert gateway.gate.shut


def test_a_gateway_out_of_reach_is_an_engine_error_and_the_engine_stays_as_it_is(inner):
    engine = GatedEngine(inner, GateClient("http://127.0.0.1:1", patience=0.0))
    for call in (engine.info, engine.pause):
        with pytest.raises(EngineError, match="no answer"):
            call()
    assert inner.told == []
    engine.close()


@pytest.mark.parametrize("answer", ["[]", "{}", "<html>", '{"error": 3}'])
@pytest.mark.parametrize("code", [200, 409])
def test_what_answers_and_is_no_gateway_is_an_engine_error(inner, answer, code):
    transport = httpx.MockTransport(lambda _: httpx.Response(code, text=answer))
    engine = GatedEngine(inner, GateClient("http://x", transport=transport))
    with pytest.raises(EngineError):
        engine.info()


def test_no_gateway_no_change(inner):
    assert behind_gateway(inner, None) is inner
    with pytest.raises(UsageError):
        behind_gateway(inner, "127.0.0.1:9331")
