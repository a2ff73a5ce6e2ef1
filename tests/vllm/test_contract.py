"""The adapters' contract against a real server. It is one server for all, brought back to its start each time."""

from __future__ import annotations

import httpx
import pytest
from vllm_server import EXTENSION, LastingStream

from receiver.engines import make_engine
from receiver.testing.engine_contract import EngineContract


@pytest.fixture(scope="module", params=["no", "yes"], ids=["stock", "extension"])
def extension(request):
    return request.param


@pytest.fixture(scope="module")
def server(start_vllm, versions, extension):
    with start_vllm(versions[0], *(EXTENSION if extension == "yes" else ())) as server:
        yield server


def start_over(server, checkpoint):
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        client.post("/pause", params={"mode": "abort"})
        arguments = {"weights_path": str(checkpoint)}
        client.post("/collective_rpc", json={"method": "reload_weights", "kwargs": arguments}).raise_for_status()
        client.post("/update_weight_version", json={"new_version": "default"}).raise_for_status()
        client.post("/resume").raise_for_status()


class TestVllm(EngineContract):
    @pytest.fixture
    def engine(self, server, versions, extension):
        start_over(server, versions[0])
        engine = make_engine("vllm", url=server.url, options={"extension": extension})
        yield engine
        engine.close()

    @pytest.fixture
    def checkpoints(self, versions):
        return versions[1:3]

    @pytest.fixture
    def start_request(self, server, tmp_path):
        def start():
            stream = LastingStream(server.url, (5, 6, 7), tmp_path)
            assert stream.reach(1)
            return stream

        return start
