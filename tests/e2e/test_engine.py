"""A receiver and a real engine over HTTP: killed and restarted, either of them, at awkward moments."""

from __future__ import annotations

import signal
import threading

import httpx
import pytest
import training
from engines import holds, ready, save, serve


def test_it_loads_each_version_refuses_a_broken_one_and_goes_on(stream, follow, engine):
    command, status = follow(engine.url)
    ready(status, 1, command)
    assert holds(engine, 1)
    stream.publish()
    ready(status, 2, command)
    assert holds(engine, 2)
    stream.poison()
    training.until(lambda: (status()["last_activation"] or {}).get("outcome") == "rolled-back")
    training.until(lambda: status()["serving"] == 2)
    record = status()
    assert not record["ready"]
    assert record["error"]["kind"] == "engine"
    assert record["target"] == 3
    assert (holds(engine, 2), engine.info().version, engine.info().paused) == (True, stream.label(2), False)
    assert training.differences(training.load(stream.live), training.load(save(stream, 2))) == []
    stream.publish()
    ready(status, 4, command)
    assert holds(engine, 4)
    assert status()["error"] is None
    command.send(signal.SIGTERM)
    assert command.end(10).code == 0


@pytest.mark.parametrize("moment", ["load", "confirm", "probe", "resume"])
def test_a_daemon_killed_between_pause_and_resume_is_made_good_by_the_next_one(
    stream, follow, engine, moment, monkeypatch
):
    arrived, go = threading.Event(), threading.Event()
    original = getattr(engine, moment)

    def held(*arguments, **options):
        arrived.set()
        assert go.wait(30)
        return original(*arguments, **options)

    monkeypatch.setattr(engine, moment, held)
    command, _ = follow(engine.url)
    assert arrived.wait(30)
    command.send(signal.SIGKILL)
    assert command.end().code == -signal.SIGKILL
    monkeypatch.setattr(engine, moment, original)
    assert engine.info().paused
    go.set()
    command, status = follow(engine.url)
    ready(status, 1, command)
    assert (holds(engine, 1), engine.info().paused) == (True, False)


@pytest.mark.parametrize("moment", ["load", "confirm", "resume"])
def test_a_daemon_killed_between_pause_and_resume_is_made_good_without_the_store(
    stream, follow, engine, moment, monkeypatch
):
    command, status = follow(engine.url)
    ready(status, 1, command)
    arrived, go = threading.Event(), threading.Event()
    original = getattr(engine, moment)

    def held(*arguments, **options):
        arrived.set()
        assert go.wait(60)
        return original(*arguments, **options)

    monkeypatch.setattr(engine, moment, held)
    stream.publish()
    assert arrived.wait(60)
    command.send(signal.SIGKILL)
    assert command.end().code == -signal.SIGKILL
    monkeypatch.setattr(engine, moment, original)
    label, paused = stream.label(2), engine.info().paused
    stream.url.rename(stream.root / "away")
    go.set()
    command, status = follow(engine.url)
    ready(status, 2, command)
    assert paused
    info = engine.info()
    assert (holds(engine, 2), info.version, info.paused) == (True, label, False)
    record = status()
    assert (record["target"], record["error"]["kind"]) == (None, "store-not-found")
    (stream.root / "away").rename(stream.url)
    stream.publish()
    ready(status, 3, command)
    assert holds(engine, 3)
    training.until(lambda: status()["error"] is None)


def test_an_engine_killed_and_started_again_is_loaded_before_it_is_ready(stream, follow):
    process, url = serve(stream)
    try:
        command, status = follow(url)
        ready(status, 1, command)
        process.kill()
        process.wait()
        training.until(lambda: status()["error"] is not None)
        record = status()
        assert (record["ready"], record["serving"], record["error"]["kind"]) == (False, None, "engine")
        stream.publish()
        process, again = serve(stream, port=int(url.rpartition(":")[2]))
        assert again == url
        ready(status, 2, command)
        info = httpx.get(f"{url}/info", trust_env=False).json()
        assert (info["version"], info["paused"]) == (stream.label(2), False)
    finally:
        process.kill()
        process.wait()
