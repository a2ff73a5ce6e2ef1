from __future__ import annotations

import pytest

from receiver.engines import make_engine
from receiver.engines.none import NoEngine
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from receiver.testing.engine_contract import EngineContract
from tools.demo.model import TIED
from tools.demo.serving import build


class Checkpoints(EngineContract):
    @pytest.fixture
    def checkpoints(self, tiny_checkpoints):
        return tiny_checkpoints


class TestNoEngine(Checkpoints):
    checks = False

    @pytest.fixture
    def engine(self):
        return NoEngine()


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block"])
class TestTorchModuleEngine(Checkpoints):
    @pytest.fixture
    def engine(self, tiny_checkpoints, scheme):
        model = build(tiny_checkpoints[0], scheme)
        return TorchModuleEngine(model.module, scheme=scheme, mapping=TIED, probe=model.probe)


class TestTorchServerEngine(Checkpoints):
    @pytest.fixture
    def engine(self, tiny_checkpoints):
        model = build(tiny_checkpoints[0], "bf16")
        served = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
        with serve_in_thread(EngineApp(served, model)) as url:
            engine = make_engine("torch", url=url)
            yield engine
            engine.close()
