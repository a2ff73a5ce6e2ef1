"""Links that somebody else leads to the other slot: what is there is verified before any engine gets it."""

from __future__ import annotations

import pytest
import training
from following import ready_at


def lead_to_the_other_slot(run):
    """Do by hand what a swap does; returns the slot that is live then."""
    other = {"a": "b", "b": "a"}[run.live.resolve().name]
    link = run.live.with_name("by-hand")
    link.symlink_to(f"{run.live.name}.slots/{other}")
    link.replace(run.live)
    return run.live.resolve()


def damage(slot):
    path = next(slot.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("mode", ["pinned", "paused", "following"])
def test_the_other_slot_is_verified_before_it_is_served(run, engine, mode, damaged):
    with run.running(poll=3600.0) as made:
        ready_at(made, 1)
        run.publish()
        made.wake()
        ready_at(made, 2)
        training.until(lambda: made.status.record()["state"] == "following")
        if damaged:
            damage(run.live.with_name(f"{run.live.name}.slots") / {"a": "b", "b": "a"}[run.live.resolve().name])
        loads = engine.calls.count("load")
        lead_to_the_other_slot(run)
        if mode == "pinned":
            made.pin("1")
        elif mode == "paused":
            made.pause_following()
        made.wake()
        version = 2 if mode == "following" else 1
        training.until(lambda: made.failure or made._slots.live().record.version == version)
        ready_at(made, version)
    assert training.differences(engine.loaded, run.snapshots[version]) == []
    training.assert_holds(run.live, run.snapshots[version])
    assert mode == "following" or engine.calls.count("load") == loads + 1


def test_a_newer_version_is_built_from_the_slot_that_is_live_now(run, engine):
    with run.running() as made:
        ready_at(made, 1)
        run.publish()
        ready_at(made, 2)
        made.pause_following()
        training.until(lambda: made.status.record()["state"] == "paused")
        lead_to_the_other_slot(run)
        run.publish()
        made.resume_following()
        ready_at(made, 3)
    assert training.differences(engine.loaded, run.snapshots[3]) == []
    training.assert_holds(run.live, run.snapshots[3])
