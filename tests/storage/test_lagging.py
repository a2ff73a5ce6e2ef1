"""Listings that lag: publishing, restoring and receiving never need them."""

from __future__ import annotations

import pytest
import training

import deltastore.writer
from deltastore import Writer, open_checkpoint
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import LaggingBackend
from deltastore.testing.storage_contract import StorageContract
from receiver.patcher import Patcher
from receiver.slots import Slots


class CaughtUp(LaggingBackend):
    """Catches up before every listing."""

    def list(self, prefix):
        self.catch_up()
        return super().list(prefix)


class TestLaggingBackendThatHasCaughtUp(StorageContract):
    race_rounds = 10

    @pytest.fixture
    def open_another(self, tmp_path):
        return lambda: CaughtUp(LocalBackend(tmp_path))


def test_a_stream_whose_listings_show_nothing(tmp_path, monkeypatch):
    backend = LaggingBackend(LocalBackend(tmp_path / "store"))
    monkeypatch.setattr(deltastore.writer, "open_backend", lambda *_, **__: backend)
    snapshots = [training.small_snapshot(number) for number in range(3)]
    directories = [training.save(tmp_path / f"checkpoint{number}", each) for number, each in enumerate(snapshots)]
    for number in (1, 2):
        with Writer("anywhere", base=directories[0]) as writer:
            writer.publish(open_checkpoint(directories[number])).result()
    store = store_at(backend)
    assert [*backend.list("")] == []
    assert store.latest().version == 2
    slots = Slots(tmp_path / "live")
    slots.lock()
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    for number, snapshot in enumerate(snapshots):
        store.restore(number, tmp_path / f"restored{number}")
        training.assert_holds(tmp_path / f"restored{number}", snapshot)
        patcher.move_to(store.manifest(number))
        training.assert_holds(tmp_path / "live", snapshot)
    slots.unlock()
