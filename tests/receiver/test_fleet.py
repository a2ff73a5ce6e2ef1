"""Heartbeats: how often, what happens when they fail, and what a fleet of a thousand costs a store."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter

import pytest
import training

from deltastore import Writer
from deltastore.clock import now
from deltastore.errors import StorageError
from deltastore.heartbeat import Heartbeat, heartbeat_key, is_receiver_id, read_fleet
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import Fault, FaultyBackend
from receiver.fleet import LEAST_SECONDS, Heartbeats, own_id
from receiver.follower import Follower

RECEIVERS = 1000 if os.environ.get("DELTASTORE_THOROUGH") else 100


def beat(receiver_id="r1", **changes):
    given = {
        "stream_id": "a" * 32,
        "receiver_id": receiver_id,
        "host": "host",
        "version": 1,
        "target": 1,
        "state": "following",
        "stages": {},
        "software": "deltastore 0",
        "every": 30.0,
        "sent_at": now(),
    }
    return Heartbeat(**{**given, **changes})


class Scene:
    """A receiver whose clock is ours."""

    def __init__(self, root):
        self.backend = FaultyBackend(LocalBackend(root))
        self.time, self.now, self.told = 1000.0, beat(), []
        self.heartbeats = Heartbeats(
            self.backend, lambda: self.now, every=30.0, told=self.told.append, clock=lambda: self.time
        )

    def sent_in(self, seconds, *, change=lambda second: {}):
        """Let so many seconds pass, with a look at each; return when something was sent."""
        found = []
        for second in range(seconds):
            self.now = beat(**change(second))
            if self.heartbeats.beat():
                found.append(second)
            self.time += 1
        return found


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_while_nothing_changes_one_is_sent_every_thirty_seconds(scene):
    assert scene.sent_in(100) == [0, 30, 60, 90]
    assert scene.backend.calls == [("write", "fleet/r1.json")] * 4


def test_a_change_is_sent_soon_and_never_more_often_than_every_five(scene):
    sent = scene.sent_in(60, change=lambda second: {"version": second})
    assert sent == list(range(0, 60, int(LEAST_SECONDS)))


def test_a_change_is_sent_at_once_after_a_quiet_while(scene):
    assert scene.sent_in(20, change=lambda second: {"state": "patching" if second >= 12 else "following"}) == [0, 12]


def test_there_is_nothing_to_send_while_nothing_is_known(scene):
    scene.now = None
    assert not scene.heartbeats.beat()
    assert scene.backend.calls == []


def test_failures_are_neither_raised_nor_hurried_and_told_now_and_then(scene, caplog):
    for _ in range(20):
        scene.backend.add(Fault(operation="write"))
    with caplog.at_level(logging.WARNING, "receiver"):
        sent = scene.sent_in(600, change=lambda second: {"version": second})
        assert sent == list(range(0, 600, 30))
        assert scene.told == [False] * 20
        assert len(caplog.records) == 1
        assert caplog.records[0].fields["error_kind"] == "storage"
    scene.sent_in(60)
    assert scene.told[-1] is True


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, StorageError])
def test_nothing_that_a_backend_raises_disturbs(scene, error):
    scene.backend.add(Fault(operation="write", error=lambda: error("x")))
    assert scene.heartbeats.beat()
    assert scene.told == [False]


def test_a_clean_stop_takes_it_away_and_another_leaves_it(scene, tmp_path):
    for remove in (False, True):
        scene = Scene(tmp_path)
        scene.heartbeats.start()
        training.until(lambda scene=scene: scene.told)
        scene.heartbeats.stop(remove=remove)
        assert (tmp_path / heartbeat_key("r1")).exists() is not remove


def test_a_store_that_hangs_does_not_keep_a_receiver_from_stopping(scene):
    go = threading.Event()
    scene.backend.add(Fault(operation="write", hook=lambda: go.wait(30)))
    scene.heartbeats.start()
    training.until(lambda: scene.backend.calls)
    stopping = threading.Thread(target=lambda: scene.heartbeats.stop(remove=True))
    stopping.start()
    stopping.join(8)
    assert not stopping.is_alive()
    go.set()
    scene.heartbeats._thread.join(20)


def test_an_id_is_made_once_and_kept(tmp_path):
    path = tmp_path / "receiver-id"
    made = own_id(path)
    assert is_receiver_id(made)
    assert own_id(path) == made
    for damage in (b"", b"../x\n", b"\xff", b"a b"):
        path.write_bytes(damage)
        again = own_id(path)
        assert is_receiver_id(again)
        assert own_id(path) == again
    assert is_receiver_id(own_id(tmp_path / "nowhere" / "receiver-id"))


# -- a whole fleet ----------------------------------------------------------------------------------------


class Metered:
    """A backend that counts the calls and bytes of its users."""

    def __init__(self, inner):
        self.inner, self.url = inner, inner.url
        self.calls, self.bytes = Counter(), Counter()

    def read(self, key, *, limit):
        self.calls["read"] += 1
        data = self.inner.read(key, limit=limit)
        self.bytes["read"] += len(data)
        return data

    def write(self, key, data):
        self.calls["write"] += 1
        self.bytes["write"] += len(data)
        self.inner.write(key, data)

    def list(self, prefix):
        self.calls["list"] += 1
        return self.inner.list(prefix)

    def spent(self):
        spent = dict(self.calls), dict(self.bytes)
        self.calls.clear()
        self.bytes.clear()
        return spent


def test_what_a_fleet_asks_of_a_store_is_what_the_page_says(tmp_path):
    """docs/operations.md, "What a fleet asks of the store", has these figures."""
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        writer.publish(training.small_snapshot(1)).result()
        fleet = []
        for _ in range(RECEIVERS):
            backend = Metered(LocalBackend(tmp_path / "store"))
            follower = Follower(store_at(backend), "latest")
            assert follower.wanted().version == 1
            fleet.append((backend, follower))
        for backend, _ in fleet:
            calls, _bytes = backend.spent()
            assert calls == {"read": 4}  # the base, the hint, the newest, and that there is none after it

        def a_round(version):
            asked = []
            for backend, follower in fleet:
                assert follower.wanted().version == version
                asked.append(backend.spent())
            assert all(one == asked[0] for one in asked)  # no receiver costs more for the others
            return asked[0]

        for _ in range(3):
            assert a_round(1) == ({"read": 1}, {})
        for seed in range(2, 5):
            writer.publish(training.small_snapshot(seed)).result()
            calls, size = a_round(seed)
            assert calls == {"read": 3}  # the new one, the hint, and that there is none after it
            assert size["read"] < 4096
            assert a_round(seed) == ({"read": 1}, {})
        for seed in range(5, 37):
            writer.publish(training.small_snapshot(seed)).result()
        calls, size = a_round(36)
        assert calls["read"] <= 4  # thirty-two versions at once: the hint leads there
        assert size["read"] < 8192

        stream = fleet[0][1]._store.stream_id
        for number, (backend, _) in enumerate(fleet):
            made = beat(f"r{number:04d}", stream_id=stream)
            sender = Heartbeats(backend, lambda made=made: made, every=30.0, told=lambda _: None)
            assert sender.beat()
            assert not sender.beat()
            calls, size = backend.spent()
            assert calls == {"write": 1}
            assert size["write"] < 1024
        admin = Metered(LocalBackend(tmp_path / "store"))
        assert len(read_fleet(admin, stream_id=stream)) == RECEIVERS
        assert admin.spent()[0] == {"list": 1, "read": RECEIVERS}
