"""Ctrl-C and SIGTERM at any instant: the documented exit code, one line, nothing half-made, nothing left over."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING

import pytest
import training
from forkserver import signal_at_change

from deltastore import open_store
from deltastore.fsck import check
from deltastore.storage.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


@pytest.fixture
def run(tmp_path):
    """Return a small stream of two versions and the directories they came from."""
    snapshots = [
        {name: tensor for name, tensor in snapshot.items() if tensor.numel() < 5000}
        for snapshot in training.chain(3, seed=6)
    ]
    return [training.save(tmp_path / "in" / str(number), snapshot) for number, snapshot in enumerate(snapshots)]


def interrupted(ended) -> bool:
    """Tell whether an end is that of an interrupted command; fail if it is neither that nor a good end."""
    assert "Traceback" not in ended.err, ended.err
    if ended.code == 0:
        return False
    assert ended.code == 130, ended
    *log, last = ended.err.strip().splitlines()
    assert last == "Interrupted."
    assert all(" INFO " in line for line in log)  # a receiver's, of what it did before
    assert ended.out == ""
    return True


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture
def scratch(tmp_path):
    """An empty directory for temporary files, and the environment that has them made there."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    return directory


def test_an_init_interrupted_at_every_change_leaves_a_whole_store_or_none(commands, run, tmp_path, scratch, stride):
    number, whole = 0, set()
    while True:
        store = tmp_path / f"store{number}"
        environment = {**signal_at_change(signal.SIGINT, number), "TMPDIR": str(scratch)}
        ended = commands.run("deltastore", "init", store, "--base", run[0], env=environment)
        assert leftovers(scratch) == []
        there = (store / "manifests" / "0000000000.json").exists()
        if not interrupted(ended):
            # The last few changes are the end of a command that has done its work, or none came any more.
            assert there
        objects = [info.key for info in LocalBackend(store).list("")]
        if there:
            report = check(LocalBackend(store), read_data=True)
            assert report.ok, (number, report.problems)
            open_store(store).restore(0, tmp_path / "restored" / str(number))
        else:
            # Once the manifest may have been sent, the parts stay: it may yet arrive.
            assert [key for key in objects if not key.startswith("parts/")] == [], number
            commands.run("deltastore", "init", store, "--base", run[0]).ok()
        whole.add(there)
        if ended.code == 0:
            break
        number += stride
    assert whole == {False, True}


def test_a_publish_interrupted_at_every_change_publishes_all_or_nothing(commands, run, tmp_path, scratch, stride):
    number = 0
    while True:
        store = tmp_path / f"store{number}"
        commands.run("deltastore", "init", store, "--base", run[0]).ok()
        environment = {**signal_at_change(signal.SIGINT, number), "TMPDIR": str(scratch)}
        ended = commands.run("deltastore", "publish", store, run[1], env=environment)
        assert leftovers(scratch) == []
        stopped = interrupted(ended)
        report = check(LocalBackend(store), read_data=True)
        assert report.ok, report.problems
        there = open_store(store).latest().version
        parts = {info.key for info in LocalBackend(store).list("parts/0000000001/")}
        wanted = {part.key for part in open_store(store).manifest(1).model.parts} if there else set()
        # A thread that was just starting cannot be waited for: its upload may be left as an orphan.
        assert parts >= wanted, number
        commands.run("deltastore", "publish", store, run[2]).ok()
        open_store(store).restore(there + 1, tmp_path / "restored" / str(number))
        training.assert_holds(tmp_path / "restored" / str(number), training.load(run[2]))
        if not stopped:
            break
        number += stride
    assert number > 5


def test_a_restore_interrupted_at_every_change_leaves_nothing_or_all(commands, run, tmp_path, scratch, stride):
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", run[0]).ok()
    commands.run("deltastore", "publish", store, run[1]).ok()
    number = 0
    while True:
        out = tmp_path / "out"
        environment = {**signal_at_change(signal.SIGINT, number), "TMPDIR": str(scratch)}
        ended = commands.run("deltastore", "restore", store, 1, out / "restored", env=environment)
        assert leftovers(scratch) == []
        assert leftovers(out) in ([], ["restored"]), number
        if leftovers(out):
            training.assert_holds(out / "restored", training.load(run[1]))
            (out / "restored").rename(tmp_path / f"moved{number}")
        if not interrupted(ended):
            break
        number += stride
    assert number > 10


def test_a_receiver_interrupted_at_every_change_keeps_a_whole_version(commands, run, tmp_path, scratch, stride):
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", run[0]).ok()
    commands.run("deltastore", "publish", store, run[1]).ok()
    wanted = [training.load(directory) for directory in run[:2]]
    number = 0
    while True:
        live = tmp_path / f"round{number}" / "live"
        training.save(live, wanted[0])
        words = ["receiver", "once", "--store", store, "--checkpoint", live]
        ended = commands.run(*words, env={**signal_at_change(signal.SIGINT, number), "TMPDIR": str(scratch)})
        assert leftovers(scratch) == []
        assert set(leftovers(live.parent)) <= {"live", "live.slots"}
        found = training.load(live)
        assert any(training.differences(found, snapshot) == [] for snapshot in wanted)
        if not interrupted(ended):
            break
        commands.run(*words).ok()
        training.assert_holds(live, wanted[1])
        number += stride
    assert number > 20


def test_interrupts_at_random_instants(big, commands, tmp_path, held, rounds, scratch):
    draw = random.Random(11)
    store = tmp_path / "store"
    live = tmp_path / "live"
    environment = {"TMPDIR": str(scratch)}
    for words, target in (
        (["deltastore", "init", store, "--base", big.checkpoints[0]], None),
        (["deltastore", "restore", big.store, 2, tmp_path / "out" / "restored"], tmp_path / "out" / "restored"),
        (["receiver", "once", "--store", big.store, "--checkpoint", live], live),
    ):
        for _ in range(rounds(4, 20)):
            command = commands.start(*words, env=environment)
            # Not before the command line has been read: what comes earlier is the interpreter's own.
            command.ends_within(draw.uniform(0.02, 0.4))
            command.send(signal.SIGINT)
            if not interrupted(command.end(20)):
                break
            assert leftovers(scratch) == []
            if target is None and (store / "manifests" / "0000000000.json").exists():
                break  # committed before the interrupt was seen
            assert leftovers(tmp_path / "out") in ([], ["restored"])
            assert target is None or not target.exists() or held(target) == big.ids[2]
        else:
            commands.run(*words, env=environment).ok()
    assert held(tmp_path / "out" / "restored") == held(live) == big.ids[2]
    assert check(LocalBackend(store), read_data=True).ok


def test_sigterm_at_every_change_ends_a_running_receiver_in_good_order(commands, run, tmp_path):
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", run[0]).ok()
    commands.run("deltastore", "publish", store, run[1]).ok()
    wanted = [training.load(directory) for directory in run[:2]]
    number = 0
    while number < 200:
        live = tmp_path / f"round{number}" / "live"
        training.save(live, wanted[0])
        words = ["receiver", "run", "--store", store, "--checkpoint", live, "--listen", "127.0.0.1:0", "--poll", 0.05]
        command = commands.start(*words, env=signal_at_change(signal.SIGTERM, number))
        while not command.ends_within(0.05):
            if "Engine: activated" in command.err and "/1 (" in command.err:
                command.ends_within(0.2)  # the change may be the last of all
                break
        alone = command.ends_within(0)
        command.send(signal.SIGTERM)
        ended = command.end(10)
        assert ended.code == 0, ended
        assert "Traceback" not in ended.err
        found = training.load(live)
        assert any(training.differences(found, snapshot) == [] for snapshot in wanted)
        if not alone:
            break
        number += 7
    assert 20 < number < 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_at_random_instants_end_a_running_receiver_in_good_order(number, big, commands, tmp_path, held, rounds):
    draw = random.Random(13)
    live = tmp_path / "live"
    for _ in range(rounds(3, 20)):
        words = ["receiver", "run", "--store", big.store, "--checkpoint", live, "--listen", "127.0.0.1:0"]
        command = commands.start(*words)
        training.until(lambda command=command: "Listening on" in command.err, what="listening")
        command.ends_within(draw.uniform(0, 0.4))
        command.send(number)
        ended = command.end(10)
        assert ended.code == (0 if number == signal.SIGTERM else 130), ended
        assert "Traceback" not in ended.err
        assert not live.exists() or held(live) == big.ids[2]


@pytest.mark.parametrize("what", ["no store yet", "no answer", "store gone"])
def test_sigterm_ends_a_receiver_whose_store_is_out_of_reach(what, commands, run, tmp_path, unused_endpoint):
    store, more = tmp_path / "store", []
    if what == "no answer":
        store = "s3://weights/run"
        options = {"endpoint_url": unused_endpoint, "key": "key", "secret": "secret"}
        more = [word for name, value in options.items() for word in ("--storage-option", f"{name}={value}")]
    elif what == "store gone":
        commands.run("deltastore", "init", store, "--base", run[0]).ok()
    words = ["receiver", "run", "--store", store, "--checkpoint", tmp_path / "live", "--listen", "127.0.0.1:0"]
    command = commands.start(*words, *more, "--poll", 0.05)
    training.until(lambda: "Listening on" in command.err, what="listening")
    if what == "store gone":
        training.until(lambda: "Engine: activated" in command.err, what="serving")
        store.rename(tmp_path / "elsewhere")
    command.ends_within(1)
    command.send(signal.SIGTERM)
    assert command.end(10).code == 0


@pytest.fixture
def unused_endpoint():
    """An address of this machine where connections are refused as long as the test runs."""
    import socket  # noqa: PLC0415 - only here

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and nothing answers
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
