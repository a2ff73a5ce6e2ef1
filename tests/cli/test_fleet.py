"""`deltastore fleet` over records of turns and members of which some are damaged."""

from __future__ import annotations

import pytest
import training

from deltastore import Writer, open_store
from deltastore.groups import joined, members_ledger
from deltastore.turns import taken, turns_ledger


@pytest.fixture
def store(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        writer.publish(training.small_snapshot(1)).result()
    opened = open_store(tmp_path / "store")
    for name in ("bad", "good"):
        place = {"stream_id": opened.stream_id, "receiver_id": f"{name}-1"}
        turns_ledger(opened.backend, stream_id=opened.stream_id, fleet=name).change(
            lambda turns, name=name, place=place: taken(turns, fleet=name, version=1, most=1, **place)
        )
        members_ledger(opened.backend, stream_id=opened.stream_id, group=name).change(
            lambda members, name=name, place=place: joined(members, group=name, size=2, engine=True, **place)
        )
    return tmp_path / "store"


KEYS = ["turns/bad/0000000001.json", "groups/bad/members/0000000001.json"]


def test_what_is_damaged_is_shown_as_such_and_all_else_as_it_is(store, commands):
    told = commands.run("deltastore", "fleet", store, "--json").ok().json
    assert ([fleet["fleet"] for fleet in told["fleets"]], told["damaged"]) == (["bad", "good"], [])
    for key in KEYS:
        (store / key).write_bytes(b"torn")
    told = commands.run("deltastore", "fleet", store, "--json")
    assert told.code == 3
    assert [fleet["fleet"] for fleet in told.json["fleets"]] == ["good"]  # who holds a turn of the other is not known
    assert [group["group"] for group in told.json["groups"]] == ["good"]
    assert [entry["key"] for entry in told.json["damaged"]] == KEYS
    assert {entry["kind"] for entry in told.json["damaged"]} == {"corrupt-object"}
    assert all("delete" in entry["hint"] for entry in told.json["damaged"])
    shown = commands.run("deltastore", "fleet", store)
    assert shown.code == 3
    for line in ("turn of good: good-1", "group good: good-1", *(f"damaged: corrupt-object  {key}" for key in KEYS)):
        assert line in shown.out


@pytest.mark.parametrize(("option", "shown"), [("--clear-turn", "fleets"), ("--clear-member", "groups")])
def test_who_is_known_is_cleared_and_of_others_it_is_said_why_not(store, commands, option, shown):
    for key in KEYS:
        (store / key).write_bytes(b"torn")
    told = commands.run("deltastore", "fleet", store, option, "good-1", "--json")
    assert told.code == 3
    assert told.json[shown][0]["turns" if shown == "fleets" else "members"] == []
    refused = commands.run("deltastore", "fleet", store, option, "bad-1")
    assert refused.code == 3
    assert "Try: " in refused.err
    assert [(store / key).read_bytes() for key in KEYS] == [b"torn", b"torn"]
