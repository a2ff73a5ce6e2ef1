"""Every way in which the steps of an activation can fail: what is served is always what was confirmed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deltastore.errors import EngineError
from receiver.activation import Weights, activate

NEW, OLD = Weights(7, Path("new")), Weights(6, Path("old"))
STEPS = ("load", "confirm", "resume")


class Engine:
    """Fails at the calls it is told, counted from the first load; knows what it may never be asked."""

    def __init__(self, failing):
        self.failing = set(failing)
        self.calls = []
        self.held = None
        self.confirmed = None
        self.paused = False
        self.served = None

    def _step(self, name):
        self.calls.append(name)
        if len(self.calls) - 1 in self.failing:
            raise EngineError(f"call {len(self.calls) - 1}", key=name)

    def pause(self):
        self.paused = True

    def load(self, checkpoint, *, version):
        assert self.paused
        self.held = self.confirmed = None
        self._step("load")
        self.held = (version, checkpoint)

    def confirm(self, version):
        self._step("confirm")
        assert self.held is not None
        assert self.held[0] == version
        self.confirmed = self.held

    def resume(self):
        assert self.confirmed is not None, "resumed on weights that were not confirmed"
        self._step("resume")
        self.served = self.confirmed
        self.paused = False


@pytest.mark.parametrize("fallback", [OLD, None], ids=["with the old version", "alone"])
@pytest.mark.parametrize("failing", [set(c) for n in range(4) for c in itertools.combinations(range(9), n)], ids=str)
def test_what_is_served_is_what_was_confirmed(failing, fallback):
    engine = Engine(failing)
    result = activate(engine, NEW, fallback=fallback)
    tries = [NEW, NEW] + [fallback] * (fallback is not None)
    # The model: each try is three calls that end at the first that fails.
    position, wanted = 0, None
    for weights in tries:
        for _ in range(3):
            failed = position in failing
            position += 1
            if failed:
                break
        else:
            wanted = weights
        if wanted is not None:
            break
    assert len(engine.calls) == position
    if wanted is None:
        assert (result.outcome, result.version, engine.paused) == ("latched", None, True)
        assert isinstance(result.error, EngineError)
    else:
        assert engine.served == (str(wanted.version), wanted.directory)
        assert not engine.paused
        assert result.version == wanted.version
        assert result.outcome == ("activated" if wanted is NEW else "rolled-back")
        assert (result.error is None) == (wanted is NEW)
    assert result.paused_seconds >= sum(result.stages.values())  # all of them are in the pause
    assert set(result.stages) <= {"pause", *STEPS}


def test_an_engine_that_cannot_be_paused_is_left_alone():
    engine = Engine(())
    engine.pause = lambda: (_ for _ in ()).throw(EngineError("busy"))
    with pytest.raises(EngineError, match="busy"):
        activate(engine, NEW, fallback=OLD)
    assert engine.calls == []
