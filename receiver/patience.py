"""How long the package's HTTP servers wait for a client that does not ask: uvicorn itself waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Patient"]


class Patient(H11Protocol):
    """Closes a connection on which no whole head of a request came for ``asking_seconds``.

    Above twice the connections that are answered, others are closed at once: each takes a descriptor.
    """

    asking_seconds = 30.0
    _asking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self._wait_no_longer()
        seconds = max(self.asking_seconds, self.timeout_keep_alive)
        self._asking = self.loop.call_later(seconds, self._lose_patience)

    def _wait_no_longer(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _lose_patience(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
