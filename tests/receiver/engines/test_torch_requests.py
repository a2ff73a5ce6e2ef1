"""What becomes of the torch server's running requests, by the contract."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from receiver.engines import make_engine
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from receiver.testing.engine_contract import EngineContract
from tools.demo.model import TIED
from tools.demo.serving import build

SECONDS = 60.0


class Paced:
    """A generation that takes its time for each token until it is hurried."""

    def __init__(self, generation, hurry):
        self._generation, self._hurry = generation, hurry

    def step(self, caches):
        self._hurry.wait(0.03)
        return self._generation.step(caches)


class Request:
    """One stream of `/generate`, of some seconds unless hurried."""

    def __init__(self, url, hurry):
        self.finish = hurry.set
        self.tokens = []
        self._last = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()
        assert self.reach(1)

    def _read(self, url):
        body = {"prompt": "def ", "max_tokens": 150}
        with httpx.stream("POST", f"{url}/generate", json=body, trust_env=False, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                content = json.loads(line)
                with self._changed:
                    if "token" in content:
                        self.tokens.append(content["token"])
                    self._last = content
                    self._changed.notify_all()

    def reach(self, count, *, timeout=SECONDS):
        with self._changed:
            return self._changed.wait_for(lambda: len(self.tokens) >= count, timeout)

    def outcome(self, *, timeout=SECONDS):
        self._thread.join(timeout)
        return self._last["finish_reason"]


class TestTorchServerRequests(EngineContract):
    @pytest.fixture
    def checkpoints(self, tiny_checkpoints):
        return tiny_checkpoints

    @pytest.fixture
    def hurry(self):
        return threading.Event()

    @pytest.fixture
    def url(self, tiny_checkpoints, hurry):
        model = build(tiny_checkpoints[0], "bf16")
        generate = model.generate
        model.generate = lambda *arguments, **options: Paced(generate(*arguments, **options), hurry)
        served = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
        with serve_in_thread(EngineApp(served, model)) as url:
            yield url

    @pytest.fixture
    def engine(self, url):
        engine = make_engine("torch", url=url)
        yield engine
        engine.close()

    @pytest.fixture
    def start_request(self, url, hurry):
        return lambda: Request(url, hurry)
