"""Anchors that a writer makes behind its commits, from the shadow."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import training

import deltastore.anchoring
import deltastore.writer
from deltastore import Writer, open_store
from deltastore.errors import PublishError, StorageError
from deltastore.fsck import check
from deltastore.storage.faults import Fault, FaultyBackend
from deltastore.storage.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path


def snapshots(count: int) -> list[training.Snapshot]:
    return [training.small_snapshot(seed) for seed in range(count)]


def steps(count: int, elements: int) -> list[training.Snapshot]:
    """Snapshots of which each changes a little: the shadow follows such changes while they are encoded."""
    versions = [training.small_snapshot(0, elements=elements)]
    for number in range(1, count):
        versions.append(training.step(versions[-1], 6 * number + 1))
    return versions


tiny_and_not = pytest.mark.parametrize("elements", [64, 40_000])


def anchors(path: Path) -> list[int]:
    return sorted(open_store(path).anchored(range(100)))


def test_a_writer_anchors_the_versions_that_the_policy_names(tmp_path) -> None:
    versions = snapshots(8)
    base = training.save(tmp_path / "base", versions[0])
    with Writer(tmp_path / "store", base=base, anchors=True, anchor_every=3) as writer:
        for snapshot in versions[1:]:
            writer.publish(snapshot)
        assert writer.anchor_error is None
    assert anchors(tmp_path / "store") == [3, 6]
    store = open_store(tmp_path / "store")
    assert check(store.backend, read_data=True).ok
    store.restore(6, tmp_path / "six")
    training.assert_holds(tmp_path / "six", versions[6])
    assert [(step.kind, step.end) for step in store.plan(None, 7).steps] == [("anchor", 6), ("delta", 7)]
    with Writer(tmp_path / "store", anchors=True) as writer:  # the policy is the stream's
        for snapshot in versions[:2]:
            writer.publish(snapshot)
    assert anchors(tmp_path / "store") == [3, 6, 9]
    with Writer(tmp_path / "store") as writer:  # and nobody has to
        for snapshot in versions[:4]:
            writer.publish(snapshot)
    assert anchors(tmp_path / "store") == [3, 6, 9]


def test_an_anchor_is_made_when_a_new_receiver_would_fetch_too_much(tmp_path) -> None:
    versions = snapshots(6)
    base = training.save(tmp_path / "base", versions[0])
    with Writer(tmp_path / "store", base=base, anchors=True, anchor_when=8.0) as writer:
        for snapshot in versions[1:]:
            writer.publish(snapshot).result()
    store = open_store(tmp_path / "store")
    made = anchors(tmp_path / "store")
    cost, expected = store.base.model.parts[0].size, []
    for version in range(1, 6):
        cost += store.manifest(version).stored_bytes
        if cost > 8 * store.base.model.snapshot_bytes:
            expected.append(version)
            cost = store.plan(None, version).stored_bytes
    assert made == expected
    assert len(made) in {1, 2, 3}


def test_without_a_stored_base_the_first_version_is_anchored(tmp_path) -> None:
    versions = snapshots(3)
    base = training.save(tmp_path / "base", versions[0])
    with Writer(tmp_path / "store", base=base, upload_base=False, anchors=True, anchor_when=50) as writer:
        for snapshot in versions[1:]:
            writer.publish(snapshot).result()
    assert anchors(tmp_path / "store") == [1]


def test_an_anchor_that_fails_fails_no_publish(tmp_path, caplog, monkeypatch) -> None:
    versions = snapshots(5)
    base = training.save(tmp_path / "base", versions[0])
    faulty = FaultyBackend(
        LocalBackend(tmp_path / "store"),
        [Fault(operation="write", key_prefix="routes/0000000002"), Fault(operation="create", key_prefix="nothing")],
    )
    monkeypatch.setattr(deltastore.writer, "open_backend", lambda *_, **__: faulty)
    with Writer(tmp_path / "store", base=base, anchors=True, anchor_every=2) as writer:
        for snapshot in versions[1:4]:
            writer.publish(snapshot).result()
        assert isinstance(writer.anchor_error, StorageError)
        writer.publish(versions[4]).result()
    assert writer.anchor_error is None
    assert "Version 2 got no anchor" in caplog.text
    assert anchors(tmp_path / "store") == [4]
    assert check(LocalBackend(tmp_path / "store"), read_data=True).ok


@tiny_and_not
def test_the_shadow_waits_for_the_anchor_that_is_read_from_it(elements, tmp_path, monkeypatch) -> None:
    """The version after an anchored one is encoded and committed meanwhile; only then it waits."""
    versions = steps(4, elements)
    base = training.save(tmp_path / "base", versions[0])
    begun, go_on = threading.Event(), threading.Event()
    make = deltastore.anchoring.Anchoring._anchor

    def slowly(self: object, manifest: object) -> int:
        begun.set()
        assert go_on.wait(30)
        return make(self, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(deltastore.anchoring.Anchoring, "_anchor", slowly)
    with Writer(tmp_path / "store", base=base, anchors=True, anchor_every=2) as writer:
        writer.publish(versions[1]).result()
        writer.publish(versions[2]).result()
        assert begun.wait(30)
        publication = writer.publish(versions[3])
        training.until(lambda: open_store(tmp_path / "store").latest().version == 3)
        assert not publication.done()
        go_on.set()
        publication.result()
    assert anchors(tmp_path / "store") == [2]
    assert check(LocalBackend(tmp_path / "store"), read_data=True).ok


@tiny_and_not
def test_a_publish_that_fails_while_an_anchor_is_read_changes_neither(elements, tmp_path, monkeypatch) -> None:
    versions = steps(4, elements)
    base = training.save(tmp_path / "base", versions[0])
    begun, go_on = threading.Event(), threading.Event()
    make = deltastore.anchoring.Anchoring._anchor

    def slowly(self: object, manifest: object) -> int:
        begun.set()
        assert go_on.wait(30)
        return make(self, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(deltastore.anchoring.Anchoring, "_anchor", slowly)
    with Writer(tmp_path / "store", base=base, anchors=True, anchor_every=2) as writer:
        writer.publish(versions[1]).result()
        writer.publish(versions[2]).result()
        assert begun.wait(30)
        with pytest.raises(PublishError):
            writer.publish(list(versions[3].items())[:-1])
        go_on.set()
        writer.publish(versions[3]).result()
    assert anchors(tmp_path / "store") == [2]
    store = open_store(tmp_path / "store")
    for version in (2, 3):
        store.restore(version, tmp_path / str(version))
        training.assert_holds(tmp_path / str(version), versions[version])
    assert check(LocalBackend(tmp_path / "store"), read_data=True).ok


def test_a_resumed_writer_that_took_over_anchors_its_versions(tmp_path) -> None:
    versions = snapshots(4)
    base = training.save(tmp_path / "base", versions[0])
    with Writer(tmp_path / "store", base=base, anchor_every=3) as writer:
        writer.publish(versions[1]).result()
    with Writer(tmp_path / "store", resume=True, weights=versions[1], takeover=True, anchors=True) as writer:
        assert writer.version == 2
        for snapshot in (versions[2], versions[3], versions[2]):
            writer.publish(snapshot)
    assert anchors(tmp_path / "store") == [3]
    open_store(tmp_path / "store").restore(3, tmp_path / "three")
    training.assert_holds(tmp_path / "three", versions[2])


def test_a_policy_outside_the_limits_is_wrong_use(tmp_path) -> None:
    from deltastore.errors import UsageError  # noqa: PLC0415 - only here

    base = training.save(tmp_path / "base", training.small_snapshot(0))
    for policy in ({"anchor_every": 0}, {"anchor_when": 0.5}):
        with pytest.raises(UsageError):
            Writer(tmp_path / "store", base=base, **policy)
    assert not (tmp_path / "store").exists()
