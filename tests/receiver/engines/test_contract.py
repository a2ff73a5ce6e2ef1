from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import training

from receiver.engines import make_engine
from receiver.engines.base import EngineInfo
from receiver.engines.gated import GateClient, GatedEngine
from receiver.engines.none import NoEngine
from receiver.engines.torch_module import TorchModuleEngine
from receiver.gateway.server import GatewayServer
from receiver.testing.engine_contract import EngineContract
from receiver.testing.engine_server import EngineServer
from receiver.testing.streams import CompletionStream
from tools.demo.model import TIED
from tools.demo.serving import build

NO_REQUEST = {"running": False, "aborted": False}
HOOKS = Path(__file__).with_name("hooks.py")


class Checkpoints(EngineContract):
    @pytest.fixture
    def checkpoints(self, tiny_checkpoints):
        return tiny_checkpoints


class TestNoEngine(Checkpoints):
    checks = False
    probes = False

    @pytest.fixture
    def engine(self):
        return NoEngine()


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block"])
class TestTorchModuleEngine(Checkpoints):
    @pytest.fixture
    def engine(self, tiny_checkpoints, scheme):
        model = build(tiny_checkpoints[0], scheme)
        return TorchModuleEngine(model.module, scheme=scheme, mapping=TIED, probe=model.probe)


class Streamed(CompletionStream):
    """A request of a few seconds, unless it is brought to its end."""

    def __init__(self, server, url=None):
        super().__init__(url or server.url, (5, 6, 7), most_tokens=100_000)
        self._engine = server.engine
        assert self.reach(1)

    def finish(self):
        for request in self._engine._requests:
            request.most_tokens = len(request.tokens) + 5


class OfServers(Checkpoints):
    @pytest.fixture
    def start_request(self, server):
        return lambda: Streamed(server)


@pytest.mark.parametrize("extension", ["no", "yes"])
class TestVllmEngine(OfServers):
    @pytest.fixture
    def server(self, tiny_checkpoints, extension):
        with EngineServer(tiny_checkpoints[0], kind="vllm", extension=extension == "yes") as server:
            yield server

    @pytest.fixture
    def engine(self, server, extension):
        engine = make_engine("vllm", url=server.url, options={"extension": extension})
        yield engine
        engine.close()


class TestSglangEngine(OfServers):
    @pytest.fixture
    def server(self, tiny_checkpoints):
        with EngineServer(tiny_checkpoints[0], kind="sglang") as server:
            yield server

    @pytest.fixture
    def engine(self, server):
        engine = make_engine("sglang", url=server.url)
        yield engine
        engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
class TestGatedEngine(OfServers):
    """Behind a gateway, which clients ask too. It is shut until the first version is served."""

    version_at_first = "s/0"

    @pytest.fixture
    def server(self, tiny_checkpoints, kind):
        with (
            EngineServer(tiny_checkpoints[0], kind=kind) as server,
            GatewayServer(server.url, "127.0.0.1:0", control="127.0.0.1:0") as server.gateway,
        ):
            yield server

    @pytest.fixture
    def engine(self, server, kind, tiny_checkpoints):
        engine = GatedEngine(make_engine(kind, url=server.url), GateClient(server.gateway.control_url))
        training.until(lambda: server.gateway.gate.watching)
        assert engine.info() == EngineInfo(engine.info().incarnation, None, paused=True)
        engine.pause()
        engine.load(tiny_checkpoints[0], version="s/0")
        engine.resume()
        yield engine
        engine.close()

    @pytest.fixture
    def start_request(self, server):
        return lambda: Streamed(server, server.gateway.url)


class HookedRequest:
    """The one request of tests/receiver/engines/hooks.py; only its end can be seen."""

    def __init__(self, state):
        self.tokens = []
        self._state = state
        self._set(running=True)

    def reach(self, count, *, timeout=0.0):
        return json.loads(self._state.read_bytes())["running"]

    def finish(self):
        self._set(running=False)

    def outcome(self, *, timeout=0.0):
        return "abort" if json.loads(self._state.read_bytes())["aborted"] else "length"

    def _set(self, **what):
        draft = self._state.with_suffix(".draft")
        draft.write_text(json.dumps(json.loads(self._state.read_bytes()) | what))
        draft.replace(self._state)


@pytest.mark.parametrize("asks", [True, False], ids=["info", "remembers"])
class TestCommandEngine(Checkpoints):
    @pytest.fixture
    def state(self, tmp_path):
        state = tmp_path / "state.json"
        state.write_text(
            json.dumps(
                {"incarnation": "a", "version": None, "paused": False, "weights": ""}
                | {"running": False, "aborted": False}
            )
        )
        return state

    @pytest.fixture
    def engine(self, state, asks):
        arguments = {
            "pause": " {in_flight}",
            "load": " {checkpoint} {version} {keep_kv}",
            "confirm": " {version}",
            "resume": "",
            "probe": "",
        } | ({"info": ""} if asks else {})
        hooks = {name: f"{sys.executable} -I -S {HOOKS} {state} {name}{rest}" for name, rest in arguments.items()}
        return make_engine("command", options=hooks | {"probes-paused": "yes"})

    @pytest.fixture
    def start_request(self, state, asks):
        return lambda: HookedRequest(state)
