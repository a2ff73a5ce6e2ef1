"""Forgetting and collecting: what is relied on is proven first, and what may be needed is left alone."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import training
from anchors import begin_anchor, finish_anchor, make_anchor

from deltastore import Writer, open_store
from deltastore.clock import now
from deltastore.errors import (
    CommitInDoubt,
    CorruptObject,
    ObjectNotFound,
    StorageError,
    StreamMismatch,
    VersionConflict,
    VersionForgotten,
)
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.planner import Planner
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.retention import encode_retention, retention_key
from deltastore.route import begun_key
from deltastore.storage.local import LocalBackend
from deltastore.tags import set_tag
from deltastore.testing import Effect, Fault, FaultyBackend


@pytest.fixture
def place(tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0, elements=16))
    with Writer(tmp_path / "store", base=base) as writer:
        for seed in range(1, 6):
            writer.publish(training.small_snapshot(seed, elements=16)).result()
    return tmp_path / "store"


@pytest.fixture
def store(place):
    return open_store(place)


def anchoring(store):
    return lambda version: make_anchor(store, version)


def faulty(place, *faults):
    return store_at(FaultyBackend(LocalBackend(place), faults))


def kinds(store):
    return {(problem.kind, problem.key) for problem in check(store.backend).problems}


def test_a_dry_run_and_nothing_to_do_write_nothing(store, place):
    assert forget(store, Policy(keep_last=2), dry_run=True).forgotten == ((0, 3),)
    assert forget(store, Policy(keep_last=9)).number is None
    assert store.retention() is None
    make_anchor(store, 2)
    collect(store, dry_run=True)
    assert collect(store).objects == ()
    assert not (place / "retention").exists()


def test_without_an_anchor_it_says_which_one_would_help(store):
    result = forget(store, Policy(keep_last=2))
    assert (result.number, result.dropped_parts, result.anchor_first) == (1, (), 4)
    make_anchor(store, 4)
    again = forget(store, Policy(keep_last=2))
    assert (again.number, again.forgotten, again.dropped_parts) == (2, (), ((0, 4),))
    assert again.anchor_first is None
    assert again.freed_bytes >= result.anchor_saves


@pytest.mark.parametrize("damage", ["flip", "missing", "another", "dishonest"])
@pytest.mark.parametrize("keep_last", [2, 3])
def test_nothing_is_let_go_for_an_anchor_that_does_not_hold(store, place, damage, keep_last, tmp_path):
    if damage == "another":  # an honest anchor, but of another version
        route = msgspec.structs.replace(begin_anchor(store, 3), snapshot_id=store.manifest(2).snapshot_id)
        finish_anchor(store, route)
        attempt_id = route.attempt_id
    elif damage == "dishonest":  # it says what it should, and holds something else
        route = begin_anchor(store, 3, holding=2)
        finish_anchor(store, route)
        attempt_id = route.attempt_id
    else:
        attempt_id = make_anchor(store, 4)
        part = next((place / "routes").rglob("*.safetensors"))
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
        if damage == "missing":
            part.unlink()
    result = forget(store, Policy(keep_last=keep_last))
    assert result.dropped_parts == ()
    if damage == "another":  # no route at all, to anybody
        assert (result.refused_routes, result.dropped_routes) == ((), ())
    else:
        assert (result.refused_routes, result.dropped_routes) == ((attempt_id,), (attempt_id,))
    collect(store)
    assert Planner(store).read_all() == []
    store.restore(4, tmp_path / "out")
    training.assert_holds(tmp_path / "out", training.small_snapshot(4, elements=16))


def test_a_route_that_no_record_had_to_rely_on_is_proven_before_one_lists_it(store, place):
    """Else the next record would take it for proven, and let everything else go for it."""
    make_anchor(store, 4)
    first = forget(store, Policy(keep_last=5))
    assert (first.number, first.refused_routes) == (1, ())
    make_anchor(store, 3)
    part = next((place / "routes" / f"{3:010d}").rglob("*.safetensors"))
    part.unlink()
    second = forget(store, Policy(keep_last=4))
    assert (second.number, len(second.refused_routes)) == (2, 1)


def test_a_tag_that_relies_on_an_anchor_that_does_not_hold_keeps_its_version_from_being_forgotten(store, place):
    make_anchor(store, 2)
    set_tag(store, "best", 3)
    next((place / "routes").rglob("*.safetensors")).unlink()
    with pytest.raises((CorruptObject, ObjectNotFound)):
        forget(store, Policy(keep_last=1))
    assert store.retention() is None


def test_version_0_keeps_its_files_schemas_and_tables(store, tmp_path):
    forget(store, Policy(keep_last=1), make_anchor=anchoring(store))
    removed = {doomed.key.rpartition("/")[2] for doomed in collect(store).objects if "0000000000/" in doomed.key}
    assert removed == {"model-00000.safetensors"}
    store.restore(5, tmp_path / "out")
    training.assert_holds(tmp_path / "out", training.small_snapshot(5, elements=16))


def test_a_stream_without_its_base_is_kept_reachable_from_the_base(tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0, elements=16))
    with Writer(tmp_path / "bare", base=base, upload_base=False) as writer:
        for seed in range(1, 4):
            writer.publish(training.small_snapshot(seed, elements=16)).result()
    bare = open_store(tmp_path / "bare")
    forget(bare, Policy(keep_last=1))
    assert collect(bare).objects == ()
    bare.restore(3, tmp_path / "out", base=base)
    training.assert_holds(tmp_path / "out", training.small_snapshot(3, elements=16))
    assert check(bare.backend, read_data=True).ok


def test_a_record_that_another_was_faster_than_is_computed_anew(store, place):
    slow = faulty(
        place,
        Fault(
            operation="create",
            effect=Effect.NONE,
            key_prefix="retention/",
            hook=lambda: forget(store, Policy(keep_last=2)),
        ),
    )
    result = forget(slow, Policy(keep_last=4))
    assert result.number is None  # the faster one kept less already
    assert store.retention().kept == ((4, 5),)


def test_a_lost_answer_is_read_back_and_doubt_is_said(place, store):
    assert forget(faulty(place, Fault(operation="create", effect=Effect.AFTER)), Policy(keep_last=4)).number == 1
    gone = lambda: StorageError("refused", transient=False)  # noqa: E731 - a name for it
    doubtful = faulty(place, Fault(operation="create", effect=Effect.LATE, error=gone))
    with pytest.raises(CommitInDoubt):
        forget(doubtful, Policy(keep_last=3))
    forget(store, Policy(keep_last=2))
    doubtful.backend.land()  # it arrives late, and loses
    assert store.retention().kept == ((4, 5),)
    assert kinds(store) == set()


def test_what_cannot_be_finished_any_more_is_removed_and_what_can_is_not(store, place):
    route = begin_anchor(store, 3)
    store.backend.write(begun_key(3, route.attempt_id), b'{"created_at":"%s"}' % now().encode())
    old = begin_anchor(store, 2)
    store.backend.write(begun_key(2, old.attempt_id), b'{"created_at":"2020-01-01T00:00:00Z"}')
    first = collect(store)
    assert first.young == 1
    assert {doomed.reason for doomed in first.objects} == {"abandoned"}
    assert all(f"/{old.attempt_id}/" in doomed.key for doomed in first.objects)
    with pytest.raises(VersionConflict):
        finish_anchor(store, old)
    finish_anchor(store, route)
    assert [found.attempt_id for found in Planner(store).read_all()] == [route.attempt_id]
    assert collect(store, grace=0).objects == ()
    store.backend.write(old.parts[0].key, b"a part that comes late")
    assert [doomed.key for doomed in collect(store).objects] == [old.parts[0].key]


def test_a_route_finished_while_it_is_closed_stays(store, place):
    route = begin_anchor(store, 3)
    racing = faulty(
        place,
        Fault(operation="create", effect=Effect.NONE, key_prefix="routes/", hook=lambda: finish_anchor(store, route)),
    )
    assert collect(racing, grace=0).objects == ()
    assert collect(store, grace=0).objects == ()
    assert [found.attempt_id for found in Planner(store).read_all()] == [route.attempt_id]


def test_a_route_begun_before_a_record_and_finished_after_it_is_dropped(store):
    route = begin_anchor(store, 4)
    make_anchor(store, 4)
    forget(store, Policy(keep_last=2))
    finish_anchor(store, route)
    assert {doomed.reason for doomed in collect(store).objects} == {"forgotten", "dropped"}
    assert len(Planner(store).read_all()) == 1
    assert kinds(store) == set()


def test_parts_of_versions_to_come_are_left_alone(store):
    key = f"parts/{6:010d}/{1:032x}/model-00000.safetensors"
    store.backend.write(key, b"of a writer that sleeps")
    forget(store, Policy(keep_last=1), make_anchor=anchoring(store))
    assert key not in {doomed.key for doomed in collect(store, grace=0).objects}


def test_a_reader_that_loses_its_race_is_told_or_finds_another_way(store, place, tmp_path):
    def let_go():
        forget(store, Policy(keep_last=2), make_anchor=anchoring(store))
        collect(store)

    parts = Fault(operation="read", effect=Effect.NONE, key_prefix="parts/0000000002", hook=let_go)
    reader = faulty(place, parts)
    reader.restore(4, tmp_path / "four")
    training.assert_holds(tmp_path / "four", training.small_snapshot(4, elements=16))
    assert reader.backend.remaining == 0

    def let_go_more():
        forget(store, Policy(keep_last=1), make_anchor=anchoring(store))
        collect(store)

    reader = faulty(place, Fault(operation="read", effect=Effect.NONE, key_prefix="routes/", hook=lambda: None),
                    Fault(operation="read", effect=Effect.NONE, key_prefix="routes/", hook=let_go_more))  # fmt: skip
    with pytest.raises(VersionForgotten):
        reader.restore(4, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_missing_part_of_a_kept_version_is_damage_and_of_a_forgotten_one_is_not(store, place, tmp_path):
    forget(store, Policy(keep_last=2), make_anchor=anchoring(store))
    assert kinds(store) == set()  # not collected yet, and no problem
    collect(store)
    assert check(store.backend, read_data=True).ok
    kept = store.manifest(5).model.parts[0].key
    store.backend.delete(kept)
    assert kinds(store) == {("missing-object", kept)}
    with pytest.raises(ObjectNotFound):
        store.restore(5, tmp_path / "out")


@pytest.mark.parametrize("how", ["takes back", "beyond", "nonsense", "gap"])
def test_records_that_break_a_rule_are_named(store, how):
    make_anchor(store, 4)
    forget(store, Policy(keep_last=2))
    record = store.retention()
    key = retention_key(3 if how == "gap" else 2)
    changed = {
        "takes back": msgspec.structs.replace(record, number=2, kept=((3, 5),)),
        "beyond": msgspec.structs.replace(record, number=2, until=9, kept=((9, 9),)),
        "gap": msgspec.structs.replace(record, number=3),
        "nonsense": None,
    }[how]
    data = b"nonsense\n" if changed is None else encode_retention(changed, hash_function=store.hash)
    store.backend.write(key, data)
    named = {"gap": ("missing-retention", retention_key(2))}.get(how, ("corrupt-object", key))
    assert kinds(store) == {named}
    if how in {"takes back", "nonsense"}:
        fresh = store_at(store.backend)
        for act in (lambda: collect(fresh), lambda: forget(fresh, Policy(keep_last=1)), lambda: fresh.plan(None, 5)):
            with pytest.raises(CorruptObject):
                act()


MOMENTS = [("read", "retention/"), ("list", "tags/"), ("list", "parts/"), ("list", "routes/"), ("delete", "")]


@pytest.mark.parametrize(
    ("moment", "when"),
    [(moment, "hook") for moment in MOMENTS] + [(moment, "after") for moment in MOMENTS[1:]],
    ids=str,
)
def test_a_collector_that_sleeps_while_a_version_is_tagged_and_forgotten_spares_it(
    store, place, moment, when, tmp_path
):
    def meanwhile():
        set_tag(store, "best", 2)
        forget(store, Policy(keep_last=1), make_anchor=anchoring(store))

    store.backend.write(f"parts/{3:010d}/{7:032x}/model-00000.safetensors", b"something to delete")
    backend = FaultyBackend(LocalBackend(place))
    sleeper = store_at(backend)
    backend.add(Fault(operation=moment[0], effect=Effect.NONE, key_prefix=moment[1], **{when: meanwhile}))
    collect(sleeper, grace=0)
    collect(store, grace=0)
    for version in (2, 5):
        store.restore(version, tmp_path / str(version))
        training.assert_holds(tmp_path / str(version), training.small_snapshot(version, elements=16))
    with pytest.raises(VersionForgotten):
        store.plan(None, 3)


def test_a_store_that_is_replaced_while_it_is_looked_at_loses_nothing(store, place, tmp_path):
    def meanwhile():
        shutil.rmtree(place)
        with Writer(place, base=tmp_path / "base") as writer:
            for seed in range(1, 6):
                writer.publish(training.small_snapshot(seed, elements=16)).result()

    sleeper = faulty(place)
    sleeper.manifests(range(6))
    sleeper.backend.add(Fault(operation="list", effect=Effect.NONE, key_prefix="parts/", hook=meanwhile))
    with pytest.raises(StreamMismatch):
        collect(sleeper, grace=0)
    assert check(LocalBackend(place), read_data=True).ok


def test_no_part_is_taken_for_a_lost_one_on_the_word_of_a_manifest_that_is_not_in_the_store(store, monkeypatch):
    # As a log segment tells it that an older history left behind.
    told = store.manifests(range(6))
    other = msgspec.structs.replace(told[5], attempt_id="0" * 32, commit_id="0" * 32)
    monkeypatch.setattr(
        store, "manifests", lambda versions: {version: told[version] for version in versions} | {5: other}
    )
    with pytest.raises(StreamMismatch):
        collect(store, grace=0)
    assert check(store.backend, read_data=True).ok


@pytest.mark.s3
def test_an_object_store_is_kept_small_as_a_directory_is(s3, tmp_path):
    url, options = f"{s3.url}/retention", dict(s3.storage_options)
    base = training.save(tmp_path / "base", training.small_snapshot(0, elements=16))
    with Writer(url, base=base, storage_options=options) as writer:
        for seed in range(1, 6):
            writer.publish(training.small_snapshot(seed, elements=16)).result()
    store = open_store(url, storage_options=options)
    set_tag(store, "best", 1)
    forget(store, Policy(keep_last=2), make_anchor=anchoring(store))
    assert collect(store).by_reason()["forgotten"][0] == 3  # of 2, 3 and 4
    assert collect(store).objects == ()
    for version in (1, 4, 5):
        store.restore(version, tmp_path / str(version))
        training.assert_holds(tmp_path / str(version), training.small_snapshot(version, elements=16))
    with pytest.raises(VersionForgotten):
        store.plan(None, 3)
    assert check(store.backend, read_data=True).ok
