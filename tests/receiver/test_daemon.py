"""The receiver's loop with an engine that fails on request, and with a real one over HTTP."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import training
from following import ready_at

import receiver.daemon
import receiver.patcher
from deltastore import Writer, open_store
from deltastore.digest import hasher
from deltastore.errors import (
    CorruptObject,
    EngineError,
    SignatureMismatch,
    SlotError,
    StorageError,
    StoreNotFound,
    StreamMismatch,
    UsageError,
    VersionNotFound,
)
from deltastore.manifest import encode_manifest, manifest_key
from deltastore.signing import Signer, generate_key
from receiver.follower import Follower
from receiver.status import Status, StatusServer


def test_it_follows_versions_as_they_are_published(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        for version in (2, 3):
            run.publish()
            ready_at(made, version)
            assert training.differences(engine.loaded, run.snapshots[version]) == []
            training.assert_holds(run.live, run.snapshots[version])
        training.until(lambda: made.status.record()["state"] == "following")
        assert made.status.record()["lag"] == 0
    assert engine.served == ["1", "2", "3"]
    assert engine.calls[-1] == "close"


def test_many_versions_are_caught_up_with_in_one_load(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        hold, go = threading.Event(), threading.Event()
        engine.hooks["info"] = lambda: (hold.set(), go.wait(20))
        hold.wait(20)
        run.publish(5)
        go.set()
        ready_at(made, 6)
    assert engine.served == ["1", "6"]


def test_a_steady_poll_is_one_read(run, engine, monkeypatch):
    made = run.receiver()
    store = made._open_store()
    made._slots.lock()
    made._begin(store)
    made._step()
    asked = []
    read = store.backend.read
    monkeypatch.setattr(
        type(store.backend), "read", lambda self, key, *, limit: asked.append(key) or read(key, limit=limit)
    )
    made._step()
    made._slots.unlock()
    assert asked == ["manifests/0000000002.json"]


def test_waking_it_makes_it_look_at_once(run, engine):
    with run.running(poll=3600.0) as made:
        ready_at(made, 1)
        training.until(lambda: made.status.record()["state"] == "following")
        run.publish()
        made.wake()
        ready_at(made, 2)


def test_a_fixed_target_is_kept_and_may_be_older(run, engine):
    run.publish(3)
    with run.running(target="3") as made:
        ready_at(made, 3)
        run.publish()
    with run.running(target="1") as made:
        ready_at(made, 1)
        training.assert_holds(run.live, run.snapshots[1])
    assert engine.served == ["3", "1"]


@pytest.mark.parametrize("options", [{}, {"nice": 19, "io_priority": "idle"}])
def test_it_stops_while_it_waits_for_bandwidth(run, engine, options):
    with run.running(max_bandwidth=1, **options) as made:
        training.until(lambda: made.status.record()["state"] == "patching")
    assert made.failure == []
    assert not run.live.exists()


def test_it_follows_behind_others_and_within_bounds(run, engine):
    with run.running(nice=19, io_priority="idle", memory_budget=256 << 20, max_bandwidth=1 << 30) as made:
        ready_at(made, 1)
        run.publish()
        ready_at(made, 2)
    training.assert_holds(run.live, run.snapshots[2])


def test_a_budget_that_cannot_work_is_refused(run, engine):
    with pytest.raises(UsageError, match="too little"):
        run.receiver(memory_budget=64 << 20)
    with pytest.raises(UsageError, match="12 worker"):
        run.receiver(memory_budget=256 << 20, workers=12)


def test_a_version_folded_into_a_patch_is_the_one_that_is_tried_and_refused(run, engine, monkeypatch):
    run.receiver().once()
    run.publish()
    wanted = Follower.wanted
    looks = itertools.count()

    def publish_then_look(follower):
        if next(looks) == 2:  # after the pass's own and the one at the plan: the parts are here
            run.publish()
        return wanted(follower)

    monkeypatch.setattr(Follower, "wanted", publish_then_look)
    monkeypatch.setattr(receiver.patcher, "_FOLDED_SHARE", 10)
    engine.refused = {"3"}
    made = run.receiver()
    with pytest.raises(EngineError):
        made.once()
    store = open_store(run.url)
    refused = [version for version in range(4) if made._serving.has_refused(store.manifest(version).commit_id)]
    assert (made.status.target, refused) == (3, [3])
    assert (engine.served, made.status.version) == (["1", "1"], 1)


def test_a_target_still_to_come_is_waited_for(run, engine):
    with run.running(target="2") as made:
        training.until(lambda: isinstance(made.status.error, VersionNotFound))
        assert not made.status.ready
        run.publish()
        ready_at(made, 2)
    with pytest.raises(VersionNotFound):
        run.receiver(target="9").once()


def test_a_store_that_is_not_there_yet_is_waited_for(run, engine):
    run.url.rename(run.root / "later")
    with pytest.raises(StoreNotFound):
        run.receiver().once()
    with run.running() as made:
        training.until(lambda: isinstance(made.status.error, StoreNotFound))
        (run.root / "later").rename(run.url)
        ready_at(made, 1)


def test_a_store_that_vanishes_is_waited_for_while_the_old_version_is_served(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        run.url.rename(run.root / "away")
        run.url.touch()
        training.until(lambda: made.status.record()["state"] == "following")
        assert made.status.serving == 1
        run.url.unlink()
        (run.root / "away").rename(run.url)
        run.publish()
        ready_at(made, 2)


def other_stream(run, versions):
    """Put another stream with the same tensors in the store's place."""
    shutil.rmtree(run.url)
    snapshots = [training.small_snapshot(100 + number) for number in range(versions + 1)]
    with Writer(run.url, base=training.save(run.root / f"other{versions}", snapshots[0])) as writer:
        for snapshot in snapshots[1:]:
            writer.publish(snapshot).result()
    return snapshots


@pytest.mark.parametrize("versions", [0, 1, 4])
def test_another_stream_in_the_stores_place_is_refused(run, engine, versions):
    with run.running() as made:
        ready_at(made, 1)
        other_stream(run, versions)
        before = len(engine.calls)
        training.until(lambda: len(engine.calls) > before + 3 or made.status.error is not None)
        assert made.thread.is_alive()
        assert made.status.serving == 1
    training.assert_holds(run.live, run.snapshots[1])
    for _ in range(2):
        with pytest.raises(StreamMismatch) as caught:
            run.receiver().once()
        assert caught.value.exit_code == 12
    with run.running() as made:
        made.thread.join(20)
        assert isinstance(made.failure[0], StreamMismatch)
    training.assert_holds(run.live, run.snapshots[1])
    assert engine.served == ["1"]


def test_a_store_rolled_back_to_an_older_backup_is_refused(run, engine):
    shutil.copytree(run.url, run.root / "backup")
    run.publish(2)
    with run.running() as made:
        ready_at(made, 3)
        shutil.rmtree(run.url)
        (run.root / "backup").rename(run.url)
        del run.snapshots[2:]
        with Writer(run.url) as writer:
            for seed in (50, 51, 52):
                writer.publish(training.small_snapshot(seed)).result()
        training.until(lambda: isinstance(made.status.error, CorruptObject))
        assert made.status.serving == 3
    with pytest.raises(StreamMismatch, match="rolled back or replaced"):
        run.receiver().once()
    training.assert_holds(run.live, training.small_snapshot(3))
    assert engine.served == ["3"]


def test_a_version_that_nobody_trusted_signed_is_not_taken(run, engine):
    run.url = run.root / "signed"
    public = generate_key(run.root / "key")
    with Writer(run.url, base=run.base, sign_key=run.root / "key", hash_name="blake3") as writer:
        writer.publish(run.snapshots[1]).result()
        with run.running(trusted_keys=(public,)) as made:
            ready_at(made, 1)
            writer.publish(run.snapshots[0]).result()
            ready_at(made, 2)
            good = open_store(run.url).manifest(2)
            forged = msgspec.structs.replace(
                good,
                version=3,
                parent_version=2,
                commit_id="f" * 32,
                parent_commit_id=good.commit_id,
                parent_snapshot_id=good.snapshot_id,
                components={"model": msgspec.structs.replace(good.model, parts=(), changed_elements=0)},
            )
            generate_key(run.root / "forger")
            signers = [Signer.load(run.root / name) for name in ("forger", "key")]
            by_forger, by_owner = (
                encode_manifest(forged, hash_function=hasher("blake3"), signer=one) for one in signers
            )
            path = run.url / manifest_key(3)
            path.write_bytes(by_forger)
            training.until(lambda: isinstance(made.status.error, SignatureMismatch))
            assert (made.status.serving, made.failure) == (2, [])
            path.write_bytes(by_owner)
            ready_at(made, 3)
    with pytest.raises(SignatureMismatch):
        run.receiver(trusted_keys=("0" * 64,)).once()
    training.assert_holds(run.live, run.snapshots[0])


def test_a_second_receiver_is_refused_and_told_who_is_first(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        with pytest.raises(SlotError, match=str(os.getpid())):
            run.receiver().once()
    run.receiver().once()


def test_a_dead_engine_makes_the_receiver_unready_until_it_is_loaded_again(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        engine.dead = True
        training.until(lambda: made.status.error is not None)
        assert not made.status.ready
        assert made.status.serving is None
        engine.restart()
        engine.dead = False
        ready_at(made, 1)
    assert engine.served == ["1", "1"]


def test_an_engine_that_restarts_between_two_polls_is_loaded_again_before_ready(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        engine.restart()
        seen = []
        engine.hooks["confirm"] = lambda: seen.append(made.status.ready)
        training.until(lambda: engine.served == ["1", "1"])
        ready_at(made, 1)
        assert seen == [False]


@pytest.mark.parametrize("obstacle", ["store", "part", "version", "pin"])
def test_an_engine_that_restarts_is_loaded_again_whatever_stands_in_the_way_of_a_new_version(
    run, engine, obstacle, monkeypatch
):
    if obstacle == "pin":
        run.receiver().once()
        (run.root / "host" / "live.slots" / "control.json").write_bytes(b"damaged")
    with run.running(poll=0.01) as made:
        training.until(lambda: made.status.serving == 1)

        def refuse(*_, **__):
            raise StorageError("nobody answers")

        if obstacle == "store":
            monkeypatch.setattr(type(made._store.backend), "read", refuse)
        elif obstacle == "part":
            monkeypatch.setattr(made._patcher, "move_to", refuse)
            run.publish()
        elif obstacle == "version":
            made.pin("9")
        training.until(lambda: made.status.error is not None)
        served = len(engine.served)
        engine.restart()
        training.until(lambda: made.status.serving == 1 and len(engine.served) > served)
        assert engine.number == "1"
        assert made.status.error is not None


@pytest.mark.parametrize("moment", ["pause", "load", "confirm", "resume", "info"])
def test_an_engine_that_restarts_in_any_moment_is_loaded_and_confirmed_again(run, engine, moment):
    with run.running() as made:
        ready_at(made, 1)
        engine.hooks[moment] = engine.restart
        run.publish()
        training.until(lambda: engine.number == "2" and made.status.ready)
        ready_at(made, 2)
        assert (engine.number, engine.paused) == ("2", False)
        assert training.differences(engine.loaded, run.snapshots[2]) == []


@pytest.mark.parametrize("moment", ["pause", "load", "confirm", "resume"])
def test_a_step_that_fails_once_is_tried_again(run, engine, moment):
    engine.failures[moment] = 1
    with run.running() as made:
        ready_at(made, 1)
    assert engine.number == "1"


def test_a_paused_engine_left_by_a_daemon_that_died_is_resumed(run, engine):
    run.receiver().once()
    engine.pause()
    engine.version, engine.broken = None, True
    with run.running() as made:
        ready_at(made, 1)
    assert (engine.paused, engine.number) == (False, "1")


def test_a_version_that_the_engine_refuses_is_rolled_back_and_left_alone(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        engine.refused.add("2")
        run.publish()
        training.until(lambda: made.status.serving == 1 and engine.served == ["1", "1"])
        training.until(lambda: made.status.error is not None)
        training.assert_holds(run.live, run.snapshots[1])
        assert training.differences(engine.loaded, run.snapshots[1]) == []
        assert not made.status.ready
        loads = engine.calls.count("load")
        assert loads == 1 + 2 + 1
        infos = engine.calls.count("info")
        training.until(lambda: engine.calls.count("info") > infos + 3)
        assert engine.calls.count("load") == loads
        assert made.status.record()["version"] == 1
        run.publish()
        ready_at(made, 3)
        training.assert_holds(run.live, run.snapshots[3])


def test_after_a_refused_version_the_store_is_polled_as_often_as_before(run, engine):
    with run.running(poll=0.1) as made:
        ready_at(made, 1)
        engine.refused.add("2")
        run.publish()
        training.until(lambda: made.status.error is not None and engine.served == ["1", "1"])
        infos = engine.calls.count("info")
        # Twenty polls take two seconds; backing off, they would take many minutes.
        training.until(lambda: engine.calls.count("info") > infos + 20, seconds=10)


def test_once_tells_that_the_engine_refused(run, engine):
    run.receiver().once()
    engine.refused.add("2")
    run.publish()
    with pytest.raises(EngineError, match="no 2"):
        run.receiver().once()
    training.assert_holds(run.live, run.snapshots[1])
    assert (engine.number, engine.paused) == ("1", False)


def test_once_tells_that_the_engine_stays_paused(run, engine):
    engine.refused.add("1")
    made = run.receiver()
    with pytest.raises(EngineError, match="no 1"):
        made.once()
    assert engine.paused
    assert engine.served == []
    assert not made.status.ready


def test_an_engine_that_takes_nothing_stays_paused_and_is_tried_ever_more_slowly(run, engine):
    engine.refused.add("1")
    with run.running(poll=0.01) as made:
        training.until(lambda: engine.calls.count("pause") >= 3)
        assert made.status.error is not None
        assert made.status.serving is None
        training.until(lambda: made.status.record()["state"] == "latched")
        assert engine.paused
        engine.refused.clear()
        ready_at(made, 1)


def test_a_slot_of_another_stream_is_never_the_fallback(run, engine):
    run.publish(1)
    run.receiver(target="1").once()
    run.receiver(target="2").once()
    other_stream(run, 2)
    # What the error tells an operator to do.
    run.live.unlink()
    engine.restart()
    engine.refused.add("1")
    engine.served.clear()
    with pytest.raises(EngineError):
        run.receiver(target="1").once()
    assert engine.served == []
    assert engine.paused


@pytest.mark.parametrize("damage", ["weights", "record", "digests", "gone"])
def test_a_damaged_slot_is_never_the_fallback(run, engine, damage):
    run.receiver().once()
    run.publish()
    run.receiver().once()
    other = {"a": "b", "b": "a"}[run.live.readlink().name]
    slots = run.live.with_name("live.slots")
    path = {
        "weights": slots / other / "model.safetensors",
        "record": slots / f"{other}.json",
        "digests": slots / f"{other}.digests",
        "gone": slots / f"{other}.digests",
    }[damage]
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    engine.restart()
    engine.refused.add("2")
    engine.served.clear()
    with pytest.raises(EngineError):
        run.receiver().once()
    assert engine.served == []
    assert engine.paused
    engine.refused.clear()
    run.receiver().once()
    assert engine.served == ["2"]
    training.assert_holds(run.live, run.snapshots[2])


def test_damage_of_a_part_keeps_the_old_version_until_it_is_mended(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        hold, go = threading.Event(), threading.Event()
        engine.hooks["info"] = lambda: (hold.set(), go.wait(20))
        hold.wait(20)
        run.publish()
        part = next((run.url / "parts" / "0000000002").rglob("*.safetensors"))
        whole = part.read_bytes()
        part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        go.set()
        training.until(lambda: made.status.error is not None)
        assert made.status.error.key == part.relative_to(run.url).as_posix()
        assert made.status.serving == 1
        training.assert_holds(run.live, run.snapshots[1])
        part.write_bytes(whole)
        ready_at(made, 2)


def test_metrics_and_status_tell_what_happened(run, engine):
    made = run.receiver()
    made.once()
    text = made.status.metrics().decode()
    for line in (
        "receiver_version 1.0",
        "receiver_target_version 1.0",
        "receiver_ready 1.0",
        "receiver_patches_total 1.0",
        'receiver_activations_total{outcome="activated"} 1.0',
    ):
        assert line in text
    record = made.status.record()
    patching = {"plan", "fetch", "decode", "verify", "patch", "swap"}
    activating = {"barrier", "drain", "pause", "load", "confirm", "probe", "resume"}
    assert set(record["stages"]) == {"poll", *patching, *activating}
    assert record["stages"]["decode"] + record["stages"]["verify"] <= record["stages"]["patch"] * 2  # two workers
    schema = open_store(run.url).schema()
    assert record["stage_bytes"]["verify"] == record["stage_bytes"]["patch"] == schema.nbytes
    assert 0 < record["stage_bytes"]["decode"] <= record["stage_bytes"]["fetch"]
    assert record["stage_bytes"]["load"] == sum(path.stat().st_size for path in run.live.glob("*.safetensors"))
    for stage in ("decode", "verify", "load"):
        assert f'receiver_stage_bytes_total{{stage="{stage}"}} {float(record["stage_bytes"][stage])}' in text
        assert f'receiver_stage_seconds_count{{stage="{stage}"}} 1.0' in text
    assert record["last_activation"]["outcome"] == "activated"


# -- as processes -----------------------------------------------------------------------------------------


@pytest.fixture
def started(commands):
    """Start `receiver run` and wait for its address."""

    def start(run, *more, **options):
        words = ["receiver", "run", "--store", run.url, "--checkpoint", run.live, "--listen", "127.0.0.1:0"]
        command = commands.start(*words, "--poll", 0.05, *more, **options)
        training.until(lambda: "Listening on" in command.err or command.ends_within(0), what=command.err)
        url = command.err.partition("Listening on ")[2].partition("\n")[0].rstrip(".")
        return command, httpx.Client(base_url=url, trust_env=False, timeout=10)

    yield start
    commands.end_all()


def test_the_daemon_over_http(run, started, commands):
    command, client = started(run)
    with client:
        training.until(lambda: client.get("/readyz").status_code == 200, what="ready")
        run.publish()
        assert client.post("/wake").json() == {"woken": True}
        training.until(lambda: client.get("/status").json()["serving"] == 2, what="version 2")
        assert client.get("/healthz").text == "ok\n"
        assert client.get("/readyz").json() == {"ready": True}
        assert "receiver_version 2.0" in client.get("/metrics").text
        assert client.get("/wake").status_code == 405
        told = commands.run("receiver", "status", "--url", client.base_url, "--json").ok().json
        assert (told["ready"], told["version"], told["lag"]) == (True, 2, 0)
        second = commands.run("receiver", "once", "--store", run.url, "--checkpoint", run.live)
        assert second.code == 1
        assert str(command.pid) in second.err
        assert str(client.base_url).rstrip("/") in second.err
    command.send(signal.SIGTERM)
    assert command.end(10).code == 0
    gone = commands.run("receiver", "status", "--url", client.base_url)
    assert gone.code == 1
    assert "Try:" in gone.err


def test_an_address_that_is_not_loopback_needs_a_token(run, started, commands):
    words = ["receiver", "run", "--store", run.url, "--checkpoint", run.live, "--listen"]
    for address in (
        "0.0.0.0:0",
        "[::]:0",
        "nonsense",
        "127.0.0.1:99999",
        "127.0.0.1:²",
        "127.0.0.1:" + "9" * 5000,
        ":80",
    ):
        ended = commands.run(*words, address)
        assert ended.code == 2, (address, ended)
        assert "Try:" in ended.err
    assert not run.live.exists()


def test_a_token_is_asked_for_on_every_page(run):
    status = Status(store="s", checkpoint="c", target="latest")
    woken = threading.Event()
    told = SimpleNamespace(wake=woken.set)
    with (
        StatusServer(status, "127.0.0.1:0", token="secret", receiver=told) as server,  # noqa: S106 - a test's
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        pages = [("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/status"), ("GET", "/metrics"), ("POST", "/wake")]
        for method, page in pages:
            assert client.request(method, page).status_code == 401
            assert client.request(method, page, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert not woken.is_set()
        for method, page in pages:
            answer = client.request(method, page, headers={"Authorization": "Bearer secret"})
            assert answer.status_code == (503 if page == "/readyz" else 200)
        assert woken.is_set()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--engine", "nothing"), ("--target", "newest"), ("--engine-url", "http://127.0.0.1:1")],
)
def test_nonsense_is_refused_before_anything_is_touched(run, commands, option, value):
    ended = commands.run("receiver", "once", "--store", run.url, "--checkpoint", run.live, option, value)
    assert ended.code == 2
    assert not run.live.exists()


def test_usage_errors_end_a_daemon(run, engine):
    with pytest.raises(UsageError):
        run.receiver(target="newest").once()


def test_a_restart_bears_damaged_answers_from_the_store(run, engine):
    manifest = run.url / "manifests" / "0000000000.json"
    whole = manifest.read_bytes()
    damaged = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    manifest.write_bytes(damaged)
    with pytest.raises(CorruptObject):  # with nothing on this host there is nothing that could wait
        run.receiver(poll=0.01).run()
    manifest.write_bytes(whole)
    run.receiver().once()
    manifest.write_bytes(damaged)
    with run.running() as made:
        training.until(lambda: isinstance(made.status.error, CorruptObject))
        manifest.write_bytes(whole)
        ready_at(made, 1)
