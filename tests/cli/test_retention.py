"""Tags, forgetting, collecting, sizes and differences, as people type them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import training
from anchors import make_anchor

from deltastore import Writer, open_store
from deltastore.clock import now
from deltastore.heartbeat import Heartbeat, encode_heartbeat, heartbeat_key

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    with Writer(tmp_path / "store", base=base) as writer:
        for seed in (1, 2, 3, 4):
            writer.publish(training.small_snapshot(seed)).result()
    return tmp_path / "store"


def test_a_tag_is_set_moved_listed_shown_and_deleted(store, tmp_path, commands):
    assert commands.run("deltastore", "tag", store, "best", 2, "--json").ok().json["version"] == 2
    commands.run("deltastore", "tag", store, "best", "latest").ok()
    commands.run("deltastore", "tag", store, "early", "1").ok()
    listed = commands.run("deltastore", "tags", store, "--json").ok().json["tags"]
    assert [(tag["name"], tag["version"]) for tag in listed] == [("best", 4), ("early", 1)]
    assert "early" in commands.run("deltastore", "tags", store).ok().out
    log = commands.run("deltastore", "log", store, "--json").ok().json["versions"]
    assert [entry["tags"] for entry in log] == [[], ["early"], [], [], ["best"]]
    assert commands.run("deltastore", "show", store, "tag:early", "--json").ok().json["tags"] == ["early"]
    commands.run("deltastore", "restore", store, "tag:early", tmp_path / "out").ok()
    training.assert_holds(tmp_path / "out", training.small_snapshot(1))
    commands.run("deltastore", "tag", store, "early", "--delete").ok()
    assert commands.run("deltastore", "show", store, "tag:early").code == 10
    assert commands.run("deltastore", "tag", store, "early", "--delete").code == 10


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, ["tag", "{store}", "latest", "1"]),
        (2, ["tag", "{store}", "../x", "1"]),
        (2, ["tag", "{store}", "best"]),
        (2, ["tag", "{store}", "best", "1", "--delete"]),
        (10, ["tag", "{store}", "best", "9"]),
        (10, ["tag", "{store}", "best", "tag:none"]),
        (2, ["forget", "{store}", "--keep-last", "1"]),
        (2, ["forget", "{store}", "--keep-last", "0", "--yes"]),
        (2, ["forget", "{store}", "--yes"]),
        (2, ["gc", "{store}", "--grace", "-1"]),
        (10, ["gc", "{store}x"]),
        (10, ["stats", "{store}x"]),
        (10, ["diff", "{store}", "0", "9"]),
    ],
)
def test_what_cannot_be_done_ends_with_its_code(code, words, store, commands):
    ended = commands.run("deltastore", *(word.format(store=store) for word in words))
    assert ended.code == code, ended
    assert ended.out == ""
    assert "Try" in ended.err
    assert not (store / "retention").exists()
    assert not (store / "tags").exists()


def test_versions_are_forgotten_and_collected_and_read_as_forgotten(store, tmp_path, commands):
    commands.run("deltastore", "tag", store, "best", "1").ok()
    foreseen = commands.run("deltastore", "forget", store, "--keep-last", 2, "--dry-run", "--json").ok()
    assert foreseen.json["forgotten"] == [[0, 2]]
    assert foreseen.json["anchor_first"] == 3
    assert "deltastore anchor" in foreseen.err
    make_anchor(open_store(store), 3)
    done = commands.run("deltastore", "forget", store, "--keep-last", 2, "--yes", "--json").ok().json
    assert (done["number"], done["kept"], done["dropped_parts"]) == (1, [[3, 4]], [[0, 3]])
    assert "would be removed" in commands.run("deltastore", "gc", store, "--dry-run").ok().out
    removed = commands.run("deltastore", "gc", store, "--json").ok().json
    assert removed["reasons"]["forgotten"]["objects"] == removed["objects"] == 2  # of 2 and 3; the tag has others
    assert commands.run("deltastore", "gc", store).ok().out.startswith("0 objects")
    log = commands.run("deltastore", "log", store, "--json").ok().json["versions"]
    assert [entry["forgotten"] for entry in log] == [True, False, True, False, False]
    assert "delta, forgotten" in commands.run("deltastore", "log", store).ok().out
    assert commands.run("deltastore", "show", store, 2, "--json").ok().json["forgotten"]
    for words in (["restore", store, 2, tmp_path / "out"], ["plan", store, "--from", "none", "--to", 2],
                  ["show", store, 2, "--tensors"], ["tag", store, "x", 2], ["diff", store, 2, 4]):  # fmt: skip
        ended = commands.run("deltastore", *words)
        assert ended.code == 10
        assert "forgotten" in ended.err
    for version, words in ((1, ["tag:best"]), (3, ["3"]), (4, ["latest"])):
        commands.run("deltastore", "restore", store, *words, tmp_path / f"out{version}").ok()
        training.assert_holds(tmp_path / f"out{version}", training.small_snapshot(version))
    assert commands.run("deltastore", "check", store, "--read-data", "--json").ok().json["ok"]


def test_on_a_terminal_forgetting_asks(store):
    for answer, code, forgotten in (("n\n", 130, False), ("y\n", 0, True)):
        master, slave = pty.openpty()
        os.write(master, answer.encode())
        ended = subprocess.run(
            [sys.executable, "-m", "deltastore", "forget", str(store), "--keep-last", "2"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=slave,
            capture_output=True,
            check=False,
            text=True,
        )
        os.close(slave)
        os.close(master)
        assert ended.returncode == code, ended
        assert "3 versions (0-2)" in ended.stderr
        assert (open_store(store).retention() is not None) == forgotten


def test_sizes_add_up(store, commands):
    (store / "parts" / "0000000003" / f"{5:032x}").mkdir()
    (store / "parts" / "0000000003" / f"{5:032x}" / "model-00000.safetensors").write_bytes(b"x" * 100)
    stats = commands.run("deltastore", "stats", store, "--json").ok().json
    history = open_store(store).log()
    assert {"versions", "stored_bytes", "delta_bytes", "anchor_bytes", "full_bytes_equivalent", "saved_ratio",
            "orphan_bytes"} <= set(stats)  # fmt: skip
    assert stats["versions"] == stats["kept_versions"] == 5
    assert stats["delta_bytes"] == sum(manifest.stored_bytes for manifest in history[1:])
    on_disk = sum(path.stat().st_size for path in (store / "parts").rglob("*") if path.is_file())
    assert stats["stored_bytes"] + stats["orphan_bytes"] == on_disk
    assert stats["orphan_bytes"] == 100
    assert stats["full_bytes_equivalent"] == 5 * history[0].model.snapshot_bytes
    assert "saved_ratio" in commands.run("deltastore", "stats", store).ok().out


def test_a_difference_names_the_tensors_that_changed(tmp_path, commands):
    first = training.small_snapshot(0, elements=4096)
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["b.weight"][3, 1] += 1
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", first)) as writer:
        for snapshot in (second, first):
            writer.publish(snapshot).result()
    for start, end, differs in ((0, 1, True), (1, 0, True), (1, 2, True), (0, 2, False), (2, 0, False), (1, 1, None)):
        found = commands.run("deltastore", "diff", tmp_path / "store", start, end, "--json").ok().json
        assert (found["from"], found["to"], found["total_tensors"]) == (start, end, 3)
        rows = [(row["name"], row["differs"], row["changed_elements"]) for row in found["tensors"]]
        assert rows == ([] if differs is None else [("b.weight", differs, 1 if differs else 2)])
        assert found["stored_bytes"] == sum(
            step.stored_bytes for step in open_store(tmp_path / "store").plan(start, end).steps
        )
    assert "b.weight" in commands.run("deltastore", "diff", tmp_path / "store", 0, 1).ok().out


def test_what_receivers_hold_is_kept_where_that_is_asked_for(store, commands):
    opened = open_store(store)
    said = Heartbeat(
        stream_id=opened.stream_id,
        receiver_id="one",
        host="here",
        version=1,
        target=1,
        state="following",
        stages={},
        software="0",
        every=30.0,
        sent_at=now(),
    )
    opened.backend.write(heartbeat_key("one"), encode_heartbeat(said))
    for option, kept in (([], False), (["--keep-held"], True)):
        record = commands.run("deltastore", "forget", store, "--keep-last", 1, "--dry-run", "--json", *option).ok().json
        assert any(first <= 1 <= last for first, last in record["kept"]) == kept
