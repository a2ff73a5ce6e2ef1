"""Tags: strict records, the way that each one lists, and setters that lose a race or are killed in it."""

from __future__ import annotations

import msgspec
import pytest
import training
from anchors import make_anchor

from deltastore import Writer, open_store
from deltastore.errors import CorruptObject, UsageError, VersionForgotten, VersionNotFound
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.tags import delete_tag, encode_tag, parse_tag, read_tag, read_tags, set_tag, tag_key, tag_names
from deltastore.testing import Effect, Fault, FaultyBackend


@pytest.fixture
def store(tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0, elements=16))
    with Writer(tmp_path / "store", base=base) as writer:
        for seed in range(1, 6):
            writer.publish(training.small_snapshot(seed, elements=16)).result()
    return open_store(tmp_path / "store")


def kinds(store):
    return {(problem.kind, problem.key) for problem in check(store.backend).problems}


def parse(store, data, name="best"):
    return parse_tag(data, name=name, stream_id=store.stream_id, hash_name=store.hash.name)


def test_a_tag_lists_the_whole_way_to_its_version(store):
    assert set_tag(store, "best", 3).deltas == ((0, 3),)
    anchor = make_anchor(store, 2)
    tag = set_tag(store, "other", 3)
    assert (tag.deltas, tag.routes) == (((3, 3),), (anchor,))
    assert [found.name for found in read_tags(store)] == ["best", "other"]
    assert store.resolve("tag:other").version == 3


def test_a_tag_set_again_takes_the_way_that_is_cheapest_now(store):
    first = set_tag(store, "best", 3)
    assert set_tag(store, "best", 3) == first
    anchor = make_anchor(store, 3)
    assert set_tag(store, "best", 3).routes == (anchor,)
    assert read_tag(store, "best").deltas == ()


def test_every_flipped_bit_is_found_and_each_rule_broken_by_itself(store):
    tag = set_tag(store, "best", 3)
    data = encode_tag(store, tag)
    assert parse(store, data) == tag
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObject):
            parse(store, bytes(damaged))
    for changes in (
        {"name": "other"},
        {"stream_id": "2" * 32},
        {"deltas": ((3, 2),)},
        {"deltas": ((2, 3), (0, 1))},
        {"routes": ("x",)},
        {"version": -1},
        {"commit_id": "x"},
    ):
        with pytest.raises(CorruptObject):
            parse(store, encode_tag(store, msgspec.structs.replace(tag, **changes)))


@pytest.mark.parametrize("name", ["latest", "", ".x", "a/b", "../a", "a" * 64, "ä", "a b", "-a", "a\n"])
def test_what_is_no_name_is_refused(store, name):
    with pytest.raises(UsageError):
        set_tag(store, name, 1)
    assert tag_names(store) == []


def test_a_tag_of_another_commit_is_damage_and_can_be_deleted_or_set_again(store):
    tag = set_tag(store, "best", 3)
    store.backend.write(tag_key("best"), encode_tag(store, msgspec.structs.replace(tag, commit_id="3" * 32)))
    with pytest.raises(CorruptObject) as caught:
        store.resolve("tag:best")
    assert caught.value.key == "tags/best.json"
    assert kinds(store) == {("corrupt-object", "tags/best.json")}
    set_tag(store, "best", 3)
    assert kinds(store) == set()
    store.backend.write(tag_key("best"), b"nonsense")
    with pytest.raises(CorruptObject):
        collect(store)
    delete_tag(store, "best")
    with pytest.raises(VersionNotFound):
        delete_tag(store, "best")


def test_a_version_that_only_a_tag_keeps_cannot_be_tagged_again(store):
    set_tag(store, "best", 1)
    forget(store, Policy(keep_last=1))
    collect(store)
    for name in ("best", "other"):
        with pytest.raises(VersionForgotten):
            set_tag(store, name, 1)
    assert tag_names(store) == ["best"]
    assert store.plan(None, 1).end == 1
    delete_tag(store, "best")
    with pytest.raises(VersionForgotten):
        store.plan(None, 1)


def racing(store, hook, when):
    backend = FaultyBackend(LocalBackend(store.backend.url))
    backend.add(Fault(operation="write", effect=Effect.NONE, key_prefix="tags/", **{when: hook}))
    return store_at(backend)


def let_go(store):
    """Forget all but the newest version by an anchor, and collect."""
    forget(store, Policy(keep_last=1), make_anchor=lambda version: make_anchor(store, version))
    collect(store)


@pytest.mark.parametrize("when", ["hook", "after"])
def test_a_setter_that_loses_takes_its_tag_back(store, when):
    with pytest.raises(VersionForgotten):
        set_tag(racing(store, lambda: let_go(store), when), "best", 3)
    assert tag_names(store) == []


def test_a_setter_that_loses_leaves_another_ones_tag_alone(store):
    def meanwhile():
        let_go(store)
        set_tag(store, "best", 5)

    with pytest.raises(VersionForgotten):
        set_tag(racing(store, meanwhile, "after"), "best", 3)
    assert read_tag(store, "best").version == 5


def test_a_tag_set_again_and_too_late_stands_as_it_did(store):
    set_tag(store, "best", 3)
    make_anchor(store, 3)
    with pytest.raises(VersionForgotten):
        set_tag(racing(store, lambda: let_go(store), "hook"), "best", 3)
    assert store.plan(None, 3).end == 3
    collect(store)
    assert store.plan(None, 3).end == 3


def test_a_version_kept_by_another_way_is_tagged_with_that_way(store):
    def meanwhile():
        forget(store, Policy(keep_last=2), make_anchor=lambda version: make_anchor(store, version))
        collect(store)

    tag = set_tag(racing(store, meanwhile, "hook"), "best", 4)
    assert tag.deltas == ()
    assert store.plan(None, 4).stored_bytes


def test_a_setter_that_is_killed_too_late_leaves_a_tag_to_nothing(store, tmp_path):
    class Killed(BaseException):
        """What no handler catches."""

    def meanwhile():
        raise Killed

    def before():
        let_go(store)

    backend = FaultyBackend(LocalBackend(store.backend.url))
    backend.add(Fault(operation="write", effect=Effect.NONE, key_prefix="tags/", hook=before, after=meanwhile))
    with pytest.raises(Killed):
        set_tag(store_at(backend), "best", 3)
    assert tag_names(store) == ["best"]
    with pytest.raises(VersionForgotten) as caught:
        store.restore(3, tmp_path / "out")
    assert "stopped" in str(caught.value)
    assert kinds(store) == {("tag-to-nothing", "tags/best.json")}
    delete_tag(store, "best")
    assert kinds(store) == set()
