"""Versions are published, tagged, forgotten and collected in any order: what is kept restores bit for bit, no more."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import training
from anchors import begin_anchor, finish_anchor, make_anchor
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltastore import Writer, open_store
from deltastore.errors import StorageError, VersionConflict, VersionForgotten
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.retention import check_successor
from deltastore.storage.local import LocalBackend
from deltastore.tags import delete_tag, read_tags, set_tag
from deltastore.testing import Effect, Fault, FaultyBackend

NAMES = ("best", "held")
MOMENTS = [("read", "retention/"), ("list", "tags/"), ("list", "parts/"), ("list", "routes/"), ("delete", "")]
policies = st.builds(
    Policy,
    keep_last=st.integers(1, 3),
    keep_tagged=st.booleans(),
    keep_every=st.sampled_from([None, None, 2, 4]),
)


class RetentionMachine(RuleBasedStateMachine):
    """The model: the snapshots, which versions the records keep, which tags there are."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="retention-"))
        self.place = self.root / "store"
        self.history = []
        self.kept = set()
        self.tags = {}
        self.unfinished = []
        self.count = 0

    @initialize(upload_base=st.booleans())
    def begin(self, upload_base):
        self.history = [training.small_snapshot(0, elements=16)]
        self.kept = {0}
        self.base = training.save(self.root / "base", self.history[0], others=False)
        self.upload_base = upload_base
        self.writer = Writer(self.place, base=self.base, upload_base=upload_base, workers=1)
        for _ in range(3):
            self.publish()

    @property
    def store(self):
        return open_store(self.place)

    def wanted(self, policy):
        newest = len(self.history) - 1
        wanted = policy.wanted(newest, tagged=set(self.tags.values()), advised=set())
        return wanted & self.kept

    # What people do

    @rule()
    def publish(self):
        self.history.append(training.small_snapshot(len(self.history), elements=16))
        assert self.writer.publish(self.history[-1]).result().version == len(self.history) - 1
        self.kept.add(len(self.history) - 1)

    @rule(data=st.data())
    def orphan(self, data):
        """Leave parts behind of an attempt that lost, or that is not at its end yet."""
        version = data.draw(st.integers(0, len(self.history)))
        self.count += 1
        key = f"parts/{version:010d}/{self.count:032x}/model-00000.safetensors"
        LocalBackend(self.place).write(key, b"of an attempt")

    @precondition(lambda self: self.upload_base)
    @rule(data=st.data())
    def anchor(self, data):
        make_anchor(self.store, data.draw(st.sampled_from(sorted(self.kept))))

    @precondition(lambda self: self.upload_base)
    @rule(data=st.data())
    def begin_an_anchor(self, data):
        self.unfinished.append(begin_anchor(self.store, data.draw(st.sampled_from(sorted(self.kept)))))

    @precondition(lambda self: self.unfinished)
    @rule()
    def finish_an_anchor(self):
        route = self.unfinished.pop(0)
        try:
            finish_anchor(self.store, route)
        except VersionConflict:
            assert self.collected_since(route)

    def collected_since(self, route):
        directory = self.place / "routes" / f"{route.version:010d}" / route.attempt_id
        return [path.name for path in directory.iterdir()] == ["route.json"]

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def tag(self, name, data):
        version = data.draw(st.integers(0, len(self.history) - 1))
        if version in self.kept:
            assert set_tag(self.store, name, version).version == version
            self.tags[name] = version
        else:
            with pytest.raises(VersionForgotten):
                set_tag(self.store, name, version)

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def untag(self, data):
        name = data.draw(st.sampled_from(sorted(self.tags)))
        delete_tag(self.store, name)
        del self.tags[name]

    @rule(policy=policies, anchoring=st.booleans(), dry=st.booleans())
    def forget(self, policy, anchoring, dry):
        store = self.store
        foreseen = forget(store, policy, dry_run=True)
        if dry:
            return
        make = (lambda version: make_anchor(store, version)) if anchoring and self.upload_base else None
        result = forget(store, policy, make_anchor=make)
        assert foreseen.forgotten == result.forgotten
        self.kept = self.wanted(policy)
        assert forget(store, policy).number is None  # there is nothing left to let go

    @rule(grace=st.sampled_from([0.0, 3600.0]))
    def collect(self, grace):
        foreseen = collect(self.store, dry_run=True, grace=grace)
        removed = collect(self.store, grace=grace)
        assert set(foreseen.objects) == set(removed.objects)
        assert collect(self.store, grace=grace).objects == ()
        assert all(not (self.place / doomed.key).exists() for doomed in removed.objects)

    @rule(after=st.integers(0, 6))
    def collect_and_fail(self, after):
        """Break off a collector before one of its deletions."""
        backend = FaultyBackend(LocalBackend(self.place))
        deleted = [0]

        def one_more():
            deleted[0] += 1
            if deleted[0] > after:
                raise StorageError("broken off")

        backend.add(*(Fault(operation="delete", effect=Effect.NONE, hook=one_more) for _ in range(100)))
        try:
            collect(store_at(backend), grace=0)
        except StorageError:
            assert deleted[0] > after

    @rule()
    def collect_twice_at_once(self):
        failures = []

        def work():
            try:
                collect(self.store, grace=0)
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    @rule(policy=policies, name=st.sampled_from(NAMES), data=st.data(), when=st.sampled_from(MOMENTS))
    def collect_while_much_happens(self, policy, name, data, when):
        """A collector sleeps before one of its requests; meanwhile others forget, tag, collect."""
        version = data.draw(st.integers(0, len(self.history) - 1))
        backend = FaultyBackend(LocalBackend(self.place))

        def meanwhile():
            self.publish()
            if version in self.kept:
                self.tag_surely(name, version)
            self.forget(policy, anchoring=True, dry=False)
            collect(self.store, grace=0)

        operation, prefix = when
        opened = store_at(backend)
        backend.add(Fault(operation=operation, effect=Effect.NONE, key_prefix=prefix, hook=meanwhile))
        collect(opened, grace=0)

    def tag_surely(self, name, version):
        set_tag(self.store, name, version)
        self.tags[name] = version

    @rule(policy=policies, name=st.sampled_from(NAMES), data=st.data(), before=st.booleans())
    def tag_while_forgotten(self, policy, name, data, before):
        """A version is forgotten, and collected, just before or just after the tag is written."""
        version = data.draw(st.sampled_from(sorted(self.kept)))
        backend = FaultyBackend(LocalBackend(self.place))
        known = self.tags.get(name)

        def meanwhile():
            if not before and version not in self.tags.values():
                self.tags[name] = version  # a forgetter that keeps tagged versions sees it now
            self.forget(policy, anchoring=True, dry=False)
            collect(self.store, grace=0)

        fault = {"hook": meanwhile} if before else {"after": meanwhile}
        backend.add(Fault(operation="write", effect=Effect.NONE, key_prefix="tags/", **fault))
        try:
            set_tag(store_at(backend), name, version)
        except VersionForgotten:
            assert version not in self.kept
            self.tags.pop(name, None)
            if known == version:
                self.tags[name] = version
        else:
            self.tags[name] = version
            assert version in self.kept or backend.remaining or known == version

    # What must hold

    @rule(data=st.data(), based=st.booleans())
    def restore(self, data, based):
        self.check(data.draw(st.integers(0, len(self.history) - 1)), based=based)

    def check(self, version, *, based=False):
        self.count += 1
        target = self.root / f"restored{self.count}"
        base = self.base if based or not self.upload_base else None
        if version in self.kept or version in self.tags.values():
            if base is not None and not self.leads_from_the_base(version):
                base = None
            self.store.restore(version, target, base=base, workers=1)
            training.assert_holds(target, self.history[version], others=False)
            shutil.rmtree(target)
        else:
            with pytest.raises(VersionForgotten):
                self.store.restore(version, target, base=base, workers=1)
            with pytest.raises(VersionForgotten):
                self.store.plan(None if base is None else 0, version)
            assert self.store.manifest(version).version == version

    def leads_from_the_base(self, version):
        return not self.upload_base or self.store.standing(version).keeps_parts(0)

    @invariant()
    def tags_are_what_was_set(self):
        if self.history:
            assert {tag.name: tag.version for tag in read_tags(self.store)} == self.tags

    def teardown(self):
        try:
            if self.history:
                for version in range(len(self.history)):
                    self.check(version)
                store = self.store
                number = 1
                while (after := store.retention_record(number + 1)) is not None:
                    check_successor(store.retention_record(number), after)
                    number += 1
                report = check(LocalBackend(self.place), read_data=True)
                assert report.ok, report.problems
        finally:
            if self.history:
                self.writer.close()
            shutil.rmtree(self.root)


THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(
    max_examples=200 if THOROUGH else 8,
    stateful_step_count=40 if THOROUGH else 25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
