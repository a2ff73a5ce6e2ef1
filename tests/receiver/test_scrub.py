"""The live slot is read over in the background; what is damaged is mended, and the engine loads it again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import training
from following import ready_at

import receiver.mending
from deltastore import Writer, open_store
from deltastore.digest import hasher
from deltastore.errors import DamagedSlot, StorageError
from deltastore.snapshot import CHUNK_BYTES
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.patcher import Patcher
from receiver.scrub import Scrub
from receiver.slots import Slots
from receiver.status import Status

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.reader import Store

CHUNKS = 6
HASH = hasher("xxh3-128")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rng = np.random.default_rng(3)
    first = {f"t{number}": rng.integers(0, 255, CHUNK_BYTES, np.uint8) for number in range(CHUNKS)}
    import torch  # noqa: PLC0415 - only here

    tensors = {name: torch.from_numpy(data) for name, data in first.items()}
    base = training.save(tmp_path / "base", tensors)
    with Writer(tmp_path / "store", base=base) as writer:
        after = {name: tensor.clone() for name, tensor in tensors.items()}
        after["t0"][5] += 1
        writer.publish(after).result()
    return open_store(tmp_path / "store")


@pytest.fixture
def slots(store: Store, tmp_path: Path) -> Slots:
    made = Slots(tmp_path / "model")
    patcher = Patcher(store, made, workers=1)
    patcher.move_to(store.manifest(0))
    patcher.move_to(store.manifest(1))
    return made


def flip(path: Path, offset: int) -> None:
    """Change a byte as a bad disk does: nothing shows it."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def step(scrub: Scrub, slots: Slots, clock: Clock, seconds: float) -> list[int]:
    live = slots.live()
    assert live is not None
    clock.seconds += seconds
    return scrub.step(live, slots.source(live, workers=1), HASH, stopped=lambda: False).tolist()


def test_it_reads_at_its_rate_and_goes_on_where_it_was(slots: Slots, tmp_path: Path) -> None:
    clock = Clock()
    scrub = Scrub(tmp_path / "note", rate=CHUNK_BYTES, clock=clock)
    for chunk in (1, 2):
        assert step(scrub, slots, clock, 1.0) == []
        assert scrub.record.chunk == chunk
    assert step(scrub, slots, clock, 3600.0) == []  # a second's worth, however long nobody read
    assert scrub.record.chunk == 3
    while scrub.record.passed_at is None:  # the rest, and then from the start
        assert step(scrub, slots, clock, 1.0) == []
    again = Scrub(tmp_path / "note", rate=CHUNK_BYTES, clock=clock)
    assert again.record == scrub.record
    for damage in (b"", b"torn", (tmp_path / "note").read_bytes().replace(b'"format":1', b'"format":2')):
        (tmp_path / "note").write_bytes(damage)
        assert Scrub(tmp_path / "note", rate=1).record.passed_at is None


def test_it_finds_what_nothing_shows_and_goes_past_it(slots: Slots, tmp_path: Path) -> None:
    clock = Clock()
    scrub = Scrub(tmp_path / "note", rate=CHUNK_BYTES, clock=clock)
    path = slots.link / "model.safetensors"
    flip(path, path.stat().st_size - 7)
    found = [chunk for _ in range(8) for chunk in step(scrub, slots, clock, 1.0)]
    assert found == [CHUNKS - 1]


def test_a_rate_below_a_chunk_gets_there_too(slots: Slots, tmp_path: Path) -> None:
    clock = Clock()
    scrub = Scrub(tmp_path / "note", rate=1000, clock=clock)
    for _ in range(2):
        step(scrub, slots, clock, 1.0)
    assert scrub.record.chunk == 1
    for _ in range(9):
        step(scrub, slots, clock, 2000.0)
    assert scrub.record.passed_at is not None


def test_after_a_swap_it_starts_anew(store: Store, slots: Slots, tmp_path: Path) -> None:
    clock = Clock()
    scrub = Scrub(tmp_path / "note", rate=CHUNK_BYTES, clock=clock)
    for _ in range(3):
        step(scrub, slots, clock, 1.0)
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    patcher.move_to(store.manifest(0))
    step(scrub, slots, clock, 0.0)
    assert scrub.record.chunk in {0, 1}


@pytest.mark.parametrize("moment", ["idle", "start", "patch"])
def test_the_daemon_mends_what_is_damaged(moment: str, store: Store, slots: Slots, tmp_path: Path) -> None:
    import threading  # noqa: PLC0415 - only here

    path = slots.link / "model.safetensors"
    status = Status(store="x", checkpoint="x", target="x")
    options = Options(
        store=str(tmp_path / "store"),
        checkpoint=slots.link,
        poll=0.02,
        scrub_rate=1 << 30 if moment == "idle" else 0,
    )
    made = Receiver(options, status)
    if moment == "start":
        flip(path, path.stat().st_size - 7)
        path.touch()
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        training.until(lambda: status.ready, what="getting ready") if moment != "start" else None
        if moment != "start":
            flip(path, path.stat().st_size - 7)
        if moment == "patch":
            with Writer(tmp_path / "store") as writer:
                import torch  # noqa: PLC0415 - only here

                with_more = {name: torch.from_numpy(data) for name, data in _tensors(slots).items()}
                with_more[f"t{CHUNKS - 1}"] = training.load(tmp_path / "base")[f"t{CHUNKS - 1}"]
                with_more["t1"] = with_more["t1"] + 1
                writer.publish(with_more).result()
        training.until(lambda: status.record()["last_repair"], what="mending")
        training.until(lambda: status.ready, what="getting ready again")
        if moment == "patch":
            training.until(lambda: status.version == 2, what="the next version")
        if moment == "idle":
            training.until(lambda: status.record()["scrub"]["passed_at"], what="a pass")
    finally:
        made.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert status.record()["last_repair"]["damaged"] == 1
    assert b"receiver_repairs_total 1.0" in status.metrics()
    live = slots.live()
    assert live is not None
    checkpoint = slots.open(live)
    slots.verify(checkpoint, slots.digests(live, checkpoint.schema), HASH, workers=1)


def test_a_config_that_is_lost_meanwhile_is_had_again(store: Store, slots: Slots, tmp_path: Path) -> None:
    import threading  # noqa: PLC0415 - only here

    status = Status(store="x", checkpoint="x", target="x")
    options = {"scrub_rate": 1 << 30, "poll": 3600.0}
    made = Receiver(Options(store=str(tmp_path / "store"), checkpoint=slots.link, **options), status)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        training.until(lambda: status.ready, what="getting ready")
        path = slots.link / "config.json"
        before = path.read_bytes()
        path.unlink()
        training.until(lambda: status.record()["last_repair"], what="mending")
        training.until(lambda: status.ready, what="getting ready again")
    finally:
        made.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert path.read_bytes() == before
    assert status.record()["last_repair"]["damaged"] == 0


def test_the_daemon_reads_over_behind_others_and_while_it_waits(
    store: Store, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading  # noqa: PLC0415 - only here

    niceness: list[int] = []
    read = Scrub.step

    def seen(self: Scrub, *words: Any, **options: Any) -> Any:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return read(self, *words, **options)

    monkeypatch.setattr(Scrub, "step", seen)
    status = Status(store="x", checkpoint="x", target="x")
    options = {"scrub_rate": 1 << 30, "nice": 19, "poll": 3600.0}
    made = Receiver(Options(store=str(tmp_path / "store"), checkpoint=slots.link, **options), status)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        training.until(lambda: status.record()["scrub"]["passed_at"], what="a pass, long before the next look")
    finally:
        made.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert set(niceness) == {19}


def _tensors(slots: Slots) -> dict[str, np.ndarray]:
    live = slots.live()
    assert live is not None
    checkpoint = slots.open(live)
    return {spec.name: checkpoint.tensor(spec.name).copy() for spec in checkpoint.schema}


def test_what_cannot_be_mended_is_told_and_goes_on_being_served(
    store: Store, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading  # noqa: PLC0415 - only here

    tried: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise DamagedSlot("It is nowhere to be had.")

    monkeypatch.setattr(receiver.mending, "repair", fail)
    path = slots.link / "model.safetensors"
    flip(path, path.stat().st_size - 7)
    status = Status(store="x", checkpoint="x", target="x")
    made = Receiver(
        Options(store=str(tmp_path / "store"), checkpoint=slots.link, poll=0.02, scrub_rate=1 << 28), status
    )
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        training.until(lambda: tried, what="mending")
        assert thread.is_alive()
    finally:
        made.stop()
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("moment", ["idle", "start"])
def test_an_order_waits_until_the_slot_is_mended(
    moment: str, store: Store, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading  # noqa: PLC0415 - only here

    mend = receiver.mending.repair

    def ordered(*words: Any, **options: Any) -> Any:
        made.pin("0")
        return mend(*words, **options)

    monkeypatch.setattr(receiver.mending, "repair", ordered)
    path = slots.link / "model.safetensors"
    if moment == "start":
        flip(path, path.stat().st_size - 7)
        path.touch()
    status = Status(store="x", checkpoint="x", target="latest")
    options = {"poll": 0.02, "scrub_rate": 1 << 30, "nice": 19, "memory_budget": 256 << 20}
    made = Receiver(Options(store=str(tmp_path / "store"), checkpoint=slots.link, **options), status)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        if moment == "idle":
            training.until(lambda: status.ready, what="getting ready")
            flip(path, path.stat().st_size - 7)
        training.until(lambda: status.record()["last_repair"], what="mending")
        training.until(lambda: status.version == 0 and status.ready, what="the version pinned meanwhile")
    finally:
        made.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert status.record()["last_repair"]["damaged"] == 1
    training.assert_holds(slots.link, training.load(tmp_path / "base"))


@pytest.mark.parametrize("meanwhile", ["nothing", "store away", "engine restarted", "receiver restarted"])
def test_no_engine_loads_what_cannot_be_mended_yet(
    meanwhile: str, run: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    mendable = False
    mend = receiver.mending.repair

    def repair(*words: Any, **options: Any) -> Any:
        tried.append(1)
        if not mendable:
            raise StorageError("The store cannot tell now.")
        return mend(*words, **options)

    def tried_again(made: Any) -> None:
        before = len(tried)
        training.until(lambda: made.failure or len(tried) > before + 2, what="trying to mend it again")
        assert made.failure == []

    monkeypatch.setattr(receiver.mending, "repair", repair)
    with run.running(scrub_rate=1 << 30) as made:
        ready_at(made, 1)
        engine.calls.clear()
        path = run.live / "model.safetensors"
        flip(path, path.stat().st_size - 3)
        tried_again(made)
        if meanwhile == "store away":
            run.url.rename(run.root / "away")
        if meanwhile == "engine restarted":
            engine.restart()
        tried_again(made)
        assert "load" not in engine.calls
        assert not made.status.ready
        if meanwhile != "receiver restarted":
            if meanwhile == "store away":
                (run.root / "away").rename(run.url)
            mendable = True
            ready_at(made, 1)
    if meanwhile == "receiver restarted":
        with run.running(scrub_rate=0) as made:
            tried_again(made)
            assert "load" not in engine.calls
            mendable = True
            ready_at(made, 1)
    assert engine.served == ["1", "1"]
    training.assert_holds(run.live, run.snapshots[1])
