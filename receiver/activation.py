"""Activating a version on the engine: pause ▸ load ▸ confirm ▸ resume, and what happens when a step fails.

Before the pause nothing has changed: a failure leaves the engine serving the old version. After it, the load is tried
again, then the old version is loaded back; if that fails too the engine stays paused. It is never resumed on weights
that it did not confirm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deltastore.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .engines import Engine

__all__ = ["Activation", "Weights", "activate"]

_TRIES = 2


@dataclass(frozen=True, slots=True)
class Weights:
    """A version and the directory that holds it."""

    version: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Activation:
    """How it ended: serving the wanted version, serving the old one again, or paused.

    ``stages`` are seconds, whatever was done: what is in it is told as it is, in the log, `/status`, the metrics and
    the fleet. ``paused_seconds`` are those from the call that pauses to the answer that generation goes on (or to the
    end, where it does not).
    """

    outcome: Literal["activated", "rolled-back", "latched"]
    version: int | None
    stages: Mapping[str, float]
    paused_seconds: float
    error: EngineError | None = None


def activate(engine: Engine, wanted: Weights, *, fallback: Weights | None) -> Activation:
    """Make the engine serve ``wanted``; falls back to ``fallback`` (the version it served before) when it cannot.

    Raises ``EngineError`` only when the engine could not be paused: then it still serves what it did.
    """
    stages: dict[str, float] = {}
    paused_at = time.perf_counter()
    _timed(stages, "pause", engine.pause)
    failure: EngineError | None = None
    for weights, tries in ((wanted, _TRIES), (fallback, 1)):
        for _ in range(tries if weights is not None else 0):
            assert weights is not None  # noqa: S101 - told to the type checker
            try:
                _load(engine, weights, stages)
            except EngineError as error:
                failure = failure or error
            else:
                paused = time.perf_counter() - paused_at
                if weights is wanted:
                    return Activation("activated", weights.version, stages, paused)
                return Activation("rolled-back", weights.version, stages, paused, failure)
    return Activation("latched", None, stages, time.perf_counter() - paused_at, failure)


def _load(engine: Engine, weights: Weights, stages: dict[str, float]) -> None:
    version = str(weights.version)
    _timed(stages, "load", lambda: engine.load(weights.directory, version=version))
    _timed(stages, "confirm", lambda: engine.confirm(version))
    _timed(stages, "resume", engine.resume)


def _timed(stages: dict[str, float], name: str, action: Callable[[], object]) -> None:
    started = time.perf_counter()
    try:
        action()
    finally:
        stages[name] = stages.get(name, 0.0) + time.perf_counter() - started
