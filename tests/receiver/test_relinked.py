"""Links led to the other slot, and files written to, by somebody else: no engine gets what was not verified."""

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
        training.until(
            lambda: made.failure or made._slots.live().record.version == made.status.version == version,
            what="the link is led back, and the status tells so",
        )
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


@pytest.mark.parametrize("scrub_rate", [0, 1 << 30])
def test_files_that_were_written_to_are_verified_before_an_engine_that_restarted_gets_them(run, engine, scrub_rate):
    with run.running(poll=3600.0, scrub_rate=scrub_rate) as made:
        ready_at(made, 1)
        training.until(lambda: made.status.record()["state"] == "following")
        damage(run.live.resolve())
        engine.restart()
        engine.loaded = None
        made.wake()
        training.until(lambda: made.failure or engine.loaded is not None)
        ready_at(made, 1)
    assert training.differences(engine.loaded, run.snapshots[1]) == []
    training.assert_holds(run.live, run.snapshots[1])
