"""Rolling activation over a real store: turns, the canary, and what becomes of both when answers are lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import training

from deltastore import Writer
from deltastore.errors import CorruptObject, DeltastoreError, StorageError
from deltastore.ledger import encode_coordination
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.tags import set_tag
from deltastore.testing import Fault, FaultKind, FaultyBackend, RandomFaults
from deltastore.turns import given_back, turns_ledger
from receiver.activation import Solo, Weights
from receiver.turns import Canary, Rolling


@pytest.fixture
def store(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        for seed in (1, 2, 3):
            writer.publish(training.small_snapshot(seed)).result()
    return tmp_path / "store"


class Fleet:
    """Receivers with engines that only count; knows how many are paused."""

    def __init__(self, path, *, most, canary=None):
        self.path, self.most, self.canary = path, most, canary
        self.lock, self.paused, self.highest, self.pauses = threading.Lock(), set(), 0, 0

    def rolling(self, name, *, backend=None, available=lambda: True):
        store = store_at(backend or LocalBackend(self.path))
        return store, Rolling(
            store,
            Solo(),
            fleet="f",
            receiver_id=name,
            most=self.most,
            canary=self.canary,
            available=available,
            leads=lambda: True,
        )

    def pause(self, name):
        with self.lock:
            self.paused.add(name)
            self.highest = max(self.highest, len(self.paused))
            self.pauses += 1

    def resume(self, name):
        with self.lock:
            self.paused.discard(name)

    @property
    def ledger(self):
        store = store_at(LocalBackend(self.path))
        return turns_ledger(store.backend, stream_id=store.stream_id, fleet="f")

    @property
    def holders(self):
        turns = self.ledger.newest()
        return [holder.receiver_id for holder in turns.holders] if turns is not None else []


def weights(store, version):
    manifest = store.manifest(version)
    return Weights(f"{store.stream_id}/{version}", version, manifest.commit_id, None)


def activate(fleet, name, rolling, given):
    """One pass up to the resume; tells whether the engine serves these weights now."""
    if not rolling.concerns(given) or not rolling.may_pause(given):
        return False
    fleet.pause(name)
    time.sleep(0.0005)
    assert rolling.may_resume(given, loaded=True)
    fleet.resume(name)
    return True


def patiently(action):
    """Do something until the store answers; a pass that failed is begun anew."""
    while True:
        try:
            if action() is not False:
                return
        except StorageError:
            pass
        time.sleep(0.002)


def roll(fleet, name, seed, updates, opened, *, vanishes_at=None, barrier):
    """Bring one receiver through so many updates, over a store that loses answers."""
    chance = RandomFaults(seed=seed, share=0.05, kinds=[FaultKind.RESET, FaultKind.LOSE_ANSWER, FaultKind.BUSY])
    _, rolling = fleet.rolling(name)
    rolling._ledger._backend = FaultyBackend(LocalBackend(fleet.path), chance=chance)
    given = [weights(opened, version) for version in (1, 2)]
    for number in range(updates):
        wanted = given[number % 2]
        if number == vanishes_at:
            patiently(lambda: rolling.may_pause(wanted))  # noqa: B023 - called here
            fleet.vanished.set()
            assert fleet.cleared.wait(120)  # an operator did; another daemon begins
            _, rolling = fleet.rolling(name)
        patiently(lambda: activate(fleet, name, rolling, wanted))  # noqa: B023
        patiently(lambda: rolling.served(wanted))  # noqa: B023
        barrier.wait(120)


def test_a_hundred_rolling_updates_over_eight_receivers_and_never_more_unavailable_than_may_be(store):
    fleet, names, updates = Fleet(store, most=2), [f"r{number}" for number in range(8)], 100
    fleet.vanished, fleet.cleared = threading.Event(), threading.Event()
    opened, barrier = store_at(LocalBackend(store)), threading.Barrier(len(names))
    with ThreadPoolExecutor(len(names)) as pool:
        done = [
            pool.submit(
                roll, fleet, name, seed, updates, opened, vanishes_at=50 if seed == 3 else None, barrier=barrier
            )
            for seed, name in enumerate(names)
        ]
        assert fleet.vanished.wait(240)
        assert "r3" in fleet.holders
        fleet.highest = 0  # with its turn gone, one at a time
        training.until(lambda: fleet.holders == ["r3"] and barrier.n_waiting == 7, seconds=60)
        assert fleet.highest <= 1
        fleet.ledger.change(lambda turns: given_back(turns, receiver_id="r3", by="operator"))
        fleet.cleared.set()
        for one in done:
            one.result(300)
    assert fleet.pauses == updates * len(names)
    assert fleet.highest == 2
    assert fleet.holders == []


def test_a_receiver_that_vanished_with_its_turn_stops_the_others_until_it_is_cleared_or_comes_back(store):
    fleet = Fleet(store, most=1)
    opened, gone = fleet.rolling("gone")
    _, other = fleet.rolling("other")
    one = weights(opened, 1)
    assert gone.concerns(one)
    assert gone.may_pause(one)
    for _ in range(40):
        assert not other.concerns(one)
        assert not other.may_pause(one)
    _, back = fleet.rolling("gone")  # it begins anew, with the turn that it has
    assert back.concerns(one)
    assert back.may_pause(one)
    back.served(one)
    assert other.concerns(one)
    assert other.may_pause(one)
    assert fleet.holders == ["other"]
    fleet.ledger.change(lambda turns: given_back(turns, receiver_id="other", by="operator"))
    assert fleet.holders == []
    assert back.may_pause(one)
    other.served(one)
    assert fleet.holders == ["gone"]


@pytest.mark.parametrize("damage", [b"", b"torn", b"x" * (1 << 20), "flipped", "future"])
@pytest.mark.parametrize("known", [False, True])
def test_a_damaged_record_is_never_taken_for_a_free_turn(store, damage, known):
    fleet = Fleet(store, most=2)
    opened, holder = fleet.rolling("holder")
    _, other = fleet.rolling("other")
    one = weights(opened, 1)
    if known:  # it has read what was there before, by which there was room
        other.served(one)
        assert other.concerns(one)
    assert holder.may_pause(one)
    newest = max(store.joinpath("turns", "f").iterdir())
    whole = newest.read_bytes()
    if damage == "flipped":
        damage = whole.replace(b"holder", b"halder", 1)
    elif damage == "future":
        damage = encode_coordination(msgspec.structs.replace(fleet.ledger.newest(), format=99, holders=()))
    newest.write_bytes(damage)
    for refused in (lambda: other.concerns(one), lambda: other.may_pause(one), lambda: holder.served(one)):
        with pytest.raises(DeltastoreError) as caught:
            refused()
        assert caught.value.key == f"turns/f/{newest.name}"
        assert caught.value.hint
    if isinstance(caught.value, CorruptObject):
        assert caught.value.key in caught.value.hint
    assert newest.read_bytes() == damage  # and nobody writes over it, or beyond it
    assert max(newest.parent.iterdir()) == newest
    newest.write_bytes(whole)
    holder.served(one)
    assert fleet.holders == []
    assert other.concerns(one)
    assert other.may_pause(one)


def test_an_engine_that_does_not_serve_needs_no_turn(store):
    fleet = Fleet(store, most=1)
    opened, first = fleet.rolling("first")
    one = weights(opened, 1)
    assert first.may_pause(one)
    _, fresh = fleet.rolling("fresh", available=lambda: False)
    assert fresh.concerns(one)
    assert fresh.may_pause(one)
    assert fleet.holders == ["first"]


def test_a_turn_whose_return_was_lost_is_given_back_at_the_next_pass(store):
    fleet = Fleet(store, most=1)
    backend = FaultyBackend(LocalBackend(store))
    opened, one = fleet.rolling("one", backend=backend)
    given = weights(opened, 1)
    assert one.may_pause(given)
    for _ in range(2):
        backend.add(Fault(operation="create"))
    with pytest.raises(StorageError):
        one.served(given)
    assert fleet.holders == ["one"]
    one.served(given)
    assert fleet.holders == []
    calls = len(backend.calls)
    one.served(given)
    assert len(backend.calls) == calls  # settled: nothing is asked


@pytest.mark.parametrize("promote_by", ["probe", "tag:good"])
def test_the_others_wait_for_the_canary(store, promote_by):
    fleet = Fleet(store, most=None, canary=Canary("canary", promote_by))
    opened, canary = fleet.rolling("canary")
    _, other = fleet.rolling("other")
    newest = lambda: opened.manifest(3)  # noqa: E731 - what `latest` is
    assert canary.wanted("latest", newest).version == 3
    assert other.wanted("latest", newest) is None
    two, three = weights(opened, 2), weights(opened, 3)
    assert not other.concerns(two)
    assert not other.may_pause(two)
    assert activate(fleet, "canary", canary, two)
    canary.served(two)
    if promote_by != "probe":
        assert not other.concerns(two)
        set_tag(opened, "good", 2)
    assert other.wanted("latest", newest).version == 2
    assert activate(fleet, "other", other, two)
    assert not other.concerns(three)
    assert activate(fleet, "canary", canary, three)
    canary.served(three)
    if promote_by == "probe":
        assert other.wanted("latest", newest).version == 3
        assert other.concerns(three)
        assert other.concerns(two)  # what was promoted once may be gone back to
    else:
        assert other.wanted("latest", newest).version == 2
        assert not other.concerns(three)


def test_waiting_is_one_small_read_a_pass(store):
    fleet = Fleet(store, most=1)
    opened, first = fleet.rolling("first")
    one = weights(opened, 1)
    assert first.may_pause(one)
    backend = FaultyBackend(LocalBackend(store))
    _, waits = fleet.rolling("waits", backend=backend)
    assert not waits.concerns(one)
    for _ in range(20):
        before = len(backend.calls)
        assert not waits.concerns(one)
        assert [call[0] for call in backend.calls[before:]] == ["read"]


def test_of_a_group_only_the_leader_takes_a_turn_and_a_round_called_off_gives_it_back(store):
    fleet = Fleet(store, most=1)
    opened, leader = fleet.rolling("leader")
    _, follower = fleet.rolling("follower")
    follower._leads = lambda: False
    one = weights(opened, 1)
    assert follower.concerns(one)
    assert follower.may_pause(one)
    assert fleet.holders == []
    leader._inner = NoRound()
    assert not leader.may_pause(one)
    assert fleet.holders == []


class NoRound(Solo):
    """A group whose rounds are all called off."""

    def may_pause(self, weights):
        del weights
        return False
