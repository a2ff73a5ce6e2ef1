"""A trainer killed, or asleep, in the middle of a publish: another goes on on another machine, and nothing is lost."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
import training
from forkserver import signal_at_change

from deltastore import open_store
from deltastore.fsck import check
from deltastore.storage.local import LocalBackend


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


@pytest.fixture
def run(tmp_path):
    """Return five snapshots that all differ, and their checkpoints."""
    snapshots = [{name: tensor for name, tensor in training.base_snapshot(8).items() if tensor.numel() < 5000}]
    for number in (1, 2, 4, 7):
        snapshots.append(training.step(snapshots[-1], number))
    places = [training.save(tmp_path / "in" / str(number), snapshot) for number, snapshot in enumerate(snapshots)]
    return snapshots, places


def assert_history(store, contents, tmp_path):
    """Fail unless the store has exactly these versions, each of them whole."""
    opened = open_store(store)
    history = opened.log()
    assert len(history) == len(contents)
    epochs = [manifest.writer_epoch for manifest in history]
    assert epochs == sorted(epochs)
    for version, snapshot in enumerate(contents):
        opened.restore(version, tmp_path / "restored" / str(version))
        training.assert_holds(tmp_path / "restored" / str(version), snapshot)
    shutil.rmtree(tmp_path / "restored")
    report = check(LocalBackend(store), read_data=True)
    assert report.ok, report.problems


@pytest.mark.parametrize("start", ["anchor", "weights"])
def test_a_trainer_killed_at_every_change_is_resumed_elsewhere(start, commands, run, tmp_path, rounds):
    snapshots, places = run
    commands.run("deltastore", "init", tmp_path / "fresh", "--base", places[0]).ok()
    number, counts = 0, set()
    while True:
        store, here, there = (tmp_path / f"{name}{number}" for name in ("store", "here", "there"))
        shutil.copytree(tmp_path / "fresh", store)
        words = ["trainer", store, "--resume", "--spool", here, *places[1:4]]
        ended = commands.run(*words, env=signal_at_change(signal.SIGKILL, number))
        committed = open_store(store).latest().version
        if ended.code == 0:
            assert committed == 3
            break
        assert ended.code == -signal.SIGKILL
        told = len(ended.out.split())
        assert committed in {told, told + 1}
        shutil.rmtree(here, ignore_errors=True)  # another machine has nothing of it
        # The trainer's own checkpoint may be older than what it published last.
        loaded = ["--weights", places[max(committed - number % 3, 0)]] if start == "weights" else []
        again = commands.run("trainer", store, "--resume", *loaded, "--spool", there, places[4], places[2]).ok()
        assert again.out.split() == [str(committed + 1), str(committed + 2)]
        assert_history(store, [*snapshots[: committed + 1], snapshots[4], snapshots[2]], tmp_path)
        counts.add(committed)
        number += rounds(7, 1)
    assert counts >= {0, 1, 2}
    assert number > 20


def test_a_trainer_killed_at_any_instant_is_taken_over(big, commands, tmp_path, held, rounds):
    draw = random.Random(17)
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", big.checkpoints[0]).ok()
    contents = [0]
    for turn in range(rounds(4, 30)):
        which = 3 - contents[-1] if contents[-1] else 1
        words = ["--resume", "--takeover"] + ["--weights", str(big.checkpoints[contents[-1]])] * (turn % 2)
        before = open_store(store).latest()
        trainer = commands.start("trainer", store, *words, "--spool", tmp_path / f"spool{turn}", big.checkpoints[which])
        training.until(lambda before=before: open_store(store).latest().version > before.version, what="taking over")
        if not trainer.ends_within(draw.uniform(0, 1.0)):
            trainer.send(signal.SIGKILL)
        trainer.end()
        newest = open_store(store).latest()
        assert newest.version - before.version in {1, 2}
        contents.append(contents[-1])
        contents += [which] * (newest.version - before.version - 1)
    assert [manifest.snapshot_id for manifest in open_store(store).log()] == [big.ids[which] for which in contents]
    open_store(store).restore(len(contents) - 1, tmp_path / "last")
    assert held(tmp_path / "last") == big.ids[contents[-1]]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_trainer_that_wakes_after_a_takeover_has_changed_nothing_and_is_fenced(commands, run, tmp_path):
    snapshots, places = run
    store = tmp_path / "store"
    words = ["trainer", store, "--base", places[0], "--spool", tmp_path / "here", "--stop-before-commit"]
    asleep = commands.start(*words, places[1], places[2])
    training.until(lambda: is_stopped(asleep.pid), what="falling asleep")
    words = ["trainer", store, "--resume", "--takeover", "--weights", places[0], "--spool", tmp_path / "there"]
    assert commands.run(*words, places[3]).ok().out.split() == ["2"]
    parts = {info.key for info in LocalBackend(store).list("parts/0000000001/")}
    before = {key: data for key, data in training.tree(store).items() if key not in parts}
    asleep.send(signal.SIGCONT)
    ended = asleep.end()
    assert ended.code == 11
    assert ended.out == ""
    assert "version-conflict" in ended.err
    assert "fenced" in ended.err
    assert parts  # it had uploaded them, and has taken them away
    assert training.tree(store) == before
    assert_history(store, [snapshots[0], snapshots[0], snapshots[3]], tmp_path)


def test_a_fork_killed_at_every_change_is_whole_or_absent(commands, run, tmp_path, rounds):
    snapshots, places = run
    commands.run("trainer", tmp_path / "source", "--base", places[0], "--spool", tmp_path / "s", places[1]).ok()
    before = training.tree(tmp_path / "source")
    (tmp_path / "tmp").mkdir()
    number, whole = 0, set()
    while True:
        fork = tmp_path / f"fork{number}"
        words = ["deltastore", "init", fork, "--from", tmp_path / "source", "latest"]
        environment = {**signal_at_change(signal.SIGKILL, number), "TMPDIR": str(tmp_path / "tmp")}
        ended = commands.run(*words, env=environment)
        there = (fork / "manifests" / "0000000000.json").exists()
        whole.add(there)
        if not there:
            assert commands.run("deltastore", "log", fork).code == 10
            commands.run(*words).ok()
        assert_history(fork, [snapshots[1]], tmp_path)
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        number += rounds(13, 1)
    assert whole == {False, True}
    assert training.tree(tmp_path / "source") == before
