"""A receiver beside forgetters and collectors: it goes on to the newest version, or says that its own is forgotten."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import training
from anchors import make_anchor

import deltastore.reader
from deltastore import Writer, open_store
from deltastore.errors import VersionForgotten
from deltastore.gc import collect, forget
from deltastore.policy import Policy
from deltastore.storage.local import LocalBackend
from deltastore.tags import set_tag
from deltastore.testing import Effect, Fault, FaultyBackend
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.status import Status

SNAPSHOTS = [training.small_snapshot(seed, elements=64) for seed in range(6)]


@pytest.fixture
def writer(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", SNAPSHOTS[0])) as writer:
        for snapshot in SNAPSHOTS[1:5]:
            writer.publish(snapshot).result()
        yield writer


def once(tmp_path, target="latest"):
    options = Options(store=str(tmp_path / "store"), checkpoint=tmp_path / "live", target=target)
    Receiver(options, Status(store=options.store, checkpoint=str(options.checkpoint), target=target)).once()


def let_go(tmp_path, keep_last=1):
    store = open_store(tmp_path / "store")
    forget(store, Policy(keep_last=keep_last), make_anchor=lambda version: make_anchor(store, version))
    collect(store)


@pytest.mark.parametrize("held", [None, "1"])
def test_a_fixed_target_that_is_forgotten_is_told_and_what_is_there_stays(writer, tmp_path, held):
    if held is not None:
        once(tmp_path, held)
    let_go(tmp_path)
    with pytest.raises(VersionForgotten):
        once(tmp_path, "2")
    if held is not None:
        training.assert_holds(tmp_path / "live", SNAPSHOTS[1])
        once(tmp_path, held)  # what it has needs no store
    once(tmp_path)
    training.assert_holds(tmp_path / "live", SNAPSHOTS[4])


def test_a_tagged_target_outlives_its_record(writer, tmp_path):
    set_tag(open_store(tmp_path / "store"), "best", 2)
    let_go(tmp_path)
    once(tmp_path, "tag:best")
    training.assert_holds(tmp_path / "live", SNAPSHOTS[2])


def test_the_newest_version_is_gone_to_when_the_one_on_its_way_is_forgotten(writer, tmp_path, monkeypatch):
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))

    def meanwhile():
        writer.publish(SNAPSHOTS[5]).result()
        let_go(tmp_path)

    fault = Fault(operation="read", effect=Effect.NONE, key_prefix="parts/0000000003", hook=meanwhile)
    backend.add(fault)
    monkeypatch.setattr(deltastore.reader, "open_backend", lambda *_, **__: backend)
    once(tmp_path)
    assert backend.remaining == 0
    training.assert_holds(tmp_path / "live", SNAPSHOTS[5])


@contextmanager
def following(tmp_path, **options):
    """Run a daemon in a thread of its own; yields its status. It must neither end nor raise."""
    made = Options(store=str(tmp_path / "store"), checkpoint=tmp_path / "live", poll=0.02, **options)
    status = Status(store=made.store, checkpoint=str(made.checkpoint), target="latest")
    receiver, failures = Receiver(made, status), []

    def run():
        try:
            receiver.run()
        except BaseException as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield status
        assert thread.is_alive()
    finally:
        receiver.stop()
        thread.join(20)
    assert failures == []


@pytest.mark.parametrize("newer", [True, False], ids=["another-version", "another-way"])
@pytest.mark.parametrize("operation", ["read", "read_range"], ids=["whole", "in-pieces"])
def test_a_daemon_goes_on_when_what_it_fetches_is_forgotten_and_collected(operation, newer, tmp_path, monkeypatch):
    """Held in the middle of a part; then that part is gone, with its version or with the way over it."""
    held, go = threading.Event(), threading.Event()

    def hold():
        held.set()
        assert go.wait(20)

    elements = 64 if operation == "read" else 1 << 20  # of which a part is fetched in a dozen pieces
    snapshots = [training.small_snapshot(seed, elements=elements) for seed in range(4)]
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))
    options = {} if operation == "read" else {"max_bandwidth": 8 << 20}
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", snapshots[0])) as writer:
        once(tmp_path)  # from version 0 on there is no way but the deltas
        for snapshot in snapshots[1:3]:
            writer.publish(snapshot).result()
        key = open_store(tmp_path / "store").manifest(2).model.parts[-1].key
        backend.add(*([Fault(operation=operation, effect=Effect.NONE, key_prefix=key)] * (2 if options else 0)))
        backend.add(Fault(operation=operation, effect=Effect.NONE, key_prefix=key, hook=hold))
        monkeypatch.setattr(deltastore.reader, "open_backend", lambda *_, **__: backend)
        with following(tmp_path, **options) as status:
            assert held.wait(20)
            monkeypatch.undo()
            if newer:
                writer.publish(snapshots[3]).result()
            let_go(tmp_path)
            assert not (tmp_path / "store" / key).exists()
            assert status.version == 0
            go.set()
            newest = 3 if newer else 2
            training.until(lambda: status.serving == newest, what=f"version {newest}")
            training.until(lambda: status.record()["state"] == "following")
            assert (status.version, status.error) == (newest, None)
            assert b"receiver_failures_total{" not in status.metrics()  # another plan, and not another pass
            training.assert_holds(tmp_path / "live", snapshots[newest])
    assert backend.remaining == 0
    assert [*(tmp_path / "live.slots" / "parts").iterdir()] == []
