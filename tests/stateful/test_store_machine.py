"""Everything that may happen to a store, in any order, against a dictionary of snapshots.

Two writers that fail in every way, are killed and come back; makers of routes; taggers, makers of records, collectors;
damage; a receiver that goes forwards and backwards. One history, each version its own bytes, or forgotten, for ever.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import training
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import deltastore.compact
import deltastore.writer
from deltastore import Writer, open_store
from deltastore.compact import anchor, compact
from deltastore.errors import (
    CommitInDoubt,
    DeltastoreError,
    PublishError,
    StorageError,
    VersionConflict,
    VersionForgotten,
    WriterFenced,
)
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.tags import delete_tag, read_tags, set_tag
from deltastore.testing import Effect, Fault, FaultyBackend
from receiver.patcher import Patcher
from receiver.slots import Slots

NAMES = ("one", "two")
TAGS = ("best", "held")
#: What damage does no harm to, whoever reads it: hints.
HINTS = ("LATEST", "begun.json")
#: One of many, whose number must not decide what Hypothesis draws: sizes of objects may differ from run to run.
WHERE = st.integers(0, (1 << 32) - 1)


class Trainer:
    """A writer behind a faulty backend, and what it knows."""

    def __init__(self, directory, base=None):
        self.backend = FaultyBackend(LocalBackend(directory))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deltastore.writer, "open_backend", lambda *_, **__: self.backend)
            self.writer = Writer("here", base=base, workers=1)
        self.lost = False
        self.doubt = None
        self.version = self.writer.version


class StoreMachine(RuleBasedStateMachine):
    """The model: the snapshots by version, those that the records forgot, the tags; else the store is asked."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        self.store = self.root / "store"
        self.history = []
        self.forgotten = set()
        self.tags = {}
        self.manifests = {}
        self.trainers = {}
        self.seed = 0
        self.restored = 0
        # A failure is found again only if the objects' names are the same.
        ids = random.Random(0)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(secrets, "token_hex", lambda size: ids.randbytes(size).hex())

    @initialize(hash_name=st.sampled_from(["xxh3-128", "blake3"]))
    def begin(self, hash_name):
        self.history = [training.small_snapshot(0, elements=16)]
        base = training.save(self.root / "base", self.history[0])
        with Writer(self.store, base=base, hash_name=hash_name, workers=1) as writer:
            for _ in range(3):
                self.history.append(self.snapshot())
                writer.publish(self.history[-1]).result()
        self.open("one")

    def snapshot(self, fresh=True):
        """Return a new snapshot, like the newest one with a few changes, or that one itself."""
        after = {name: tensor.clone() for name, tensor in self.history[-1].items()}
        if fresh:
            self.seed += 1
            name = sorted(after)[self.seed % 3]
            data = training.flat(after[name])
            data[self.seed % len(data)] = (int(data[self.seed % len(data)]) + 1 + self.seed % 250) % 256
        return after

    def outcome(self, trainer, snapshot, act):
        """Act, and put down in the model what must have become of it."""
        expected_version = len(self.history)
        behind = trainer.version != expected_version - 1
        try:
            act()
        except VersionConflict:
            assert behind
            trainer.lost = True
        except WriterFenced:
            assert trainer.lost
        except CommitInDoubt:
            commit_id = trainer.writer._doubt.manifest.commit_id
            trainer.doubt = trainer.doubt or (trainer.version + 1, snapshot, commit_id)
        else:
            assert not behind
            self.history.append(snapshot)
            trainer.version = expected_version
        self.settle_doubts()

    def settle_doubts(self):
        """See which of the versions in doubt have landed after all."""
        for trainer in self.trainers.values():
            if self.has_landed(trainer):
                self.history.append(trainer.doubt[1])

    def has_landed(self, trainer):
        """Tell whether the newest version is the one that a writer was in doubt of; two may be of the same number."""
        if trainer.doubt is None or trainer.doubt[0] != len(self.history):
            return False
        key = self.store / "manifests" / f"{len(self.history):010d}.json"
        return key.exists() and trainer.doubt[2] in key.read_text()

    @precondition(lambda self: self.history)
    @rule(name=st.sampled_from(NAMES))
    def open(self, name):
        """Open a writer, or again after it was closed or lost: it goes on from the newest version."""
        if name in self.trainers:
            self.leave(name)
        self.trainers[name] = Trainer(self.store)
        assert self.trainers[name].version == len(self.history) - 1

    def leave(self, name):
        trainer = self.trainers.pop(name)
        newest = len(self.history)
        with suppress(CommitInDoubt):
            trainer.writer.close()
        if trainer.doubt is not None and trainer.doubt[0] == newest:
            self.trainers[name] = trainer
            self.settle_doubts()
            del self.trainers[name]

    @precondition(lambda self: self.trainers)
    @rule(data=st.data())
    def close(self, data):
        self.leave(data.draw(st.sampled_from(sorted(self.trainers))))

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), lands=st.booleans())
    def crash(self, data, lands):
        """Forget a writer as a kill would: nothing is settled, what is on its way may land or not."""
        trainer = self.trainers.pop(data.draw(st.sampled_from(sorted(self.trainers))))
        if lands:
            trainer.backend.land()
            if self.has_landed(trainer):
                self.history.append(trainer.doubt[1])
        trainer.writer._committer.shutdown()
        trainer.writer._spool.close()

    @precondition(lambda self: self.trainers)
    @rule(
        data=st.data(), fresh=st.integers(0, 9), fault=st.sampled_from([None, None, "part", "lost", "late", "before"])
    )
    def publish(self, data, fresh, fault):
        trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
        backend = trainer.backend
        snapshot = self.snapshot(fresh > 0)
        if trainer.doubt is not None:
            return self.settle(trainer)
        if fault == "part" and fresh and not trainer.lost:
            backend.add(Fault(operation="write", key_prefix="parts/"))
            before = len(self.history)
            with pytest.raises(StorageError):
                trainer.writer.publish(snapshot).result()
            assert len(self.history) == before
            assert backend.remaining == 0
            return None
        if not trainer.lost:
            if fault == "lost":
                backend.add(Fault(operation="create", effect=Effect.AFTER))
            elif fault == "before":
                backend.add(Fault(operation="create"))
            elif fault == "late":
                backend.add(Fault(operation="create", effect=Effect.LATE))
                # Refused for good, so that it stays in doubt.
                for _ in range(2):
                    backend.add(Fault(operation="read", key_prefix=f"manifests/{trainer.version + 1:010d}"))
        self.outcome(trainer, snapshot, lambda: trainer.writer.publish(snapshot).result())
        backend._left.clear()
        return None

    def settle(self, trainer):
        """Publish while a version is in doubt: it is settled first."""
        version, pending, _ = trainer.doubt
        newest = self.snapshot()
        try:
            trainer.writer.publish(newest).result()
        except VersionConflict:
            assert version < len(self.history)
            assert training.differences(self.history[version], pending) or version < len(self.history)
            trainer.lost, trainer.doubt = True, None
            return
        # Settled as ours, and the next one published after it.
        if version == len(self.history):
            self.history.append(pending)
        assert training.differences(self.history[version], pending) == []
        trainer.doubt = None
        trainer.version = version + 1
        assert trainer.writer.version == trainer.version
        self.history.append(newest)

    @precondition(lambda self: any(trainer.doubt for trainer in self.trainers.values()))
    @rule()
    def land(self):
        """Let requests that were on their way arrive now."""
        for trainer in self.trainers.values():
            trainer.backend.land()
        self.settle_doubts()

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), how=st.sampled_from(["missing", "unknown", "shape", "iterator", "metadata"]))
    def publish_bad(self, data, how):
        trainer = self.trainers[data.draw(st.sampled_from(sorted(self.trainers)))]
        if trainer.lost or trainer.doubt is not None:
            return
        snapshot = self.snapshot()
        name = data.draw(st.sampled_from(sorted(snapshot)))
        metadata = {}
        error = PublishError
        if how == "missing":
            del snapshot[name]
        elif how == "unknown":
            snapshot["x.weight"] = snapshot[name]
        elif how == "shape":
            snapshot[name] = snapshot[name].reshape(-1)[:-1]
        elif how == "metadata":
            metadata = {"list": []}
        else:
            error = ZeroDivisionError
            snapshot = ((key, tensor) if key != name else 1 // 0 for key, tensor in list(snapshot.items()))
        with pytest.raises(error):
            trainer.writer.publish(snapshot, metadata=metadata)
        assert trainer.writer.version == trainer.version

    @precondition(lambda self: self.history)
    @rule(data=st.data(), based=st.booleans())
    def restore(self, data, based):
        version = data.draw(st.integers(0, len(self.history) - 1))
        base = None
        if based:
            held = data.draw(st.integers(0, len(self.history) - 1))
            base = training.save(self.root / f"held{self.restored}", self.history[held], others=False)
        self.assert_restores(version, base=base)

    def may_be_asked_for(self, version):
        return version not in self.forgotten or version in self.tags.values()

    def assert_restores(self, version, *, base=None):
        """A version is restored bit for bit, or is forgotten."""
        self.restored += 1
        target = self.root / f"restored{self.restored}"
        if not self.may_be_asked_for(version):
            with pytest.raises(VersionForgotten):
                open_store(self.store).restore(version, target, base=base, workers=1)
            return
        open_store(self.store).restore(version, target, base=base, workers=1)
        training.assert_holds(target, self.history[version], others=False)
        shutil.rmtree(target)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def receive(self, data):
        """Take the receiver's checkpoint to any version, forwards or backwards, with a receiver that just started."""
        version = data.draw(st.integers(0, len(self.history) - 1))
        opened, slots = open_store(self.store), Slots(self.root / "live")
        slots.lock()
        try:
            patcher = Patcher(opened, slots, workers=1)
            live = patcher.adopt()
            before = None if live is None else live.record.version
            if before == version:
                return
            try:
                patcher.move_to(opened.manifest(version))
            except VersionForgotten:
                assert not self.may_be_asked_for(version)
                version = before
        finally:
            slots.unlock()
        if version is not None:
            training.assert_holds(self.root / "live", self.history[version], others=False)

    @precondition(lambda self: self.history)
    @rule(name=st.sampled_from(TAGS), data=st.data())
    def tag(self, name, data):
        version = data.draw(st.integers(0, len(self.history) - 1))
        if version in self.forgotten:
            with pytest.raises(VersionForgotten):
                set_tag(open_store(self.store), name, version)
        else:
            set_tag(open_store(self.store), name, version)
            self.tags[name] = version

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def untag(self, data):
        name = data.draw(st.sampled_from(sorted(self.tags)))
        delete_tag(open_store(self.store), name)
        del self.tags[name]

    @precondition(lambda self: len(self.history) > 2)
    @rule(
        keep_last=st.integers(1, 4),
        keep_every=st.sampled_from([None, 2]),
        keep_tagged=st.booleans(),
        anchoring=st.booleans(),
    )
    def forget(self, keep_last, keep_every, keep_tagged, anchoring):
        opened = open_store(self.store)
        policy = Policy(keep_last=keep_last, keep_every=keep_every, keep_tagged=keep_tagged)
        forget(opened, policy, make_anchor=(lambda version: anchor(opened, version, workers=1)) if anchoring else None)
        wanted = policy.wanted(len(self.history) - 1, tagged=set(self.tags.values()), advised=set())
        self.forgotten |= set(range(len(self.history))) - wanted

    @precondition(lambda self: self.history)
    @rule(grace=st.sampled_from([0.0, 3600.0]), broken_off=st.sampled_from([None, None, 0, 2]))
    def gc(self, grace, broken_off):
        """Collect, or be broken off before one of the deletions."""
        backend = FaultyBackend(LocalBackend(self.store))
        if broken_off is not None:
            backend.add(*(Fault(operation="delete", effect=Effect.NONE) for _ in range(broken_off)))
            backend.add(*(Fault(operation="delete") for _ in range(20)))
        with suppress(StorageError):
            collect(store_at(backend), grace=grace)

    @precondition(lambda self: len(self.history) > 1)
    @rule(data=st.data(), chosen=WHERE, place=WHERE, how=st.sampled_from(["flip", "cut", "remove"]))
    def damage(self, data, chosen, place, how):
        """Damage one object for a moment: a check finds it, and whoever reads meets right bytes or an error."""
        harmless = {doomed.key for doomed in collect(open_store(self.store), dry_run=True, grace=0).objects}
        paths = sorted(path for path in self.store.rglob("*") if path.is_file() and not path.name.startswith("."))
        path = paths[chosen % len(paths)]
        version = data.draw(st.integers(0, len(self.history) - 1))
        key, content = path.relative_to(self.store).as_posix(), path.read_bytes()
        place %= len(content)
        if how == "remove":
            path.unlink()
        else:
            path.write_bytes(content[:place] + (bytes([content[place] ^ 4]) + content[place + 1 :]) * (how == "flip"))
        try:
            self.assert_damage(key, version, harmless=harmless, removed=how == "remove")
        finally:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def assert_damage(self, key, version, *, harmless, removed):
        """An object is damaged: a version is restored all the same, or an error of ours says that it cannot be."""
        spare = key.startswith("routes/") and not self.forgotten
        hint = key in HINTS or key.endswith(HINTS)
        unfinished = key.startswith("parts/") and int(key.split("/")[1]) >= len(self.history)
        # A record of a route or a tag that is gone never was; the newest manifest or record that is gone neither.
        told = not (removed and (key.endswith("route.json") or key.startswith(("tags/", "manifests/", "retention/"))))
        if told and not (hint or unfinished or key in harmless):
            assert not check(LocalBackend(self.store), read_data=True).ok, key
        self.restored += 1
        target = self.root / f"restored{self.restored}"
        try:
            open_store(self.store).restore(version, target, workers=1)
        except DeltastoreError:
            assert not target.exists()
            assert not self.may_be_asked_for(version) or not (spare or hint or unfinished or key in harmless)
        else:
            training.assert_holds(target, self.history[version], others=False)
            shutil.rmtree(target)

    @precondition(lambda self: len(self.history) > 2)
    @rule(
        operation=st.sampled_from([None, "write", "create", "read"]),
        effect=st.sampled_from([Effect.BEFORE, Effect.AFTER]),
        anchored=st.booleans(),
    )
    def compact(self, operation, effect, anchored):
        """Make skips over two and four versions, or an anchor of the newest; the store may fail once on the way."""
        backend = FaultyBackend(LocalBackend(self.store))
        opened = store_at(backend)
        if operation is not None:
            backend.add(Fault(operation=operation, effect=effect, key_prefix="routes/"))
        with pytest.MonkeyPatch.context() as patch, suppress(StorageError):
            patch.setattr(deltastore.compact, "SPANS", (2, 4))
            if anchored:
                anchor(opened, len(self.history) - 1, workers=1)
            else:
                compact(opened, workers=1)

    @invariant()
    def history_is_contiguous_and_never_changes(self):
        if not self.history:
            return
        log = open_store(self.store).log()
        assert [manifest.version for manifest in log] == list(range(len(self.history)))
        for version in range(len(self.history)):
            data = (self.store / "manifests" / f"{version:010d}.json").read_bytes()
            assert self.manifests.setdefault(version, data) == data

    @invariant()
    def tags_are_what_was_set(self):
        if self.history:
            assert {tag.name: tag.version for tag in read_tags(open_store(self.store))} == self.tags

    def teardown(self):
        try:
            if self.history:
                report = check(LocalBackend(self.store), read_data=True)
                assert report.ok, report.problems
                for version in range(len(self.history)):
                    self.assert_restores(version)
        finally:
            for name in list(self.trainers):
                with suppress(DeltastoreError):
                    self.trainers.pop(name).writer.close()
            shutil.rmtree(self.root)
            self.patch.undo()


#: How many runs of how many steps: under a minute by default, up to an hour with DELTASTORE_PROFILE=nightly.
PROFILES = {"ci": (12, 25), "nightly": (3000, 50)}
PROFILE = os.environ.get("DELTASTORE_PROFILE", "ci")
TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=PROFILES[PROFILE][0],
    stateful_step_count=PROFILES[PROFILE][1],
    deadline=None,
    derandomize=PROFILE == "ci",
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
