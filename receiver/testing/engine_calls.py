"""What is asked of an engine's server, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

__all__ = ["Answer", "Call", "wrong"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was made of a server; ``query`` and ``body`` as they came, parsed.

    Names of ``headers`` are in lower case. ``left`` tells whether the client has gone meanwhile.
    """

    method: str
    path: str
    query: dict[str, str]
    body: dict[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)
    left: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route answers: JSON, text, or events of a stream."""

    content: object = None
    status: int = 200
    events: Generator[object, None, None] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def wrong(message: str) -> Answer:
    """Return the answer to a request that makes no sense."""
    return Answer({"error": {"message": message, "type": "Bad Request", "param": None, "code": 400}}, status=400)
