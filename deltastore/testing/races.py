"""Races of creates: many writers, one key, one winner."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.storage import Backend

__all__ = ["Races", "race_creates"]

_LIMIT = 1 << 16


@dataclass(slots=True)
class Races:
    """What came of a number of races. ``unknown`` are those whose winner was told otherwise: an answer was lost."""

    won: int = 0
    unknown: int = 0


def race_creates(
    backends: Sequence[Backend],
    rounds: int,
    *,
    racers: int = 8,
    abreast: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> Races:
    """Have ``racers`` threads create one key at the same instant, ``rounds`` times, ``abreast`` of them side by side.

    The writers take the ``backends`` in turn. Raises ``AssertionError`` when two were told that they won, when the
    object is not the winner's, or is nobody's.
    """
    races = Races()
    with ThreadPoolExecutor(abreast) as courses:
        for number, won in enumerate(
            courses.map(lambda turn: _race(backends, f"race/{turn:06d}", racers), range(rounds))
        ):
            races.won += won
            races.unknown += not won
            progress(number + 1)
    return races


def _race(backends: Sequence[Backend], key: str, racers: int) -> bool:
    """Run one race; tells whether its winner knows."""
    barrier = threading.Barrier(racers)
    contents = [f"writer {number} ".encode() * 100 for number in range(racers)]
    told: list[int] = []

    def create(number: int) -> None:
        barrier.wait()
        try:
            backends[number % len(backends)].create(key, contents[number])
        except StorageError:
            return
        told.append(number)

    with ThreadPoolExecutor(racers) as pool:
        for done in [pool.submit(create, number) for number in range(racers)]:
            done.result()
    data = backends[0].read(key, limit=_LIMIT)
    assert data in contents, f"{key} is nobody's"  # noqa: S101 - what this is for
    assert len(told) <= 1, f"{key} was won by {told}"  # noqa: S101
    assert not told or data == contents[told[0]], f"{key} is not its winner's"  # noqa: S101
    return bool(told)
