"""The gate that forward passes go through, and that a pause shuts."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltastore.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GenerationGate"]


class GenerationGate:
    """Lets any number of forward passes through at once, or none of them.

    Not re-entrant: a thread inside a pass that asks for another while a pause waits for the first waits for
    ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._shut = False
        self._closed = False

    @property
    def held(self) -> bool:
        """Whether the gate is shut and no pass is running; it stays so until ``resume``."""
        with self._changed:
            return self._shut and self._running == 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Hold one forward pass; waits while the gate is shut, ``EngineError`` once it is closed for good."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._shut)
            if self._closed:
                raise EngineError("the engine is shutting down", hint="another engine.")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def pause(self, *, timeout: float | None = None) -> None:
        """Keep new passes out and wait until those running have ended; pausing twice is no error.

        When they have not ended after ``timeout`` seconds the gate opens again and ``EngineError`` is
        raised: a failed pause holds nothing.
        """
        with self._changed:
            self._shut = True
            self._changed.wait_for(lambda: self._running == 0 or not self._shut, timeout)
            if not self._shut:
                raise EngineError("the engine was resumed while it was pausing", hint="pausing again.")
            if self._running:
                self._shut = False
                self._changed.notify_all()
                raise EngineError(
                    f"{self._running} forward passes have not ended {timeout:g} s after the pause",
                    hint="a longer pause timeout, or look for a stuck request.",
                )

    def resume(self) -> None:
        """Let passes through again; resuming twice is no error."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def close(self) -> None:
        """Turn every waiting and later pass away for good; those running go on to their end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
