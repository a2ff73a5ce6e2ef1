"""Passes that fail, and when they are made again."""

from __future__ import annotations

import pytest

from deltastore.errors import CorruptObject, DamagedSlot, EngineError, SelfTestFailed, StorageError, UsageError
from receiver.passes import Passes
from receiver.slots import Slots
from receiver.status import Status
from receiver.stopping import Overtaken, Wakeups


class Clock(Wakeups):
    """Rests take no time, and are counted."""

    def __init__(self):
        super().__init__()
        self.rests = []

    def rest(self, seconds):
        self.rests.append(seconds)
        return False


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def status(tmp_path):
    return Status(store="s", checkpoint=str(tmp_path / "live"), target="latest")


@pytest.fixture
def passes(tmp_path, status, clock):
    return Passes(Slots(tmp_path / "live"), status, clock, poll=1.0)


def failing(*errors):
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)

    return action


def test_pauses_grow_to_a_minute_and_stay_there_for_days(passes, clock):
    passes.until_done(failing(*(StorageError("nobody answers") for _ in range(3000))))
    assert len(clock.rests) == 3000
    assert clock.rests[0] <= 2
    assert all(30 <= pause <= 60 for pause in clock.rests[10:])


def test_whoever_is_overtaken_begins_again_at_once(passes, clock, status):
    passes.until_done(failing(Overtaken(), Overtaken()))
    assert clock.rests == []
    assert status.error is None


@pytest.mark.parametrize("error", [UsageError("no"), CorruptObject("no"), SelfTestFailed("no")])
def test_what_an_operator_has_to_mend_is_raised_while_nothing_is_served(passes, clock, error):
    with pytest.raises(type(error)):
        passes.until_done(failing(error))
    assert clock.rests == []


@pytest.mark.parametrize("error", [UsageError("no"), CorruptObject("no"), DamagedSlot("no"), EngineError("no")])
def test_whoever_serves_a_version_tries_everything_again(passes, clock, status, error):
    status.version = 3
    passes.until_done(failing(error))
    assert len(clock.rests) == 1
    with pytest.raises(SelfTestFailed):
        passes.until_done(failing(SelfTestFailed("no")))


def test_no_pass_begins_once_it_is_stopped(passes, clock):
    begun = []
    clock.stop()
    passes.until_done(lambda: begun.append(1))
    assert begun == []


def test_what_the_system_refused_is_a_failure_as_any_other(passes, status, clock, tmp_path):
    """A disk that fails where nobody looked for it must not end what an engine is held by."""
    errors = iter([OSError(5, "Input/output error", str(tmp_path / "live.slots")), PermissionError(13, "Denied")])

    def action():
        for error in errors:
            raise error

    passes.until_done(action)
    assert len(clock.rests) == 2
    assert isinstance(status.error, StorageError)
    assert "Denied" in str(status.error)
