"""A trainer that goes on on another machine: from the store, from a checkpoint, from the weights that it loaded."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import training

import deltastore.attempt
import deltastore.compact
import deltastore.planner
import deltastore.replay
import deltastore.writer
from deltastore import Writer, open_store
from deltastore.compact import anchor, compact
from deltastore.errors import (
    BaseMismatch,
    CommitInDoubt,
    PublishError,
    StorageError,
    StoreNotFound,
    UsageError,
    VersionConflict,
    VersionNotFound,
    WriterFenced,
)
from deltastore.fsck import check
from deltastore.manifest import Manifest, manifest_key
from deltastore.plan import cheapest
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend

PLACE = "here"


@pytest.fixture(scope="module")
def snapshots():
    """Four snapshots that all differ, of many dtypes, with one tensor of two chunks."""
    base = {name: tensor for name, tensor in training.base_snapshot(3).items() if tensor.numel() < 5000}
    base["model.ids"] = torch.arange(77)
    base["model.layers.0.mlp.up_proj.weight"] = torch.randn(1100, 1000).bfloat16()
    chain = [base]
    for number in (1, 2, 4):
        chain.append(training.step(chain[-1], number))
    return chain


@pytest.fixture(scope="module")
def published(snapshots, tmp_path_factory):
    """A store of versions 0 to 2, and its base; the last snapshot is not published."""
    root = tmp_path_factory.mktemp("published")
    with Writer(root / "store", base=training.save(root / "base", snapshots[0])) as writer:
        for number in (1, 2):
            writer.publish(snapshots[number], step=number).result()
    return root


@pytest.fixture
def url(published, tmp_path):
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    return tmp_path / "store"


@pytest.fixture
def faulty(url, monkeypatch):
    backend = FaultyBackend(LocalBackend(url))
    monkeypatch.setattr(deltastore.writer, "open_backend", lambda *_, **__: backend)
    return backend


def whole(url, tmp_path, contents):
    """Fail unless the store's versions hold exactly these snapshots."""
    store = open_store(url)
    assert len(store.log()) == len(contents)
    report = check(LocalBackend(url), read_data=True)
    assert report.ok, report.problems
    for version, snapshot in enumerate(contents):
        store.restore(version, tmp_path / "whole" / str(version))
        training.assert_holds(tmp_path / "whole" / str(version), snapshot)


def in_one_buffer(snapshot):
    """Yield pairs in any order, each in the memory of the one before."""
    buffer = torch.empty(max(training.flat(tensor).numel() for tensor in snapshot.values()), dtype=torch.uint8)
    for name, tensor in reversed(snapshot.items()):
        part = buffer[: training.flat(tensor).numel()]
        part[:] = training.flat(tensor)
        yield name, part.view(tensor.dtype).reshape(tensor.shape) if tensor.numel() else tensor
        buffer.fill_(0xAB)


def wrapped(snapshot):
    return {f"module.{name}": tensor for name, tensor in snapshot.items()}


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("start", ["anchor", "base", "state dict", "pairs", "wrapped"])
def test_a_writer_goes_on_from_whatever_its_machine_has(start, version, url, snapshots, tmp_path):
    given = {
        "anchor": dict,
        "base": lambda: {"base": training.save(tmp_path / "local", snapshots[version], shards=2)},
        "state dict": lambda: {"weights": snapshots[version]},
        "pairs": lambda: {"weights": in_one_buffer(snapshots[version])},
        "wrapped": lambda: {"weights": wrapped(snapshots[version])},
    }[start]()
    (tmp_path / "spool").mkdir()
    with Writer(url, resume=True, spool=tmp_path / "spool", **given) as writer:
        assert writer.version == 2
        assert writer.publish(snapshots[3]).result().version == 3
    whole(url, tmp_path, snapshots)
    assert [manifest.writer_epoch for manifest in open_store(url).log()] == [1, 2, 2, 3]


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("anchored", [False, True])
def test_weights_behind_go_by_routes_and_past_damaged_ones(damage, anchored, url, snapshots, monkeypatch):
    """They are in the shadow alone: a route that cannot be followed must not have changed them."""
    monkeypatch.setattr(deltastore.compact, "SPANS", () if anchored else (2,))
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 1000)
    monkeypatch.setattr(deltastore.replay, "_LEAST_WINDOW_CHUNKS", 1)
    route = anchor(open_store(url), 2) if anchored else compact(open_store(url)).routes[0]
    if anchored:  # so that the anchor is the cheaper way
        monkeypatch.setattr(deltastore.planner, "cheapest", dearest_deltas)
    assert len(route.parts) > 2
    if damage:
        path = url / route.parts[-1].key
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with Writer(url, resume=True, weights=snapshots[0]) as writer:
        assert writer.version == 2
        writer.publish(snapshots[3]).result()
    assert open_store(url).restore(3, url.parent / "three").version == 3
    training.assert_holds(url.parent / "three", snapshots[3])


def dearest_deltas(start, end, known, routes, **options):
    """Find ways as if a delta cost more than an anchor does."""
    heavy = {version: msgspec.structs.replace(manifest) for version, manifest in known.items()}
    for version, manifest in heavy.items():
        if version:
            parts = [msgspec.structs.replace(part, size=64 << 20) for part in manifest.model.parts]
            model = msgspec.structs.replace(manifest.model, parts=tuple(parts))
            heavy[version] = msgspec.structs.replace(manifest, components={"model": model})
    hops = cheapest(start, end, heavy, routes, **options)
    return hops and tuple(
        dataclasses.replace(hop, record=known[hop.record.version]) if isinstance(hop.record, Manifest) else hop
        for hop in hops
    )


def test_the_tensors_that_differ_are_named_by_way_of_routes(url, snapshots, monkeypatch):
    monkeypatch.setattr(deltastore.compact, "SPANS", (2,))
    compact(open_store(url))
    for number in (0, 1):
        for path in (url / "parts" / f"{number + 1:010d}").rglob("model-*"):
            path.unlink()
    with pytest.raises(BaseMismatch, match=r"tensors differ from version 2"):
        Writer(url, resume=True, weights=snapshots[3])


def test_there_must_be_a_stream(tmp_path, snapshots):
    base = training.save(tmp_path / "base", snapshots[0])
    for given in ({}, {"base": base}, {"weights": snapshots[0]}):
        with pytest.raises(StoreNotFound):
            Writer(tmp_path / "nowhere", resume=True, **given)
    assert not (tmp_path / "nowhere").exists()


def test_what_contradicts_itself_is_wrong_use(url, snapshots, tmp_path):
    for given in (
        {"weights": snapshots[2]},
        {"takeover": True},
        {"resume": True, "weights": snapshots[2], "base": tmp_path / "base"},
    ):
        with pytest.raises(UsageError):
            Writer(url, **given)
    assert open_store(url).latest().version == 2


def test_without_a_stored_base_the_weights_are_enough(tmp_path, snapshots):
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "store", base=base, upload_base=False) as writer:
        writer.publish(snapshots[1]).result()
    with pytest.raises(VersionNotFound):
        Writer(tmp_path / "store", resume=True)
    for number, weights in ((2, snapshots[0]), (3, snapshots[2])):
        with Writer(tmp_path / "store", resume=True, weights=weights) as writer:
            assert writer.publish(snapshots[number]).result().version == number
    open_store(tmp_path / "store").restore(3, tmp_path / "out", base=base)
    training.assert_holds(tmp_path / "out", snapshots[3])


def test_a_tied_head_that_the_stream_lacks_is_no_hindrance(tmp_path):
    snapshot = training.small_snapshot(0)
    snapshot["model.embed_tokens.weight"] = snapshot.pop("b.weight")
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", snapshot)):
        pass
    head = {"lm_head.weight": snapshot["model.embed_tokens.weight"]}
    with Writer(tmp_path / "store", resume=True, weights=snapshot | head) as writer:
        assert writer.publish(snapshot | head).result().changed_elements == 0


def test_weights_that_are_no_version_are_refused_by_name(url, snapshots):
    wrong = {name: tensor.clone() for name, tensor in snapshots[2].items()}
    names = ["model.ids", "model.layers.0.norm.weight"]
    wrong[names[0]][5] += 1
    training.flat(wrong[names[1]])[7] ^= 1
    for weights in (wrong, in_one_buffer(wrong)):
        with pytest.raises(BaseMismatch) as caught:
            Writer(url, resume=True, weights=weights)
        assert caught.value.tensors == tuple(names)
        assert all(name in str(caught.value) for name in names)
        assert "version 2" in str(caught.value)
        assert caught.value.hint
    assert open_store(url).latest().version == 2


def test_weights_of_two_versions_are_those_of_none(url, snapshots):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(BaseMismatch) as caught:
        Writer(url, resume=True, weights=snapshots[2] | {name: snapshots[1][name]})
    assert caught.value.tensors == (name,)


def unfit(snapshot):
    name = "model.ids"
    yield "missing", {key: tensor for key, tensor in snapshot.items() if key != name}, (name,)
    yield "unknown", snapshot | {"model.new": snapshot[name]}, ("model.new is unknown",)
    yield "shape", snapshot | {name: snapshot[name][:-1]}, (name,)
    yield "dtype", snapshot | {name: snapshot[name].int()}, (name,)
    yield "twice", [*snapshot.items(), (name, snapshot[name])], (name,)
    yield "nothing", {}, ()


@pytest.mark.parametrize("case", [case for case, *_ in unfit({"model.ids": torch.arange(2)})])
def test_weights_that_do_not_fit_the_stream_are_refused_by_name(case, url, snapshots):
    _, weights, names = next(entry for entry in unfit(snapshots[2]) if entry[0] == case)
    with pytest.raises(BaseMismatch) as caught:
        Writer(url, resume=True, weights=weights)
    for name in names:
        assert name in str(caught.value)
        assert any(found in name or name in found for found in caught.value.tensors)


def test_what_is_no_tensor_is_refused(url, snapshots):
    with pytest.raises(PublishError):
        Writer(url, resume=True, weights=snapshots[2] | {"model.ids": "text"})


def test_a_trainer_that_went_back_publishes_the_next_version(url, snapshots, tmp_path):
    """Its snapshot is an older version's; the delta is computed against the newest all the same."""
    with Writer(url, resume=True, weights=snapshots[1]) as writer:
        assert writer.version == 2
        back = writer.publish(snapshots[1], step=1).result()
        assert back.version == 3
        assert back.changed_elements == open_store(url).manifest(2).model.changed_elements
        assert writer.publish(snapshots[3], step=2).result().version == 4
    store = open_store(url)
    assert store.manifest(3).snapshot_id == store.manifest(1).snapshot_id
    whole(url, tmp_path, [*snapshots[:3], snapshots[1], snapshots[3]])
    assert [manifest.step for manifest in store.log()] == [None, 1, 2, 1, 2]


# Taking over


def test_a_takeover_changes_nothing_but_who_may_publish(url, snapshots, tmp_path):
    old = Writer(url, resume=True)
    with Writer(url, resume=True, takeover=True) as writer:
        assert writer.version == 3
        taken = open_store(url).manifest(3)
        assert (taken.snapshot_id, taken.model.parts) == (open_store(url).manifest(2).snapshot_id, ())
        assert (taken.model.changed_elements, taken.writer_epoch) == (0, 3)
        assert open_store(url).latest().version == 3
        before = training.tree(url)
        with pytest.raises(VersionConflict):
            old.publish(snapshots[2]).result()
        with pytest.raises(WriterFenced):
            old.publish(snapshots[2])
        old.close()
        assert training.tree(url) == before
        assert writer.publish(snapshots[3]).result().version == 4
    whole(url, tmp_path, [*snapshots[:3], snapshots[2], snapshots[3]])
    assert [manifest.writer_epoch for manifest in open_store(url).log()] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("start", ["anchor", "base", "weights"])
def test_a_takeover_comes_before_anything_is_fetched(start, url, snapshots, tmp_path, faulty):
    given = {"base": {"base": tmp_path / "base"}, "weights": {"weights": snapshots[0]}, "anchor": {}}[start]
    with Writer(PLACE, resume=True, takeover=True, **given) as writer:
        fetched = [
            place
            for place, (operation, key) in enumerate(faulty.calls)
            if operation == "read" and key.startswith("parts/") and "-0" in key.rsplit("/", 1)[1]
        ]
        assert faulty.calls.index(("create", manifest_key(3))) < min(fetched)
        writer.publish(snapshots[3]).result()
    whole(url, tmp_path, [*snapshots[:3], snapshots[2], snapshots[3]])


def test_weights_that_are_no_version_take_nothing_over(url, snapshots):
    with pytest.raises(BaseMismatch):
        Writer(url, resume=True, takeover=True, weights=snapshots[3])
    assert open_store(url).latest().version == 2


def test_a_writer_held_before_its_commit_loses_to_a_takeover(url, snapshots, tmp_path, faulty):
    arrived, go = threading.Event(), threading.Event()
    faulty.add(Fault(operation="create", effect=Effect.NONE, hook=lambda: (arrived.set(), go.wait(60))))
    old = Writer(PLACE, resume=True)
    held = old.publish(snapshots[3])
    assert arrived.wait(60)
    with Writer(PLACE, resume=True, takeover=True) as writer:
        go.set()
        with pytest.raises(VersionConflict):
            held.result(60)
        with pytest.raises(WriterFenced):
            old.publish(snapshots[3])
        writer.publish(snapshots[3]).result()
    old.close()
    whole(url, tmp_path, [*snapshots[:3], snapshots[2], snapshots[3]])


def test_a_takeover_that_comes_too_late_is_a_conflict_and_may_be_tried_again(url, snapshots, tmp_path, faulty):
    old = Writer(PLACE, resume=True)
    faulty.add(
        Fault(operation="create", effect=Effect.NONE, hook=lambda: faulty.add() or old.publish(snapshots[3]).result(60))
    )
    with pytest.raises(VersionConflict):
        Writer(PLACE, resume=True, takeover=True)
    assert old.version == 3
    with Writer(PLACE, resume=True, takeover=True) as writer:
        assert writer.version == 4
    with pytest.raises(VersionConflict):
        old.publish(snapshots[3]).result()
    old.close()
    whole(url, tmp_path, [*snapshots, snapshots[3]])


def test_of_two_takeovers_one_wins(url, snapshots, tmp_path, faulty):
    barrier = threading.Barrier(2)
    for _ in range(2):
        faulty.add(Fault(operation="create", effect=Effect.NONE, hook=lambda: barrier.wait(60)))

    def take_over(number):
        try:
            return Writer(PLACE, resume=True, takeover=True, weights=snapshots[number])
        except VersionConflict as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(take_over, (1, 2)))
    (winner,) = (outcome for outcome in outcomes if isinstance(outcome, Writer))
    (loser,) = (outcome for outcome in outcomes if isinstance(outcome, VersionConflict))
    assert loser.hint
    assert winner.publish(snapshots[3]).result().version == 4
    with Writer(PLACE, resume=True, takeover=True) as reopened:
        assert reopened.version == 5
        with pytest.raises(VersionConflict):
            winner.publish(snapshots[3]).result()
        reopened.publish(snapshots[0]).result()
    winner.close()
    whole(url, tmp_path, [*snapshots[:3], snapshots[2], snapshots[3], snapshots[3], snapshots[0]])


def test_a_takeover_whose_answer_is_lost_has_taken_over(url, snapshots, faulty):
    faulty.add(Fault(operation="create", effect=Effect.AFTER))
    with Writer(PLACE, resume=True, takeover=True) as writer:
        assert writer.version == 3
        writer.publish(snapshots[3]).result()


def test_a_takeover_in_doubt_is_told_and_may_be_tried_again(url, snapshots, tmp_path, faulty):
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    faulty.add(Fault(operation="create", effect=Effect.LATE, error=error))
    with pytest.raises(CommitInDoubt):
        Writer(PLACE, resume=True, takeover=True)
    with Writer(PLACE, resume=True, takeover=True) as writer:
        faulty.land()  # too late: another has its place
        assert writer.publish(snapshots[3]).result().version == 4
    whole(url, tmp_path, [*snapshots[:3], snapshots[2], snapshots[3]])


def test_a_base_version_is_taken_over_too(tmp_path, snapshots):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", snapshots[0])) as old:
        with Writer(tmp_path / "store", resume=True, takeover=True) as writer:
            writer.publish(snapshots[1]).result()
        with pytest.raises(VersionConflict):
            old.publish(snapshots[1]).result()
    whole(tmp_path / "store", tmp_path, [snapshots[0], snapshots[0], snapshots[1]])
