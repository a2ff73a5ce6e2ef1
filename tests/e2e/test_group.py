"""Four real receivers of one group: two with engines, two that only prepare; one killed at every phase of a round."""

from __future__ import annotations

import signal

import httpx
import pytest
import training
from engines import Stream, holds
from small_engines import Engines

from deltastore import open_store
from deltastore.groups import RoundObjects

MEMBERS = ("leader", "engine", "follower-1", "follower-2")
PHASES = ("wanted", "ready", "go", "loaded", "outcome")


class GroupOfFour:
    """The group, its stream and its engines."""

    def __init__(self, commands, stream, engines, urls):
        self.commands, self.stream, self.engines, self.urls = commands, stream, engines, urls
        self.running = {}

    def start(self, name):
        words = ["receiver", "run", "--store", self.stream.url, "--checkpoint", self.stream.root / name / "live"]
        words += ["--listen", "127.0.0.1:0", "--poll", 0.05, "--base", self.stream.base, "--receiver-id", name]
        words += ["--group", "g", "--group-size", len(MEMBERS), "--group-ready-timeout", 4, "--group-load-timeout", 4]
        if name in self.urls:
            words += ["--engine", "torch", "--engine-url", self.urls[name]]
        (self.stream.root / name).mkdir(exist_ok=True)
        command = self.running[name] = self.commands.start(*words)
        training.until(lambda: "Listening on" in command.err or command.ends_within(0))

    def status(self, name):
        command = self.running[name]
        assert not command.ends_within(0), command.err
        url = command.err.partition("Listening on ")[2].partition("\n")[0].rstrip(".")
        return httpx.get(f"{url}/status", trust_env=False, timeout=10).json()

    def all_serve(self, version):
        records = [self.status(name) for name in MEMBERS]
        return all(record["ready"] and record["serving"] == version for record in records)

    def begun(self, objects, number, phase, victim):
        """Tell whether a round has come so far."""
        if phase in ("ready", "loaded"):
            return getattr(objects, phase)(number, victim)
        return getattr(objects, phase)(number) is not None


@pytest.fixture
def group(commands, tmp_path):
    stream = Stream(tmp_path)
    engines = Engines(stream.base, MEMBERS[:2])
    with engines.served() as urls:
        yield GroupOfFour(commands, stream, engines, urls)
        commands.end_all()


@pytest.mark.parametrize("victim", ["leader", "engine", "follower-1"])
def test_a_member_killed_at_any_phase_and_all_end_with_one_version_and_never_two_at_once(group, victim):
    for name in MEMBERS:
        group.start(name)
    training.until(lambda: group.all_serve(1), seconds=60)
    store = open_store(group.stream.url)
    objects = RoundObjects(store.backend, stream_id=store.stream_id, group="g", receiver_id="test")
    for phase in PHASES:
        number = objects.newest() + 1
        group.stream.publish()
        version = group.stream.versions
        training.until(lambda: group.begun(objects, number, phase, victim), seconds=60)  # noqa: B023 - called here
        group.running[victim].send(signal.SIGKILL)
        group.running[victim].end()
        group.start(victim)
        training.until(lambda: group.all_serve(version), seconds=60, what=f"version {version} after {phase}")  # noqa: B023
        assert all(holds(engine, version) for engine in group.engines.made.values())
    assert max(map(len, group.engines.seen)) == 1
