"""Real vLLM servers for the tests, each a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from tiny_llama import END

from receiver.testing.streams import CompletionStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
STARTING_SECONDS = 240
CONTEXT = 16384  # tokens: more than five minutes of a request that lasts
EXTENSION = (
    "--worker-extension-cls",
    "receiver.engines.vllm_extension.DeltastoreWorker",
    "--weight-transfer-config",
    '{"backend": "deltastore"}',
)


class Ending:
    """How a request is told to end: what it carries, and a way to tell it. See tests/vllm/told_to_end.py."""

    def __init__(self, directory: Path) -> None:
        self._told = directory / uuid.uuid4().hex
        self.arguments = {"end_when": str(self._told)}

    def tell(self) -> None:
        self._told.touch()


class LastingStream(CompletionStream):
    """A completion that lasts until it is told to end: its last token is then ``END``, and its reason ``stop``."""

    def __init__(self, url: str, prompt: Sequence[int], directory: Path) -> None:
        self._ending = Ending(directory)
        more = {"vllm_xargs": self._ending.arguments, "stop_token_ids": [END]}
        super().__init__(url, prompt, most_tokens=CONTEXT - len(prompt), more=more)

    def finish(self) -> None:
        self._ending.tell()


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

    def paused(self) -> bool:
        return httpx.get(f"{self.url}/is_paused", trust_env=False, timeout=60).json()["is_paused"]

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
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "8", "--enforce-eager", "--enable-scale-out"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--logits-processors", "told_to_end:ToldToEnd", *arguments]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=os.environ | settings | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'vllm'}"},
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
