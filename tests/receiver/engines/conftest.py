from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from engines import TINY, weights

from tools.demo.model import save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A tiny model's threads only wait for each other, for very long where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    paths = tuple(tmp_path_factory.mktemp("checkpoint") / f"seed{seed}" for seed in (1, 2))
    for seed, path in enumerate(paths, start=1):
        save_checkpoint(path, TINY, weights(seed))
    return paths


class ServerProcess:
    """One engine server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@contextmanager
def engine_server(checkpoint: Path, ready_file: Path, *, scheme: str = "bf16") -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "receiver.engines.serve", "--model", "tools.demo.serving:build"]
    command += ["--checkpoint", str(checkpoint), "--scheme", scheme, "--threads", "1"]
    command += ["--ready-file", str(ready_file)]
    # The ready file is for those who cannot read the server's output; the line there is what to wait for.
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    drain = threading.Thread(target=process.stderr.read)
    try:
        line = process.stderr.readline()
        assert line.startswith("serving on "), line + process.stderr.read()
        # What it says later must not fill the pipe.
        drain.start()
        yield ServerProcess(process, json.loads(ready_file.read_bytes())["url"])
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)
        if drain.ident is not None:
            drain.join()
        process.stderr.close()


@pytest.fixture(name="engine_server")
def engine_server_fixture():
    """The context manager itself; test modules cannot import from here."""
    return engine_server
