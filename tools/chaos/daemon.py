"""One ``receiver run`` as a process of its own: started, asked, measured, ended; and what it holds, read by others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import xxhash
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

from receiver.engines.weights import WeightsDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

__all__ = ["Daemon", "Growth", "Held", "Sample", "digest_of", "growth", "held", "live_file", "until"]

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
#: How much more there may be at the end than after the warm-up: a few connections, and the threads that serve them.
_DESCRIPTORS_BOUND = 8
_THREADS_BOUND = 4
#: Records have numbers in them, and those more digits.
_KEPT_BOUND = 64 << 10


def until(condition: Callable[[], object], *, what: str, seconds: float = 300.0, every: float = 0.005) -> None:
    """Look until ``condition`` holds: another process's progress cannot be waited on. Raises ``AssertionError``."""
    left, before = seconds, time.monotonic()
    while not condition():
        now = time.monotonic()
        left -= min(now - before, 1.0)  # a process that was stopped meanwhile did not wait
        assert left > 0, f"{what}: not within {seconds:.0f} s"
        before = now
        time.sleep(every)


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at rest, ``version`` versions into the run. Sizes in bytes; ``kept``: all of ``DIR.slots``."""

    version: int
    life: int
    anonymous: int
    resident: int
    descriptors: int
    threads: int
    kept: int
    kept_files: int
    temporary_files: int


class Growth(NamedTuple):
    """Something of the daemon after its warm-up and at its end; ``bound``: how much more the end may have."""

    what: str
    first: float
    last: float
    bound: float


def growth(samples: Sequence[Sample], *, memory_bound: float) -> list[Growth]:
    """Compare the medians of the second quarter of the last life with those of its last quarter.

    Not the most: a connection, or a record's draft, is there for a moment.
    """
    life = max(sample.life for sample in samples)
    own = [sample for sample in samples if sample.life == life]
    quarter = len(own) // 4
    assert quarter, "too few samples"
    windows = own[quarter : 2 * quarter], own[-quarter:]
    bounds = {
        "anonymous": memory_bound,
        "descriptors": _DESCRIPTORS_BOUND,
        "threads": _THREADS_BOUND,
        "kept": _KEPT_BOUND,
        "kept_files": 0,
        "temporary_files": 0,
    }
    return [
        Growth(what, *(median(getattr(sample, what) for sample in window) for window in windows), bound=bound)
        for what, bound in bounds.items()
    ]


@dataclass(frozen=True, slots=True)
class Held:
    """What the link leads to at one moment: the slot's own word, and the digest of its tensors."""

    version: int
    snapshot_id: str
    digest: str


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest a checkpoint's tensors with their names, by nothing that the receiver uses."""
    words = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return xxhash.xxh3_128_hexdigest("\n".join([*words, WeightsDigest(tensors)()]).encode())


def live_file(link: Path) -> Path:
    """Return the first weight file of the slot that a link leads to."""
    return min(link.resolve(strict=True).glob("*.safetensors"))


def held(link: Path) -> Held | None:
    """Read what is live, while it may be swapped at any moment; ``None`` when it was, or is not there.

    A file that was live when it was open stays whole: slots are emptied by unlinking.
    """
    with ExitStack() as stack:
        try:
            leads_to = link.readlink()
            directory = link.resolve(strict=True)
            names = sorted(path.name for path in directory.glob("*.safetensors"))
            files = {name: stack.enter_context((directory / name).open("rb")) for name in names}
            line = directory.with_name(f"{directory.name}.json").read_bytes().splitlines()[0]
            for name, file in files.items():
                if (link / name).stat().st_ino != os.fstat(file.fileno()).st_ino:
                    return None
            if link.readlink() != leads_to or not files:
                return None
        except (OSError, IndexError):
            return None
        record = json.loads(line)
        tensors: dict[str, torch.Tensor] = {}
        for file in files.values():
            # By the descriptor: the name may mean another file by now.
            opened = stack.enter_context(safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt"))
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        return Held(record["version"], record["snapshot_id"], digest_of(tensors))


class Daemon:
    """A process that follows, and its log; ``home`` is where that and its temporary files go."""

    def __init__(self, home: Path, checkpoint: Path, options: Sequence[str]) -> None:
        self.log = home / "receiver.log"
        self.lives = 0
        self._checkpoint = checkpoint
        self._temporary = home / "temporary"
        self._temporary.mkdir()
        self._command = [sys.executable, "-m", "receiver", "run", "--checkpoint", str(checkpoint), *options]
        self._process: subprocess.Popen[bytes] | None = None
        # A connection a request: one that is kept may be closed by the daemon, as idle, just when it is used.
        self._http = httpx.Client(trust_env=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
        self._url: str | None = None

    def start(self) -> None:
        """Start it, and return when it listens."""
        begun = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, "--listen", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"TMPDIR": str(self._temporary)},
            )
        self.lives += 1

        def listening() -> re.Match[bytes] | None:
            assert self.exit_code is None, self.tail()
            with self.log.open("rb") as file:
                file.seek(begun)
                return re.search(rb"Listening on (http://[0-9.:]+[0-9])", file.read())

        until(listening, what="the receiver's start", seconds=_START_SECONDS)
        match = listening()
        assert match is not None
        self._url = match[1].decode()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while it runs."""
        assert self._process is not None
        return self._process.poll()

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End it by SIGTERM; it must end well, and in time."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the receiver did not end within {_STOP_SECONDS} s\n{self.tail()}") from None
        assert code == 0, f"the receiver ended with {code}\n{self.tail()}"

    def close(self) -> None:
        """End what still runs, however it is."""
        self._http.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    # Asking it

    def status(self) -> dict[str, Any]:
        """Return what it says of itself: nothing where it has just ended."""
        try:
            record: dict[str, Any] = self._http.get(f"{self._url}/status").raise_for_status().json()
        except httpx.TransportError:
            return {}
        return record

    def pin(self, target: str) -> None:
        """Have it follow another target."""
        self._http.post(f"{self._url}/pin", json={"version": target}).raise_for_status()

    def counters(self) -> dict[str, float]:
        """Return its counters; those with a label as ``name label``. What was not counted yet is 0."""
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(self._http.get(f"{self._url}/metrics").raise_for_status().text):
            for name, labels, value, *_ in family.samples:
                if name.endswith(("_total", "_count")):
                    found[" ".join([name, *labels.values()])] = value
        return found

    def sample(self, version: int) -> Sample:
        """Measure it."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        slots = self._checkpoint.with_name(f"{self._checkpoint.name}.slots")
        kept = [path.stat().st_size for path in slots.rglob("*") if path.is_file()]
        return Sample(
            version=version,
            life=self.lives,
            anonymous=int(fields["RssAnon"].split()[0]) << 10,
            resident=int(fields["VmRSS"].split()[0]) << 10,
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),  # noqa: PTH208 - names are counted
            threads=int(fields["Threads"]),
            kept=sum(kept),
            kept_files=len(kept),
            temporary_files=sum(path.is_file() for path in self._temporary.rglob("*")),
        )
