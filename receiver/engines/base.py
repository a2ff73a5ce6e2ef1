"""What a receiver asks of an inference engine.

An activation is ``pause`` ▸ ``load`` ▸ ``confirm`` ▸ ``probe`` ▸ ``resume``; the receiver decides the order and what to
do when a step fails (receiver/activation.py). Adapters raise ``EngineError`` and nothing else for anything the engine
did or failed to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Engine", "EngineInfo", "InFlight", "Probe"]

#: What becomes of requests that run when the pause begins: they run to their end first, they end at once and their
#: clients are told, or they are frozen and go on after the resume, on the new weights.
InFlight = Literal["wait", "abort", "keep"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself.

    ``incarnation`` changes whenever the process restarts; ``version`` is the label last loaded through ``load``
    (``<stream id>/<number>``), or ``None`` when it never was (a fresh start) or is not known (a load that failed);
    ``paused`` tells whether generation is held.
    """

    incarnation: str
    version: str | None
    paused: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """What the engine makes of a fixed prompt: the log-probability of each token of a greedy continuation.

    Natural logarithms, NaN and infinities as the engine gave them; ``tokens`` are their ids where the engine tells.
    """

    logprobs: tuple[float, ...]
    tokens: tuple[int, ...] = ()


class Engine(Protocol):
    """One inference engine, seen from its receiver. Calls may come from several threads."""

    @property
    def probes_paused(self) -> bool:
        """Whether ``probe`` works while generation is held; if not, it is asked right after ``resume``."""
        ...

    def info(self) -> EngineInfo:
        """Ask the engine who it is and what it serves."""
        ...

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Hold generation: when this returns no forward pass runs, and none starts before ``resume``.

        With ``wait`` the running requests have ``timeout`` seconds to end (``None``: as long as the adapter waits for
        an answer); if they do not, ``DrainTimeout`` is raised. Pausing again while paused or draining is no error, and
        another ``in_flight`` then holds for what still runs.
        """
        ...

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Load the weights of ``checkpoint``, a complete directory, and name them ``version``.

        What was cached of the old weights is dropped, in every cache the engine has, unless ``keep_kv``. Weights are
        requantized where the engine's precision is another than the checkpoint's.
        """
        ...

    def confirm(self, version: str) -> None:
        """Raise ``EngineError`` unless the engine says that it holds ``version``, whole."""
        ...

    def probe(self) -> Probe | None:
        """Run the fixed prompt; ``None`` where there is nothing that could run one."""
        ...

    def resume(self) -> None:
        """Let generation go on."""
        ...

    def close(self) -> None:
        """Release connections; the engine itself goes on."""
        ...
