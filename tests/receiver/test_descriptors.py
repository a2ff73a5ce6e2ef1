"""What a pass had open is closed with it or before the next, not when the garbage happens to be collected."""

from __future__ import annotations

import gc
import sys

import pytest
import training
from descriptors import open_under
from following import ready_at

import receiver.daemon
import receiver.patcher
from deltastore.errors import CorruptObject, StorageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def no_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_open(run, versions, *, before=lambda: None):
    """Follow so many versions, doing something before each but the first; yields what is open in the slots."""
    with run.running() as made:
        for version in range(1, versions + 1):
            if version > 1:
                before()
                run.publish()
            ready_at(made, version)
            training.until(lambda: made.status.record()["state"] == "following")
            yield open_under(run.live.with_name("live.slots"))


@pytest.mark.parametrize("chained", [False, True])
def test_failed_patches_leave_nothing_open(run, engine, monkeypatch, no_garbage_collector, chained):
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
    *_, second, _, _, last = found = list(held_open(run, 5, before=lambda: failing.extend([1, 1])))
    assert [name for name in last if name.endswith("(deleted)")] == []
    assert max(map(len, found[1:])) <= len(second)


def test_what_garbage_keeps_open_is_closed_before_the_next_version(run, engine, monkeypatch, no_garbage_collector):
    build = receiver.patcher.build_checkpoint

    def builds(*arguments, **options):
        ring = [build(*arguments, **options)]
        ring.append(ring)  # as an error does that is kept in one of its frames
        return ring[0]

    monkeypatch.setattr(receiver.patcher, "build_checkpoint", builds)
    found = [len(names) for names in held_open(run, 6)]
    assert max(found[2:]) <= found[2]
