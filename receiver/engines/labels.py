"""The version string that a server keeps for us, and how a server that started anew is told from the one before.

A server that other people wrote has one string for the version of its weights, which we set: to the label of what it
holds, to ``unknown`` while that is not sure, and with `` paused`` behind where it cannot be asked whether it is.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["UNKNOWN", "Incarnations", "Mark", "holds_weights", "is_label"]

UNKNOWN: Final = "unknown"
_PAUSED: Final = " paused"


def is_label(text: str) -> bool:
    """Whether a server's version string is a label (``<stream id>/<number>``) and so was set by a receiver."""
    return "/" in text and not text.endswith(_PAUSED)


@dataclass(frozen=True, slots=True)
class Mark:
    """A version string with what it says of a pause; ``weights`` is a label, ``unknown``, or the server's own."""

    weights: str
    paused: bool

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Take a server's version string apart."""
        return cls(text.removesuffix(_PAUSED), text.endswith(_PAUSED))

    def __str__(self) -> str:
        return self.weights + _PAUSED * self.paused

    @property
    def label(self) -> str | None:
        """The label, where there is one."""
        return self.weights if is_label(self.weights) else None


class Incarnations:
    """Tells a server that started anew from one that goes on, by its version string. Thread-safe.

    Only the receiver sets the string, so one that it did not set is that of another process. This needs no help from
    the server, and it is enough: a restarted server has lost the label, so nothing is believed of it either way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._changes = 0
        self._token = uuid.uuid4().hex

    def ask(self, read: Callable[[], str]) -> tuple[str, str]:
        """Read the string by ``read``; return it, and the token of the process that gave it."""
        before = self._changes
        text = read()
        with self._lock:
            # An answer from before a change of ours says nothing about the time after it.
            if text not in self._known and before == self._changes:
                self._known = {text}
                self._token = uuid.uuid4().hex
            return text, self._token

    def change(self, text: str, write: Callable[[], object]) -> None:
        """Have ``write`` set the string to ``text``."""
        with self._lock:
            self._changes += 1
            self._known.add(text)
        write()
        with self._lock:
            self._changes += 1
            self._known = {known for known in self._known if known == text or is_label(Mark.parse(known).weights)}


def holds_weights(checkpoint: Path) -> bool:
    """Whether a directory has weights at all: a server that is told to load another may find out half-way."""
    return any(checkpoint.glob("*.safetensors"))
