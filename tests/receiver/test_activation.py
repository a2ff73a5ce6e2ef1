"""Every way in which the steps of an activation can fail: what is served is always what was confirmed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deltastore.errors import CorruptObject, DrainTimeout, EngineError, StorageError, UnsupportedFormat, UsageError
from receiver.activation import PREPARED, Case, Policy, Solo, Weights, advance, keeps_kv
from receiver.engines.base import EngineInfo, Probe
from receiver.serving import _Run

NEW, OLD = Weights("s/7", 7, "new", Path("new")), Weights("s/6", 6, "old", Path("old"))


class Engine:
    """Fails at the calls it is told, by number, before or after their effect; knows what it may never be asked."""

    def __init__(self, failing=(), *, after=False, probes_paused=True):
        self.failing, self.after = set(failing), after
        self.probes_paused = probes_paused
        self.calls = []
        self.incarnation, self.version, self.paused = "one", OLD.label, False
        self.held, self.confirmed, self.probed = OLD, OLD, True
        self.drains = False
        self.options = []

    def _step(self, name, effect):
        self.calls.append(name)
        fails = len(self.calls) - 1 in self.failing
        if self.after or not fails:
            effect()
        if fails:
            raise EngineError(f"call {len(self.calls) - 1}", key=name)

    def info(self):
        self._step("info", lambda: None)
        return EngineInfo(self.incarnation, self.version, self.paused)

    def pause(self, in_flight="wait", *, timeout=None):
        if in_flight == "wait" and self.drains:
            self.calls.append("pause")
            self.options.append((in_flight, timeout))
            raise DrainTimeout("two streams run on")
        self.options.append((in_flight, timeout))
        self._step("pause", lambda: setattr(self, "paused", True))

    def load(self, checkpoint, *, version, keep_kv=False):
        assert self.paused, "loaded without a pause"
        self.options.append(keep_kv)
        self.held = self.confirmed = None

        def loaded():
            self.held, self.version, self.probed = {NEW.label: NEW, OLD.label: OLD}[version], version, False
            assert self.held.directory == checkpoint

        self._step("load", loaded)

    def confirm(self, version):
        assert self.version == version
        self._step("confirm", lambda: setattr(self, "confirmed", self.held))

    def probe(self):
        assert self.paused or not self.probes_paused
        self._step("probe", lambda: setattr(self, "probed", True))
        return Probe((-1.0,))

    def resume(self):
        assert self.confirmed is not None, "resumed on weights that were not confirmed"
        assert self.probed or not self.probes_paused, "resumed on weights that were not probed"
        self._step("resume", lambda: setattr(self, "paused", False))


def activate(engine, *, fallback=OLD, policy=None, coordinator=None, judge=lambda *_: None):
    states = []
    run = _Run(
        engine, coordinator or Solo(), policy or Policy(), NEW, fallback, lambda one: states.append(one.state), judge
    )
    result = run.activate(PREPARED)
    result_states = [state for state, _ in itertools.groupby(states)]
    return result, result_states


FAILING = [set(c) for n in range(4) for c in itertools.combinations(range(14), n)]


@pytest.mark.parametrize("fallback", [OLD, None], ids=["with the old version", "alone"])
@pytest.mark.parametrize("probes_paused", [True, False], ids=["probed", "probed after"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_is_served_is_what_was_confirmed(after, probes_paused, fallback):
    outcomes = set()
    for failing in FAILING:
        engine = Engine(failing, after=after, probes_paused=probes_paused)
        result, _ = activate(engine, fallback=fallback)
        outcomes.add(result.outcome)
        told = (failing, engine.calls)
        if result.outcome in ("activated", "rolled-back"):
            assert result.weights == (NEW if result.outcome == "activated" else OLD), told
            assert (engine.confirmed, engine.probed, engine.paused) == (result.weights, True, False), told
        else:
            assert result.weights is None, told
        if result.outcome == "latched":
            assert engine.paused, told
        if result.outcome in ("failed", "refused"):
            assert (engine.held, engine.confirmed) == (OLD, OLD), told
        assert (result.error is None) == (result.outcome == "activated"), told
        assert isinstance(result.error, EngineError | None), told
        assert result.paused_seconds >= 0
        assert set(result.stages) <= {"barrier", "drain", "pause", "load", "confirm", "probe", "resume"}
    # Four failures and more latch what has a version to go back to.
    assert outcomes == {"activated", "failed", "lost"} | {"rolled-back" if fallback else "latched"}


def test_all_states_are_gone_through_in_order():
    result, states = activate(Engine())
    assert result.outcome == "activated"
    assert states == ["prepared", "waiting", "draining", "paused", "loading", "confirming", "resuming", "serving"]


def test_an_engine_that_takes_neither_stays_paused():
    engine = Engine()
    engine.load = lambda *_, **__: (_ for _ in ()).throw(EngineError("no"))
    result, states = activate(engine)
    assert (result.outcome, result.weights, engine.paused) == ("latched", None, True)
    assert str(result.error) == "no"
    assert states[-1] == "latched"


def test_weights_that_fail_their_probe_on_the_way_back_too_are_never_resumed():
    def not_finite(*_):
        raise EngineError("NaN")

    for probes_paused in (True, False):
        engine = Engine(probes_paused=probes_paused)
        result, _ = activate(engine, judge=not_finite)
        assert (result.outcome, engine.paused) == ("latched", True)
        assert engine.calls.count("load") == 4
        assert ("resume" in engine.calls) == (not probes_paused)


@pytest.mark.parametrize(
    ("at_deadline", "paused", "outcome"),
    [("abort", ["wait", "abort"], "activated"), ("keep", ["wait", "keep"], "activated"), ("give-up", ["wait"], None)],
)
def test_what_the_operator_chose_happens_at_the_deadline(at_deadline, paused, outcome):
    engine = Engine()
    engine.drains = True
    result, _ = activate(engine, policy=Policy(drain_deadline=7.0, at_deadline=at_deadline))
    assert result.outcome == (outcome or "given-up")
    asked = [one for one in engine.options if isinstance(one, tuple)]
    assert asked == [(mode, 7.0 if mode == "wait" else None) for mode in paused]
    assert not engine.paused
    if outcome is None:
        assert isinstance(result.error, DrainTimeout)
        assert engine.held is OLD
        assert "load" not in engine.calls


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep"])
def test_running_requests_are_treated_as_told(in_flight):
    engine = Engine()
    result, _ = activate(engine, policy=Policy(in_flight=in_flight))
    assert engine.options[0][0] == in_flight
    assert {"drain", "pause"} & set(result.stages) == ({"drain", "pause"} if in_flight == "wait" else {"pause"})


def test_the_cache_of_old_weights_is_kept_only_if_that_is_said_twice():
    for in_flight, more in (("wait", "is wrong under new ones"), ("keep", "in one answer")):
        with pytest.raises(UsageError, match=more) as caught:
            Policy(in_flight=in_flight, keep_kv=True).check()
        assert "--unsafe-keep-kv" in caught.value.hint
    policy = Policy(keep_kv=True, unsafe_keep_kv=True)
    policy.check()
    engine = Engine({5})  # the confirm after the first load
    result, _ = activate(engine, policy=policy)
    assert result.outcome == "activated"
    # After a load that may have done half of its work nobody knows what is cached.
    assert [one for one in engine.options if isinstance(one, bool)] == [True, False]
    assert not keeps_kv(PREPARED, Policy())


class Told:
    """A coordinator that answers as told, and remembers what it heard."""

    def __init__(self, *answers):
        self.answers, self.heard = list(answers), []

    def _next(self, *heard):
        self.heard.append(heard)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def may_pause(self, weights):
        return self._next("may_pause", weights.version)

    def may_resume(self, weights, *, loaded):
        return self._next("may_resume", weights.version, loaded)

    def served(self, weights):
        self._next("served", weights.version)


def test_a_group_that_says_no_before_the_pause_leaves_all_as_it_was():
    engine, group = Engine(), Told(False)
    result, _ = activate(engine, coordinator=group)
    assert (result.outcome, engine.calls) == ("refused", ["info"])


def test_a_group_that_says_no_after_the_load_goes_back_together():
    engine, group = Engine(), Told(True, False, True, None)
    result, _ = activate(engine, coordinator=group)
    assert result.outcome == "rolled-back"
    assert group.heard == [("may_pause", 7), ("may_resume", 7, True), ("may_resume", 6, True), ("served", 6)]
    assert (engine.held, engine.paused) == (OLD, False)


def test_a_group_hears_of_a_load_that_failed():
    engine, group = Engine({4, 6}), Told(True, False, True, None)
    result, _ = activate(engine, coordinator=group)
    assert result.outcome == "rolled-back"
    assert group.heard[1:] == [("may_resume", 7, False), ("may_resume", 6, True), ("served", 6)]


def test_a_group_that_agrees_to_neither_keeps_it_shut():
    engine, group = Engine(), Told(True, False, False)
    result, _ = activate(engine, coordinator=group)
    assert (result.outcome, engine.paused) == ("latched", True)


def test_an_engine_that_could_not_be_paused_goes_on_and_its_group_hears_it():
    engine, group = Engine({1}), Told(True, False, True)
    result, _ = activate(engine, coordinator=group)
    assert (result.outcome, engine.held, engine.paused) == ("failed", OLD, False)
    assert group.heard == [("may_pause", 7), ("may_resume", 7, False), ("may_resume", 6, True)]


def test_a_paused_engine_whose_round_is_off_goes_back():
    engine, group = Engine(), Told(False, True, None)
    engine.paused, engine.version = True, NEW.label
    result, _ = activate(engine, coordinator=group)
    assert (result.outcome, engine.held, engine.paused) == ("rolled-back", OLD, False)
    engine, group = Engine(), Told(False)
    engine.paused, engine.version = True, NEW.label
    result, _ = activate(engine, coordinator=group, fallback=None)
    assert (result.outcome, engine.paused) == ("latched", True)


@pytest.mark.parametrize("error", [StorageError("away"), CorruptObject("damaged"), UnsupportedFormat("newer")])
@pytest.mark.parametrize(("answers", "outcome"), [([], "failed"), ([True], "undecided")])
def test_a_coordinator_that_cannot_be_understood_decides_nothing(answers, outcome, error):
    engine = Engine()
    result, _ = activate(engine, coordinator=Told(*answers, error))
    assert (result.outcome, engine.paused) == (outcome, bool(answers))
    assert result.error is error


def test_an_engine_that_restarts_after_its_resume_is_not_taken_for_the_one_that_confirmed():
    engine = Engine()
    resume = engine.resume

    def and_restart():
        resume()
        engine.incarnation, engine.version = "two", None

    engine.resume = and_restart
    result, _ = activate(engine)
    assert (result.outcome, result.weights) == ("lost", None)


def test_an_engine_that_restarts_under_the_pause_is_paused_and_loaded_in_its_new_incarnation():
    engine = Engine()
    confirm = engine.confirm

    def restart(version):
        engine.confirm = confirm
        engine.incarnation, engine.version, engine.paused = "two", None, False
        raise EngineError("the connection broke")

    engine.confirm = restart
    run = _Run(engine, Solo(), Policy(), NEW, OLD, lambda _: None, lambda *_: None)
    assert run.activate(PREPARED).outcome == "activated"
    assert run.incarnation == "two"
    assert [call for call in engine.calls if call in ("pause", "load")] == ["pause", "load", "pause", "load"]


def test_events_that_cannot_come_are_told():
    with pytest.raises(ValueError, match="after the end"):
        advance(
            advance(PREPARED, "gone", policy=Policy(), case=Case(fallback=True, probes_paused=True)),
            "done",
            policy=Policy(),
            case=Case(fallback=True, probes_paused=True),
        )
