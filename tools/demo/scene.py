"""The demonstration's scene: a trainer here, an engine and a receiver in processes of their own, and a client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import torch

from deltastore import Writer, open_checkpoint
from deltastore.digest import hasher
from deltastore.snapshot import snapshot_id
from receiver.engines.weights import WeightsDigest
from receiver.quantize import make_scheme
from tools.demo.client import Client
from tools.demo.model import TIED
from tools.demo.processes import PATIENCE_SECONDS, eventually, process, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from deltastore import Published
    from tools.demo.train import Trainer

__all__ = ["Row", "Scene"]

_WINDOW_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Row:
    """One version's figures: seconds of each stage, tokens a second around it."""

    version: int
    changed: float
    stored_bytes: int
    ratio: float
    publish: float
    fetch: float
    patch: float
    pause: float
    before: float
    during: float
    after: float


class Scene:
    """Everything that runs, and the proofs after each version. A failed proof is an ``AssertionError``."""

    def __init__(
        self, trainer: Trainer, home: Path, *, store: str, scheme: str, receiver_options: Sequence[str] = ()
    ) -> None:
        self._trainer = trainer
        self._home = home
        self._store = store
        self._scheme = scheme
        self._receiver_options = receiver_options
        self._stack = ExitStack()
        self._link = home / "engine-host" / "model"
        self.expected: dict[str, str] = {}
        self.full_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        base = self._home / "base"
        self._trainer.save_checkpoint(base)
        self.full_bytes = open_checkpoint(base).schema.nbytes
        self._writer = self._stack.enter_context(Writer(self._store, base=base, workers=2))
        # A new host: its checkpoint comes out of the store, config and tokenizer included.
        receiver = [sys.executable, "-m", "receiver"]
        at = ["--store", self._store, "--checkpoint", str(self._link)]
        subprocess.run([*receiver, "once", "--log-level", "warning", *at], check=True, stdout=subprocess.DEVNULL)
        ready = self._home / "engine.json"
        engine = [sys.executable, "-m", "receiver.engines.serve", "--model", "tools.demo.serving:build"]
        engine += ["--checkpoint", str(self._link), "--scheme", self._scheme, "--threads", "1"]
        self._stack.enter_context(process("engine", [*engine, "--ready-file", str(ready)], self._home))
        self.engine_url = json.loads(eventually(lambda: text_of(ready)))["url"]
        follow = ["--engine", "torch", "--engine-url", self.engine_url, "--poll", "0.1", "--listen", "127.0.0.1:0"]
        follow += ["--in-flight", "keep"]  # the client's streams go on under new weights
        follow += self._receiver_options
        self._stack.enter_context(process("receiver", [*receiver, "run", *at, *follow], self._home))
        lock = self._link.with_name("model.slots") / "lock"
        self._status_url = eventually(lambda: json.loads(text_of(lock) or "{}").get("url"))
        self._http = self._stack.enter_context(httpx.Client(trust_env=False, timeout=10))
        self._expect(0, self._trainer.snapshot())
        self._until_serving(0)
        self.client = self._stack.enter_context(Client(self.engine_url))
        # The first pass at each context length pays for making its kernels; a whole stream has seen all of them.
        self.client.wait_for(self._label(0), count=260, timeout=PATIENCE_SECONDS)
        self._quiet = self._observe()

    def _observe(self) -> float:
        """Let the client run undisturbed for a moment; returns its tokens a second."""
        start = time.monotonic()
        version = self._writer.version
        self.client.wait_for(self._label(version), count=self._count(version) + 50, timeout=PATIENCE_SECONDS)
        while time.monotonic() < start + _WINDOW_SECONDS:
            self.client.wait_for(self._label(version), count=self._count(version) + 1, timeout=PATIENCE_SECONDS)
        return self.client.rate(start, time.monotonic())

    def _label(self, version: int) -> str:
        """Return what the engine calls a version."""
        return f"{self._writer.store.stream_id}/{version}"

    def _count(self, version: int) -> int:
        return sum(token.version == self._label(version) for token in self.client.tokens)

    def _expect(self, version: int, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Requantize the trainer's own tensors, and remember the digest of what the engine must hold."""
        scheme = make_scheme(self._scheme)
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in snapshot.items():
            if name not in TIED:
                weights |= scheme.quantize(name, tensor)
        self.expected[self._label(version)] = WeightsDigest(weights)()

    def _status(self) -> dict[str, Any]:
        record: dict[str, Any] = self._http.get(f"{self._status_url}/status").json()
        return record

    def _until_serving(self, version: int) -> dict[str, Any]:
        def serving() -> dict[str, Any] | None:
            record = self._status()
            assert record["error"] is None, record["error"]
            return record if record["serving"] == version else None

        return eventually(serving)

    def step(self) -> Row:
        """Train a step, publish it, wait until it is served, and prove all that was promised."""
        self._trainer.step()
        snapshot = self._trainer.snapshot()
        started = time.monotonic()
        published = self._writer.publish(snapshot, metadata={"learning_rate": 2e-6}).result()
        committed = time.monotonic()
        self._expect(published.version, snapshot)
        record = self._until_serving(published.version)
        self.client.wait_for(self._label(published.version), count=5, timeout=PATIENCE_SECONDS)
        arrived = next(token.at for token in self.client.tokens if token.version == self._label(published.version))
        last_old = max(token.at for token in self.client.tokens if token.at < arrived)
        during = self.client.rate(started, last_old)
        before, self._quiet = self._quiet, self._observe()
        self._prove(published, snapshot)
        return Row(
            version=published.version,
            changed=published.changed_elements / published.total_elements,
            stored_bytes=published.stored_bytes,
            ratio=published.stored_bytes / self.full_bytes,
            publish=committed - started,
            fetch=record["stages"]["fetch"],
            patch=record["stages"]["patch"],
            pause=record["last_activation"]["paused_seconds"],
            before=before,
            during=during,
            after=self._quiet,
        )

    def _prove(self, published: Published, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Compare, bit for bit, what is on the engine's disk and in its memory with what the trainer holds."""
        checkpoint = open_checkpoint(self._link.resolve())
        xxh3 = hasher("xxh3-128")
        found = snapshot_id(checkpoint.schema, checkpoint.digests(xxh3, workers=2), xxh3)
        assert found == published.snapshot_id, f"the local checkpoint is {found}, not {published.snapshot_id}"
        for name, tensor in snapshot.items():
            if name not in TIED:
                mine = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert checkpoint.tensor(name).tobytes() == mine, f"{name} differs from the trainer's"
        info = self._http.get(f"{self.engine_url}/info").json()
        assert info["version"] == self._label(published.version), info
        expected = self.expected[info["version"]]
        assert info["weights_digest"] == expected, "the engine's weights are not the trainer's, requantized"

    def prove_tokens(self) -> int:
        """Check every token there was: its forward pass ran on one version's whole weights. Returns their number."""
        assert self.client.failure is None, self.client.failure
        for token in self.client.tokens:
            assert token.before == token.after, f"weights changed under a forward pass of version {token.version}"
            assert token.before == self.expected[token.version or ""], f"version {token.version} ran on other weights"
        return len(self.client.tokens)
