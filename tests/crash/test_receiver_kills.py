"""A receiver killed at any instant: what an engine finds is one whole version, and the next start finishes."""

from __future__ import annotations

import json
import random
import signal

import pytest
import training
from forkserver import count_writes, signal_at_change

from deltastore import open_store


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


def once(big, checkpoint, *more):
    return ["receiver", "once", "--store", big.store, "--checkpoint", checkpoint, "--json", *more]


def parts_here(checkpoint, store, start, end) -> int:
    """Return how many bytes of a plan's parts lie whole beside a checkpoint; parts of older plans may lie there too."""
    directory = checkpoint.with_name(f"{checkpoint.name}.slots") / "parts"
    parts = [part for step in open_store(store).plan(start, end).steps for part in step.parts]
    return sum(part.size for part in parts if (directory / part.digest.replace(":", "-")).exists())


def stored_bytes(commands, big, start, end) -> int:
    words = ["deltastore", "plan", big.store, "--from", start, "--to", end, "--json"]
    return commands.run(*words).ok().json["stored_bytes"]


@pytest.mark.timeout(3600)
def test_kills_of_a_patch_at_random_instants(big, commands, tmp_path, held, rounds):
    draw = random.Random(1)
    live = tmp_path / "live"
    commands.run(*once(big, live, "--target", 1)).ok()
    durations = [commands.run(*once(big, live, "--target", target)).ok().seconds for target in (2, 0)]
    longest = max(durations)
    at, killed = 0, 0
    for _ in range(rounds(50, 1000)):
        target = (at + 1) % 3  # never the version before, which the other slot still holds
        full = stored_bytes(commands, big, at, target)
        command = commands.start(*once(big, live, "--target", target))
        if not command.ends_within(draw.uniform(0, longest)):
            command.send(signal.SIGKILL)
            killed += 1
        code = command.end().code
        assert code in {0, -signal.SIGKILL}
        now = held(live)
        assert now in {big.ids[at], big.ids[target]}
        assert (live / "config.json").read_text() == "{}"
        before = parts_here(live, big.store, at, target) if now == big.ids[at] else 0
        record = commands.run(*once(big, live, "--target", target)).ok().json
        assert held(live) == big.ids[target]
        if now == big.ids[at]:
            assert record["last_update"]["fetched_bytes"] == full - before
        else:
            assert record["last_update"] == {}
        at = target
    assert killed >= 10  # the others were faster than the signal


def written_bytes(log) -> int:
    return sum(int(line) for line in log.read_text().split())


@pytest.mark.parametrize("start", ["version", "nothing"])
def test_kills_of_one_patch_over_and_over_repeat_no_work(start, big, commands, tmp_path, held, rounds):
    draw = random.Random(5)
    model = (big.checkpoints[0] / "model.safetensors").stat().st_size
    resumed = 0
    for number in range(rounds(3, 30)):
        live, log = tmp_path / f"live{number}", tmp_path / f"log{number}"
        log.touch()
        if start == "version":
            commands.run(*once(big, live, "--target", 1)).ok()
        goal = live.with_name(f"{live.name}.slots") / ("b.goal" if start == "version" else "a.goal")
        for _ in range(6):
            enough = written_bytes(log) + draw.randrange(model // 3)
            resumed += goal.exists() and written_bytes(log) > model // 10
            command = commands.start(*once(big, live, "--target", 2), env=count_writes(log))
            while not command.ends_within(0.001) and written_bytes(log) < enough:
                pass
            command.send(signal.SIGKILL)
            if command.end().code == 0:
                break
            assert held(live) == big.ids[1] if start == "version" else not live.exists()
        commands.run(*once(big, live, "--target", 2), env=count_writes(log)).ok()
        assert held(live) == big.ids[2]
        assert model <= written_bytes(log) < 1.5 * model
    assert resumed >= 3


def test_kills_of_a_running_daemon_that_jumps_from_nothing(big, commands, tmp_path, held, rounds):
    draw = random.Random(2)
    duration = commands.run(*once(big, tmp_path / "measure")).ok().seconds
    live = tmp_path / "live"
    for _ in range(rounds(5, 25)):
        command = commands.start(
            "receiver", "run", "--store", big.store, "--checkpoint", live, "--listen", "127.0.0.1:0", "--poll", 0.05
        )
        command.ends_within(draw.uniform(0, duration))
        command.send(signal.SIGKILL)
        assert command.end().code == -signal.SIGKILL
        assert not live.is_symlink() or held(live) == big.ids[2]
    commands.run(*once(big, live)).ok()
    assert held(live) == big.ids[2]


def test_kills_while_a_plain_directory_is_adopted(big, commands, tmp_path, held, rounds):
    draw = random.Random(3)
    live = tmp_path / "live"
    training.save(live, training.small_snapshot())
    seen = set()
    small = training.small_snapshot()
    base = training.save(tmp_path / "base", small)
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", base).ok()
    words = ["receiver", "once", "--store", store, "--checkpoint", live]
    duration = commands.run(
        "receiver", "once", "--store", store, "--checkpoint", tmp_path / "m", "--base", base
    ).seconds
    for number in range(rounds(25, 100)):
        if live.is_symlink():
            # Back to a plain directory for the next round.
            live.unlink()
            training.save(live, small)
            live.with_name("live.slots").rename(tmp_path / f"slots{number}")
        command = commands.start(*words)
        if not command.ends_within(draw.uniform(0, 1.2 * duration)):
            command.send(signal.SIGKILL)
        command.end()
        seen.add(live.is_symlink())
        training.assert_holds(live, small)
    assert seen == {True, False}
    commands.run(*words).ok()
    assert live.is_symlink()
    training.assert_holds(live, small)


@pytest.mark.parametrize("kind", ["patch", "adoption", "takeover"])
def test_kills_before_every_change_on_disk(kind, commands, tmp_path, stride):
    """Instead of a random instant, each one: the n-th change is the last thing that the process does."""
    snapshots = training.chain(3, seed=4)
    small = [{name: tensor for name, tensor in snapshot.items() if tensor.numel() < 5000} for snapshot in snapshots]
    base = training.save(tmp_path / "base", small[0])
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", base).ok()
    for snapshot in small[1:]:
        directory = training.save(tmp_path / "next", snapshot, others=False)
        commands.run("deltastore", "publish", store, directory).ok()
        directory.rename(tmp_path / f"kept{len(list(tmp_path.iterdir()))}")
    live = tmp_path / "live"
    words = ["receiver", "once", "--store", store, "--checkpoint", live, "--json"]
    number = 0
    while True:
        root = tmp_path / f"round{number}"
        root.mkdir()
        live = root / "live"
        words[5] = live
        if kind == "patch":
            commands.run(*words, "--target", 1).ok()
        elif kind == "adoption":
            training.save(live, small[1], shards=2)
        else:
            live.symlink_to(training.save(root / "elsewhere", small[1]))
        ended = commands.run(*words, env=signal_at_change(signal.SIGKILL, number))
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended
        found = training.load(live)
        assert training.differences(found, small[1]) == [] or training.differences(found, small[2]) == []
        for name, data in training.OTHER_FILES.items():
            assert (live / name).read_bytes() == data
        record = json.loads(commands.run(*words).ok().out)
        assert record["version"] == 2
        training.assert_holds(live, small[2])
        number += stride
    assert number > 20


def test_kills_at_every_change_of_a_repair(commands, tmp_path, held, rounds):
    """Whatever is live, its whole files stay whole, and the next repair ends it."""
    snapshot = {name: tensor for name, tensor in training.base_snapshot(3).items() if tensor.numel() < 5000}
    store, number, seen = tmp_path / "store", 0, set()
    commands.run("deltastore", "init", store, "--base", training.save(tmp_path / "base", snapshot, shards=2)).ok()
    while True:
        live = tmp_path / f"round{number}" / "live"
        words = ["receiver", "repair", "--checkpoint", live, "--store", store, "--json"]
        commands.run("receiver", "once", "--store", store, "--checkpoint", live).ok()
        path = min(live.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        ended = commands.run(*words, env=signal_at_change(signal.SIGKILL, number))
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended
        whole = training.differences(training.load(live), snapshot) == []
        assert whole == (live.readlink().name == "b")
        seen.add(whole)
        commands.run(*words).ok()
        training.assert_holds(live, snapshot)
        commands.run("receiver", "verify", "--checkpoint", live).ok()
        number += rounds(5, 1)
    assert seen == {False, True}
    assert number > 20
