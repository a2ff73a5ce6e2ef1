"""Activating a version on an engine: the states, and what each event leads to. receiver/serving.py carries it out.

Before the pause nothing has changed: a failure leaves the engine with what it served. After it the load is tried again,
then the version before is loaded back; if that fails too the engine is *latched*: it stays paused. It is never resumed
on weights that were not confirmed in that incarnation. docs/activation.md has the diagram.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deltastore.errors import DeltastoreError

    from .engines import InFlight, Probe

__all__ = [
    "PREPARED",
    "UNKNOWN",
    "Activation",
    "AtDeadline",
    "Case",
    "Coordinator",
    "Event",
    "Goal",
    "Outcome",
    "Policy",
    "Progress",
    "Solo",
    "State",
    "Step",
    "Weights",
    "advance",
    "keeps_kv",
]

#: ``preparing`` goes before all this: the version is put in place on the disk.
State = Literal[
    "idle",
    "preparing",
    "prepared",
    "waiting",
    "draining",
    "paused",
    "loading",
    "confirming",
    "resuming",
    "serving",
    "latched",
]
#: What is to be done next. ``look`` asks the engine how it is, ``ask``, ``settle`` and ``report`` ask or tell the
#: coordinator, ``release`` takes a pause back under which nothing was loaded, ``rest`` is nothing: it has ended.
Step = Literal["look", "ask", "pause", "load", "confirm", "probe", "settle", "resume", "report", "release", "rest"]
#: A look ends with ``held``, ``running``, ``other`` (another incarnation, or after a resume another
#: version) or ``gone`` (no answer); a pause also with ``timed-out`` (its drain); a coordinator also with ``refused``.
Event = Literal["done", "failed", "timed-out", "refused", "held", "running", "other", "gone"]
Goal = Literal["wanted", "fallback"]
#: ``refused``, ``given-up`` and ``failed`` leave the engine with what it served. ``lost``: it went away, restarted or
#: cannot be held. ``undecided``: loaded, confirmed and held, and the coordinator is out of reach. The next pass begins
#: again with all of these, and with ``latched``.
Outcome = Literal["activated", "rolled-back", "latched", "refused", "given-up", "failed", "lost", "undecided"]
AtDeadline = Literal["abort", "keep", "give-up"]


@dataclass(frozen=True, slots=True)
class Weights:
    """A version, its label ``<stream id>/<version>``, and the directory that holds it."""

    label: str
    version: int
    commit_id: str
    directory: Path


class Coordinator(Protocol):
    """Who decides that weights are activated, and when generation may go on.

    All may raise ``StorageError``, and the daemon's ``Stopped`` when told to end.
    """

    def may_pause(self, weights: Weights) -> bool:
        """Say that they are prepared here, and wait for the decision: pause and load them, or leave them."""
        ...

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Say whether they are loaded and confirmed here, and wait for all others.

        ``True``: generation goes on. ``False``: it stays held and the weights before are loaded; their own
        ``may_resume`` follows.
        """
        ...

    def served(self, weights: Weights) -> None:
        """Say that generation goes on with them."""
        ...


class Solo:
    """One engine alone: everything at once."""

    def may_pause(self, weights: Weights) -> bool:
        """Agree."""
        del weights
        return True

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Agree if they are loaded."""
        del weights
        return loaded

    def served(self, weights: Weights) -> None:
        """Hear it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator decides. ``drain_deadline`` is in seconds; ``tries`` are those of one version in one pause.

    ``at_deadline`` is what happens to requests that have not ended by then: they are ended, they are frozen and go on
    with the new weights, or (``give-up``) the old weights go on being served and the next pass tries again.
    """

    in_flight: InFlight = "wait"
    drain_deadline: float = 30.0
    at_deadline: AtDeadline = "keep"
    keep_kv: bool = False
    unsafe_keep_kv: bool = False
    tries: int = 2

    def check(self) -> None:
        """Raise ``UsageError`` for what cannot be right, unless the operator has said it twice."""
        if self.keep_kv and not self.unsafe_keep_kv:
            running = " Requests that run on would mix both in one answer." if self.in_flight == "keep" else ""
            raise UsageError(
                f"The KV cache of old weights is wrong under new ones.{running}",
                hint="Leave --kv-cache at flush, or add --unsafe-keep-kv if you mean it.",
            )
        if self.tries < 1 or not self.drain_deadline >= 0:
            raise UsageError("A policy needs a try, and a deadline that is not negative.", hint="Give such ones.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What an activation has to do with: a version to go back to, and an engine that probes while it is paused."""

    fallback: bool
    probes_paused: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an activation stands.

    ``unknown``: the engine is not known to serve what it confirmed: it is fresh, was found paused, or a load was begun;
    then only a confirmed load leads to a resume. ``tries`` and ``pauses`` are those made for the goal.
    """

    state: State
    step: Step
    goal: Goal = "wanted"
    in_flight: InFlight = "wait"
    tries: int = 0
    pauses: int = 0
    unknown: bool = False
    probed: bool = False
    outcome: Outcome | None = None


#: Where an activation begins, with an engine that is known to serve what it confirmed, and with any other.
PREPARED = Progress("prepared", "look")
UNKNOWN = Progress("prepared", "look", unknown=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How it ended, and with which weights served (``None``: what was served before, or nothing).

    ``stages`` are seconds. ``paused_seconds`` go from the call that pauses to the answer that generation goes on.
    """

    outcome: Outcome
    weights: Weights | None
    stages: Mapping[str, float]
    paused_seconds: float
    probe: Probe | None = None
    error: DeltastoreError | None = None


def advance(progress: Progress, event: Event, *, policy: Policy, case: Case) -> Progress:
    """Return where an event leads to, and with it what to do next. An event that cannot come is a ``ValueError``."""
    return _AFTER[progress.step](progress, event, policy, case)


def keeps_kv(progress: Progress, policy: Policy) -> bool:
    """Tell whether a load leaves the caches: only the first one, for after another nobody knows what is in them."""
    return policy.keep_kv and progress.goal == "wanted" and progress.tries == 0


def _ended(state: State, outcome: Outcome, goal: Goal = "wanted") -> Progress:
    return Progress(state, "rest", goal, outcome=outcome)


def _over(progress: Progress, event: Event, _policy: Policy, _case: Case) -> Progress:
    raise ValueError(f"{event} after the end, in the state {progress.state}")


def _looked(progress: Progress, event: Event, policy: Policy, case: Case) -> Progress:
    if progress.state == "prepared":
        if event not in ("held", "running"):
            return _ended("idle", "lost")
        return replace(
            progress,
            state="waiting",
            step="ask",
            in_flight=policy.in_flight,
            unknown=progress.unknown or event == "held",
        )
    if progress.state == "paused":
        return _looked_while_paused(progress, event, policy)
    return _looked_after_the_resume(progress, event, policy, case)


def _decided(progress: Progress, event: Event, _policy: Policy, case: Case) -> Progress:
    if event == "done":
        return replace(progress, state="draining", step="pause")
    if event == "failed":
        return _ended("idle", "failed")
    if not progress.unknown:
        return _ended("idle", "refused")
    # What it was paused for, or is to be loaded after a restart, is off: it must not stay as it is.
    if case.fallback:
        return replace(progress, state="draining", step="pause", goal="fallback")
    return _ended("latched", "latched")


def _paused(progress: Progress, event: Event, policy: Policy, _case: Case) -> Progress:
    if event == "done":
        return replace(progress, state="paused", step="look")
    if event == "timed-out" and progress.in_flight == "wait":
        if policy.at_deadline == "give-up" and not progress.unknown:
            return replace(progress, state="resuming", step="release", outcome="given-up")
        # Of unknown weights there is nothing to go on with.
        return replace(progress, in_flight="keep" if policy.at_deadline == "give-up" else policy.at_deadline)
    if progress.unknown:
        return replace(progress, state="paused", step="look", pauses=progress.pauses + 1)
    return replace(progress, state="resuming", step="release", outcome="failed")


def _looked_while_paused(progress: Progress, event: Event, policy: Policy) -> Progress:
    """Nothing is loaded into an engine that is not held, whatever its pause answered."""
    if event == "held":
        if progress.tries < policy.tries:
            return replace(progress, state="loading", step="load", unknown=True, probed=False)
        return replace(progress, step="report")
    if event == "gone" or progress.pauses >= policy.tries:
        return replace(progress, step="report", outcome="lost")
    return replace(progress, state="draining", step="pause", pauses=progress.pauses + 1, unknown=True)


def _loaded(progress: Progress, event: Event, _policy: Policy, _case: Case) -> Progress:
    return replace(progress, state="confirming", step="confirm") if event == "done" else _again(progress)


def _confirmed(progress: Progress, event: Event, _policy: Policy, case: Case) -> Progress:
    if event != "done":
        return _again(progress)
    return replace(progress, step="probe") if case.probes_paused else replace(progress, state="resuming", step="settle")


def _probed(progress: Progress, event: Event, _policy: Policy, _case: Case) -> Progress:
    late = progress.state == "resuming"
    if event == "done":
        return replace(progress, state="resuming", step="look" if late else "settle", probed=True)
    if late:  # what runs on such weights is worth nothing
        return replace(progress, state="draining", step="pause", in_flight="abort", tries=progress.tries + 1)
    return _again(progress)


def _again(progress: Progress) -> Progress:
    return replace(progress, state="paused", step="look", tries=progress.tries + 1)


def _settled(progress: Progress, event: Event, _policy: Policy, case: Case) -> Progress:
    if progress.outcome is not None:  # it never was paused, and serves what it did
        return _ended("idle", progress.outcome)
    if event == "done":
        return replace(progress, step="resume")
    if event == "failed":
        return _ended("paused", "undecided", progress.goal)
    return _go_back(progress, case)


def _resumed(progress: Progress, event: Event, _policy: Policy, _case: Case) -> Progress:
    # One that failed may have let it go on for all that.
    return replace(progress, step="look", tries=progress.tries + (event != "done"))


def _looked_after_the_resume(progress: Progress, event: Event, policy: Policy, case: Case) -> Progress:
    if progress.outcome is not None:  # released, or not
        return replace(
            progress, state="idle", step="report", outcome=progress.outcome if event == "running" else "lost"
        )
    if event == "running":
        if progress.probed or case.probes_paused:
            return _ended("serving", "activated" if progress.goal == "wanted" else "rolled-back", progress.goal)
        return replace(progress, step="probe")
    if event == "held":  # the same incarnation and version: it still has what was confirmed
        if progress.tries < policy.tries:
            return replace(progress, step="resume", tries=progress.tries + 1)
        return replace(progress, state="paused", step="report")
    return _ended("idle", "lost", progress.goal)


def _released(progress: Progress, _event: Event, _policy: Policy, _case: Case) -> Progress:
    return replace(progress, step="look")


def _reported(progress: Progress, _event: Event, _policy: Policy, case: Case) -> Progress:
    if progress.outcome is None:
        return _go_back(progress, case)
    if progress.outcome != "lost" and case.fallback:  # the others go back to what is served here
        return replace(progress, step="settle", goal="fallback")
    return _ended("idle", progress.outcome, progress.goal)


def _go_back(progress: Progress, case: Case) -> Progress:
    if progress.goal == "wanted" and case.fallback:
        return replace(progress, state="paused", step="look", goal="fallback", tries=0, pauses=0)
    return _ended("latched", "latched", progress.goal)


_AFTER: dict[Step, Callable[[Progress, Event, Policy, Case], Progress]] = {
    "rest": _over,
    "look": _looked,
    "ask": _decided,
    "pause": _paused,
    "load": _loaded,
    "confirm": _confirmed,
    "probe": _probed,
    "settle": _settled,
    "resume": _resumed,
    "release": _released,
    "report": _reported,
}
