"""The gate that requests go through on their way to the engine, and what the engine works on behind it.

Everything here happens in one event loop: what is decided between two ``await`` is decided at once.

The gate opens for a label, and shuts before an update. Requests that come meanwhile wait. What an answer's bytes were
made by is known from when they arrive: a request is let in under the label that the gate is open for, and only
``settle`` gives a running one another label. The receiver calls it while the engine is held and has sent what it had,
before generation goes on. What arrives from then on is kept back until the gate opens for that label, and thrown away
if it opens for another one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deltastore.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .wanted import Wanted

__all__ = ["AnswerLost", "Gate", "GateState", "NotServed", "Running", "StillShut"]

#: Of an answer that its client reads more slowly than the engine makes it, so many bytes wait while the gate is open.
#: While it is shut nothing but the second bound keeps the gateway from taking what the engine has made.
_AHEAD_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 256 << 20
#: Settled: nothing has arrived for so long, which has to come about within the other.
_QUIET_SECONDS: Final = 0.2
_SETTLE_SECONDS: Final = 5.0


class NotServed(Exception):
    """The weights that are served now are not those that a request wants."""


class StillShut(Exception):
    """The gate did not open in time."""


class AnswerLost(Exception):
    """The rest of an answer will not come. ``code`` is for programs, ``status`` for an answer that has not begun."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """How the gate stands. ``doubts`` counts how often the engine may have become another one."""

    shut: bool
    version: str | None
    settled: str | None
    in_flight: int
    held: int
    doubts: int
    watching: bool


class Running:
    """A request that the engine works on, and what of its answer the client has not got yet."""

    def __init__(self, gate: Gate, version: str, wanted: Wanted) -> None:
        self.start = version
        self.made_by = version
        self.wanted = wanted
        self.cancel: Callable[[], object] = lambda: None
        self._gate = gate
        self._pieces: deque[tuple[object, int, str]] = deque()
        self._kept_back: list[tuple[object, int, str]] | None = None
        self._bytes = 0
        self._ended = False
        self._lost: AnswerLost | None = None
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        self.arrived_at = asyncio.get_running_loop().time()

    async def put(self, piece: object, size: int = 0) -> None:
        """Add what arrived from the engine; waits while much is waiting, unless the gate is shut."""
        self.arrived_at = asyncio.get_running_loop().time()
        pieces = self._pieces if self._kept_back is None else self._kept_back
        pieces.append((piece, size, self.made_by))
        self._bytes += size
        self._arrival.set()
        if self._bytes > _MOST_BYTES:
            self.lose(AnswerLost("The client reads too slowly.", code="slow_reader", status=503))
        while self._bytes > _AHEAD_BYTES and not self._gate.shut and self._lost is None:
            self._room.clear()
            await self._room.wait()

    async def take(self) -> tuple[object, str] | None:
        """Return the next piece and the label of the weights that made it, ``None`` at the end.

        Raises ``AnswerLost`` once what can still be sent is taken.
        """
        while not self._pieces:
            if self._lost is not None:
                raise self._lost
            if self._ended and self._kept_back is None:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        piece, size, label = self._pieces.popleft()
        self._bytes -= size
        self._room.set()
        return piece, label

    def end(self) -> None:
        """Note that the engine has said all."""
        self._ended = True
        self._gate.leave(self)
        self._arrival.set()

    def lose(self, reason: AnswerLost) -> None:
        """Give up the rest of the answer, and what is kept back of it. Does nothing to one that has ended."""
        if self._ended and self._kept_back is None:
            return
        self._lost = self._lost or reason
        self._kept_back = None
        self._gate.leave(self)
        self._arrival.set()
        self._room.set()
        self.cancel()

    def keep_back(self, label: str) -> None:
        """From now on weights work on it that may not be confirmed."""
        self.made_by = label
        self._kept_back = self._kept_back or []

    def release(self) -> None:
        """Let go what is kept back."""
        self._pieces.extend(self._kept_back or ())
        self._kept_back = None
        self._arrival.set()

    def make_room(self) -> None:
        """Look again whether what arrives may be taken."""
        self._room.set()


class Gate:
    """Shut at first: nobody knows yet what the engine serves."""

    def __init__(self) -> None:
        self.shut = True
        self.version: str | None = None
        self.settled: str | None = None
        self.held = 0
        self.doubts = 0
        self.watching = False
        self.doubted = True  # shut by itself, and not yet seen to by the receiver
        self.shut_at = time.monotonic()
        self._running: set[Running] = set()
        self._unconfirmed: set[Running] = set()
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> GateState:
        """How it stands now."""
        return GateState(
            shut=self.shut,
            version=self.version,
            settled=self.settled,
            in_flight=len(self._running),
            held=self.held,
            doubts=self.doubts,
            watching=self.watching,
        )

    # What requests do

    async def admit(self, wanted: Wanted, *, hold: float) -> Running:
        """Let a request in; while the gate is shut it waits, ``hold`` seconds at most.

        Raises ``StillShut``, and ``NotServed`` where it wants other weights than those that are served.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + hold
        while self.shut or self.version is None:
            self.held += 1
            try:
                await asyncio.wait_for(self._opened.wait(), until - loop.time())
            except asyncio.TimeoutError as error:
                raise StillShut from error
            finally:
                self.held -= 1
        if not wanted.allows(self.version):
            raise NotServed
        running = Running(self, self.version, wanted)
        self._running.add(running)
        self._idle.clear()
        return running

    def leave(self, running: Running) -> None:
        """Note that the engine works no more on a request; leaving twice is no error."""
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    # What the receiver does

    async def shut_for(self, seconds: float, *, cut: bool) -> int:
        """Let nobody in any more, and wait so long for those that are; returns how many then are.

        With ``cut`` the answers of those are given up.
        """
        self._shut()
        self.doubted = False
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        if cut:
            for running in tuple(self._running):
                running.lose(_updating("The weights were updated before the answer was whole."))
        return len(self._running)

    async def settle(self, label: str) -> None:
        """Take what arrives from now on as made by the weights of ``label``, and keep it back until they are confirmed.

        Waits until nothing arrives any more: all of that is older. Raises ``EngineError`` when that does not come
        about, or the gate is open.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _SETTLE_SECONDS
        while self.shut and (wait := self._quiet_in()) > 0:
            if loop.time() > until:
                raise EngineError(
                    f"The engine was told to hold generation {_SETTLE_SECONDS:g} s ago, and its answers go on.",
                    hint="Pause it again.",
                )
            await asyncio.sleep(wait)
        if not self.shut:
            raise EngineError("The gate is open.", hint="Shut it first.")
        self._lose_others(self._unconfirmed, label)
        self.settled = label
        for running in tuple(self._running):
            if running.wanted.allows(label):
                running.keep_back(label)
                self._unconfirmed.add(running)
            else:
                running.lose(_updating("The version that was asked for is not served any more."))

    def open(self, label: str, *, doubts: int | None) -> None:
        """Let requests in, under this label: the weights are confirmed. ``doubts`` is what the receiver last saw.

        Raises ``EngineError`` where the engine may have become another one since.
        """
        if doubts is not None and (doubts != self.doubts or not self.watching):
            raise EngineError(
                "The gateway has lost the engine since the receiver looked.", hint="Ask the engine what it serves."
            )
        # One that was never settled, and yet is open for another label: nobody knows what made its tokens.
        self._lose_others(self._running | self._unconfirmed, label)
        for running in self._unconfirmed:
            running.release()
        self._unconfirmed.clear()
        self.version, self.settled, self.shut, self.doubted = label, None, False, False
        self._opened.set()

    def doubt(self) -> None:
        """Shut by itself: the engine may have become another one. The receiver has to open again."""
        self.doubts += 1
        self.watching = False
        self.doubted = True
        self._shut()

    def _shut(self) -> None:
        if not self.shut:
            self.shut_at = time.monotonic()
        self.shut = True
        self._opened.clear()
        for running in self._running:
            running.make_room()

    def _quiet_in(self) -> float:
        """Return how many seconds it takes at least until nothing has arrived for long enough."""
        now = asyncio.get_running_loop().time()
        return max((running.arrived_at + _QUIET_SECONDS - now for running in self._running), default=0.0)

    def _lose_others(self, among: set[Running], label: str) -> None:
        for running in tuple(among):
            if running.made_by != label:
                self._unconfirmed.discard(running)
                running.lose(_updating("Weights that were refused have worked on it."))


def _updating(message: str) -> AnswerLost:
    return AnswerLost(message, code="weights_updated", status=503)
