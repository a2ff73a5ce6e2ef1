"""The daemon as its operator meets it: pins and pauses, metrics, heartbeats, a store that is gone, clocks that jump."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone

import httpx
import pytest
import training

import deltastore.clock
import receiver.control
import receiver.status
from deltastore import Writer
from deltastore.errors import SlotError, StorageError, UsageError, VersionNotFound
from deltastore.heartbeat import read_fleet
from deltastore.storage.local import LocalBackend
from receiver.activation import Activation
from receiver.coordination import Coordination
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.repair import Repaired
from receiver.status import Status, StatusServer


class Scene:
    """A stream, and receivers without an engine."""

    def __init__(self, root):
        self.root = root
        self.url = root / "store"
        self.live = root / "live"
        self.control = root / "live.slots" / "control.json"
        self.snapshots = [training.small_snapshot(0)]
        self.base = training.save(root / "base", self.snapshots[0])

    def publish(self, count=1):
        with Writer(self.url, base=None if (self.url / "manifests").exists() else self.base) as writer:
            for _ in range(count):
                self.snapshots.append(training.small_snapshot(len(self.snapshots)))
                writer.publish(self.snapshots[-1]).result()

    def receiver(self, **options):
        given = {"store": str(self.url), "checkpoint": self.live, "poll": 0.02, **options}
        status = Status(store=given["store"], checkpoint=str(self.live), target=given.get("target", "latest"))
        made = Receiver(Options(**given), status)
        made.status = status
        return made

    @contextmanager
    def running(self, **options):
        made = self.receiver(**options)
        made.failure = []

        def run():
            try:
                made.run()
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                made.failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield made
        finally:
            made.stop()
            thread.join(20)
            assert not thread.is_alive()

    def holds(self, version):
        training.assert_holds(self.live, self.snapshots[version])


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    made.publish(3)
    return made


def at(made, version, state="following"):
    def there():
        record = made.status.record()
        return made.failure or (record["serving"], record["state"]) == (version, state)

    training.until(there, what=f"{state} at {version}: {made.status.record()}")
    assert made.failure == []


# -- pins and pauses --------------------------------------------------------------------------------------


def test_a_pin_moves_the_host_and_survives_a_restart(scene):
    with scene.running() as made:
        at(made, 3)
        assert made.pin("1").pinned == "1"
        at(made, 1)
        assert made.status.ready
    scene.publish()
    for _ in range(2):
        with scene.running() as made:
            at(made, 1)
            record = made.status.record()
            assert (record["pinned"], record["wanted"], record["target"], record["lag"]) == ("1", "1", 1, 0)
    scene.holds(1)
    scene.receiver().once()
    scene.holds(1)
    with scene.running() as made:
        at(made, 1)
        assert made.pin("latest").pinned is None
        at(made, 4)
    scene.receiver().once()
    scene.holds(4)


def test_a_pin_takes_the_place_of_a_configured_target(scene):
    with scene.running(target="2") as made:
        at(made, 2)
        made.pin("latest")
        at(made, 3)
        assert made.status.record()["pinned"] == "latest"
        made.pin("2")
        at(made, 2)
        assert made.status.record()["pinned"] is None


def test_a_pin_that_is_not_published_yet_is_waited_for(scene):
    with scene.running() as made:
        at(made, 3)
        made.pin("5")
        training.until(lambda: isinstance(made.status.error, VersionNotFound))
        assert made.status.serving == 3
        scene.publish(2)
        made.wake()
        at(made, 5)


@pytest.mark.parametrize("target", ["newest", "-1", "1.0", "tag:../../x", "tag:", "../1", "12345678901"])
def test_nonsense_is_no_pin(scene, target):
    with scene.running() as made:
        at(made, 3)
        with pytest.raises(UsageError):
            made.pin(target)
        assert not scene.control.exists()


def test_paused_it_stays_and_tells_how_far_behind_it_is(scene):
    with scene.running() as made:
        at(made, 3)
        assert made.pause_following().paused
        at(made, 3, "paused")
        scene.publish(2)
        training.until(lambda: made.status.lag == 2)
        assert (made.status.serving, made.status.ready) == (3, True)
        made.pin("1")
        training.until(lambda: made.status.target == 1)
        assert made.status.serving == 3
    scene.receiver().once()
    scene.holds(3)
    with scene.running() as made:
        at(made, 3, "paused")
        assert made.status.record()["pinned"] == "1"
        assert made.resume_following().pinned == "1"
        at(made, 1)


def test_paused_with_nothing_there_once_says_so(scene):
    with scene.running() as made:
        at(made, 3)
        made.pause_following()
    scene.live.unlink()
    with pytest.raises(SlotError, match="paused") as caught:
        scene.receiver().once()
    assert "resume-following" in caught.value.hint
    assert not scene.live.exists()


@pytest.mark.parametrize("damage", [b"", b"{}", b"pinned"])
def test_with_a_damaged_pin_it_stays_where_it_is_until_it_is_told_again(scene, damage):
    with scene.running() as made:
        at(made, 3)
        made.pin("1")
        at(made, 1)
    scene.control.write_bytes(damage)
    with pytest.raises(SlotError) as caught:
        scene.receiver().once()
    assert "receiver pin" in caught.value.hint
    with scene.running() as made:
        at(made, 1, "held")
        record = made.status.record()
        assert (record["error"]["kind"], record["ready"]) == ("slot", False)
        with pytest.raises(SlotError):
            made.resume_following()
        with pytest.raises(SlotError):
            made.pause_following()
        made.pin("2")
        at(made, 2)
        assert made.status.error is None
    scene.holds(2)


def test_an_order_that_cannot_be_written_is_not_in_force(scene, monkeypatch):
    with scene.running() as made:
        at(made, 3)

        def full(path, control):
            raise StorageError("no room")

        monkeypatch.setattr(receiver.control, "write_control", full)
        with pytest.raises(StorageError):
            made.pin("1")
        assert made.status.record()["pinned"] is None
        monkeypatch.undo()
        made.wake()
        at(made, 3)


def test_an_order_before_the_start_touches_nothing(scene):
    with scene.running() as first:
        at(first, 3)
        second = scene.receiver()
        with pytest.raises(SlotError):
            second.pin("1")
        with pytest.raises(SlotError):
            second.run()
        with pytest.raises(SlotError):
            second.pause_following()
    assert not scene.control.exists()


def test_an_order_overtakes_a_patch(scene, monkeypatch):
    with scene.running() as made:
        at(made, 3)
        begun, go = threading.Event(), threading.Event()
        prepare = made._slots.prepare

        def held():
            begun.set()
            assert go.wait(20)
            return prepare()

        monkeypatch.setattr(made._slots, "prepare", held)
        scene.publish()
        assert begun.wait(20)
        made.pin("3")
        monkeypatch.undo()
        go.set()
        at(made, 3)
        assert made.status.record()["pinned"] == "3"
        # Version 4 was never put in place: one patch, from nothing, is all there was.
        assert "receiver_patches_total 1.0" in made.status.metrics().decode()
    scene.holds(3)


# -- over HTTP and from a shell ---------------------------------------------------------------------------


@pytest.fixture
def served(scene):
    with (
        scene.running() as made,
        StatusServer(made.status, "127.0.0.1:0", token=None, receiver=made) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        at(made, 3)
        yield made, client


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"version": 1}', 200),
        (b'{"version": "1"}', 200),
        (b'{"version": "tag:none"}', 200),
        (b'{"version": -1}', 400),
        (b'{"version": 1.5}', 400),
        (b'{"version": true}', 400),
        (b'{"version": "../../etc"}', 400),
        (b'{"version": 1, "path": "/x"}', 400),
        (b"{}", 400),
        (b"", 400),
        (b"\xff", 400),
        (b"[" * 1000, 400),
        (b" " * 2000, 413),
    ],
)
def test_only_a_pin_is_taken_for_one(served, body, code):
    made, client = served
    answer = client.post("/pin", content=body)
    assert answer.status_code == code, answer.text
    assert (made.status.record()["pinned"] is not None) == (code == 200)
    if code != 200:
        assert answer.json()["error"]["message"]


def test_web_pages_give_no_orders(served):
    made, client = served
    for path in ("/pin", "/pause-following", "/resume-following", "/wake"):
        answer = client.post(path, content=b'{"version": 1}', headers={"Origin": "http://127.0.0.1:9310"})
        assert answer.status_code == 403
        assert client.get(path).status_code == 405
    assert made.status.record()["pinned"] is None


def test_the_shell_tells_and_asks(served, commands):
    made, client = served
    url = ("--url", str(client.base_url))
    assert commands.run("receiver", "pin", "2", *url, "--json").ok().json == {"pinned": "2", "paused": False}
    at(made, 2)
    assert "2" in commands.run("receiver", "pause-following", *url).ok().out
    at(made, 2, "paused")
    told = commands.run("receiver", "status", *url, "--json").ok().json
    assert (told["pinned"], told["paused"], told["target"], told["state"]) == ("2", True, 2, "paused")
    assert "paused" in commands.run("receiver", "status", *url).ok().out
    assert commands.run("receiver", "resume-following", *url, "--json").ok().json["paused"] is False
    wrong = commands.run("receiver", "pin", "newest", *url)
    assert (wrong.code, "Try: Give latest" in wrong.err) == (2, True)
    commands.run("receiver", "pin", "latest", *url).ok()
    at(made, 3)
    scene_control = made._slots.directory / "control.json"
    scene_control.unlink()
    scene_control.mkdir()
    failed = commands.run("receiver", "pin", "1", *url)
    assert (failed.code, "Try:" in failed.err) == (1, True)
    nobody = commands.run("receiver", "pin", "1", "--url", "http://127.0.0.1:1")
    assert (nobody.code, "Try:" in nobody.err) == (1, True)


# -- what is measured -------------------------------------------------------------------------------------


def value(made, name):
    for line in made.status.metrics().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return None


def test_the_documented_metrics_are_there_and_move(scene, monkeypatch):
    with scene.running() as made:
        for name in (
            'retries_total{of="pass"}',
            'heartbeats_total{outcome="sent"}',
            'activations_total{outcome="lost"}',
        ):
            assert value(made, f"receiver_{name}") == 0  # there from the start, so that its rate is known
        at(made, 3)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in scene.snapshots[0].values())
        assert value(made, "receiver_version") == value(made, "receiver_target_version") == 3
        assert value(made, "receiver_lag_versions") == 0
        assert 0 <= value(made, "receiver_target_age_seconds") < 600
        assert value(made, "receiver_ready") == 1
        assert value(made, "receiver_pinned") == value(made, "receiver_paused") == 0
        assert value(made, "receiver_written_bytes_total") == nbytes
        assert value(made, "receiver_fetched_bytes_total") > 0
        assert value(made, 'receiver_stage_bytes_total{stage="patch"}') == nbytes
        assert value(made, 'receiver_stage_bytes_total{stage="fetch"}') > 0
        for stage in ("poll", "fetch", "verify", "patch", "swap", "pause", "load", "confirm", "resume"):
            assert value(made, f'receiver_stage_seconds_count{{stage="{stage}"}}') >= 1, stage
        polls = value(made, 'receiver_stage_seconds_count{stage="poll"}')
        training.until(lambda: value(made, 'receiver_stage_seconds_count{stage="poll"}') > polls)
        scene.publish()
        at(made, 4)
        assert value(made, "receiver_patches_total") == 2
        assert value(made, "receiver_written_bytes_total") == 2 * nbytes
        made.pause_following()
        assert value(made, "receiver_paused") == 1
        made.pin("9")
        training.until(lambda: value(made, 'receiver_failures_total{kind="version-not-found"}'))
        training.until(lambda: value(made, 'receiver_retries_total{of="pass"}'))
        assert value(made, "receiver_pinned") == 1
        assert value(made, "receiver_repairs_total") == 0
        made.status.repaired(Repaired(4, 9, 2, ("t",), 1, 1, 100, ("model.safetensors",), ()))
        assert value(made, "receiver_repairs_total") == 2
        made._pause(0.0)
        assert value(made, 'receiver_retries_total{of="request"}') == 1


def test_bytes_are_counted_once_though_stages_overlap_and_threads_overtake(scene):
    made = scene.receiver()
    for _ in range(2):
        made.status.enter("patching")
        for what, done in (("fetch", 10), ("patch", 5), ("fetch", 30), ("fetch", 20), ("patch", 50), ("fetch", 40)):
            made.status.progress(what, done, 100)
    assert value(made, 'receiver_stage_bytes_total{stage="fetch"}') == 80
    assert value(made, 'receiver_stage_bytes_total{stage="patch"}') == 100
    assert value(made, "receiver_written_bytes_total") == 100


def test_whatever_stages_an_activation_had_are_told_everywhere(scene):
    made = scene.receiver()
    made.status.receiver_id = made.status.stream_id = "0" * 32
    stages = {"quantize": 2.0, "barrier": 0.5, "pause": 0.1, "load": 0.2, "first_tokens": 4.0}
    ended = Activation(outcome="activated", weights=None, stages=stages, paused_seconds=0.3)
    made.status.activated(ended, nbytes=7)
    record = made.status.record()
    assert record["stages"] == made.status.heartbeat_record(every=1.0).stages == stages
    assert record["last_activation"]["paused_seconds"] == 0.3
    for stage, seconds in stages.items():
        assert value(made, f'receiver_stage_seconds_sum{{stage="{stage}"}}') == seconds
    assert value(made, 'receiver_stage_bytes_total{stage="load"}') == record["stage_bytes"]["load"] == 7


# -- heartbeats -------------------------------------------------------------------------------------------


def test_a_running_receiver_is_seen_in_the_fleet_and_is_gone_after_a_clean_stop(scene, commands):
    words = ["receiver", "run", "--store", scene.url, "--checkpoint", scene.live, "--listen", "127.0.0.1:0"]
    command = commands.start(*words, "--poll", 0.05, "--group", "rack 1", "--log-format", "json")
    fleet = ("deltastore", "fleet", scene.url, "--json")
    training.until(lambda: commands.run(*fleet).ok().json["receivers"], what=command.err)
    seen = commands.run(*fleet).ok().json["receivers"][0]
    fields = {"receiver_id", "host", "group", "version", "target", "lag", "state", "heartbeat_age", "stages"}
    assert fields <= set(seen)
    assert (seen["group"], seen["silent"]) == ("rack 1", False)
    assert seen["receiver_id"] == (scene.root / "live.slots" / "receiver-id").read_text().strip()
    (scene.url / "fleet" / "torn.json").write_bytes(b"torn")
    told = commands.run(*fleet)
    both = told.json["receivers"]
    assert told.code == 3
    assert [entry["state"] == "damaged" for entry in both] == [entry["receiver_id"] == "torn" for entry in both]
    assert [(entry["kind"], entry["key"]) for entry in told.json["damaged"]] == [("corrupt-object", "fleet/torn.json")]
    shown = commands.run("deltastore", "fleet", scene.url)
    assert (shown.code, "damaged: corrupt-object  fleet/torn.json" in shown.out) == (3, True)
    forgotten = commands.run(*fleet, "--forget-older-than", "7").ok().json
    assert (forgotten["forgotten"], len(forgotten["receivers"])) == (["torn"], 1)
    assert commands.run("deltastore", "check", scene.url).ok()
    command.send(signal.SIGTERM)
    ended = command.end(10)
    assert ended.code == 0
    assert commands.run(*fleet).ok().json["receivers"] == []
    events = [json.loads(line)["event"] for line in ended.err.splitlines()]
    assert events == ["listening", "patched", "activated", "stopped"]
    assert commands.run("deltastore", "fleet", scene.root / "nothing").code == 10


def test_without_heartbeats_the_store_is_only_read(scene, commands):
    before = training.tree(scene.url)
    words = ["receiver", "run", "--store", scene.url, "--checkpoint", scene.live, "--listen", "127.0.0.1:0"]
    command = commands.start(*words, "--no-heartbeat")
    training.until(lambda: "Engine: activated" in command.err, what=command.err)
    command.send(signal.SIGTERM)
    command.end(10)
    assert training.tree(scene.url) == before


def test_a_store_that_may_only_be_read_is_followed_all_the_same(scene, monkeypatch):
    def refuse(self, key, data):
        raise StorageError("read only", transient=False)

    monkeypatch.setattr(LocalBackend, "write", refuse)
    with scene.running(heartbeat=30.0) as made:
        at(made, 3)
        training.until(lambda: value(made, 'receiver_heartbeats_total{outcome="failed"}'))
        assert made.status.error is None
        monkeypatch.undo()
        scene.publish()
        at(made, 4)


def test_a_store_out_of_reach_gets_no_heartbeats_and_a_daemon_that_died_leaves_its_own(scene):
    with scene.running(heartbeat=30.0) as made:
        at(made, 3)
        training.until(lambda: value(made, 'receiver_heartbeats_total{outcome="sent"}'))
        scene.url.rename(scene.root / "away")
        scene.url.touch()
        made._follower._polls = 29  # the next poll looks at what it knows, and sees that all is gone
        training.until(lambda: not made._in_touch)
        assert made._heartbeat() is None
        scene.url.unlink()
        (scene.root / "away").rename(scene.url)
        made.wake()
        training.until(lambda: made._in_touch)
        stream = made._store.stream_id
        assert [member.heartbeat.version for member in read_fleet(LocalBackend(scene.url), stream_id=stream)]
        made._step = lambda: 1 / 0
        made.wake()
        training.until(lambda: made.failure)
    assert isinstance(made.failure[0], ZeroDivisionError)
    assert len(read_fleet(LocalBackend(scene.url), stream_id=stream)) == 1


# -- time -------------------------------------------------------------------------------------------------


def test_a_store_that_is_gone_for_an_hour_is_caught_up_with_in_one_pass(scene, monkeypatch):
    made = scene.receiver(poll=1.0)
    clock, gone = [5000.0], [False]
    monkeypatch.setattr(receiver.status.time, "monotonic", lambda: clock[0])
    read = LocalBackend.read

    def unreachable(self, key, *, limit):
        if gone[0]:
            raise StorageError("nobody answers")
        return read(self, key, limit=limit)

    monkeypatch.setattr(LocalBackend, "read", unreachable)
    pauses, seen = [], []

    def wait(seconds):
        """Let time pass; the store is away from the tenth second on for an hour, in which versions come."""
        clock[0] += seconds
        passed = clock[0] - 5000.0
        if gone[0]:
            pauses.append(seconds)
            seen.append(made.status.record())
        if not gone[0] and 10 <= passed < 3610:
            gone[0] = True
        elif gone[0] and passed >= 3610:
            gone[0] = False
            scene.publish(6)
        elif passed >= 3610 and made.status.serving == 9:
            made.stop()

    monkeypatch.setattr(made._wakeups, "rest", wait)
    made.run()
    assert made.status.serving == 9
    assert value(made, "receiver_patches_total") == 2  # the first three, and six at once
    stale = seen[-1]
    assert (stale["serving"], stale["state"], stale["version"]) == (3, "degraded", 3)
    assert stale["seconds_since_success"] > 3000
    assert stale["failed_passes"] > 10
    assert stale["error"]["message"] == "nobody answers"
    assert 0 <= stale["next_try_in"] <= 60
    assert max(pauses) <= 60
    assert all(pause >= 30 for pause in pauses[10:])
    assert len(pauses) < 200
    scene.holds(9)


@pytest.mark.parametrize("hours", [[5, -5], [-1000, 0, 1000], [24 * 365 * 20]])
def test_wall_clocks_that_jump_change_nothing_but_ages(scene, monkeypatch, hours):
    jumps = itertools.cycle(hours)

    class Jumping(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz or timezone.utc) + timedelta(hours=next(jumps))

    monkeypatch.setattr(deltastore.clock, "datetime", Jumping)
    with scene.running(heartbeat=5.0) as made:
        at(made, 3)
        for version in (4, 5):
            scene.publish()
            at(made, version)
            record = made.status.record()
            assert record["target_age"] >= 0
            assert 0 <= record["seconds_since_success"] < 60
            assert made.status.ready
        training.until(lambda: value(made, 'receiver_heartbeats_total{outcome="sent"}'))
        assert value(made, "receiver_target_age_seconds") >= 0


def test_an_id_that_could_lead_elsewhere_and_a_group_that_cannot_be_shown_are_refused(scene):
    names = [{"group": "a\x1b"}, {"group": ""}, {"group": "a b", "size": 2}, {"size": 2}, {"fleet": "../x"}]
    names += [{"canary": "a b"}, {"promote_by": "luck"}, {"promote_by": "tag:"}]
    for options in (
        {"receiver_id": "../x"},
        {"receiver_id": ""},
        *({"coordination": Coordination(**name)} for name in names),
    ):
        with pytest.raises(UsageError):
            scene.receiver(**options)
    with pytest.raises(UsageError):
        scene.receiver(self_test=True, coordination=Coordination(group="g", size=2))
    shutil.rmtree(scene.url)


# -- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["starting", "held", "paused", "out of reach", "waiting for a pin"])
def test_sigterm_ends_it_in_every_state(scene, commands, stage):
    if stage != "starting":
        with scene.running() as made:
            at(made, 3)
            if stage == "paused":
                made.pause_following()
            elif stage == "waiting for a pin":
                made.pin("99")
        if stage == "held":
            scene.control.write_bytes(b"damaged")
        elif stage == "out of reach":
            scene.url.rename(scene.root / "away")
    words = ["receiver", "run", "--store", scene.url, "--checkpoint", scene.live, "--listen", "127.0.0.1:0"]
    command = commands.start(*words, "--poll", 30)
    training.until(lambda: "Listening on" in command.err, what=command.err)
    said = {"held": "Following waits", "out of reach": "Next try", "waiting for a pin": "Next try"}.get(stage)
    if said:
        training.until(lambda: said in command.err, what=command.err)
    elif stage == "paused":
        training.until(lambda: "Engine: activated" in command.err, what=command.err)
    command.send(signal.SIGTERM)
    ended = command.end(10)
    assert ended.code == 0, ended
    assert "Traceback" not in ended.err


@pytest.fixture
def silent():
    """An endpoint that takes connections and never says a word; and what was connected."""
    taken, ended = [], threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.settimeout(0.1)

        def take():
            while not ended.is_set():
                with suppress(TimeoutError):
                    taken.append(listener.accept()[0])

        thread = threading.Thread(target=take)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        ended.set()
        thread.join()
        for one in taken:
            one.close()


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_sigterm_ends_it_while_a_request_hangs(scene, commands, silent, client):
    endpoint, taken = silent
    options = {"endpoint_url": endpoint, "key": "key", "secret": "secret", "client": client}
    more = [word for name, given in options.items() for word in ("--storage-option", f"{name}={given}")]
    words = ["receiver", "run", "--store", "s3://weights/run", "--checkpoint", scene.live, "--listen", "127.0.0.1:0"]
    command = commands.start(*words, *more)
    training.until(lambda: taken or command.ends_within(0), what=command.err)
    command.send(signal.SIGTERM)
    ended = command.end(10)
    assert ended.code == 0, ended
    assert "not waited for" in ended.err


def test_nothing_is_activated_once_it_is_told_to_stop(scene, monkeypatch):
    made = scene.receiver()
    patch = made._patch

    def stopped_meanwhile(wanted):
        patch(wanted)
        made.stop()

    monkeypatch.setattr(made, "_patch", stopped_meanwhile)
    made.run()
    assert (made.status.version, made.status.serving) == (3, None)
    made.hold_activations()  # returns, for none is going on
    scene.holds(3)
