"""A collection or forgetting killed at any instant: the kept restores, the rest is forgotten, the next run ends it."""

from __future__ import annotations

import shutil
import signal

import pytest
import training
from anchors import begin_anchor, make_anchor
from forkserver import signal_at_change

from deltastore import Writer, open_store
from deltastore.errors import VersionForgotten
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.policy import Policy
from deltastore.storage.local import LocalBackend
from deltastore.tags import set_tag

KEPT = {2, 5, 6}


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


@pytest.fixture
def place(tmp_path):
    """Seven versions, one tagged, four to forget; a route to drop, one unfinished, parts of an attempt that lost."""
    place = tmp_path / "first"
    snapshots = [training.small_snapshot(seed, elements=16) for seed in range(7)]
    with Writer(place, base=training.save(tmp_path / "base", snapshots[0])) as writer:
        for snapshot in snapshots[1:]:
            writer.publish(snapshot).result()
    store = open_store(place)
    set_tag(store, "best", 2)
    make_anchor(store, 3)
    make_anchor(store, 5)
    begin_anchor(store, 4)
    store.backend.write(f"parts/{4:010d}/{7:032x}/model-00000.safetensors", b"of an attempt that lost")
    return place


def assert_right(place, tmp_path, kept):
    store = open_store(place)
    for version in range(7):
        target = tmp_path / "restored"
        if version in kept:
            store.restore(version, target, workers=1)
            training.assert_holds(target, training.small_snapshot(version, elements=16))
            shutil.rmtree(target)
        else:
            with pytest.raises(VersionForgotten):
                store.plan(None, version)
    report = check(LocalBackend(place))
    assert report.ok, report.problems


def test_kills_at_every_change_of_a_collection(place, commands, tmp_path, stride):
    assert forget(open_store(place), Policy(keep_last=2)).number == 1
    number, left = 0, set()
    while True:
        copy = tmp_path / f"store{number}"
        shutil.copytree(place, copy)
        ended = commands.run("deltastore", "gc", copy, "--grace", 0, env=signal_at_change(signal.SIGKILL, number))
        assert_right(copy, tmp_path, KEPT)
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        left.add(len(collect(open_store(copy), grace=0).objects))
        assert collect(open_store(copy), grace=0).objects == ()
        assert_right(copy, tmp_path, KEPT)
        shutil.rmtree(copy)
        number += stride
    assert len(left) > 3
    assert collect(open_store(copy), grace=0).objects == ()


def test_kills_at_every_change_of_a_forgetting(place, commands, tmp_path, stride):
    number = 0
    words = ("--keep-last", 2, "--yes")
    while True:
        copy = tmp_path / f"store{number}"
        shutil.copytree(place, copy)
        ended = commands.run("deltastore", "forget", copy, *words, env=signal_at_change(signal.SIGKILL, number))
        done = open_store(copy).retention() is not None
        assert_right(copy, tmp_path, KEPT if done else set(range(7)))
        if ended.code == 0:
            assert done
            break
        assert ended.code == -signal.SIGKILL
        commands.run("deltastore", "forget", copy, *words).ok()
        commands.run("deltastore", "gc", copy).ok()
        assert_right(copy, tmp_path, KEPT)
        shutil.rmtree(copy)
        number += stride
    assert number > 2
