"""``python -m tools.chaos.soak --gigabytes 10``: versions published and received over a link with every kind of fault.

Stream after stream, each on a fresh S3 server whose disk is given back after it: a writer publishes sparse and dense
steps, a receiver follows them, every version is restored from the store's anchor, all through the proxy. Whatever
fails is tried again, as a trainer or a daemon does. At the end of a stream it is read without faults: no step may be
missing, and every byte that was received or restored must have been the trainer's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import xxhash
from safetensors.numpy import load_file, save_file

from deltastore import Writer, open_checkpoint
from deltastore.cli.records import human_bytes, table
from deltastore.errors import CommitInDoubt, DeltastoreError, VersionConflict, WriterFenced
from deltastore.fsck import check
from deltastore.reader import store_at
from deltastore.storage import close_backend, open_backend
from deltastore.storage.faults import FaultKind
from deltastore.testing.s3_server import s3_server
from receiver.patcher import Patcher
from receiver.slots import Slots

from .proxy import Traffic, running_proxy
from .rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deltastore.reader import Store
    from deltastore.storage import Backend

    Snapshot = dict[str, np.ndarray]

__all__ = ["PATIENCE", "SoakReport", "rules", "soak"]

_T = TypeVar("_T")

_TENSOR_ELEMENTS = 1 << 20
_TRIES = 40
_WORKERS = 2
# Short waits of the libraries, so that a stall costs seconds; the deadlines of ours are what they always are.
PATIENCE = {
    "s3fs": {"config_kwargs.read_timeout": 3},
    "obstore": {"client_options.read_timeout": "3s"},
}


def rules(share: float = 0.02, *, stall: float = 5.0) -> list[Rule]:
    """Return every kind of fault, each for a share of all requests.

    The slow link has two in a hundred of those that carry weights, and so about that share of the bytes.
    """
    slow = Rule(kind=FaultKind.SLOW, path="/model-0", share=0.02, bytes_per_second=8e6)
    others = [kind for kind in FaultKind if kind is not FaultKind.SLOW]
    return [slow, *(Rule(kind=kind, share=share, seconds=stall) for kind in others)]


@dataclass(slots=True)
class SoakReport:
    """What went through, by kind of fault; what failed and was tried again, by kind of error."""

    streams: int = 0
    versions: int = 0
    restored: int = 0
    received: int = 0
    seconds: float = 0.0
    most_disk_bytes: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """All bytes of bodies, both ways."""
        return sum(count.bytes_up + count.bytes_down for count in self.traffic.values())

    def persist(self, action: Callable[[], _T]) -> _T:
        """Do something until it works; only errors of ours may come, and not for ever."""
        for _ in range(_TRIES):
            try:
                return action()
            except DeltastoreError as error:
                self.errors[error.kind] += 1
                last = error
        raise AssertionError(f"still failing after {_TRIES} tries") from last

    def show(self) -> str:
        """Return a table."""
        rows = [
            (str(count.requests), human_bytes(count.bytes_up), human_bytes(count.bytes_down), kind)
            for kind, count in sorted(self.traffic.items())
        ]
        again = ", ".join(f"{count} x {kind}" for kind, count in self.errors.most_common())
        return (
            table(("requests", "up", "down", "fault"), rows)
            + f"\n{self.streams} streams, {self.versions} versions, {self.received} received, {self.restored} restored"
            f": all bit-exact, none lost\n{human_bytes(self.bytes)} in {self.seconds:.0f} s, at most "
            f"{human_bytes(self.most_disk_bytes)} on disk; tried again after {again or 'nothing'}"
        )


def soak(
    total_bytes: float,
    *,
    directory: Path,
    seed: int = 0,
    model_mib: int = 16,
    steps: int = 6,
    faults: Sequence[Rule] | None = None,
    progress: Callable[[SoakReport], object] = lambda _: None,
) -> SoakReport:
    """Run streams until ``total_bytes`` went through, the S3 clients in turn. Raises ``AssertionError``."""
    report = SoakReport()
    started = time.monotonic()
    while report.bytes < total_bytes:
        home = Path(tempfile.mkdtemp(dir=directory))
        client = ("s3fs", "obstore")[report.streams % 2]
        try:
            with s3_server(home / "server") as server, running_proxy(server.endpoint, seed=seed) as (proxy, endpoint):
                proxy.seed += report.streams
                proxy.traffic = report.traffic
                proxy.play(rules() if faults is None else faults)
                direct = {**server.storage_options}
                faulty = {**direct, **PATIENCE[client], "client": client, "endpoint_url": endpoint}
                stream = _Stream(home, f"{server.url}/soak", faulty, report)
                stream.run(_snapshots(seed + report.streams, model_mib, steps))
                stream.prove(direct)
                report.most_disk_bytes = max(report.most_disk_bytes, _size(home))
        finally:
            shutil.rmtree(home, ignore_errors=True)
        report.streams += 1
        report.seconds = time.monotonic() - started
        progress(report)
    return report


class _Stream:
    """One stream under faults: its writer, its receiver, and what each step should be."""

    def __init__(self, home: Path, url: str, options: dict[str, object], report: SoakReport) -> None:
        self._home = home
        self._url = url
        self._options = options
        self._report = report
        self._digests: dict[int | None, str] = {}
        self._writer: Writer | None = None

    def run(self, snapshots: Iterator[Snapshot]) -> None:
        """Publish each step, follow it, and restore every version at the end."""
        backend = open_backend(self._url, storage_options=self._options)
        slots = Slots(self._home / "live")
        slots.lock()
        try:
            patcher: Patcher | None = None
            for step, snapshot in enumerate(snapshots):
                directory = _save(self._home / f"step-{step}", snapshot)
                self._digests[step or None] = _digest(directory)
                self._report.persist(lambda step=step, directory=directory: self._publish(step, directory))
                if step:
                    shutil.rmtree(directory)
                store = self._report.persist(lambda: store_at(backend))
                if patcher is None:
                    patcher = self._report.persist(lambda store=store: Patcher(store, slots, workers=_WORKERS))
                self._follow(store, patcher, step)
            self._report.persist(self._close)
            for manifest in self._report.persist(lambda: store_at(backend).log()):
                self._restore(backend, manifest.version, manifest.step)
        finally:
            slots.unlock()
            close_backend(backend)

    def prove(self, options: dict[str, object]) -> None:
        """Read the whole stream without faults: no step is missing, nothing is damaged."""
        backend = open_backend(self._url, storage_options=options)
        steps = [manifest.step for manifest in store_at(backend).log()]
        found = check(backend, read_data=True)
        close_backend(backend)
        # A step whose commit was in doubt may be there twice: once settled, once published again without a change.
        assert list(dict.fromkeys(steps)) == list(self._digests), f"published {steps}"
        assert found.ok, found.problems
        self._report.versions += len(steps)

    def _publish(self, step: int, directory: Path) -> None:
        if self._writer is None:
            self._writer = Writer(
                self._url, base=self._home / "step-0", storage_options=self._options, workers=_WORKERS, spool=self._home
            )
        # After an error the version may have been committed all the same: that is what its step tells.
        if step in {0, self._writer.head.step}:
            return
        try:
            self._writer.publish(open_checkpoint(directory), step=step).result()
        except (VersionConflict, WriterFenced):
            # What was read back was damaged on its way, and looked like somebody else's.
            self._close()
            raise

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except CommitInDoubt:
                self._report.errors[CommitInDoubt.kind] += 1

    def _follow(self, store: Store, patcher: Patcher, step: int) -> None:
        def move() -> int | None:
            patcher.adopt()
            manifest = store.latest()
            patcher.move_to(manifest)
            return manifest.step

        assert self._report.persist(move) == (step or None)
        assert _digest(self._home / "live") == self._digests[step or None], f"step {step} was received wrong"
        self._report.received += 1

    def _restore(self, backend: Backend, version: int, step: int | None) -> None:
        target = self._home / "restored"

        def restore() -> None:
            store_at(backend).restore(version, target, workers=_WORKERS)

        self._report.persist(restore)
        assert _digest(target) == self._digests[step], f"version {version} was restored wrong"
        shutil.rmtree(target)
        self._report.restored += 1


def _snapshots(seed: int, mib: int, steps: int) -> Iterator[Snapshot]:
    """Yield a base and its steps: sparse ones, and every third one dense."""
    dice = np.random.default_rng(seed)
    elements = (mib << 20) // 2
    sizes = [min(_TENSOR_ELEMENTS, elements - start) for start in range(0, elements, _TENSOR_ELEMENTS)]
    weights = {
        f"layers.{number}.weight": (dice.standard_normal(size, np.float32) * 0.02).astype(np.float16)
        for number, size in enumerate(sizes)
    }
    yield weights
    for step in range(1, steps + 1):
        weights = {name: tensor.copy() for name, tensor in weights.items()}
        for tensor in weights.values():
            bits = tensor.view(np.uint16)
            if step % 3 == 0:
                bits += dice.integers(0, 1 << 7, bits.size, np.uint16)
            else:
                bits[dice.integers(0, bits.size, bits.size // 50)] += np.uint16(1)
        yield weights


def _save(directory: Path, snapshot: Snapshot) -> Path:
    directory.mkdir()
    save_file(snapshot, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def _digest(directory: Path) -> str:
    """Hash all tensors of a checkpoint, by nothing of ours."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(load_file(directory / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).view(np.uint8))
    return digest.hexdigest()


def _size(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def main() -> int:
    """Print the traffic by kind of fault; exits with 1 at the first byte that is not the trainer's."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos.soak", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="how much is to go through, both ways (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and the weights")
    parser.add_argument("--mib", type=int, default=16, help="MiB of weights in a stream (16)")
    parser.add_argument("--directory", type=Path, help="where scratch files go")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    def tell(report: SoakReport) -> None:
        print(f"{report.streams} streams, {human_bytes(report.bytes)}, {report.seconds:.0f} s", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="deltastore-soak-", dir=options.directory) as scratch:
        report = soak(
            options.gigabytes * 1e9,
            directory=Path(scratch),
            seed=options.seed,
            model_mib=options.mib,
            progress=tell,
        )
    missing = {kind.value for kind in FaultKind} - set(report.traffic)
    print(msgspec.json.encode(report).decode() if options.json else report.show())
    if missing:
        print(f"never met: {', '.join(sorted(missing))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
