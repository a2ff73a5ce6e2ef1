"""Rolling activation: this receiver's turn among its fleet's, and the canary that goes first.

A turn is taken before an engine that serves is paused, and given back when it serves again (deltastore/turns.py). It is
never given back by time: who vanished with a turn stops the others, until it serves or an operator clears it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import CorruptObject, VersionNotFound
from deltastore.ledger import Choice
from deltastore.tags import read_tag
from deltastore.turns import given_back, promoting, taken, turns_ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.manifest import Manifest
    from deltastore.reader import Store
    from deltastore.turns import Turns

    from .activation import Decider, Weights

__all__ = ["PROBE", "Canary", "Rolling"]

#: Promoted as soon as the canary serves it, confirmed.
PROBE = "probe"
_LOOKS_PER_LISTING = 30


@dataclass(frozen=True, slots=True)
class Canary:
    """Which receiver goes first, and what promotes a version: ``probe``, or ``tag:NAME``."""

    receiver_id: str
    promote_by: str = PROBE


class Rolling:
    """A ``Decider`` round another one: first the canary's word, and a turn; then what the other one says.

    ``most``: receivers of ``fleet`` that may be unavailable at once (``None``: any number). ``available`` tells whether
    this receiver's engine serves now: to pause one that does not takes nothing from the fleet, and needs no turn.
    ``leads`` tells whether it is to take turns at all: of a group only the leader does.
    """

    def __init__(
        self,
        store: Store,
        inner: Decider,
        *,
        fleet: str,
        receiver_id: str,
        most: int | None,
        canary: Canary | None,
        available: Callable[[], bool],
        leads: Callable[[], bool],
    ) -> None:
        self._store = store
        self._inner = inner
        self._place = {"stream_id": store.stream_id, "fleet": fleet, "receiver_id": receiver_id}
        self._me = receiver_id
        self._most = most
        self._canary = canary
        self._available = available
        self._leads = leads
        self._ledger = turns_ledger(store.backend, stream_id=store.stream_id, fleet=fleet)
        self._known: Turns | None = None
        self._looks = 0
        self._unsettled = True  # a turn from before a restart, or one whose return was lost
        self._promoted: Choice | None = None

    # Which version

    def wanted(self, target: str, own: Callable[[], Manifest]) -> Manifest | None:
        """Return the version to prepare: with ``latest``, the latest that the canary promoted; ``None`` before one."""
        if target != "latest" or self._goes_first():
            return own()
        choice = self._latest_promoted()
        if choice is None:
            return None
        manifest = self._store.manifest(choice.version)
        if manifest.commit_id != choice.commit_id:
            raise CorruptObject(
                f"The canary promoted version {choice.version} of commit {choice.commit_id}; it is "
                f"{manifest.commit_id} here.",
                key=self._store.backend.url,
                hint="All receivers of a fleet have to follow one store.",
            )
        return manifest

    def concerns(self, weights: Weights) -> bool:
        """Tell whether these weights are promoted, and a turn is to be had for them now."""
        if not self._leads():
            return True
        return self._is_promoted(_choice(weights)) and (not self._needs_turn() or self._has_room(self._look()))

    def _goes_first(self) -> bool:
        return self._canary is None or self._canary.receiver_id == self._me or not self._leads()

    def _latest_promoted(self) -> Choice | None:
        assert self._canary is not None  # noqa: S101 - told to the type checker
        if self._canary.promote_by != PROBE:
            try:
                tag = read_tag(self._store, self._canary.promote_by.removeprefix("tag:"))
            except VersionNotFound:
                return None
            return Choice(tag.version, tag.commit_id)
        known = self._look()
        return known.promoted[-1] if known is not None and known.promoted else None

    def _is_promoted(self, choice: Choice) -> bool:
        if self._goes_first():
            return True
        assert self._canary is not None  # noqa: S101 - told to the type checker
        if self._canary.promote_by != PROBE:
            return self._latest_promoted() == choice
        known = self._look()
        return known is not None and choice in known.promoted

    # Decider

    def may_pause(self, weights: Weights) -> bool:
        """Take a turn if one is needed and to be had, and ask the other coordinator; raises what that does."""
        if not self._leads():
            return self._inner.may_pause(weights)
        if not self._is_promoted(_choice(weights)) or (self._needs_turn() and not self._take(weights)):
            return False
        if self._inner.may_pause(weights):
            return True
        self._give_back()
        return False

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Ask the other coordinator."""
        return self._inner.may_resume(weights, loaded=loaded)

    def served(self, weights: Weights) -> None:
        """Give the turn back, and promote the version if this is the canary.

        Said again at every pass, so that neither is forgotten when the store does not answer; what is settled asks
        nothing of it. Raises ``StorageError``.
        """
        self._inner.served(weights)
        choice = _choice(weights)
        if self._canary is not None and self._canary.receiver_id == self._me and self._promoted != choice:
            if self._canary.promote_by == PROBE:
                self._known = self._ledger.change(lambda turns: promoting(turns, choice, **self._place))
            self._promoted = choice
        if self._unsettled:
            self._give_back()

    def _needs_turn(self) -> bool:
        return self._most is not None and self._available()

    def _has_room(self, known: Turns | None) -> bool:
        return known is None or known.holds(self._me) or len(known.holders) < (self._most or 0)

    def _take(self, weights: Weights) -> bool:
        most = self._most or 0
        self._unsettled = True
        self._known = self._ledger.change(lambda turns: taken(turns, version=weights.version, most=most, **self._place))
        return self._known is not None and self._known.holds(self._me)

    def _give_back(self) -> None:
        self._known = self._ledger.change(lambda turns: given_back(turns, receiver_id=self._me))
        self._unsettled = False

    def _look(self) -> Turns | None:
        """Return the turns as they are: one small read while nothing changes, and a listing now and then."""
        self._looks += 1
        if self._known is None or self._looks % _LOOKS_PER_LISTING == 0 or self._ledger.has(self._known.number + 1):
            self._known = self._ledger.newest()
        return self._known


def _choice(weights: Weights) -> Choice:
    return Choice(weights.version, weights.commit_id)
