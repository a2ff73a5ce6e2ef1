"""The gate that streams and their forward passes go through, and that a pause shuts."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltastore.errors import DrainTimeout, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from receiver.engines.base import InFlight

__all__ = ["GenerationGate", "Stream", "StreamAborted"]


class StreamAborted(EngineError):
    """A pause ended this stream; what it generated so far is all there is."""


class Stream:
    """One running stream, as the gate knows it."""

    __slots__ = ("aborted",)

    def __init__(self) -> None:
        self.aborted = False


class GenerationGate:
    """Lets any number of forward passes through at once, or none of them; and new streams in, or none.

    Not re-entrant: a thread inside a pass that asks for another while a pause waits for the first waits for
    ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._streams: set[Stream] = set()
        self._draining = 0  # pauses that wait for streams to end: no new one begins
        self._shut = False
        self._closed = False

    @property
    def held(self) -> bool:
        """Whether the gate is shut and no pass is running; it stays so until ``resume``."""
        with self._changed:
            return self._shut and self._running == 0

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """Hold one stream of passes; waits while a pause holds or drains, ``EngineError`` once closed for good."""
        stream = Stream()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._shut or self._draining))
            self._turn_away()
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._changed:
                self._streams.discard(stream)
                self._changed.notify_all()

    @contextmanager
    def forward(self, stream: Stream | None = None) -> Iterator[None]:
        """Hold one forward pass; waits while the gate is shut, ``EngineError`` once it is closed for good.

        ``StreamAborted`` once a pause has ended the stream that it belongs to.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._shut or (stream is not None and stream.aborted))
            self._turn_away()
            if stream is not None and stream.aborted:
                raise StreamAborted("a pause ended this stream", hint="asking again, from here on.")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _turn_away(self) -> None:
        if self._closed:
            raise EngineError("the engine is shutting down", hint="another engine.")

    def pause(self, in_flight: InFlight = "keep", *, drain: float | None = None, timeout: float | None = None) -> None:
        """Keep new passes out and wait until those running have ended; pausing twice is no error.

        ``wait`` first lets running streams end, for ``drain`` seconds (``DrainTimeout``), and no new one begin;
        ``abort`` ends them at their next pass; ``keep`` freezes them. When passes have not ended after ``timeout``
        seconds the gate opens again and ``EngineError`` is raised: a failed pause holds nothing.
        """
        with self._changed:
            if in_flight == "wait":
                self._drain(drain)
            elif in_flight == "abort":
                for stream in self._streams:
                    stream.aborted = True
            self._shut = True
            self._changed.notify_all()
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

    def _drain(self, seconds: float | None) -> None:
        """Wait until no stream runs, or another pause has shut the gate."""
        self._draining += 1
        try:
            if not self._changed.wait_for(lambda: self._shut or not self._streams, seconds):
                raise DrainTimeout(
                    f"{len(self._streams)} streams have not ended {seconds:g} s after the pause",
                    hint="a longer drain deadline, or ending or freezing them.",
                )
        finally:
            self._draining -= 1
            self._changed.notify_all()

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
