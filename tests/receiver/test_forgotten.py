"""A receiver beside forgetters and collectors: it goes on to the newest version, or says that its own is forgotten."""

from __future__ import annotations

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
from receiver.daemon import Options, Receiver
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
