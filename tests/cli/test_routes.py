"""`deltastore anchor` and `compact`, and what plan, log, show and check tell of routes."""

from __future__ import annotations

import pytest
import training

from deltastore import Writer, open_store


@pytest.fixture
def store(tmp_path):
    snapshot = training.small_snapshot(0)
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", snapshot), anchor_every=16) as writer:
        for number in range(1, 19):
            snapshot = training.step(snapshot, number)
            writer.publish(snapshot).result()
    return tmp_path / "store"


def anchored(store, commands):
    log = commands.run("deltastore", "log", store, "--json").ok().json
    return [entry["version"] for entry in log["versions"] if entry["anchored"]]


def test_a_store_is_compacted_once(store, commands):
    added = commands.run("deltastore", "compact", store, "--json").ok().json
    assert [(route["kind"], route["from"], route["to"]) for route in added["routes"]] == [
        ("skip", 0, 16),
        ("anchor", None, 16),
    ]
    assert added["segments"] == []
    assert all(route["stored_bytes"] > 0 for route in added["routes"])
    assert commands.run("deltastore", "compact", store).ok().out == "0 routes and 0 log segments added\n"
    plan = commands.run("deltastore", "plan", store, "--from", "0", "--to", "17", "--json").ok().json
    assert plan["steps"][-1]["kind"] == "delta"
    assert plan["steps"][0]["to"] == 16
    back = commands.run("deltastore", "plan", store, "--from", "16", "--to", "0", "--json").ok().json
    assert {step["kind"] for step in back["steps"]} <= {"inverse", "anchor"}
    assert anchored(store, commands) == [0, 16]
    assert "delta, anchor" in commands.run("deltastore", "log", store).ok().out
    assert commands.run("deltastore", "show", store, "16", "--json").ok().json["anchored"]
    assert not commands.run("deltastore", "show", store, "15", "--json").ok().json["anchored"]
    report = commands.run("deltastore", "check", store, "--read-data", "--json").ok().json
    assert report["ok"]


def test_any_version_is_anchored_by_hand(store, commands, tmp_path):
    first = commands.run("deltastore", "anchor", store, "7", "--json").ok().json
    assert (first["version"], first["made"], first["route"]["kind"]) == (7, True, "anchor")
    again = commands.run("deltastore", "anchor", store, "7", "--json").ok().json
    assert (again["made"], again["route"]) == (False, None)
    assert commands.run("deltastore", "anchor", store, "7").ok().out == "version 7 has an anchor\n"
    assert "anchor" in commands.run("deltastore", "anchor", store, "latest").ok().out
    assert anchored(store, commands) == [0, 7, 18]
    assert commands.run("deltastore", "anchor", store, "99").code == 10
    commands.run("deltastore", "restore", store, "18", tmp_path / "out").ok()


def test_a_base_that_is_not_stored_has_to_be_named(commands, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", base, "--no-upload-base", "--anchor-every", 1).ok()
    changed = training.save(tmp_path / "next", training.small_snapshot(1))
    commands.run("deltastore", "publish", store, changed, "--base", base).ok()
    for verb in (["anchor", store, "1"], ["compact", store]):
        ended = commands.run("deltastore", *verb)
        assert ended.code == 10
        assert "Try: Give the base checkpoint with --base" in ended.err
    commands.run("deltastore", "compact", store, "--base", base).ok()
    assert anchored(store, commands) == [1]


def test_the_policy_is_part_of_the_stream(commands, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    words = ["--anchor-every", "100", "--anchor-when", "1.5"]
    commands.run("deltastore", "init", tmp_path / "store", "--base", base, *words).ok()
    policy = open_store(tmp_path / "store").stream.anchors
    assert policy is not None
    assert (policy.every, policy.when) == (100, 1.5)
    for wrong in (["--anchor-every", "0"], ["--anchor-when", "0.9"]):
        assert commands.run("deltastore", "init", tmp_path / "other", "--base", base, *wrong).code == 2


def test_damage_to_a_route_is_told(store, commands):
    commands.run("deltastore", "compact", store).ok()
    part = next(path for path in (store / "routes").rglob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert commands.run("deltastore", "check", store).ok()
    report = commands.run("deltastore", "check", store, "--read-data", "--json")
    assert report.code == 3
    assert [problem["key"] for problem in report.json["problems"]] == [str(part.relative_to(store))]
    part.unlink()
    found = commands.run("deltastore", "check", store, "--json").json["problems"]
    assert [(problem["kind"], problem["key"]) for problem in found] == [
        ("missing-object", str(part.relative_to(store)))
    ]
