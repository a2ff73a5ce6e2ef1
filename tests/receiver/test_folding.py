"""Which version a patch ends at when newer ones appear while it is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import training

import receiver.patcher
from deltastore import Writer, open_store
from deltastore.errors import StorageError
from receiver.patcher import Patcher
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.manifest import Manifest

SNAPSHOTS = training.chain(4, seed=7)


class Scene:
    """A receiver at version 0 of a stream, and how many versions of it there are at each look."""

    def __init__(self, root: Path) -> None:
        with Writer(root / "store", base=training.save(root / "base", SNAPSHOTS[0])) as writer:
            for snapshot in SNAPSHOTS[1:]:
                writer.publish(snapshot).result()
        self.store = open_store(root / "store")
        self.slots = Slots(root / "host" / "model")
        self.slots.lock()
        self.patcher = Patcher(self.store, self.slots, workers=1)
        self.patcher.move_to(self.store.manifest(0))
        self.looks: list[int] = []

    def newest(self, *versions: int) -> Callable[[], Manifest]:
        coming = iter(versions)

        def look() -> Manifest:
            self.looks.append(next(coming))
            return self.store.manifest(self.looks[-1])

        return look

    def bytes_to(self, version: int) -> int:
        return self.store.plan(0, version).stored_bytes

    def holds(self, version: int) -> None:
        training.assert_holds(self.slots.link, SNAPSHOTS[version])
        live = self.slots.live()
        assert live is not None
        assert live.record.commit_id == self.store.manifest(version).commit_id


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(receiver.patcher, "_FOLDED_SHARE", 1.0)
    return Scene(tmp_path)


def test_the_target_is_the_newest_when_the_way_is_planned(scene: Scene) -> None:
    patched = scene.patcher.move_to(scene.store.manifest(1), newest=scene.newest(2, 2))
    assert (patched.start, patched.end, patched.fetched_bytes) == (0, 2, scene.bytes_to(2))
    scene.holds(2)


def test_versions_that_appear_until_the_parts_are_here_are_folded_in(scene: Scene) -> None:
    patched = scene.patcher.move_to(scene.store.manifest(1), newest=scene.newest(1, 3))
    assert (patched.start, patched.end) == (0, 3)
    assert patched.fetched_bytes == patched.stored_bytes == scene.bytes_to(3)
    scene.holds(3)
    assert list(scene.slots.parts.iterdir()) == []


def test_from_then_on_the_target_is_fixed(scene: Scene) -> None:
    scene.patcher.move_to(scene.store.manifest(1), newest=scene.newest(1, 2, 3))
    scene.holds(2)
    assert scene.looks == [1, 2]


def test_versions_that_are_not_cheap_wait_for_their_own_patch(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver.patcher, "_FOLDED_SHARE", 0.0)
    patched = scene.patcher.move_to(scene.store.manifest(1), newest=scene.newest(1, 3))
    assert (patched.end, patched.fetched_bytes) == (1, scene.bytes_to(1))
    scene.holds(1)


def test_an_older_answer_changes_nothing(scene: Scene) -> None:
    scene.patcher.move_to(scene.store.manifest(2), newest=scene.newest(1, 1))
    scene.holds(2)


def test_a_question_that_fails_does_not_fail_the_patch(scene: Scene) -> None:
    def newest() -> Manifest:
        scene.looks.append(0)
        if len(scene.looks) > 1:
            raise StorageError("nobody answers")
        return scene.store.manifest(1)

    scene.patcher.move_to(scene.store.manifest(1), newest=newest)
    scene.holds(1)
    assert len(scene.looks) == 2
