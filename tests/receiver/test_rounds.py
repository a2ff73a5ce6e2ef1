"""Groups over a real store: members as threads, with real rounds and engines that only remember."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import training

from deltastore import Writer
from deltastore.errors import CorruptObject, StorageError, UsageError
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import FaultKind, FaultyBackend, RandomFaults
from receiver.activation import Weights
from receiver.rounds import Group


@pytest.fixture
def store(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        for seed in (1, 2):
            writer.publish(training.small_snapshot(seed)).result()
    return tmp_path / "store"


class Ended(Exception):
    """A member was told to end."""


class One:
    """One member, as its daemon would drive it."""

    def __init__(self, store, name, *, size=3, engine=True, ready=20.0, load=20.0, group="g", backend=None):
        self.store = store_at(backend or LocalBackend(store))
        self.name, self.engine = name, engine
        self.serving, self.live, self.paused, self.ended = None, None, False, threading.Event()
        self.group = Group(
            self.store,
            group,
            size=size,
            receiver_id=name,
            engine=engine,
            poll=0.01,
            ready_timeout=ready,
            load_timeout=load,
            wait=self.wait,
        )

    def wait(self, seconds):
        if self.ended.wait(seconds):
            raise Ended

    def weights(self, version):
        manifest = self.store.manifest(version)
        return Weights(f"{self.store.stream_id}/{version}", version, manifest.commit_id, None)

    def go_to(self, target, *, loads=lambda version: True):
        """One pass; ``target``: what it would follow by itself."""
        wanted = self.group.wanted(lambda: self.store.manifest(target), order=target)
        if wanted is None:
            return
        self.live = wanted.version
        weights = self.weights(self.live)
        if self.serving == self.live and not self.paused and not self.group.due(weights):
            return
        if not self.group.concerns(weights) or not self.group.may_pause(weights):
            return
        self.paused, self.serving = True, None
        loaded = loads(self.live)
        if self.group.may_resume(weights, loaded=loaded):
            self.serving, self.paused = self.live, False

    def follow(self, target, **options):
        try:
            while True:
                with suppress(StorageError, CorruptObject):  # the daemon begins the pass anew
                    self.go_to(target(), **options)
                self.wait(0.01)
        except Ended:
            pass


@pytest.fixture
def running():
    """Run members in threads; ends them all."""
    begun = []

    def run(member, target, **options):
        member.group.join()
        thread = threading.Thread(target=member.follow, args=(target,), kwargs=options, daemon=True)
        begun.append((member, thread))
        thread.start()

    yield run
    for member, _ in begun:
        member.ended.set()
    for _, thread in begun:
        thread.join(20)
        assert not thread.is_alive()


def test_members_go_to_what_their_leader_wants_and_back(store, running):
    target = SimpleNamespace(version=1)
    members = [One(store, name, engine=name == "b") for name in "abc"]
    for member in members:
        running(member, lambda: target.version)
    for version in (1, 2, 0, 2):
        target.version = version
        training.until(lambda: [member.serving for member in members] == [target.version] * 3)
    assert [member.group.leads for member in members] == [False, True, False]


def test_a_version_that_one_cannot_load_leads_all_back_and_is_left_alone(store, running):
    target = SimpleNamespace(version=1)
    members = [One(store, name) for name in "ab"] + [One(store, "c")]
    for member in members[:2]:
        running(member, lambda: target.version)
    running(members[2], lambda: target.version, loads=lambda version: version != 2)
    training.until(lambda: all(member.serving == 1 for member in members))
    target.version = 2
    leader = members[0]
    training.until(lambda: leader.group.refuses(leader.store.manifest(2).commit_id))
    training.until(lambda: all(member.serving == 1 for member in members))
    target.version = 0
    training.until(lambda: all(member.serving == 0 for member in members))


def test_without_one_of_them_nobody_pauses_and_when_it_comes_all_go_on(store, running):
    members = [One(store, name, ready=0.2) for name in "abc"]
    for member in members[:2]:
        running(member, lambda: 1)
    leader = members[0]
    training.until(lambda: leader.group._round is not None and leader.group._round.number > 3)
    assert not any(member.paused for member in members)
    running(members[2], lambda: 1)
    training.until(lambda: all(member.serving == 1 for member in members))


def test_a_group_that_is_complete_or_of_another_size_is_told(store):
    for name in "abc":
        One(store, name).group.join()
        One(store, name).group.join()  # again, after a restart
    with pytest.raises(UsageError, match=r"has its 3 members already: a, b, c"):
        One(store, "d").group.join()
    with pytest.raises(UsageError, match="has 3 members, not 2"):
        One(store, "a", size=2).group.join()


def test_a_follower_that_begins_anew_takes_no_round(store, running):
    members = [One(store, name, engine=name == "a") for name in "abc"]
    for member in members:
        running(member, lambda: 1)
    training.until(lambda: all(member.serving == 1 for member in members))
    number = members[0].group._objects.newest()
    members[2].ended.set()
    again = One(store, "c", engine=False)
    running(again, lambda: 1)
    training.until(lambda: again.serving == 1)
    assert members[0].group._objects.newest() == number


def test_an_engine_that_lost_its_weights_is_loaded_again_together_with_the_others(store, running):
    members = [One(store, name) for name in "ab"] + [One(store, "c", engine=False)]
    for member in members:
        running(member, lambda: 1)
    training.until(lambda: all(member.serving == 1 for member in members))
    number = members[0].group._objects.newest()
    members[1].serving = None
    training.until(lambda: all(member.serving == 1 for member in members))
    assert members[0].group._objects.newest() == number + 1


def test_members_whose_store_loses_answers_agree_all_the_same(store, running):
    target, members = SimpleNamespace(version=1), []
    for seed, name in enumerate("abc"):
        chance = RandomFaults(seed=seed, share=0.05, kinds=[FaultKind.LOSE_ANSWER, FaultKind.RESET, FaultKind.BUSY])
        member = One(store, name)
        members.append(member)
        running(member, lambda: target.version)
        backend = FaultyBackend(LocalBackend(store), chance=chance)
        member.group._objects._backend = member.group._ledger._backend = backend
    for version in (1, 2, 0, 1, 2):
        target.version = version
        training.until(lambda: [member.serving for member in members] == [target.version] * 3, seconds=60)


class Garbling(LocalBackend):
    """Reads of a round's outcome are damaged so often."""

    def __init__(self, root, times):
        super().__init__(root)
        self.left = times

    def read(self, key, **options):
        data = super().read(key, **options)
        if key.endswith("/outcome.json") and self.left:
            self.left -= 1
            return bytes(data)[:-9]
        return data


def test_a_damaged_answer_at_the_barrier_is_read_again(store, running):
    backend = Garbling(store, 3)
    members = [One(store, "a"), One(store, "b"), One(store, "c", backend=backend)]
    for member in members:
        running(member, lambda: 1)
    training.until(lambda: [member.serving for member in members] == [1] * 3)
    assert backend.left == 0


def test_whoever_cannot_read_the_outcome_stays_paused_until_it_can(store, running):
    backend = Garbling(store, -1)
    members = [One(store, "a"), One(store, "b"), One(store, "c", backend=backend, load=0.2)]
    for member in members:
        running(member, lambda: 1)
    training.until(lambda: [member.serving for member in members] == [1, 1, None] and backend.left < -100)
    assert members[2].paused
    backend.left = 0
    training.until(lambda: members[2].serving == 1)
