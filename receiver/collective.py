"""The same decisions among ranks that share a `torch.distributed` group, for engines in the ranks' own processes.

Each decision is one gathering on a gloo group of its own: before the pause all ranks say which version they have, after
the load whether they have it loaded. All that hear the answer hear the same one.

What this cannot give, and a store can: a decision is recorded nowhere. A rank that does not hear an answer in time,
because it or another one died, never learns what the others heard. So it decides nothing any more: before the pause it
leaves the version alone, after it it stays held, as do all others then, until the job is begun anew with a new group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from deltastore.errors import StorageError

if TYPE_CHECKING:
    from .activation import Weights

__all__ = ["Collective"]


class Collective:
    """One rank's ``Coordinator``. All ranks of the default group make one at the same point, with the same time-out.

    ``timeout`` is in seconds, for each decision. Every rank has to activate the same versions in the same order: who
    follows a stream by itself lets rank 0 choose and broadcast.
    """

    def __init__(self, *, timeout: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - only where ranks share a group

        self._dist = dist
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._broken: str | None = None

    @property
    def goes_back(self) -> bool:
        """All ranks that could not, or might not, go on load the version before, and decide on it together."""
        return True

    def due(self, weights: Weights) -> bool:
        """Never: each rank asks by itself."""
        del weights
        return False

    def concerns(self, weights: Weights) -> bool:
        """Whatever it is, until an answer was missed."""
        del weights
        return self._broken is None

    def may_pause(self, weights: Weights) -> bool:
        """Tell whether all ranks have these weights; ``False`` where one did not say so in time."""
        try:
            return len(self._all_say(("prepared", weights.commit_id, True))) == 1
        except StorageError:
            return False

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Tell whether all ranks have loaded them.

        Raises ``StorageError`` when an answer is missing: others may have heard it and gone on, or may not.
        """
        said = self._all_say(("loaded", weights.commit_id, loaded))
        return said == {("loaded", weights.commit_id, True)}

    def served(self, weights: Weights) -> None:
        """Nothing to say: all ranks know."""

    def _all_say(self, mine: tuple[str, str, bool]) -> set[tuple[str, str, bool]]:
        if self._broken is not None:
            raise self._missed(self._broken)
        said: list[tuple[str, str, bool]] = [mine] * self._dist.get_world_size(self._group)
        try:
            self._dist.all_gather_object(said, mine, group=self._group)
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0]
            raise self._missed(self._broken) from error
        if len({phase for phase, _, _ in said}) != 1:
            self._broken = f"the ranks are not at the same point: {sorted(set(said))}"
            raise self._missed(self._broken)
        return set(said)

    def _missed(self, why: str) -> StorageError:
        return StorageError(
            f"The ranks did not decide: {why}.",
            transient=False,
            key="torch.distributed",
            hint="Begin the job anew: its ranks cannot find out what the others heard.",
        )
