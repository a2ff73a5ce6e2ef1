"""``python -m tools.bench generation``: an engine's tokens a second while a receiver beside it patches.

Nothing else runs: the versions lie in the store before, and the engine generates with a model of its own, so that no
activation stops it. An engine with one torch thread and a receiver with one worker are to share two cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import torch

from tools.demo.client import Client
from tools.demo.model import CausalLM, ModelConfig, save_checkpoint
from tools.demo.processes import eventually, process, text_of

from .alternation import publish_chain
from .pairs import repeated
from .report import Column, Report, Section, Target, ratio, size, text, times
from .synthetic import make_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_COLUMNS = (
    Column("beside it", "beside", text),
    Column("engine's weights", "engine_bytes", size),
    Column("checkpoint", "bytes", size),
    Column("a patch takes", "patch_seconds", times),
    Column("tokens/s alone", "alone", lambda value: f"{value:.0f}"),
    Column("meanwhile", "meanwhile", lambda value: f"{value:.0f}"),
    Column("of it", "ratio", ratio),
)
_WANTED = 0.9
_TILE = 256 << 20
#: Seconds that are looked at, at least.
_WINDOW, _QUICK_WINDOW = 1.5, 0.3
_LOOK_SECONDS = 0.1
_POLITE = ("--nice", "19", "--io-priority", "idle")
_ENGINES = {"small": ModelConfig(), "large": ModelConfig(hidden_size=1024, intermediate_size=3072)}
#: What any process costs that uses a core, and one that uses its share of the memory's bandwidth besides.
_CONTROLS = {"a loop without memory, nice 19": "sum(range(10000))", "memory copied, nice 19": "np.copyto(one, other)"}
_BUSY = f"""
import os, sys, time
import numpy as np
os.nice(19)
one, other = np.full({_TILE}, 1, np.uint8), np.full({_TILE}, 2, np.uint8)
for line in sys.stdin:
    until = time.monotonic() + float(line)
    while time.monotonic() < until:
        STEP
    print("done", flush=True)
"""


def run(settings: Settings) -> Report:
    """Measure each engine beside receivers with and without a low priority, and beside what only uses a core."""
    engines = [name for name in _ENGINES if settings.case in name and not (settings.quick and name == "large")]
    nbytes = settings.model_bytes(2048, 16)
    pair = repeated(make_pair("bf16", 0.02, min(nbytes, _TILE)), nbytes)
    publish_chain(settings.directory, pair, 2 * settings.rounds * len(engines))
    rows: list[Row] = []
    version = 0
    for name in engines:
        with _engine(settings.directory / name, _ENGINES[name]) as (client, engine_bytes):
            for options in (_POLITE, ()):
                with _receiver(settings.directory, options) as patch:
                    rows.append(_measure(client, patch, version, settings))
                rows[-1] |= {"beside": " ".join(("receiver", *options))}
                version += settings.rounds
            for shown, step in _CONTROLS.items():
                with _busy(step, _QUICK_WINDOW if settings.quick else _WINDOW) as work:
                    rows.append({**_measure(client, work, version, settings), "beside": shown})
            for row in rows[-2 - len(_CONTROLS) :]:
                row |= {"engine_bytes": engine_bytes, "bytes": pair.nbytes}
    polite = [row["ratio"] for row in rows if "--nice" in row["beside"]]
    targets = (Target("tokens/s while patching / alone", _WANTED, min(polite)),)
    title = "Tokens a second while a version is patched, against the moments before and after (one torch thread)"
    return Report("generation", (Section("generation", title, _COLUMNS, rows),), targets)


def _measure(client: Client, patch: Callable[[int], float], version: int, settings: Settings) -> Row:
    """Let windows with a patch and windows without follow each other."""
    window = _QUICK_WINDOW if settings.quick else _WINDOW
    alone, meanwhile, took = [_alone(client, window)], [], []
    ratios = []
    for number in range(version + 1, version + settings.rounds + 1):
        start = time.monotonic()
        took.append(patch(number))
        meanwhile.append(client.rate(start, time.monotonic()))
        alone.append(_alone(client, max(window, took[-1])))
        ratios.append(2 * meanwhile[-1] / (alone[-2] + alone[-1]))
    return {
        "alone": statistics.median(alone),
        "meanwhile": statistics.median(meanwhile),
        "patch_seconds": statistics.median(took),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _alone(client: Client, seconds: float) -> float:
    start = time.monotonic()
    time.sleep(seconds)
    return client.rate(start, time.monotonic())


@contextmanager
def _engine(home: Path, config: ModelConfig) -> Iterator[tuple[Client, int]]:
    """Start an engine with weights that mean nothing, and a client that never stops asking."""
    home.mkdir()
    model = CausalLM(config).initialise(0)
    snapshot = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_checkpoint(home / "model", config, snapshot)
    ready = home / "engine.json"
    command = [sys.executable, "-m", "receiver.engines.serve", "--model", "tools.demo.serving:build"]
    command += ["--checkpoint", str(home / "model"), "--scheme", "bf16", "--threads", "1", "--ready-file", str(ready)]
    with process("engine", command, home):
        url = json.loads(eventually(lambda: text_of(ready)))["url"]
        with Client(url) as client:
            # The first pass at each context length pays for making its kernels; a whole stream has seen all of them.
            eventually(lambda: len(client.tokens) > 220 or client.failure, every=0.1)
            assert client.failure is None, client.failure
            yield client, sum(path.stat().st_size for path in (home / "model").glob("*.safetensors"))


@contextmanager
def _receiver(home: Path, options: Sequence[str]) -> Iterator[Callable[[int], float]]:
    """Start a receiver that stays where it is; yields what has it patch to a version, and returns the seconds."""
    link = home / "checkpoint"
    lock = link.with_name("checkpoint.slots") / "lock"
    lock.unlink(missing_ok=True)
    command = [sys.executable, "-m", "receiver", "run", "--store", str(home / "store"), "--checkpoint", str(link)]
    command += ["--target", "0", "--workers", "1", "--scrub-rate", "0", "--no-heartbeat", "--listen", "127.0.0.1:0"]
    with process("receiver", [*command, *options], home):
        url = eventually(lambda: json.loads(text_of(lock) or "{}").get("url"))
        with httpx.Client(base_url=url, trust_env=False, timeout=10) as http:

            def holds(version: int) -> bool:
                record: dict[str, Any] = http.get("/status").json()
                assert record["error"] is None, record["error"]
                return bool(record["version"] == version and record["state"] == "following")

            def patch(version: int) -> float:
                start = time.monotonic()
                http.post("/pin", json={"version": version}).raise_for_status()
                eventually(lambda: holds(version), every=_LOOK_SECONDS)
                return time.monotonic() - start

            eventually(lambda: http.get("/status").json()["state"] == "following", every=_LOOK_SECONDS)
            yield patch


@contextmanager
def _busy(step: str, seconds: float) -> Iterator[Callable[[int], float]]:
    """Start a process that repeats a step for so long when it is told to; yields what tells it, and returns seconds."""
    command = [sys.executable, "-c", _BUSY.replace("STEP", step)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        said, heard = running.stdin, running.stdout
        assert said is not None
        assert heard is not None

        def work(_number: int) -> float:
            start = time.monotonic()
            said.write(f"{seconds}\n")
            said.flush()
            heard.readline()
            return time.monotonic() - start

        yield work
