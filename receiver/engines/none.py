"""No engine at all: the receiver keeps a checkpoint up to date, and somebody else loads it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from receiver.engines.base import EngineInfo

if TYPE_CHECKING:
    from pathlib import Path

    from receiver.engines.base import InFlight, Probe

__all__ = ["NoEngine"]


class NoEngine:
    """Does nothing, successfully, and remembers what it was told, so that a receiver need not know.

    Like an engine that restarts together with its receiver: a new incarnation that holds no version yet.
    """

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._version: str | None = None
        self._paused = False

    @property
    def probes_paused(self) -> bool:
        """Nothing is probed at any time."""
        return True

    def info(self) -> EngineInfo:
        """Tell the version of the last ``load``, and whether ``pause`` came after ``resume``."""
        return EngineInfo(self._incarnation, self._version, self._paused)

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Remember that generation would be held; there are no requests."""
        del in_flight, timeout
        self._paused = True

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Remember the version; the checkpoint is not looked at."""
        del checkpoint, keep_kv
        self._version = version

    def confirm(self, version: str) -> None:
        """Accept: there is nothing that could disagree."""

    def probe(self) -> Probe | None:
        """Tell nothing: there is nothing that could run a prompt."""
        return None

    def resume(self) -> None:
        """Remember that generation would go on."""
        self._paused = False

    def close(self) -> None:
        """Do nothing: there are no connections."""
