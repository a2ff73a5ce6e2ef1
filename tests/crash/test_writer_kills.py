"""A publishing or initialising process killed at any instant: the next one goes on, and every version is right."""

from __future__ import annotations

import random
import signal
from contextlib import suppress

import pytest
import training
from forkserver import signal_at_change

import deltastore.attempt
from deltastore import Writer, open_checkpoint, open_store
from deltastore.errors import StoreNotFound
from deltastore.fsck import check
from deltastore.storage.local import LocalBackend


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


def small_chain(length):
    return [
        {name: tensor for name, tensor in snapshot.items() if tensor.numel() < 5000}
        for snapshot in training.chain(length, seed=8)
    ]


def restored_right(store, contents, tmp_path):
    """Fail unless every version that exists restores to the snapshot that it should hold."""
    opened = open_store(store)
    for manifest in opened.log():
        target = tmp_path / "restored" / str(manifest.version)
        opened.restore(manifest.version, target)
        training.assert_holds(target, contents[manifest.version], others=False)
    report = check(LocalBackend(store), read_data=True)
    assert report.ok, report.problems
    import shutil  # noqa: PLC0415 - only here

    shutil.rmtree(tmp_path / "restored")


def test_kills_at_every_change_of_a_publish(commands, tmp_path, stride):
    snapshots = small_chain(3)
    base = training.save(tmp_path / "base", snapshots[0])
    first = training.save(tmp_path / "first", snapshots[1])
    second = training.save(tmp_path / "second", snapshots[2])
    number, committed = 0, set()
    while True:
        store = tmp_path / f"store{number}"
        commands.run("deltastore", "init", store, "--base", base).ok()
        ended = commands.run("deltastore", "publish", store, first, env=signal_at_change(signal.SIGKILL, number))
        there = open_store(store).latest().version
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        committed.add(there)
        restored_right(store, snapshots, tmp_path)
        commands.run("deltastore", "publish", store, second).ok()
        assert open_store(store).latest().version == there + 1
        restored_right(store, {0: snapshots[0], there: snapshots[there], there + 1: snapshots[2]}, tmp_path)
        number += stride
    assert committed == {0, 1}
    assert number > 10


def test_kills_at_every_change_of_an_init(commands, tmp_path, stride):
    snapshot = small_chain(1)[0]
    base = training.save(tmp_path / "base", snapshot)
    number, outcomes = 0, set()
    while True:
        store = tmp_path / f"store{number}"
        ended = commands.run("deltastore", "init", store, "--base", base, env=signal_at_change(signal.SIGKILL, number))
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        there = False
        with suppress(StoreNotFound):
            open_store(store)
            there = True
        outcomes.add(there)
        again = commands.run("deltastore", "init", store, "--base", base)
        assert again.code == (11 if there else 0)
        restored_right(store, [snapshot], tmp_path)
        number += stride
    assert outcomes == {False, True}


def test_kills_of_a_publish_at_random_instants(big, commands, tmp_path, held, rounds, monkeypatch):
    draw = random.Random(7)
    store = tmp_path / "store"
    with Writer(store, base=big.checkpoints[0]) as writer:
        assert writer.version == 0
    contents = [0]
    words = ["deltastore", "publish", store]
    duration = commands.run(*words, big.checkpoints[1]).ok().seconds
    contents.append(1)
    for _ in range(rounds(8, 40)):
        which = 3 - contents[-1] if contents[-1] else 1
        command = commands.start(*words, big.checkpoints[which])
        if not command.ends_within(draw.uniform(0, 1.1 * duration)):
            command.send(signal.SIGKILL)
        command.end()
        there = open_store(store).latest().version
        assert there in {len(contents) - 1, len(contents)}
        contents += [which] * (there == len(contents))
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 1 << 12)
    with Writer(store) as writer:
        which = 3 - contents[-1]
        writer.publish(open_checkpoint(big.checkpoints[which])).result()
        contents.append(which)
    report = check(LocalBackend(store), read_data=True)
    assert report.ok, report.problems
    opened = open_store(store)
    assert [manifest.snapshot_id for manifest in opened.log()] == [big.ids[which] for which in contents]
    opened.restore(len(contents) - 1, tmp_path / "last")
    assert held(tmp_path / "last") == big.ids[contents[-1]]
