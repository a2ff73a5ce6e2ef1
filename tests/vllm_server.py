"""Real vLLM servers for the tests, each a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
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
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, f"not ready: {self.log.read_text()[-4000:]}"
            time.sleep(0.25)

    def kill(self) -> None:
        """End the server and its workers at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)


@contextmanager
def run_vllm(python: str, checkpoint: Path, log: Path, *arguments: str) -> Iterator[VllmServer]:
    """Serve a checkpoint as ``m`` while the block lasts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager", "--enable-scale-out"]
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
