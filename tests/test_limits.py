"""The bounds of fetching and building: a rate kept from second to second, room never exceeded, budgets that add up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltastore.limits
from deltastore.errors import UsageError
from deltastore.limits import UNLIMITED, Bandwidth, Limits, Room, within_budget
from deltastore.manifest import MAX_PART_BYTES

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def go_on() -> None:
    pass


@pytest.mark.parametrize("rate", [2_000_000, 50_000_000, 3_000_000_000])
@pytest.mark.parametrize("latency", [0.0, 0.01, 0.04])
def test_a_rate_is_kept_from_second_to_second(rate: int, latency: float) -> None:
    clock = Clock()
    bandwidth = Bandwidth(rate, clock=clock, sleep=clock.sleep)
    arrived: list[tuple[float, int]] = []
    while clock.now < 110:
        bandwidth.take(bandwidth.piece_bytes, go_on)
        clock.now += latency
        arrived.append((clock.now, bandwidth.piece_bytes))
    for start in (100.0, 103.3, 107.77, 108.9):
        second = sum(nbytes for at, nbytes in arrived if start < at <= start + 1)
        assert second == pytest.approx(rate, rel=0.0501)
    assert sum(nbytes for _, nbytes in arrived) == pytest.approx(10 * rate, rel=0.01)


def test_what_was_not_used_is_lost() -> None:
    clock = Clock()
    bandwidth = Bandwidth(1_000_000, clock=clock, sleep=clock.sleep)
    clock.now += 3600
    start = clock.now
    for _ in range(20):
        bandwidth.take(65_536, go_on)
    assert clock.now - start == pytest.approx(20 * 65_536 / 1_000_000, abs=0.051)


def test_threads_share_one_rate() -> None:
    bandwidth = Bandwidth(20_000_000)
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: bandwidth.take(500_000, go_on), range(40)):
            pass
    assert time.monotonic() - start >= 0.95


def test_who_is_not_wanted_any_more_does_not_wait_on() -> None:
    clock = Clock()
    bandwidth = Bandwidth(1000, clock=clock, sleep=clock.sleep)
    asked = []

    def give_up() -> None:
        asked.append(clock.now)
        if len(asked) == 3:
            raise KeyError

    with pytest.raises(KeyError):
        bandwidth.take(1_000_000, give_up)
    assert clock.now < 101


def test_a_throttled_piece_is_a_twentieth_of_a_second_and_never_tiny() -> None:
    assert Limits(bandwidth=Bandwidth(20_000_000)).piece_bytes == 1_000_000
    assert Limits(bandwidth=Bandwidth(10)).piece_bytes == 65_536
    assert Limits(bandwidth=Bandwidth(1 << 40)).piece_bytes == UNLIMITED.piece_bytes == 8 * MIB


def test_room_is_never_exceeded_and_is_given_back() -> None:
    room, lock, used, most = Room(100), threading.Lock(), 0, 0

    def hold(nbytes: int) -> None:
        nonlocal used, most
        with room.hold(nbytes):
            with lock:
                used += min(nbytes, 100)
                most = max(most, used)
            time.sleep(0.001)  # so that holders meet
            with lock:
                used -= min(nbytes, 100)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(hold, [60, 30, 100, 10, 500, 40] * 10):
            pass
    assert (used, room._used) == (0, 0)
    assert 60 < most <= 100


def test_room_comes_back_from_a_read_that_failed() -> None:
    limits = Limits(room=Room(10))
    for _ in range(3):
        with pytest.raises(KeyError), limits.taking(10, go_on):
            raise KeyError
    with limits.taking(10, go_on):
        pass


@given(
    budget=st.integers(1, 1 << 40),
    workers=st.none() | st.integers(1, 64),
    cores=st.integers(1, 64),
    whole_parts=st.booleans(),
)
def test_a_budget_adds_up_or_is_refused_with_the_least_that_works(
    budget: int, workers: int | None, cores: int, whole_parts: bool
) -> None:
    options = {"workers": workers, "cores": cores, "whole_parts": whole_parts}
    try:
        limits = within_budget(budget, **options)
    except UsageError as error:
        least = int((error.hint or "").partition("--memory-budget ")[2].partition("MiB")[0]) * MIB
        assert least > budget
        limits, budget = within_budget(least, **options), least
    assert limits.workers is not None
    assert limits.window_rows is not None
    assert limits.room is not None
    assert limits.workers == workers or (workers is None and 1 <= limits.workers <= cores)
    assert 1 <= limits.fetchers <= 4
    assert MIB <= limits.piece_bytes <= 8 * MIB
    largest = 2 * (MAX_PART_BYTES if whole_parts else limits.piece_bytes)
    assert largest <= limits.room.nbytes
    assert (
        deltastore.limits._PROCESS_BYTES
        + limits.workers * deltastore.limits._WORKER_BYTES
        + limits.window_rows * deltastore.limits._ROW_BYTES
        + limits.room.nbytes
        <= budget
    )


def test_more_memory_is_of_use() -> None:
    small, large = (within_budget(n * MIB, workers=None, cores=8, whole_parts=False) for n in (256, 1024))
    assert small.workers == 1
    assert large.workers == 8
    assert (large.fetchers, large.piece_bytes) == (4, 8 * MIB)
    assert small.piece_bytes < large.piece_bytes
