"""``python -m tools.chaos.receiver_soak --versions 5000``: a day of one receiver daemon, pressed into less.

At a version every 17 seconds a day has some 5,000 of them, and at a poll a second 86,400 polls: each version gets 17
polls here, 0.02 seconds apart. A trainer publishes to a fresh S3 server; one ``receiver run`` with a PyTorch engine,
heartbeats and the scrub follows over a link with every kind of fault. Meanwhile anchors are made, routes compacted,
versions forgotten and collected; a tag that the daemon is pinned to goes back and forth; the store is gone for a while;
bytes of the live slot change on disk; and at first the daemon is restarted now and then. Its last life is the long one,
in which memory, descriptors and files must stay flat. What it holds and serves has to be the trainer's, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from deltastore import Writer
from deltastore.cli.records import human_bytes
from deltastore.compact import compact
from deltastore.gc import collect, forget
from deltastore.heartbeat import FLEET
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.storage import close_backend, open_backend
from deltastore.storage.faults import FaultKind
from deltastore.tags import set_tag
from deltastore.testing.s3_server import s3_server
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from receiver.engines.weights import WeightsDigest
from tools.demo.model import TIED, CausalLM, ModelConfig, save_checkpoint
from tools.demo.serving import build

from .daemon import Daemon, digest_of, growth, held, live_file, until
from .proxy import ChaosProxy, running_proxy
from .receiver_report import POLLS, ReceiverSoakReport
from .rules import Rule
from .soak import PATIENCE, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from deltastore.testing.s3_server import S3Server

    Snapshot = dict[str, torch.Tensor]

__all__ = ["receiver_soak"]

_MODEL = ModelConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, max_position_embeddings=96)
_KEPT_VERSIONS = 20
_ANCHOR_EVERY = 40
_CORRUPT = 3
#: What lies below ``DIR.slots`` when a receiver has ended and nothing is under way.
_LEFT = frozenset(
    "a a.json a.digests b b.json b.digests parts probe scrub.json lock control.json receiver-id".split()  # noqa: SIM905
)


def receiver_soak(
    versions: int,
    *,
    directory: Path,
    seed: int = 0,
    client: str = "s3fs",
    poll: float = 0.02,
    polls: int = 0,
    restarts: int = 4,
    faults: Sequence[Rule] | None = None,
    memory_bound: float = 8 << 20,
    progress: Callable[[ReceiverSoakReport], object] = lambda _: None,
) -> ReceiverSoakReport:
    """Run a daemon over so many versions, with at least so many ``polls`` (``poll`` seconds apart) for each.

    Raises ``AssertionError`` for a wrong byte, and for what grew.
    """
    report = ReceiverSoakReport()
    with (
        tempfile.TemporaryDirectory(dir=directory) as scratch,
        s3_server(Path(scratch) / "server") as server,
        running_proxy(server.endpoint, seed=seed) as (proxy, endpoint),
    ):
        proxy.traffic = report.traffic
        link = _Link(proxy, endpoint, rules(0.005, stall=2.0) if faults is None else faults)
        with _Scene(Path(scratch), server, link, client=client, poll=poll, seed=seed, report=report) as scene:
            first_fifth = [versions * (number + 1) // (5 * restarts) for number in range(restarts)]
            scene.run(versions, polls=polls, restart_at=frozenset(first_fifth), progress=progress)
    report.growth = growth(report.samples, memory_bound=memory_bound)
    grown = [row for row in report.growth if row.last > row.first + row.bound]
    assert not grown, f"{grown}\n{report.show()}"
    return report


@dataclass(frozen=True, slots=True)
class _Link:
    """The way to the store, and what happens on it."""

    proxy: ChaosProxy
    endpoint: str
    faults: Sequence[Rule]

    def heal(self) -> None:
        self.proxy.play([])

    def trouble(self) -> None:
        self.proxy.play(self.faults)

    def cut(self) -> None:
        self.proxy.play([Rule(kind=FaultKind.REFUSE)])


class _Expected(NamedTuple):
    """A version as its trainer had it: its id, the digest of its checkpoint, and that of an engine's weights."""

    snapshot_id: str
    digest: str
    engine: str


class _Scene:
    """The trainer, the admin, the engine and the daemon."""

    def __init__(
        self,
        home: Path,
        server: S3Server,
        link: _Link,
        *,
        client: str,
        poll: float,
        seed: int,
        report: ReceiverSoakReport,
    ) -> None:
        self._home = home
        self._url = f"{server.url}/soak"
        self._direct = {**server.storage_options}
        self._link = link
        self._report = report
        self._dice = random.Random(seed)
        self._snapshots = _snapshots(seed)
        self._expected: dict[int, _Expected] = {}
        self._live = home / "host" / "model"
        self._seen: object = None
        self._looked_at = -1  # the version
        self._confirmed = False  # whether this life has served anything
        self._upkeep: Future[None] | None = None
        self._stack = ExitStack()
        faulty = {**self._direct, **PATIENCE[client], "client": client, "endpoint_url": link.endpoint}
        words = ["--store", self._url, "--engine", "torch", "--poll", str(poll), "--heartbeat-every", "5"]
        words += ["--scrub-rate", "50MB"]
        for key, value in faulty.items():
            words += ["--storage-option", f"{key}={value}"]
        self._words = words

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self) -> None:
        base = self._home / "base"
        snapshot = next(self._snapshots)
        save_checkpoint(base, _MODEL, snapshot)
        self._live.parent.mkdir()
        self._writer = self._stack.enter_context(
            Writer(
                self._url,
                base=base,
                anchors=True,
                anchor_every=_ANCHOR_EVERY,
                storage_options=self._direct,
                workers=1,
                spool=self._home,
            )
        )
        self._expect(0, self._writer.head.snapshot_id, snapshot)
        backend = open_backend(self._url, storage_options=self._direct)
        self._stack.callback(close_backend, backend)
        self._store = store_at(backend)
        self._admin = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="admin"))
        torch.set_num_threads(1)
        model = build(base, "bf16")
        self._engine = TorchModuleEngine(model.module, scheme="bf16", mapping=model.mapping, probe=model.probe)
        self._engine.prime(base)
        engine_url = self._stack.enter_context(serve_in_thread(EngineApp(self._engine, model)))
        self._daemon = Daemon(self._home, self._live, [*self._words, "--engine-url", engine_url])
        self._stack.callback(self._daemon.close)

    # The run

    def run(
        self,
        versions: int,
        *,
        polls: int,
        restart_at: frozenset[int],
        progress: Callable[[ReceiverSoakReport], object],
    ) -> None:
        """Publish so many versions and see to everything else in between; ends the daemon."""
        started = time.monotonic()
        sampled = max(1, versions // 200)
        self._daemon.start()
        self._arrive(0)
        self._link.trouble()
        for version in range(1, versions + 1):
            self._publish()
            self._report.versions = version
            if version % 20 >= 15:
                self._look()  # the daemon is left to jump over some
            else:
                self._arrive(version)
            self._happen(version)
            if polls and version % 10 == 0:
                until(lambda: self._polls() >= polls * self._report.versions, what="polls", every=0.1)
            if version in restart_at:
                self._restart()
            if version % sampled == 0:
                self._rest(version)
                self._report.samples.append(self._daemon.sample(version))
            self._report.seconds = time.monotonic() - started
            progress(self._report)
        self._link.heal()
        self._end(versions)
        self._report.seconds = time.monotonic() - started

    def _happen(self, version: int) -> None:
        """Let happen what is due at a version."""
        if version % 25 == 10:
            self._move_tag(version)
        if version % 50 == 0:
            self._tidy()
        if version % 100 == 60:
            self._cut_off(version)
        if version % 200 == 80:
            self._damage(version)

    def _end(self, version: int) -> None:
        self._rest(version)
        self._tidied()
        self._count()
        self._daemon.stop()
        slots = self._live.with_name(f"{self._live.name}.slots")
        left = {path.name for path in slots.iterdir()} - _LEFT
        assert not left, f"left over: {left}"
        assert [*(slots / "parts").iterdir()] == []
        temporary = [*(self._home / "temporary").rglob("*")]
        assert temporary == [], temporary
        assert [*self._store.backend.list(FLEET)] == [], "the heartbeat stayed"
        verify = [sys.executable, "-m", "receiver", "verify", "--checkpoint", str(self._live)]
        subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)

    def _publish(self) -> None:
        snapshot = next(self._snapshots)
        published = self._writer.publish(snapshot).result()
        self._expect(published.version, published.snapshot_id, snapshot)

    def _expect(self, version: int, snapshot_id: str, snapshot: Snapshot) -> None:
        self._expected[version] = _Expected(snapshot_id, digest_of(snapshot), WeightsDigest(snapshot)())

    # Looking at it

    def _look(self) -> None:
        """Compare what is live with what the trainer published, unless that was done."""
        try:
            mark = (self._live.readlink(), live_file(self._live).parent.stat().st_ino, self._record())
        except (OSError, ValueError):
            return
        if mark == self._seen or (found := held(self._live)) is None:
            return
        expected = self._expected.get(found.version)
        assert expected is not None, f"version {found.version} was never published"
        assert (found.snapshot_id, found.digest) == expected[:2], f"version {found.version} is not the trainer's"
        self._seen, self._looked_at = mark, found.version
        self._report.looks += 1

    def _record(self) -> tuple[int, int]:
        found = self._live.resolve().with_suffix(".json").stat()
        return (found.st_ino, found.st_mtime_ns)

    def _arrive(self, version: int) -> None:
        """Wait until a version is live and served; it has to be the trainer's, in the engine's memory too."""
        expected = self._expected[version].engine

        def there() -> bool:
            self._keep_up()
            self._look()
            served = self._engine.served  # once: after a repair it is loaded anew, and holds nothing for a moment
            if self._looked_at != version or served.version != self._label(version):
                return False
            assert served.digest == expected, f"the engine's version {version} is not the trainer's: {served}"
            # A new life finds the engine where the last one left it.
            return self._confirmed or self._daemon.status().get("serving") == version

        until(there, what=f"version {version} ({self._report.versions} published)")
        self._report.served += 1
        self._confirmed = True

    def _label(self, version: int) -> str:
        """Return what the engine calls a version."""
        return f"{self._writer.head.stream_id}/{version}"

    def _keep_up(self) -> None:
        """Start the daemon again, as a supervisor does, where a damaged answer ended it before it served anything."""
        code = self._daemon.exit_code
        if code is None:
            return
        assert code == _CORRUPT, f"the receiver ended with {code}\n{self._daemon.tail()}"
        assert not self._confirmed, f"the receiver ended while it served\n{self._daemon.tail()}"
        self._report.refused_starts += 1
        self._daemon.start()

    def _rest(self, version: int) -> None:
        """Wait until there is nothing more to do."""
        self._arrive(version)
        until(lambda: self._daemon.status()["state"] == "following", what="rest", every=0.02)

    def _polls(self) -> float:
        return self._report.counters[POLLS] + self._daemon.counters()[POLLS]

    def _count(self) -> None:
        self._report.counters.update(self._daemon.counters())

    # What happens to it

    def _move_tag(self, version: int) -> None:
        """Pin it to a tag that goes back a few versions, and to the newest again."""
        before = version - self._dice.randint(1, 8)
        set_tag(self._store, "serving", before)
        self._daemon.pin("tag:serving")
        self._arrive(before)
        set_tag(self._store, "serving", version)
        self._arrive(version)
        self._daemon.pin("latest")
        self._report.tag_moves += 2

    def _tidy(self) -> None:
        """Compact, forget and collect behind all that goes on."""
        self._tidied()

        def tidy() -> None:
            compact(self._store, workers=1)
            forget(self._store, Policy(keep_last=_KEPT_VERSIONS))
            self._report.collected += len(collect(self._store).objects)

        self._upkeep = self._admin.submit(tidy)

    def _tidied(self) -> None:
        if self._upkeep is not None:
            self._upkeep.result()

    def _cut_off(self, version: int) -> None:
        """Take the store away; what is there goes on being served."""
        self._arrive(version)
        before = self._daemon.counters()
        self._link.cut()
        tries = "receiver_retries_total request"
        until(lambda: self._daemon.counters()[tries] >= before[tries] + 3, what="tries without a store", every=0.05)
        found = held(self._live)
        assert found is not None
        assert found.version == version
        assert self._engine.served.version == self._label(version)
        self._link.trouble()
        self._report.outages += 1

    def _damage(self, version: int) -> None:
        """Change a byte of the live slot on disk; the daemon has to find and mend it."""
        self._rest(version)
        before = self._daemon.counters()["receiver_repairs_total"]
        with live_file(self._live).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        until(lambda: self._daemon.counters()["receiver_repairs_total"] > before, what="a repair", every=0.05)
        self._seen = None
        self._rest(version)
        self._report.damages += 1

    def _restart(self) -> None:
        self._count()
        time.sleep(self._dice.uniform(0, 0.3))
        self._daemon.stop()
        self._confirmed = False
        self._daemon.start()
        self._report.restarts += 1


def _snapshots(seed: int) -> Iterator[Snapshot]:
    """Yield a base and its steps: sparse ones, now and then a dense one, and one without a change.

    Only low bits of mantissas change, so that weights stay what an engine takes, however many steps there are.
    """
    state = CausalLM(_MODEL).initialise(seed).state_dict()
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if name not in TIED}
    yield weights
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        step += 1
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values() if step % 30 else ():
            bits = tensor.view(-1).view(torch.int16)
            count = bits.numel() if step % 50 == 49 else bits.numel() // 100 + 1
            where = torch.randint(0, bits.numel(), (count,), generator=generator)
            bits[where] ^= torch.randint(0, 8, (count,), generator=generator, dtype=torch.int16)
        yield weights


def main() -> int:
    """Print what was met and what grew; exits with 1 at a wrong byte, or where something grew."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos.receiver_soak", description=__doc__)
    parser.add_argument("--versions", type=int, default=5000, help="how many are published (5000)")
    parser.add_argument("--poll", type=float, default=0.02, help="the daemon's seconds between polls (0.02)")
    parser.add_argument("--polls", type=int, default=17, help="how many at least for each version (17)")
    parser.add_argument("--client", choices=sorted(PATIENCE), default="s3fs", help="the daemon's S3 client (s3fs)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and the weights")
    parser.add_argument("--directory", type=Path, help="where scratch files go")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all samples")
    options = parser.parse_args()

    def tell(report: ReceiverSoakReport) -> None:
        if report.versions % 100 == 0:
            last = report.samples[-1]
            print(
                f"{report.versions} versions, {report.seconds:.0f} s, {human_bytes(last.anonymous)}, "
                f"{last.descriptors} descriptors, {last.threads} threads",
                file=sys.stderr,
                flush=True,
            )

    with tempfile.TemporaryDirectory(prefix="receiver-soak-", dir=options.directory) as scratch:
        report = receiver_soak(
            options.versions,
            directory=Path(scratch),
            seed=options.seed,
            client=options.client,
            poll=options.poll,
            polls=options.polls,
            progress=tell,
        )
    print(msgspec.json.encode(report).decode() if options.json else report.show())
    return 0


if __name__ == "__main__":
    sys.exit(main())
