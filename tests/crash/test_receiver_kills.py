"""A receiver killed at any instant: what an engine finds is one whole version, and the next start finishes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import training
from anchors import make_anchor
from forkserver import count_writes, log_reads, signal_at_change

import deltastore.attempt
from deltastore import Writer, open_store
from deltastore.compact import compact

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


def once(big, checkpoint, *more):
    return ["receiver", "once", "--store", big.store, "--checkpoint", checkpoint, "--json", *more]


@dataclass
class Ways:
    """A stream of 32 MiB with every kind of way through it, and its versions' snapshot ids."""

    store: Path
    ids: list[str]


_LAST = 18


@pytest.fixture(scope="module")
def ways(tmp_path_factory) -> Ways:
    root = tmp_path_factory.mktemp("ways")
    generator = torch.Generator().manual_seed(8)
    weights = {f"layers.{number}.weight": torch.zeros(2 << 20, dtype=torch.bfloat16) for number in range(8)}
    base = training.save(root / "base", weights, others=False)
    (base / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltastore.attempt, "_PART_BYTES", 8 << 10)  # many parts, so that kills fall between them
        patch.setattr(deltastore.attempt, "_FIRST_PART_BYTES", 8 << 10)
        with Writer(root / "store", base=base) as writer:
            for version in range(1, _LAST + 1):
                weights = {name: tensor.clone() for name, tensor in weights.items()}
                for tensor in weights.values():
                    bits = tensor.view(torch.int16)
                    where = torch.randint(0, bits.numel(), (2000,), generator=generator)
                    bits[where] += 1 + torch.randint(0, 9, where.shape, generator=generator, dtype=torch.int16)
                writer.publish(weights).result()
                assert writer.version == version
        store = open_store(root / "store")
        compact(store, workers=2)
        make_anchor(store, 9)
    return Ways(root / "store", [manifest.snapshot_id for manifest in store.log()])


@contextmanager
def loading(live, held):
    """Load what the link leads to again and again, as an engine would at any instant; yields the ids of what it saw."""
    seen, failures, over = [], [], threading.Event()

    def load():
        try:
            while True:
                seen.append(held(live.resolve(strict=True)))
                if over.wait(0.01):
                    return
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    assert failures == []


def keys_here(checkpoint, plan) -> set[str]:
    """Return the keys of a plan's parts that lie whole beside a checkpoint; parts of older plans may lie there too."""
    directory = checkpoint.with_name(f"{checkpoint.name}.slots") / "parts"
    parts = [part for step in plan.steps for part in step.parts]
    return {part.key for part in parts if (directory / part.digest.replace(":", "-")).exists()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20 if os.environ.get("DELTASTORE_THOROUGH") == "1" else 1))
def test_kills_of_random_plans_at_random_instants(seed, ways, commands, tmp_path, held):
    """Forwards, backwards, jumps over skips and anchors: one version at every instant, no part fetched twice."""
    draw, store = random.Random(seed), open_store(ways.store)
    live, log = tmp_path / "live", tmp_path / "log"
    at, before, lasts = 1, None, 0.1
    commands.run(*once(ways, live, "--target", at)).ok()
    killed, met, resumed = 0, set(), 0
    for _ in range(50):
        # Never the version before, which the other slot still holds.
        target = draw.choice([version for version in range(_LAST + 1) if version not in {at, before}])
        plan = store.plan(at, target)
        met |= {step.kind for step in plan.steps}
        with loading(live, held) as seen:
            log.write_bytes(b"")
            command = commands.start(*once(ways, live, "--target", target), env=log_reads(log))
            if draw.random() < 0.2:  # as soon as a part is here: what takes a moment is seldom met by chance
                while not command.ends_within(0.001) and not keys_here(live, plan):
                    pass
            else:
                command.ends_within(draw.uniform(0, lasts))
            if not command.ends_within(0):
                command.send(signal.SIGKILL)
            ended = command.end()
            assert ended.code in {0, -signal.SIGKILL}
            now = held(live)
            assert now in {ways.ids[at], ways.ids[target]}
            assert (live / "config.json").read_text() == "{}"
            here = keys_here(live, plan) if now == ways.ids[at] else set()
            if ended.code:
                killed += 1
                resumed += bool(here)
            log.write_bytes(b"")
            again = commands.run(*once(ways, live, "--target", target), env=log_reads(log)).ok()
        assert set(seen) <= {ways.ids[at], ways.ids[target]}
        assert held(live) == ways.ids[target]
        parts = {part.key: part.size for step in plan.steps for part in step.parts}
        read = [key for key in log.read_text().split() if key in parts]
        if now == ways.ids[at]:
            assert sorted(read) == sorted(parts.keys() - here)
            assert again.json["last_update"]["fetched_bytes"] == sum(parts[key] for key in read)
            # The longest, but one that took so long because the machine was busy is soon forgotten.
            lasts = max(0.8 * lasts, again.seconds)
        else:
            assert (read, again.json["last_update"]) == ([], {})
        at, before = target, at
    assert killed >= 10  # the others were faster than the signal
    assert met == {"delta", "inverse", "skip", "anchor"}
    assert resumed >= 2


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
        number += rounds(2, 1)
    assert seen == {False, True}
    assert number > 20
