"""Three real receivers of one fleet, each with its engine: a canary first, then one at a time."""

from __future__ import annotations

import signal
import threading

import httpx
import pytest
import training
from engines import Stream, holds
from small_engines import Engines

NAMES = ("canary", "second", "third")


class Fleet:
    """The receivers, their stream and their engines."""

    def __init__(self, commands, stream, engines, urls):
        self.commands, self.stream, self.engines, self.urls, self.running = commands, stream, engines, urls, {}

    def start(self, name, *options):
        words = ["receiver", "run", "--store", self.stream.url, "--checkpoint", self.stream.root / name / "live"]
        words += ["--listen", "127.0.0.1:0", "--poll", 0.05, "--base", self.stream.base, "--receiver-id", name]
        words += ["--engine", "torch", "--engine-url", self.urls[name], "--max-unavailable", 1, *options]
        (self.stream.root / name).mkdir(exist_ok=True)
        command = self.running[name] = self.commands.start(*words)
        training.until(lambda: "Listening on" in command.err or command.ends_within(0))

    def status(self, name):
        command = self.running[name]
        assert not command.ends_within(0), command.err
        url = command.err.partition("Listening on ")[2].partition("\n")[0].rstrip(".")
        return httpx.get(f"{url}/status", trust_env=False, timeout=10).json()

    def serve(self, version, names=NAMES):
        return all(self.status(name)["ready"] and self.status(name)["serving"] == version for name in names)

    def told(self):
        return self.commands.run("deltastore", "fleet", self.stream.url, "--json").ok().json["fleets"]


@pytest.fixture
def fleet(commands, tmp_path):
    stream = Stream(tmp_path)
    engines = Engines(stream.base, NAMES)
    with engines.served() as urls:
        yield Fleet(commands, stream, engines, urls)
        commands.end_all()


def test_one_at_a_time_after_the_canary_and_a_holder_that_vanished_stops_the_rest(fleet):
    for name in NAMES:
        fleet.start(name, "--canary", "canary")
    training.until(lambda: fleet.serve(1), seconds=60)
    fleet.engines.most_paused = 0
    for _ in range(3):
        fleet.stream.publish()
        training.until(lambda: fleet.serve(fleet.stream.versions), seconds=60)
    assert fleet.engines.most_paused == 1

    arrived, go = threading.Event(), threading.Event()
    fleet.engines.hooks["canary"] = lambda: (arrived.set(), go.wait(60))
    before = fleet.stream.versions
    fleet.stream.publish()
    assert arrived.wait(60)
    fleet.running["canary"].send(signal.SIGKILL)
    fleet.running["canary"].end()
    (held,) = fleet.told()
    assert [turn["receiver_id"] for turn in held["turns"]] == ["canary"]
    assert held["promoted"][-1] == before
    assert fleet.serve(before, NAMES[1:])  # they wait
    fleet.engines.hooks.clear()
    go.set()
    fleet.start("canary", "--canary", "canary")
    training.until(lambda: fleet.serve(before + 1), seconds=60)
    training.until(lambda: fleet.told()[0]["turns"] == [])
    assert all(holds(engine, before + 1) for engine in fleet.engines.made.values())


def test_with_a_damaged_turn_record_the_rollout_halts_and_says_why(fleet):
    for name in NAMES:
        fleet.start(name, "--canary", "canary")
    training.until(lambda: fleet.serve(1), seconds=60)
    training.until(lambda: fleet.told() and fleet.told()[0]["turns"] == [], seconds=60)
    newest = max((fleet.stream.url / "turns" / "fleet").iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    pauses = len(fleet.engines.seen)
    fleet.stream.publish()

    key = f"turns/fleet/{newest.name}"

    def halted():  # the others wait for the canary
        return key in ((fleet.status("canary")["error"] or {}).get("message") or "")

    training.until(halted, seconds=60)
    training.until(lambda: fleet.status("second")["version"] == fleet.status("third")["version"] == 1)
    told = fleet.commands.run("deltastore", "fleet", fleet.stream.url, "--json")
    assert (told.code, told.json["fleets"]) == (3, [])
    assert {entry["receiver_id"] for entry in told.json["receivers"]} == {*NAMES}
    assert [(entry["kind"], entry["key"]) for entry in told.json["damaged"]] == [("corrupt-object", key)]
    assert key in told.json["damaged"][0]["hint"]
    assert fleet.commands.run("deltastore", "fleet", fleet.stream.url, "--clear-turn", "canary").code == 3
    assert len(fleet.engines.seen) == pauses  # nobody was paused: nobody knew that it may be
    assert all(fleet.status(name)["serving"] == 1 for name in NAMES)
    newest.unlink()  # what the hint says
    training.until(lambda: fleet.serve(2), seconds=120)
    assert all(holds(engine, 2) for engine in fleet.engines.made.values())


def test_one_command_takes_the_whole_fleet_to_a_version_and_back(fleet):
    for _ in range(2):
        fleet.stream.publish()
    tag = ("deltastore", "tag", fleet.stream.url, "live")
    fleet.commands.run(*tag, "2").ok()
    for name in NAMES:
        fleet.start(name, "--target", "tag:live")
    training.until(lambda: fleet.serve(2), seconds=60)
    fleet.engines.most_paused = 0
    for version in ("3", "1"):
        fleet.commands.run(*tag, version).ok()
        training.until(lambda: fleet.serve(int(version)), seconds=60)  # noqa: B023 - called here
    assert fleet.engines.most_paused == 1
    # An operator clears the turn of one that is gone, and only of one that has a turn.
    assert fleet.commands.run("deltastore", "fleet", fleet.stream.url, "--clear-turn", "third").code == 2
