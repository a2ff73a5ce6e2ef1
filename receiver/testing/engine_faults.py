"""What can go wrong with one call to an engine, by kind."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AnswerFault", "AnswerFaultKind", "EngineFault", "EngineFaultKind"]


class EngineFaultKind(enum.Enum):
    """How a call to an engine fails."""

    RESET = "reset"
    """The connection breaks, and nothing was done."""
    LOSE_ANSWER = "lose-answer"
    """It is done, and the connection breaks before the answer."""
    HANG = "hang"
    """No answer comes, and nothing is done."""
    HANG_AFTER = "hang-after"
    """It is done, and no answer comes."""
    BAD_REQUEST = "400"
    """It is refused, and nothing is done."""
    TOO_MANY_REQUESTS = "429"
    """It is refused for now, and nothing is done."""
    INTERNAL_ERROR = "500"
    """The server says that it failed, and nothing was done."""
    NOT_SUCCESS = "success-false"
    """Status 200, ``"success": false``, and nothing was done."""
    GARBAGE = "garbage"
    """Status 200, and an answer that is not JSON; nothing was done."""
    CLOSE_IDLE = "close-idle"
    """All goes well; the connection is closed after the answer, which does not say so."""
    DIE = "die"
    """The engine dies, and nothing was done."""
    DIE_AFTER = "die-after"
    """It is done, and the engine dies before the answer."""
    HALF_LOAD = "half-load"
    """A load stops half-way and says so; the engine's health stays good, and the next forward pass kills it."""
    PAUSE_HERE = "pause-here"
    """All goes well, after ``hook``: where a test needs two things to meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """What goes wrong with the next call to ``path``; ``hook`` runs just before it does."""

    path: str
    kind: EngineFaultKind
    hook: Callable[[], object] | None = None


class AnswerFaultKind(enum.Enum):
    """How an answer with status 200 fails: a stream after some of its events, any other in its middle."""

    CLOSE = "close"
    """The connection is closed without the answer's end."""
    RESET = "reset"
    """The connection breaks."""
    DIE = "die"
    """The engine dies."""
    HANG = "hang"
    """Nothing more comes."""
    BROKEN = "broken"
    """Half of an event is missing, and the stream goes on; or half of an object, but for its last brace."""
    END_EARLY = "end-early"
    """It ends in the middle, whole as far as HTTP can tell."""
    ERROR_EVENT = "error-event"
    """A stream's next event is an error, and its last but ``[DONE]``; other answers do not fail."""
    PAUSE_HERE = "pause-here"
    """All goes well, after ``hook``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFault:
    """What goes wrong with the next answer to ``path``, after so many events; ``hook`` runs just before it does."""

    path: str
    kind: AnswerFaultKind
    after: int = 0
    hook: Callable[[], object] | None = None
