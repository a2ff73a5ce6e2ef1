"""A compaction killed at any instant: nothing half-made counts, and the next one completes it."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
import training
from forkserver import signal_at_change

from deltastore import Writer, open_store
from deltastore.compact import Wanted, missing_skips
from deltastore.fsck import check
from deltastore.planner import Planner, read_route
from deltastore.storage.local import LocalBackend

VERSIONS = 33


@pytest.fixture(autouse=True)
def _end(commands):
    yield
    commands.end_all()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A store of 33 versions without routes, and what they hold."""
    root = tmp_path_factory.mktemp("compact")
    snapshots = [training.small_snapshot(0)]
    with Writer(root / "store", base=training.save(root / "base", snapshots[0]), anchor_every=20) as writer:
        for number in range(1, VERSIONS):
            snapshots.append(training.step(snapshots[-1], number))
            writer.publish(snapshots[-1]).result()
    return root / "store", snapshots


def expected():
    return {*missing_skips(VERSIONS - 1, ()), Wanted(20, None)}


def made(store):
    opened = open_store(store)
    routes = [read_route(opened, route.version, route.attempt_id) for route in Planner(opened).routes().values()]
    return [Wanted(route.version, route.start) for route in routes]


def restored_right(store, snapshots, tmp_path):
    report = check(LocalBackend(store), read_data=True)
    assert report.ok, report.problems
    for version in (15, 16, 20, 32):
        open_store(store).restore(version, tmp_path / "restored")
        training.assert_holds(tmp_path / "restored", snapshots[version])
        shutil.rmtree(tmp_path / "restored")


def test_kills_at_every_change_of_a_compaction(commands, tmp_path, stride, template):
    number, seen = 0, set()
    while True:
        store = tmp_path / f"store{number}"
        shutil.copytree(template[0], store)
        ended = commands.run("deltastore", "compact", store, env=signal_at_change(signal.SIGKILL, number))
        there = made(store)
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL
        seen.add(len(there))
        restored_right(store, template[1], tmp_path)
        added = commands.run("deltastore", "compact", store, "--json").ok().json["routes"]
        assert [Wanted(route["to"], route["from"]) for route in added] == sorted(
            expected() - set(there), key=lambda wanted: (wanted.start is None, wanted)
        )
        restored_right(store, template[1], tmp_path)
        shutil.rmtree(store)
        number += 3 * stride
    assert set(there) == expected()
    assert seen >= {0, len(expected()) - 1}


def test_kills_of_a_compaction_at_random_instants(commands, tmp_path, template, rounds):
    draw = random.Random(3)
    store = tmp_path / "store"
    shutil.copytree(template[0], store)
    duration = commands.run("deltastore", "compact", store).ok().seconds
    for _ in range(rounds(6, 60)):
        shutil.rmtree(store)
        shutil.copytree(template[0], store)
        rivals = [commands.start("deltastore", "compact", store) for _ in range(2)]
        for rival in rivals:
            if not rival.ends_within(draw.uniform(0, duration)):
                rival.send(signal.SIGKILL)
            rival.end()
        assert check(LocalBackend(store), read_data=True).ok
        commands.run("deltastore", "compact", store).ok()
        assert set(made(store)) == expected()
    restored_right(store, template[1], tmp_path)
