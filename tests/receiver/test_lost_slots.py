"""Slots that somebody removes or replaces below a running receiver, and another receiver that begins there."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import training
from following import ready_at

from deltastore import open_store
from deltastore.errors import SlotError
from receiver.patcher import Patcher
from receiver.slots import Slots


@contextmanager
def resting(run):
    """Yield a receiver at version 1 that does not look again before it is woken."""
    with run.running(poll=3600.0) as made:
        ready_at(made, 1)
        training.until(lambda: made.status.record()["state"] == "following")
        yield made


def remove(run):
    run.live.unlink()
    shutil.rmtree(slots_of(run))


def slots_of(run):
    return run.live.with_name(f"{run.live.name}.slots")


def test_a_receiver_whose_slots_are_gone_begins_anew(run, engine):
    with resting(run) as made:
        remove(run)
        run.publish()
        made.wake()
        ready_at(made, 2)
        training.assert_holds(run.live, run.snapshots[2])
        with pytest.raises(SlotError, match="in the hands of another receiver"):
            Slots(run.live).lock()
    assert engine.served == ["1", "2"]


def test_a_link_that_is_left_over_is_told_and_waited_for(run, engine):
    with resting(run) as made:
        shutil.rmtree(slots_of(run))
        run.publish()
        made.wake()
        training.until(lambda: "which is gone" in str(made.status.error))
        run.live.unlink()
        made.wake()
        ready_at(made, 2)
    training.assert_holds(run.live, run.snapshots[2])


def test_a_receiver_leaves_the_slots_alone_that_another_one_took(run, engine):
    with resting(run) as made:
        remove(run)
        second = Slots(run.live)
        second.lock(url="http://127.0.0.1:1")
        store = open_store(run.url)
        Patcher(store, second, workers=1).move_to(store.manifest(0))
        before = training.tree(slots_of(run))
        run.publish()
        made.wake()
        training.until(lambda: "at http://127.0.0.1:1" in str(made.status.error))
        for order in (lambda: made.pin("0"), made.pause_following, made.resume_following):
            with pytest.raises(SlotError, match="removed or replaced"):
                order()
        assert training.tree(slots_of(run)) == before
        assert engine.served == ["1"]
        second.unlock()
        made.wake()
        ready_at(made, 2)
    training.assert_holds(run.live, run.snapshots[2])


def test_nothing_is_written_by_who_lost_its_slots_meanwhile(run, tmp_path):
    store = open_store(run.url)
    slots = Slots(tmp_path / "model")
    slots.lock()
    patcher = Patcher(store, slots, workers=1)
    patcher.move_to(store.manifest(0))
    slots.directory.rename(tmp_path / "elsewhere")
    for change in (slots.prepare, lambda: slots.swap("b"), lambda: patcher.move_to(store.manifest(1))):
        with pytest.raises(SlotError):
            change()
    assert not slots.directory.exists()
    assert slots.hold_on()
    assert not slots.hold_on()
    slots.link.unlink()
    assert patcher.adopt() is None
    patcher.move_to(store.manifest(1))
    training.assert_holds(slots.link, run.snapshots[1])
    slots.unlock()
