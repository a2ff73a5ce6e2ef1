"""What a receiver asks of an inference engine.

An activation is ``pause`` ▸ ``load`` ▸ ``confirm`` ▸ ``resume``; the receiver decides the order and what to do when a
step fails. Adapters raise ``EngineError`` and nothing else for anything the engine did or failed to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Engine", "EngineInfo"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself.

    ``incarnation`` changes whenever the process restarts; ``version`` is the version last loaded through
    ``load`` as a decimal string, or ``None`` when it never was (a fresh start); ``paused`` tells whether
    generation is held.
    """

    incarnation: str
    version: str | None
    paused: bool


class Engine(Protocol):
    """One inference engine, seen from its receiver."""

    def info(self) -> EngineInfo:
        """Ask the engine who it is and what it serves."""
        ...

    def pause(self) -> None:
        """Hold generation: when this returns no forward pass runs, and none starts before ``resume``."""
        ...

    def load(self, checkpoint: Path, *, version: str) -> None:
        """Load the weights of ``checkpoint``, a complete directory, and drop what was cached of the old ones.

        Weights are requantized where the engine's precision is another than the checkpoint's.
        """
        ...

    def confirm(self, version: str) -> None:
        """Raise ``EngineError`` unless the engine holds ``version``, whole and able to run."""
        ...

    def resume(self) -> None:
        """Let generation go on."""
        ...

    def close(self) -> None:
        """Release connections; the engine itself goes on."""
        ...
