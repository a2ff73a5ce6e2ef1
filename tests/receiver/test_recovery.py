"""A start without the store: what is in place here is enough to end a pause that a daemon left behind."""

from __future__ import annotations

import pytest
import training
from following import ready_at

import receiver.daemon
from deltastore import Writer
from deltastore.errors import SelfTestFailed, StorageError, StoreNotFound, StreamMismatch
from deltastore.storage.local import LocalBackend
from deltastore.storage.retry import RetryingBackend
from receiver.coordination import Coordination
from receiver.engines.base import Probe


@pytest.fixture
def away(run, engine):
    """The engine as a daemon leaves it that was killed in a load, and a store that is not there."""
    run.receiver().once()
    run.publish()
    run.receiver().once()
    engine.pause()
    engine.version, engine.broken = None, True
    engine.served.clear()
    engine.calls.clear()
    run.url.rename(run.root / "away")
    return run


def back(run):
    (run.root / "away").rename(run.url)


def tried_again(made):
    """Wait until two more tries to reach the store have failed."""
    before = made.status.record()["failed_passes"]
    training.until(lambda: made.failure or made.status.record()["failed_passes"] > before + 1, what="two more tries")
    assert made.failure == []


def test_a_paused_engine_gets_the_live_version_without_the_store(away, engine):
    with away.running() as made:
        ready_at(made, 2)
        record = made.status.record()
        assert (record["serving"], record["target"], record["lag"]) == (2, None, None)
        assert "confirm" in engine.calls
        assert (engine.paused, engine.number) == (False, "2")
        assert training.differences(engine.loaded, away.snapshots[2]) == []
        tried_again(made)
        assert engine.served == ["2"]  # once confirmed it is left alone
        assert made.status.record()["error"]["kind"] == StoreNotFound.kind
        assert made.status.ready
        back(away)
        away.publish()
        ready_at(made, 3)
        training.until(lambda: made.status.record()["error"] is None)
        assert made.status.record()["target"] == 3
    assert engine.served == ["2", "3"]
    training.assert_holds(away.live, away.snapshots[3])


def test_another_stream_that_comes_in_the_stores_place_is_told_and_followed_by_nobody(away, engine):
    with away.running() as made:
        ready_at(made, 2)
        with Writer(away.url, base=away.base) as writer:  # another stream of the same model
            writer.publish(training.small_snapshot(9)).result()
        training.until(lambda: made.failure or isinstance(made.status.error, StreamMismatch))
        tried_again(made)
        assert (engine.paused, engine.number, made.status.serving) == (False, "2", 2)
        training.assert_holds(away.live, away.snapshots[2])
        away.url.rename(away.root / "foreign")
        back(away)
        away.publish()
        ready_at(made, 3)
    assert engine.served == ["2", "3"]


def test_a_version_that_the_engine_refuses_is_rolled_back_without_the_store(away, engine):
    engine.refused.add("2")
    with away.running() as made:
        training.until(lambda: made.failure or made.status.serving == 1)
        assert made.failure == []
        assert (engine.paused, engine.number) == (False, "1")
        tried_again(made)
        assert not made.status.ready  # 2 was in place, so that was wanted
        training.assert_holds(away.live, away.snapshots[1])
        back(away)
        away.publish()
        ready_at(made, 3)
    # Where the store is seen before 3 is there, 2 is tried once more, and refused.
    assert (engine.served[-1], set(engine.served[:-1])) == ("3", {"1"})


def test_an_engine_that_restarts_meanwhile_is_loaded_again(away, engine):
    with away.running() as made:
        ready_at(made, 2)
        engine.restart()
        training.until(lambda: made.failure or len(engine.served) == 2)
        assert made.failure == []
    assert engine.served == ["2", "2"]


def test_an_engine_that_does_not_answer_yet_is_waited_for(away, engine):
    engine.dead = True
    with away.running() as made:
        tried_again(made)
        assert not made.status.ready
        engine.dead = False
        ready_at(made, 2)


@pytest.mark.parametrize("damage", ["weights", "record", "digests"])
def test_a_damaged_live_slot_keeps_the_engine_shut_and_says_why(away, engine, damage):
    live, slots = away.live.readlink().name, away.live.with_name("live.slots")
    path = {
        "weights": slots / live / "model.safetensors",
        "record": slots / f"{live}.json",
        "digests": slots / f"{live}.digests",
    }[damage]
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    with away.running() as made:
        training.until(lambda: made.failure or made.status.latched is not None)
        assert made.failure == []
        tried_again(made)
        record = made.status.record()
        assert (record["state"], record["activation"], record["ready"]) == ("latched", "latched", False)
        assert "damaged" in record["latched"] or path.name in record["latched"]
        assert (engine.paused, engine.served) == (True, [])
        assert "load" not in engine.calls
        back(away)
        ready_at(made, 2)  # mended from the store
        assert made.status.record()["latched"] is None
    assert engine.served == ["2"]
    training.assert_holds(away.live, away.snapshots[2])


def test_an_engine_that_serves_beside_a_damaged_slot_is_not_called_latched(away, engine):
    live = away.live.readlink().name
    path = away.live.with_name("live.slots") / f"{live}.digests"
    path.write_bytes(path.read_bytes()[:-1])
    engine.restart()
    with away.running() as made:
        tried_again(made)
        assert (made.status.latched, made.status.ready) == (None, False)
    assert "pause" not in engine.calls


def test_with_nothing_on_disk_it_only_waits(run, engine):
    run.url.rename(run.root / "away")
    engine.pause()
    engine.calls.clear()
    with run.running() as made:
        tried_again(made)
        assert engine.calls == []
        assert made.status.record()["version"] is None
        back(run)
        ready_at(made, 1)


def test_a_member_of_a_group_waits_for_the_store(away, engine):
    with away.running(coordination=Coordination(group="two", size=2)) as made:
        tried_again(made)
    assert engine.calls == ["close"]
    assert engine.paused


@pytest.mark.parametrize("paused", [False, True])
def test_of_a_fleet_only_an_engine_that_serves_nothing_is_touched(away, engine, paused):
    label = f"{receiver.daemon.open_store(away.root / 'away').stream_id}/2"
    if not paused:
        engine.version, engine.paused, engine.broken = label, False, False
    with away.running(coordination=Coordination(max_unavailable=1)) as made:
        if paused:
            ready_at(made, 2)
        tried_again(made)
        assert ("pause" in engine.calls) == paused
        assert made.status.ready == paused
        back(away)
        ready_at(made, 2)


@pytest.mark.parametrize(("target", "ready"), [("2", True), ("1", False), ("tag:good", True)])
def test_what_is_in_place_counts_as_wanted_unless_a_number_was_given(away, engine, target, ready):
    with away.running(target=target) as made:
        training.until(lambda: made.failure or made.status.serving == 2)
        tried_again(made)
        assert made.status.ready == ready


def test_what_an_operator_told_wrongly_is_no_target(away, engine):
    (away.live.with_name("live.slots") / "control.json").write_bytes(b"{")
    with away.running() as made:
        training.until(lambda: made.failure or made.status.serving == 2)
        tried_again(made)
        assert not made.status.ready


def test_the_engine_does_not_wait_for_the_tries_of_the_first_request(away, engine, monkeypatch):
    """A store over the network is asked again for a minute before that is called a failure."""
    reading = LocalBackend.read
    lost = [True]

    def read(self, key, *, limit):
        if lost[0]:
            raise StorageError("nobody answers", key=key, transient=True)
        return reading(self, key, limit=limit)

    monkeypatch.setattr(LocalBackend, "read", read)
    opened = receiver.daemon.open_store
    pauses = []

    def slowly(url, *, sleep, **options):
        store = RetryingBackend(LocalBackend(away.url), sleep=lambda seconds: (pauses.append(seconds), sleep(0.01)))
        store.read("manifests/0000000000.json", limit=1 << 20)
        return opened(url, **options)

    monkeypatch.setattr(receiver.daemon, "open_store", slowly)
    back(away)
    with away.running() as made:
        ready_at(made, 2)
        assert made.status.record()["failed_passes"] == 0  # it is still asking
        training.until(lambda: len(pauses) > 3)
        assert engine.served == ["2"]
        lost[0] = False
        away.publish()
        ready_at(made, 3)


def test_a_self_test_needs_no_store(away, engine):
    engine.probed = lambda: Probe((-1.0 - len(engine.calls), -2.0), (1, 2))
    made = away.receiver(self_test=True)
    with pytest.raises(SelfTestFailed):
        made.run()
