"""A receiver takes routes where there are any, and goes round those that are damaged."""

from __future__ import annotations

import pytest
import training

from deltastore import Writer, open_store
from deltastore.compact import anchor, compact


@pytest.fixture
def run(tmp_path):
    """A compacted stream of 17 versions, and their snapshots."""
    snapshots = [training.small_snapshot(0)]
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", snapshots[0])) as writer:
        for number in range(1, 18):
            snapshots.append(training.step(snapshots[-1], number))
            writer.publish(snapshots[-1]).result()
    assert len(compact(open_store(tmp_path / "store")).routes) == 1
    return tmp_path / "store", snapshots


def moved(commands, run, tmp_path, target):
    words = ["--store", run[0], "--checkpoint", tmp_path / "host" / "live", "--base", tmp_path / "base"]
    commands.run("receiver", "once", *words, "--target", target).ok()
    training.assert_holds(tmp_path / "host" / "live", run[1][int(target)])


@pytest.mark.parametrize("damaged", [False, True])
def test_a_receiver_jumps_forwards_and_back(commands, run, tmp_path, damaged):
    assert [step.kind for step in open_store(run[0]).plan(0, 17).steps] == ["skip", "delta"]
    if damaged:
        for part in (run[0] / "routes").rglob("*.safetensors"):
            part.unlink()
    for target in ("17", "1", "16", "2", "0"):
        moved(commands, run, tmp_path, target)


def test_a_receiver_on_a_new_host_starts_from_an_anchor_or_goes_round_it(commands, run, tmp_path):
    route = anchor(open_store(run[0]), 16)
    assert route is not None
    for name in ("whole", "damaged"):
        live = tmp_path / name / "live"
        commands.run("receiver", "once", "--store", run[0], "--checkpoint", live).ok()
        training.assert_holds(live, run[1][17])
        path = run[0] / route.parts[0].key
        path.write_bytes(path.read_bytes()[:-1] + b"?")
