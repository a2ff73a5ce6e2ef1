"""The daemon and its engine: probes, self-tests, latches, components, first tokens."""

from __future__ import annotations

import json
import logging
import math
from functools import partial

import msgspec
import pytest
import training
from following import Run, ScriptedEngine, put_behind_receivers, ready_at

from deltastore import Writer, open_store
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, EngineError, SelfTestFailed, StorageError, UnsupportedFormat, UsageError
from deltastore.manifest import encode_manifest, manifest_key
from receiver.activation import Policy
from receiver.engines.base import Probe


class ProbedEngine(ScriptedEngine):
    """Its probe depends on what is loaded; ``reload`` says what it makes of weights that it did not start on."""

    def __init__(self):
        super().__init__()
        self.reload = lambda value: value
        self.start = -3.0
        self.logprob = self.start
        self.probed = lambda: Probe((self.logprob, -1.0), (1, 2))

    def restart(self):
        super().restart()
        self.logprob = getattr(self, "start", None)

    def load(self, checkpoint, *, version, keep_kv=False):
        super().load(checkpoint, version=version, keep_kv=keep_kv)
        whole = sum(int(training.flat(tensor).long().sum()) for tensor in self.loaded.values())
        self.logprob = self.reload(-(whole % 997) / 10 - 0.5)


@pytest.fixture
def engine(monkeypatch):
    return put_behind_receivers(ProbedEngine(), monkeypatch)


def test_the_probe_of_what_is_served_is_told(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        told = made.status.record()["last_activation"]
        assert told["probe"]["logprobs"] == (engine.logprob, -1.0)
        assert told["label"] == f"{open_store(run.url).stream_id}/1"
        assert made.status.record()["activation"] == "serving"


def test_an_engine_whose_reload_gives_nan_even_going_back_is_latched_and_says_so(run, engine, caplog):
    """The load succeeds, the version is confirmed, and every log-probability is NaN."""
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        engine.reload = lambda _: math.nan
        run.publish()
        looks = []  # it is tried again all the time
        training.until(lambda: looks.append(made.status.record()) or looks[-1]["state"] == "latched")
        record = looks[-1]
        assert "not finite" in record["latched"]
        assert (record["ready"], record["serving"]) == (False, None)
        assert engine.paused
        assert "receiver_latched 1.0" in made.status.metrics().decode()
        assert any(one.levelno == logging.ERROR and "latched" in one.message for one in caplog.records)
        served = list(engine.served)
        # It is tried again, and stays shut as long as nothing is right.
        activations = 'receiver_activations_total{outcome="latched"} '
        training.until(lambda: f"{activations}3.0" in made.status.metrics().decode())
        assert engine.paused
        assert engine.served == served == ["1"]
        engine.reload = lambda value: value
        ready_at(made, 2)
        assert made.status.latched is None
        assert "receiver_latched 0.0" in made.status.metrics().decode()


def test_an_engine_that_only_says_that_it_loaded_is_found_out(run, engine):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        before = engine.logprob
        engine.reload = lambda _: before
        run.publish()  # all of it changed
        training.until(lambda: made.status.error is not None)
        assert "exactly what it was before" in str(made.status.error)
        # Going back, the probe is what it was before, and has to be.
        assert engine.number == "1"
        assert made.status.record()["last_activation"]["outcome"] == "rolled-back"
        assert not made.status.ready


def test_a_version_that_hardly_changed_may_leave_the_probe_as_it_is(tmp_path, engine, caplog, monkeypatch):
    monkeypatch.setattr(training, "small_snapshot", partial(training.small_snapshot, elements=1 << 13))
    run = Run(tmp_path)
    run.publish()
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        before = engine.logprob
        engine.reload = lambda _: before
        snapshot = {name: tensor.clone() for name, tensor in run.snapshots[-1].items()}
        biggest = max(snapshot, key=lambda name: snapshot[name].numel())
        training.flat(snapshot[biggest])[0] ^= 1
        with Writer(run.url) as writer:
            published = writer.publish(snapshot).result()
        assert published.changed_elements / published.total_elements < 1e-4
        run.snapshots.append(snapshot)
        ready_at(made, 2)
    assert any("hardly anything changed" in record.message for record in caplog.records)


def test_expected_probes_are_demanded(run, engine, tmp_path):
    path = tmp_path / "probes.json"
    path.write_text(json.dumps({"1": {"logprobs": [-200.0, -1.0]}}))
    with pytest.raises(EngineError, match="not as expected"):
        run.receiver(probe_expect=path).once()
    assert (engine.paused, engine.served) == (True, [])
    path.write_text(json.dumps({"1": {"logprobs": [engine.logprob, -1.0], "tolerance": 1e-9}}))
    run.receiver(probe_expect=path).once()
    assert engine.served == ["1"]


# -- the self-test -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("started_on", ["the live slot", "something else", "loaded before"])
def test_a_self_test_compares_before_and_after_a_reload(run, engine, started_on):
    run.receiver().once()
    right = engine.logprob
    if started_on != "loaded before":
        engine.start = right if started_on == "the live slot" else right - 1
        engine.restart()
    engine.served.clear()
    made = run.receiver(self_test=True)
    run.publish()
    if started_on == "something else":
        with pytest.raises(SelfTestFailed, match="differs before and after"):
            made.once()
        assert (engine.paused, engine.served) == (True, [])
        training.assert_holds(run.live, run.snapshots[1])  # before anything is followed
    else:
        made.once()
        assert engine.served == ["1", "2"]
        assert engine.calls.count("load") == 3  # the first one, the test, and the new version


def test_an_engine_at_another_version_is_reloaded_twice(run, engine):
    run.publish()
    run.receiver(target="2").once()
    run.receiver(target="1").once()
    engine.version = engine.version.replace("/1", "/2")  # it was never taken along
    engine.served.clear()
    engine.calls.clear()
    run.receiver(target="1", self_test=True).once()
    assert engine.served == ["1", "1"]


def test_an_engine_that_cannot_reload_ends_the_daemon_before_it_follows(run, engine):
    run.receiver().once()
    engine.start = engine.logprob
    engine.restart()
    engine.reload = lambda _: math.nan
    run.publish()
    with run.running(self_test=True) as made:
        made.thread.join(20)
        assert isinstance(made.failure[0], SelfTestFailed)
        assert "cannot reload the version that it is at" in str(made.failure[0])
        assert made.failure[0].hint
    assert engine.paused
    training.assert_holds(run.live, run.snapshots[1])


def test_a_self_test_waits_for_an_engine_that_is_still_starting(run, engine):
    run.receiver().once()
    engine.dead = True
    with run.running(self_test=True, poll=0.01) as made:
        training.until(lambda: made.status.error is not None)
        engine.dead = False
        ready_at(made, 1)


def test_a_self_test_of_an_engine_without_a_probe_is_no_test(run, engine):
    engine.probed = None
    with pytest.raises(SelfTestFailed, match="has no probe"):
        run.receiver(self_test=True).once()


# -- what is refused ----------------------------------------------------------------------------------------


def test_a_version_with_more_than_the_model_is_refused_before_anything_is_patched(run, engine):
    """A draft model next to new weights would be another version's."""
    run.receiver().once()
    run.publish()
    path = run.url / manifest_key(2)
    good = open_store(run.url).manifest(2)
    more = msgspec.structs.replace(good, components={**good.components, "draft": good.model})
    path.write_bytes(encode_manifest(more, hash_function=hasher("xxh3-128")))
    with pytest.raises(UnsupportedFormat, match="carries draft beside the model, and no engine's adapter") as told:
        run.receiver().once()
    assert told.value.key == "manifests/0000000002.json"
    training.assert_holds(run.live, run.snapshots[1])
    assert engine.served == ["1", "1"]
    assert not any((run.root / "host" / "live.slots").glob("*.goal"))


def test_a_kept_cache_has_to_be_said_twice(run, commands):
    words = ["receiver", "once", "--store", run.url, "--checkpoint", run.live, "--kv-cache", "keep"]
    ended = commands.run(*words)
    assert ended.code == 2
    assert "--unsafe-keep-kv" in ended.err
    assert not run.live.exists()
    commands.run(*words, "--unsafe-keep-kv").ok()
    with pytest.raises(UsageError):
        run.receiver(policy=Policy(in_flight="keep", keep_kv=True))


# -- how it ends ------------------------------------------------------------------------------------------


def test_a_version_that_kills_its_engine_is_left_alone(run, engine):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        load = engine.load

        def die(checkpoint, *, version, keep_kv=False):
            if version.endswith("/2"):
                engine.dead = True
                engine.restart()
            load(checkpoint, version=version, keep_kv=keep_kv)

        engine.load = die
        run.publish()
        for losses in (1.0, 2.0):
            count = f'receiver_activations_total{{outcome="lost"}} {losses}'
            training.until(lambda: count in made.status.metrics().decode())  # noqa: B023
            engine.dead = False  # started again by whoever looks after it
        training.until(lambda: made.status.serving == 1)
        training.assert_holds(run.live, run.snapshots[1])
        training.until(lambda: made.status.record()["state"] == "degraded")
        run.publish()
        ready_at(made, 3)


def test_a_version_that_was_refused_is_nothing_to_go_back_to(run, engine):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        engine.refused = {"2"}
        run.publish()
        training.until(lambda: engine.served == ["1", "1"])
        engine.refused = {"1"}
        engine.restart()
        training.until(lambda: made.status.latched)
        assert engine.paused
        assert engine.served == ["1", "1"]


def test_an_engine_that_cannot_be_paused_goes_on_with_the_old_version_and_is_known_to(run, engine):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        engine.failures["pause"] = 1
        seen = []
        engine.hooks["load"] = lambda: seen.append(made.status.record()["activation"])
        run.publish()
        ready_at(made, 2)
        assert 'receiver_activations_total{outcome="failed"} 1.0' in made.status.metrics().decode()
        assert seen == ["loading"]
    assert engine.served == ["1", "1", "2"]  # released, and then activated


def test_a_turn_that_cannot_be_given_back_leaves_what_is_served_confirmed(run, engine, monkeypatch):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)

        def damaged(_weights):
            raise CorruptObject("turns/fleet/0000000001.json is damaged.", key="turns/fleet/0000000001.json")

        with monkeypatch.context() as patched:
            patched.setattr(made._coordinated, "served", damaged)
            run.publish()
            training.until(lambda: made.status.serving == 2 and made.status.error is not None)
            assert made.status.error.kind == "corrupt-object"
            assert made.status.record()["activation"] == "serving"
        ready_at(made, 2)
    assert engine.served == ["1", "2"]  # nothing was loaded a second time


def test_a_patch_that_fails_leaves_the_state_as_it_was(run, engine, monkeypatch):
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        seen = []

        def fail(*_, **__):
            seen.append(made.status.record()["activation"])
            raise StorageError("nobody answers")

        monkeypatch.setattr(made._patcher, "move_to", fail)
        run.publish()
        training.until(lambda: made.status.error is not None)
        assert seen[0] == "preparing"
        assert made.status.record()["activation"] == "serving"
        assert made.status.serving == 1


def test_an_engine_that_dies_when_asked_for_its_first_tokens_is_never_ready_with_an_error(run, engine):
    seen = []

    def die():
        engine.dead = True
        raise EngineError("nothing answers")

    engine.first_tokens = die
    with run.running(poll=0.01) as made:
        failed = made.status.failed
        made.status.failed = lambda error: (seen.append(made.status.ready), failed(error))
        training.until(lambda: seen)
    assert seen[0] is False


def test_the_first_tokens_after_a_resume_are_timed_where_the_engine_tells(run, engine):
    told = iter([None, 0.25])
    engine.first_tokens = lambda: next(told)
    with run.running(poll=0.01) as made:
        ready_at(made, 1)
        training.until(lambda: "first_tokens" in made.status.record()["stages"])
        assert made.status.record()["stages"]["first_tokens"] == 0.25


def test_how_much_changed_is_not_known_without_the_store(run, engine, monkeypatch):
    made = run.receiver()
    made.once()
    assert made._changed(0, 1) > 0.5
    monkeypatch.setattr(type(made._store), "manifest", lambda *_: (_ for _ in ()).throw(StorageError("nobody answers")))
    assert made._changed(0, 1) is None
