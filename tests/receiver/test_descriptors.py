"""What a pass had open is closed with it or before the next, not when the garbage happens to be collected."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

import pytest
import training
from following import Run, ScriptedEngine, ready_at

import receiver.daemon
import receiver.patcher
from deltastore.errors import CorruptObject, StorageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def opened(below):
    """Return the files below a directory that this process has open or mapped, over and over if so."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - only numbers
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - may be a deleted file's name
    return sorted(name for name in found if name.startswith(str(below)))


@pytest.mark.parametrize("chained", [False, True])
def test_failed_patches_leave_nothing_open(tmp_path, monkeypatch, chained):
    engine = ScriptedEngine()
    monkeypatch.setattr(receiver.daemon, "make_engine", lambda *_, **__: engine)
    run = Run(tmp_path)
    run.publish()
    build = receiver.patcher.build_checkpoint
    failing = []

    def fails(*arguments, **options):
        built = build(*arguments, **options)
        if failing:
            failing.pop()
            if not chained:
                raise StorageError("the last byte is lost")
            try:
                raise CorruptObject("the last byte is another")
            except CorruptObject as error:
                raise StorageError("the last byte is lost") from error
        return built

    monkeypatch.setattr(receiver.patcher, "build_checkpoint", fails)
    slots = run.live.with_name("live.slots")
    gc.collect()
    gc.disable()
    try:
        with run.running() as made:
            counts = []
            for version in range(1, 6):
                failing += [1, 1] if version > 1 else []
                if version > 1:
                    run.publish()
                ready_at(made, version)
                training.until(lambda: made.status.record()["state"] == "following")
                counts.append(len(opened(slots)))
            assert [name for name in opened(slots) if name.endswith("(deleted)")] == []
            assert max(counts[1:]) <= counts[1]
    finally:
        gc.enable()


def test_what_garbage_keeps_open_is_closed_before_the_next_version(tmp_path, monkeypatch):
    engine = ScriptedEngine()
    monkeypatch.setattr(receiver.daemon, "make_engine", lambda *_, **__: engine)
    run = Run(tmp_path)
    run.publish()
    build = receiver.patcher.build_checkpoint

    def builds(*arguments, **options):
        ring = [build(*arguments, **options)]
        ring.append(ring)  # as an error does that is kept in one of its frames
        return ring[0]

    monkeypatch.setattr(receiver.patcher, "build_checkpoint", builds)
    slots = run.live.with_name("live.slots")
    gc.collect()
    gc.disable()
    try:
        with run.running() as made:
            counts = []
            for version in range(1, 7):
                if version > 1:
                    run.publish()
                ready_at(made, version)
                training.until(lambda: made.status.record()["state"] == "following")
                counts.append(len(opened(slots)))
            assert max(counts[2:]) <= counts[2]
    finally:
        gc.enable()
