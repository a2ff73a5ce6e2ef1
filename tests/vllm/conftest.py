"""Real vLLM servers, in the environment that ``make test-vllm`` builds. A run without it skips these tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
STARTING_SECONDS = 240
EXTENSION = (
    "--worker-extension-cls",
    "receiver.engines.vllm_extension.DeltastoreWorker",
    "--weight-transfer-config",
    '{"backend": "deltastore"}',
)


class VllmServer:
    """One server process and what it logged."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def wait_until_ready(self) -> None:
        until = time.monotonic() + STARTING_SECONDS
        while True:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, f"not ready: {self.log.read_text()[-4000:]}"
            time.sleep(0.25)

    def kill(self) -> None:
        """End the server and its workers at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(timeout=60)


@contextmanager
def run_vllm(python: str, checkpoint: Path, log: Path, *arguments: str) -> Iterator[VllmServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), *arguments]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = VllmServer(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("DELTASTORE_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM in an environment of its own: make test-vllm")
    return python


@pytest.fixture(scope="session")
def start_vllm(vllm_python, tmp_path_factory):
    """A context manager that serves a checkpoint."""
    logs = tmp_path_factory.mktemp("vllm")
    return lambda checkpoint, *arguments: run_vllm(vllm_python, checkpoint, logs / "server.log", *arguments)


@pytest.fixture(scope="session")
def states() -> list[dict[str, object]]:
    """The weights of a base and of three steps after it."""
    made = [tiny_llama.random_state(1)]
    for seed in (2, 3, 4):
        made.append(tiny_llama.next_state(made[-1], seed))
    return made


@pytest.fixture(scope="session")
def checkpoints(states, tmp_path_factory) -> list[Path]:
    """The same as directories."""
    parent = tmp_path_factory.mktemp("checkpoints")
    return [tiny_llama.write_checkpoint(parent / f"v{number}", state) for number, state in enumerate(states)]
