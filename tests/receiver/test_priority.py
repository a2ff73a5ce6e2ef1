"""Whose priority changes: the threads that patch, those that they start, and nobody else's."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltastore.errors import UsageError
from receiver.priority import Priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities for threads")

IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "riscv64": 31, "ppc64le": 274, "s390x": 283}


def current() -> tuple[int, int, int]:
    """Return the calling thread's nice value, I/O class and level."""
    io = ctypes.CDLL(None).syscall(IOPRIO_GET[platform.machine()], 1, 0)
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), io >> 13, io & 7


def current_below() -> list[tuple[int, int, int]]:
    with ThreadPoolExecutor(1) as pool:
        return [current(), pool.submit(current).result()]


def unwanted() -> None:
    raise AssertionError("nobody interrupted it")


@pytest.mark.parametrize(("io", "expected"), [("idle", (3, 0)), ("best-effort:0", (2, 0)), ("best-effort:7", (2, 7))])
def test_a_thread_and_those_that_it_starts_work_behind_others(io: str, expected: tuple[int, int]) -> None:
    before = current()
    nice = min(19, before[0] + 3)
    assert Priority(nice=nice, io=io).run(current_below, leave=unwanted) == [(nice, *expected)] * 2
    assert current() == before
    assert current_below() == [before] * 2


def test_without_a_wish_the_caller_works_itself() -> None:
    assert Priority().run(threading.get_ident, leave=unwanted) == threading.get_ident()
    only_nice = Priority(nice=19).run(current, leave=unwanted)
    assert (only_nice[0], only_nice[1:]) == (19, current()[1:])


def test_a_process_that_is_nicer_already_stays_so() -> None:
    def behind() -> tuple[int, int, int]:
        return Priority(nice=0).run(current, leave=unwanted)

    assert Priority(nice=19).run(behind, leave=unwanted)[0] == 19


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise KeyError("of the work")

    with pytest.raises(KeyError):
        Priority(nice=19).run(work, leave=unwanted)


def test_an_interruption_ends_the_work_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert leave.wait(30)
        ended.set()

    def interrupted(_: object) -> None:
        assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr("receiver.priority.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Priority(nice=19).run(work, leave=leave.set)
    assert ended.is_set()


@pytest.mark.parametrize("wish", [{"nice": -1}, {"nice": 20}, {"io": "idle:1"}, {"io": "best-effort"}, {"io": ""}])
def test_other_values_are_refused(wish: dict[str, int | str]) -> None:
    with pytest.raises(UsageError):
        Priority(**wish)


def test_where_threads_have_no_priorities_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("receiver.priority.sys.platform", "darwin")
    assert Priority() == Priority(nice=None)
    for wish in ({"nice": 1}, {"io": "idle"}):
        with pytest.raises(UsageError, match="Linux"):
            Priority(**wish)
    monkeypatch.setattr("receiver.priority.sys.platform", "linux")
    monkeypatch.setattr("receiver.priority.platform.machine", lambda: "vax")
    assert Priority(nice=1).nice == 1
    with pytest.raises(UsageError, match="vax"):
        Priority(io="idle")
