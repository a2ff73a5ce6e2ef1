"""The engine as the daemon sees it: made to serve the live slot, and asked whether it still does."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from deltastore.errors import EngineError

from .activation import Weights, activate
from .logs import seconds_text, tell, tell_failure
from .stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engines import Engine, EngineInfo
    from .patcher import Patcher
    from .slots import LiveSlot
    from .status import Status

__all__ = ["Serving"]


class Serving:
    """One engine, the version that it confirmed, and the versions that it refused.

    No activation begins once ``stopped``.
    """

    def __init__(self, engine: Engine, status: Status, *, stopped: Callable[[], bool]) -> None:
        self._engine = engine
        self._status = status
        self._stopped = stopped
        self._confirmed: tuple[str, str] | None = None  # incarnation and version that the engine last confirmed
        self._refused: set[str] = set()  # commit ids that the engine could not load
        self._activating = threading.Lock()  # held while an activation goes on

    def serve(self, live: LiveSlot, patcher: Patcher) -> None:
        """Make sure that the engine serves the live slot.

        A restarted or paused engine is loaded and confirmed again. When it refuses the version, ``patcher`` goes back
        to the one before. Raises ``EngineError`` when it does not answer, or stays paused; ``Stopped``.
        """
        info = self._ask()
        version = str(live.record.version)
        if info.paused or info.version != version or self._confirmed != (info.incarnation, version):
            self.doubt()
            with self._activating:
                if self._stopped():
                    raise Stopped
                self._activate(live, patcher)
            info = self._ask()
        if info.version is not None and not info.paused:
            self._confirmed = (info.incarnation, info.version)
            self._status.serving = int(info.version)

    def doubt(self) -> None:
        """Believe nothing of what the engine serves until it confirms again."""
        self._confirmed = self._status.serving = None

    def has_refused(self, commit_id: str) -> bool:
        """Tell whether a version is left alone because the engine could not load it."""
        return commit_id in self._refused

    def forget_refusals(self) -> None:
        """Give the versions that the engine refused another try."""
        self._refused.clear()

    def hold(self) -> None:
        """Return when no activation is going on; none begins after this. May be called from any thread."""
        self._activating.acquire()

    def close(self) -> None:
        """Let go of the engine, which goes on as it is."""
        self._engine.close()

    def _ask(self) -> EngineInfo:
        """Ask the engine how it is; one that does not answer serves nothing that we know of."""
        try:
            return self._engine.info()
        except EngineError:
            self.doubt()
            raise

    def _activate(self, live: LiveSlot, patcher: Patcher) -> None:
        self._status.enter("activating")
        other = patcher.previous()
        result = activate(
            self._engine,
            Weights(live.record.version, live.directory),
            fallback=Weights(other.record.version, other.directory) if other else None,
        )
        self._status.activated(result)
        tell(
            "activated",
            f"Engine: {result.outcome}, version {result.version} ({seconds_text(result.stages)}).",
            level=logging.INFO if result.outcome == "activated" else logging.WARNING,
            outcome=result.outcome,
            version=result.version,
            paused_seconds=result.paused_seconds,
            stages=dict(result.stages),
        )
        if result.outcome == "rolled-back":
            self._refused.add(live.record.commit_id)
            patcher.go_back()
            self._status.version = result.version
        if result.outcome == "latched" and result.error is not None:
            raise result.error
        if result.error is not None:
            self._status.failed(result.error)
            tell_failure(result.error, "That version is left alone.", version=live.record.version)
