"""Rounds: how the members of a group activate one version together.

Pure functions say what a member does next, from what it sees of a round; ``Group`` looks at the store, asks them, and
does it. The rules, and the objects, are those of docs/format.md, section 15.4; tests/model/test_rounds_model.py walks
these functions through every interleaving.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from deltastore.errors import CorruptObject, StorageError, StreamMismatch
from deltastore.groups import RoundObjects, joined, members_ledger
from deltastore.ledger import Choice

from .logs import tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.groups import Members
    from deltastore.manifest import Manifest
    from deltastore.reader import Store

    from .activation import Weights

__all__ = ["Group", "Part", "Round", "after_load", "before_pause", "following", "is_over", "proposal"]

#: Whether a member left the group for another is looked at so rarely.
_LOOKS_PER_ROLL_CALL = 16


@dataclass(frozen=True, slots=True)
class Round:
    """What is known of a round.

    ``served``: what the last resumed round activated; ``failed``: what the last committed one wanted, if no round has
    resumed since: then all members are paused. ``go``: commit, or over. ``outcome``: resume, or the next round.
    """

    number: int
    served: Choice | None = None
    failed: Choice | None = None
    wanted: Choice | None = None
    ready: frozenset[str] = frozenset()
    go: bool | None = None
    loaded: frozenset[str] = frozenset()
    not_loaded: frozenset[str] = frozenset()
    outcome: bool | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A member's part in a round: who it is, whether it leads, and all members' ids once the group is complete."""

    me: str
    leads: bool
    members: frozenset[str] | None


def is_over(round_: Round) -> bool:
    """Whether the next round may begin."""
    return round_.go is False or round_.outcome is not None


def following(round_: Round) -> Round:
    """Return the round after one that is over."""
    if round_.outcome is None:
        return Round(round_.number + 1, round_.served, round_.failed)
    if round_.outcome:
        return Round(round_.number + 1, round_.wanted, None)
    return Round(round_.number + 1, round_.served, round_.wanted)


def proposal(round_: Round, own: Choice | None, *, leads: bool) -> Choice | None:
    """Return what a member may begin this round with; ``None``: it is not its to begin.

    ``own``: what it wants by itself.
    """
    if round_.failed is not None and round_.served is not None and round_.failed != round_.served:
        return round_.served  # all are paused: back
    if leads or (own == round_.served and round_.failed is None):
        return own
    return None


def before_pause(
    round_: Round, part: Part, own: Choice, *, late: bool
) -> Literal["begin", "report", "commit", "abort", "wait", "pause", "leave"]:
    """Return what a member that has prepared ``own`` does next in the present round. ``late``: it waited too long."""
    if round_.wanted is None:
        return "begin" if proposal(round_, own, leads=part.leads) == own else "leave"
    if round_.wanted != own:
        return "leave"
    if round_.go is not None:
        return "pause" if round_.go else "leave"
    if part.me not in round_.ready:
        return "report"
    if part.leads and part.members is not None and part.members <= round_.ready:
        return "commit"
    return "abort" if late else "wait"


def after_load(
    round_: Round, part: Part, *, loaded: bool, late: bool
) -> Literal["report", "resume", "next", "wait", "go-on", "hold"]:
    """Return what a member does next that was told to load in this round, and has, or could not."""
    if round_.outcome is not None:
        return "go-on" if round_.outcome and loaded else "hold"
    if part.me not in round_.loaded | round_.not_loaded:
        return "report"
    if not loaded or round_.not_loaded:
        return "next"
    if part.leads and part.members is not None and part.members <= round_.loaded:
        return "resume"
    return "next" if late else "wait"


class Group:
    """One member of a group: it coordinates this receiver's activations with the others' (a ``Decider``).

    ``poll``, ``ready_timeout`` (for the others' readiness, before the pause) and ``load_timeout`` (for their loads,
    while all are paused) are in seconds. ``wait`` waits so long, and raises when the receiver is told to stop.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        size: int,
        receiver_id: str,
        engine: bool,
        poll: float,
        ready_timeout: float,
        load_timeout: float,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._me = receiver_id
        self._engine = engine
        self._poll = poll
        self._ready_timeout = ready_timeout
        self._load_timeout = load_timeout
        self._wait = wait
        self._clock = clock
        place = {"stream_id": store.stream_id, "group": name}
        self._objects = RoundObjects(store.backend, **place, receiver_id=receiver_id)
        self._ledger = members_ledger(store.backend, **place)
        self._members: Members | None = None
        self._round: Round | None = None
        self._entered: int | None = None  # the round in which this member was told to pause
        self._looks = 0
        self._order: object = None
        self._refused: set[str] = set()  # commit ids that a round could not activate

    def join(self) -> None:
        """Become a member. Raises ``UsageError`` when the group is complete without it, or of another size."""
        self._members = self._ledger.change(
            lambda members: joined(
                members,
                stream_id=self._store.stream_id,
                group=self._name,
                size=self._size,
                receiver_id=self._me,
                engine=self._engine,
            )
        )

    @property
    def leads(self) -> bool:
        """Whether this member chooses the group's versions, and takes its turns."""
        return self._members is not None and self._members.leader == self._me

    # Which version

    def wanted(self, own: Callable[[], Manifest | None], *, order: object = None) -> Manifest | None:
        """Return the version to prepare: the present round's, or what the group serves; ``None`` before the first one.

        ``own``: what this receiver would follow by itself; where it leads, a round is begun for that. ``order``: who
        ordered that; with another one, versions that failed are tried again. A steady look is one small read, and for
        the leader what ``own`` takes. Raises what that raises, and ``StorageError``.
        """
        round_ = self._present()
        if round_.wanted is None:
            target = own() if self.leads else None
            if order != self._order:
                self._order = order
                self._refused.clear()
            choice = self._to_begin(round_, target)
            if choice is not None:
                self._begin(round_, choice)
                round_ = self._present()
            elif target is not None:
                return target
        choice = round_.wanted or round_.served
        return self._manifest(choice) if choice is not None else None

    def concerns(self, weights: Weights) -> bool:
        """Tell whether there is a round for these weights, or this member may begin one; as of the last look."""
        if self._round is None:
            return False
        own = _choice(weights)
        if self._round.wanted is not None:
            return self._round.wanted == own
        return self._needs_no_round(self._round, own) or proposal(self._round, own, leads=self.leads) == own

    def due(self, weights: Weights) -> bool:
        """Tell whether a round wants these weights activated, served as they are; as of the last look."""
        return self._round is not None and self._round.wanted == _choice(weights) and not is_over(self._round)

    def refuses(self, commit_id: str) -> bool:
        """Tell whether a round could not activate this commit; an order, or another target, lets it be tried again."""
        return commit_id in self._refused

    def _to_begin(self, round_: Round, target: Manifest | None) -> Choice | None:
        """Return what to begin a round with that nobody has begun, if there is a reason to."""
        own = Choice(target.version, target.commit_id) if target is not None else None
        held = round_.failed is not None
        if own is not None and own.commit_id in self._refused and round_.served is not None:
            own = round_.served
        if not held and own == round_.served:
            return None
        return proposal(round_, own, leads=self.leads)

    def _manifest(self, choice: Choice) -> Manifest:
        manifest = self._store.manifest(choice.version)
        if manifest.commit_id != choice.commit_id:
            raise StreamMismatch(
                f"The group {self._name} wants version {choice.version} of commit {choice.commit_id}; it is "
                f"{manifest.commit_id} here.",
                key=self._store.backend.url,
                hint="All members have to follow one store.",
            )
        return manifest

    # Decider

    def may_pause(self, weights: Weights) -> bool:
        """Say that they are prepared here, and wait for the round's go; ``False``: leave them.

        Raises ``StorageError``, and what ``wait`` raises.
        """
        own = _choice(weights)
        number, since = 0, self._clock()
        while True:
            round_ = self._present(closely=True)
            if self._needs_no_round(round_, own):
                self._entered = None
                return True
            if round_.number != number:
                number, since = round_.number, self._clock()
            late = self._clock() - since > self._ready_timeout
            step = before_pause(round_, self._part(), own, late=late)
            if step == "leave":
                return False
            if step == "pause":
                self._entered = round_.number
                return True
            if step == "begin":
                self._begin(round_, own)
            elif step == "report":
                self._objects.report_ready(round_.number)
                self._round = replace(round_, ready=round_.ready | {self._me})
            elif step == "wait":
                self._wait(self._poll)
            else:
                self._decide_go(round_, commit=step == "commit")

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Say whether they are loaded here, and wait for the round's outcome; ``False``: generation stays held.

        It is not left off when the receiver is told to stop: ``load_timeout`` bounds it. Raises ``StorageError`` when
        the store is out of reach for longer than that, ``CorruptObject`` when an object stays damaged so long.
        """
        own, round_ = _choice(weights), self._round
        if self._entered is None:
            return loaded and round_ is not None and self._needs_no_round(round_, own)
        if round_ is None or round_.number != self._entered or round_.wanted != own:
            return False  # no round told this member to load them
        since = self._clock()
        while True:
            late = self._clock() - since > self._load_timeout
            try:
                step = self._after_load(loaded=loaded, late=late)
            except (StorageError, CorruptObject):  # an answer may be damaged on its way
                if late:
                    raise
                step = "wait"
            if step in ("go-on", "hold"):
                return step == "go-on"
            if step == "wait":
                time.sleep(self._poll)

    def served(self, weights: Weights) -> None:
        """Nothing to say: the round's outcome said it."""

    def _after_load(self, *, loaded: bool, late: bool) -> str:
        round_ = self._look(closely=True)
        step = after_load(round_, self._part(), loaded=loaded, late=late)
        if step == "report":
            self._objects.report_loaded(round_.number, loaded=loaded)
            loads, failed = round_.loaded, round_.not_loaded
            self._round = replace(
                round_,
                loaded=loads | {self._me} if loaded else loads,
                not_loaded=failed if loaded else failed | {self._me},
            )
        elif step in ("resume", "next"):
            self._objects.decide_outcome(round_.number, resume=step == "resume")
        return step

    def _needs_no_round(self, round_: Round, own: Choice) -> bool:
        """Whether a member without an engine, which began anew, has what the group serves: there is nothing to load."""
        return not self._engine and round_.wanted is None and round_.failed is None and round_.served == own

    # Looking, and doing

    def _part(self) -> Part:
        complete = self._members is not None and len(self._members.members) == self._size
        return Part(self._me, self.leads, self._members.ids if self._members is not None and complete else None)

    def _begin(self, round_: Round, choice: Choice) -> None:
        self._objects.begin(round_.number, wanted=choice, served=round_.served, failed=round_.failed)

    def _decide_go(self, round_: Round, *, commit: bool) -> None:
        if commit:
            self._members = self._ledger.newest()  # it may be another one's place by now
            members = self._part().members
            if members is None or not members <= round_.ready:
                return
        else:
            members = frozenset()
            missing = sorted((self._part().members or frozenset()) - round_.ready) if self.leads else []
            about = f"; not ready: {', '.join(missing)}" if missing else ""
            tell("round", f"Round {round_.number} of {self._name} takes too long{about}.", round=round_.number)
        self._objects.decide_go(round_.number, commit=commit, members=members)
        if commit:
            self._objects.clean(round_.number)

    def _present(self, *, closely: bool = False) -> Round:
        """Return the round that is not over, as it is now."""
        if self._round is None:
            self._round = self._find()
        while is_over(round_ := self._look(closely=closely)):
            if round_.outcome is False and round_.wanted is not None and round_.wanted != round_.served:
                self._refused.add(round_.wanted.commit_id)
            self._round = following(round_)
            self._members = self._ledger.newest()
        return round_

    def _find(self) -> Round:
        number = self._objects.newest()
        wanted = self._objects.wanted(number) if number else None
        if number and wanted is None:
            raise StorageError(f"Round {number} of {self._name} was listed, and is not there.", key=self._name)
        return Round(number, wanted.served, wanted.failed) if wanted is not None else Round(1)

    def _look(self, *, closely: bool) -> Round:
        """Read what may have come since the last look; ``closely``: where this member decides, what others said too."""
        known = self._round
        assert known is not None  # noqa: S101 - told to the type checker
        if known.wanted is None:
            begun = self._objects.wanted(known.number)
            if begun is None:
                return known
            known = Round(known.number, begun.served, begun.failed, begun.wanted)
        closely = closely and self.leads
        if closely:
            self._call_the_roll()
        members = self._part().members or frozenset()
        if known.go is None:
            if closely:
                said = {one for one in members - known.ready if self._objects.ready(known.number, one)}
                known = replace(known, ready=known.ready | said)
            go = self._objects.go(known.number)
            known = replace(known, go=go.commit if go is not None else None)
        elif known.go and known.outcome is None:
            if closely:
                known = self._with_loaded(known, members)
            outcome = self._objects.outcome(known.number)
            known = replace(known, outcome=outcome.resume if outcome is not None else None)
        self._round = known
        return known

    def _with_loaded(self, known: Round, members: frozenset[str]) -> Round:
        said = {one: self._objects.loaded(known.number, one) for one in members - known.loaded - known.not_loaded}
        return replace(
            known,
            loaded=known.loaded | {one for one, loaded in said.items() if loaded},
            not_loaded=known.not_loaded | {one for one, loaded in said.items() if loaded is False},
        )

    def _call_the_roll(self) -> None:
        """Read now and then who the members are: not all may have joined, or one took another's place."""
        self._looks += 1
        if self._part().members is None or self._looks % _LOOKS_PER_ROLL_CALL == 0:
            self._members = self._ledger.newest()


def _choice(weights: Weights) -> Choice:
    return Choice(weights.version, weights.commit_id)
