"""The engine as the daemon sees it: made to serve the live slot, and asked whether it still does.

What is done in which order is decided by receiver/activation.py; here it is done, and timed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, DrainTimeout, EngineError, SelfTestFailed

from .activation import PREPARED, UNKNOWN, Activation, Case, Weights, advance, keeps_kv
from .logs import seconds_text, tell, tell_failure
from .probing import agree, judge
from .stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from .activation import Coordinator, Event, Policy, Progress
    from .engines import Engine, EngineInfo, Probe
    from .probing import Expected
    from .rollback import Rollback
    from .slots import LiveSlot
    from .status import Status

__all__ = ["Serving", "weights_of"]


def weights_of(slot: LiveSlot) -> Weights:
    """Return a slot's version as the engine and its coordinator know it."""
    record = slot.record
    return Weights(f"{record.stream_id}/{record.version}", record.version, record.commit_id, slot.directory)


class Serving:
    """One engine, the version that it confirmed, and the versions that it refused.

    No activation begins once ``stopped``. ``changed`` tells in which share of their elements two versions differ, or
    ``None`` where that cannot be told now. ``link``: what the engine loads instead of the slot: on the hosts of one
    engine the same version may be in different slots.
    """

    def __init__(
        self,
        engine: Engine,
        status: Status,
        *,
        policy: Policy,
        coordinator: Coordinator,
        stopped: Callable[[], bool],
        changed: Callable[[int, int], float | None],
        expected: Mapping[str, Expected] | None = None,
        link: Path | None = None,
    ) -> None:
        self._engine = engine
        self._status = status
        self._policy = policy
        self._coordinator = coordinator
        self._stopped = stopped
        self._changed = changed
        self._expected = expected or {}
        self._link = link
        self._confirmed: tuple[str, str] | None = None  # incarnation and label that the engine last confirmed
        self._probed: tuple[Weights, Probe] | None = None  # of what was served last
        self._awaits_first = False
        self._refused: set[str] = set()  # commit ids that the engine could not load
        self._lost: Counter[str] = Counter()  # commit ids, and how often the engine went away over them
        self._activating = threading.Lock()  # held while an activation goes on

    def serve(self, live: LiveSlot, rollback: Rollback) -> None:
        """Make sure that the engine serves the live slot.

        A restarted or paused engine is loaded and confirmed again. When it refuses the version, ``rollback`` goes back
        to the one before. Raises ``DamagedSlot`` when the live slot is not what it was; ``EngineError`` when the engine
        does not answer, or stays paused; ``StorageError`` when the coordinator cannot tell; ``Stopped``.
        """
        info = self._ask()
        weights = self._weights(live)
        if info.paused or self._confirmed != (info.incarnation, info.version):
            self.doubt()
        elif info.version == weights.label and not self._coordinator.due(weights):
            self._look_for_first_tokens()
            self._coordinator.served(weights)
            return
        if not self._coordinator.concerns(weights):
            self._status.enter("waiting")
            return
        rollback.verify(live)
        result = self._activate(live, rollback)
        waits = result.outcome == "latched" and result.error is None  # for the others, and for what they decide next
        if result.outcome not in ("activated", "rolled-back", "refused") and not waits:
            raise _error(result)

    def _weights(self, live: LiveSlot) -> Weights:
        weights = weights_of(live)
        return weights if self._link is None else replace(weights, directory=self._link)

    def available(self) -> bool:
        """Tell whether the engine serves a version, whichever; one that does not answer does not."""
        try:
            info = self._engine.info()
        except EngineError:
            return False
        return info.version is not None and not info.paused

    def _look_for_first_tokens(self) -> None:
        """Note how long after its resume the engine gave a token again, where it can tell; it may not know yet.

        One that does not answer here fails no pass: the next one asks how it is, before anything is believed of it.
        """
        if self._awaits_first and (first_tokens := getattr(self._engine, "first_tokens", None)) is not None:
            seconds = None
            with suppress(EngineError):
                seconds = first_tokens()
            if seconds is not None:
                self._status.first_tokens(seconds)
                self._awaits_first = False

    def self_test(self, live: LiveSlot, rollback: Rollback) -> None:
        """Reload the live version under a pause, and compare what the engine gives before and after.

        What it gives before counts if it was loaded in this incarnation, or the engine is fresh (which then has to be
        started on the live slot); else it is reloaded twice. Raises ``SelfTestFailed``, the engine being left as after
        any activation that failed; ``EngineError`` when it does not answer.
        """
        info, weights = self._ask(), weights_of(live)
        before: Probe | None = None
        if info.version in (None, weights.label) and (not info.paused or self._engine.probes_paused):
            before = self._engine.probe()
        for _ in range(1 if before is not None else 2):
            result = self._activate(live, rollback, reference=before)
            if result.outcome in ("rolled-back", "latched") or (result.outcome == "activated" and not result.probe):
                told = "the engine has no probe" if result.error is None else str(result.error)
                raise SelfTestFailed(
                    f"The engine cannot reload the version that it is at, {weights.label}: {told.rstrip('.')}.",
                    key=weights.label,
                    hint="Start the engine afresh on the live slot (the link, resolved). If it fails again, it cannot "
                    "follow a stream: another engine, precision or quantization.",
                )
            if result.outcome != "activated":
                raise _error(result)
            before = result.probe
        tell("self-test", f"The engine reloads {weights.label} as it was.", version=weights.version)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Note that a version is put in place meanwhile; what the engine serves stays as it is."""
        before = self._status.activation
        self._status.activates("preparing")
        try:
            yield
        except BaseException:
            self._status.activates(before)
            raise
        self._status.activates("prepared")

    def doubt(self) -> None:
        """Believe nothing of what the engine serves until it confirms again."""
        self._confirmed = self._status.serving = None

    def latch(self, error: DeltastoreError) -> None:
        """Note why an engine that is held stays so: nothing that is here may be loaded. Raises ``EngineError``."""
        self.doubt()
        held = self._engine.info().paused
        self._status.latches(f"The engine stays paused: {error}" if held else None)

    def has_refused(self, commit_id: str) -> bool:
        """Tell whether a version is left alone because the engine could not load it."""
        return commit_id in self._refused

    def forget_refusals(self) -> None:
        """Give the versions that the engine refused another try."""
        self._refused.clear()
        self._lost.clear()

    def hold(self) -> None:
        """Return when no activation is going on; none begins after this. May be called from any thread."""
        self._activating.acquire()

    def close(self) -> None:
        """Let go of the engine, which goes on as it is."""
        self._engine.close()

    def _ask(self) -> EngineInfo:
        """Ask the engine how it is; one that does not answer serves nothing that we know of."""
        try:
            return self._engine.info()
        except EngineError:
            self.doubt()
            raise

    def _activate(self, live: LiveSlot, rollback: Rollback, *, reference: Probe | None = None) -> Activation:
        wanted = self._weights(live)
        with self._activating:
            if self._stopped():
                raise Stopped
            self._status.enter("activating")
            other = rollback.previous() if self._coordinator.goes_back else None
            if other is not None and other.record.commit_id in self._refused:
                other = None
            run = _Run(
                self._engine,
                self._coordinator,
                self._policy,
                wanted,
                weights_of(other) if other else None,
                entered=self._entered,
                judge=self._judge(wanted, other, reference),
            )
            result = run.activate(UNKNOWN if self._confirmed is None else PREPARED)
            self._settle(result, wanted, run.incarnation, rollback, nbytes=sum(file.size for file in live.record.files))
            return result

    def _judge(
        self, wanted: Weights, other: LiveSlot | None, reference: Probe | None
    ) -> Callable[[Probe, Weights], None]:
        """Return what judges probes; how much changed is looked up here, before anything is paused."""
        before = self._probed
        shares = {
            weights.label: self._changed(before[0].version, weights.version)
            for weights in (wanted, weights_of(other) if other else wanted)
            if before is not None and before[0].commit_id != weights.commit_id
        }

        def look(probe: Probe, weights: Weights) -> None:
            same = before is None or before[0].commit_id == weights.commit_id
            odd = judge(
                probe,
                weights,
                before=None if same or before is None else before[1],
                changed=shares.get(weights.label),
                expected=self._expected,
            )
            if odd is not None:
                tell("probe", f"Engine: {odd}.", level=logging.WARNING, version=weights.version)
            if reference is not None and weights == wanted and not agree(probe, reference):
                raise EngineError(
                    f"the probe differs before and after a reload of {weights.label}",
                    key=weights.label,
                    hint="an engine that was started on the live slot; else it cannot reload this model.",
                )

        return look

    def _entered(self, progress: Progress) -> None:
        self._status.activates(progress.state)
        if progress.state == "paused":
            self.doubt()

    def _settle(
        self, result: Activation, wanted: Weights, incarnation: str, rollback: Rollback, *, nbytes: int
    ) -> None:
        """Note how an activation of a version of so many bytes ended."""
        self._status.activated(result, nbytes=nbytes)
        tell(
            "activated",
            f"Engine: {result.outcome}, {result.weights.label if result.weights else 'as it was'} "
            f"({seconds_text(result.stages)}).",
            level=_LEVELS.get(result.outcome, logging.WARNING),
            outcome=result.outcome,
            version=result.weights.version if result.weights else None,
            paused_seconds=result.paused_seconds,
            stages=dict(result.stages),
        )
        if result.outcome == "lost":
            self.doubt()
            self._lost[wanted.commit_id] += "load" in result.stages
        if result.weights is not None:
            self._awaits_first = True
            self._confirmed = (incarnation, result.weights.label)
            self._status.serving = result.weights.version
            self._probed = (result.weights, result.probe) if result.probe is not None else None
        if result.outcome == "rolled-back" or self._lost[wanted.commit_id] >= self._policy.tries:
            self._leave_alone(wanted, result.error, rollback)

    def _leave_alone(self, weights: Weights, error: DeltastoreError | None, rollback: Rollback) -> None:
        """Make the version before the live one again; without one there is nothing else to serve."""
        other = rollback.previous() if self._coordinator.goes_back else None
        if other is None or other.record.commit_id in self._refused:
            return
        self._refused.add(weights.commit_id)
        rollback.go_back()
        self._status.version = other.record.version
        if error is not None:
            self._status.failed(error)
            tell_failure(error, "That version is left alone.", version=weights.version)


_LEVELS = {"activated": logging.INFO, "refused": logging.INFO, "latched": logging.ERROR}


def _error(result: Activation) -> DeltastoreError:
    if result.error is None:
        return EngineError("The engine restarted, or was resumed, in the middle of an activation.", hint="Wait.")
    if result.outcome == "latched":
        return EngineError(
            f"The engine stays paused, for it could load neither version: {result.error}",
            key=result.error.key,
            hint="Mend it and restart it; it is tried again meanwhile.",
        )
    return result.error


@dataclass(slots=True)
class _Run:
    """One activation: does what ``advance`` says until it says that there is nothing more."""

    engine: Engine
    coordinator: Coordinator
    policy: Policy
    wanted: Weights
    fallback: Weights | None
    entered: Callable[[Progress], None]
    judge: Callable[[Probe, Weights], None]
    incarnation: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    probe: Probe | None = None
    error: DeltastoreError | None = None
    paused_at: float | None = None
    resumed_at: float | None = None

    def activate(self, progress: Progress) -> Activation:
        """Begin there, and return how it ended. Raises ``Stopped`` where the coordinator does."""
        case = Case(fallback=self.fallback is not None, probes_paused=self.engine.probes_paused)
        while progress.step != "rest":
            self.entered(progress)
            event = self._take(progress)
            progress = advance(progress, event, policy=self.policy, case=case)
        self.entered(progress)
        served = self._goal(progress) if progress.state == "serving" else None
        if served is not None:
            self._told(lambda: self.coordinator.served(served))
        until = self.resumed_at if self.resumed_at is not None else time.perf_counter()
        return Activation(
            outcome=progress.outcome or "lost",
            weights=served,
            stages=self.stages,
            paused_seconds=0.0 if self.paused_at is None else until - self.paused_at,
            probe=self.probe if served is not None else None,
            error=None if progress.outcome == "activated" else self.error,
        )

    def _goal(self, progress: Progress) -> Weights:
        weights = self.wanted if progress.goal == "wanted" else self.fallback
        assert weights is not None  # noqa: S101 - a goal only where there is one
        return weights

    def _take(self, progress: Progress) -> Event:
        """Do the next step; returns what came of it."""
        with self._timed(_stage(progress)):
            try:
                return _STEPS[progress.step](self, progress)
            except DrainTimeout as error:
                self.error = self.error or error
                return "timed-out"
            except DeltastoreError as error:
                self.error = self.error or error
                return "gone" if progress.step == "look" else "failed"

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - started

    # One step each

    def _look(self, progress: Progress) -> Event:
        info = self.engine.info()
        if progress.state == "prepared":
            self.incarnation = info.incarnation
        elif info.incarnation != self.incarnation:
            self.incarnation = info.incarnation
            return "other"
        elif progress.state == "resuming" and progress.outcome is None and info.version != self._goal(progress).label:
            return "other"
        return "held" if info.paused else "running"

    def _ask(self, progress: Progress) -> Event:
        return "done" if self.coordinator.may_pause(self._goal(progress)) else "refused"

    def _pause(self, progress: Progress) -> Event:
        if self.paused_at is None:
            self.paused_at = time.perf_counter()
        waits = progress.in_flight == "wait"
        self.engine.pause(progress.in_flight, timeout=self.policy.drain_deadline if waits else None)
        return "done"

    def _load(self, progress: Progress) -> Event:
        weights = self._goal(progress)
        keep_kv = keeps_kv(progress, self.policy)
        self.engine.load(weights.directory, version=weights.label, keep_kv=keep_kv)
        return "done"

    def _confirm(self, progress: Progress) -> Event:
        self.engine.confirm(self._goal(progress).label)
        return "done"

    def _probe(self, progress: Progress) -> Event:
        self.probe = None
        probe = self.engine.probe()
        if probe is not None:
            self.judge(probe, self._goal(progress))
            self.probe = probe
        return "done"

    def _settle(self, progress: Progress) -> Event:
        return "done" if self.coordinator.may_resume(self._goal(progress), loaded=True) else "refused"

    def _report(self, progress: Progress) -> Event:
        return "done" if self.coordinator.may_resume(self._goal(progress), loaded=False) else "refused"

    def _resume(self, progress: Progress) -> Event:
        del progress
        self.engine.resume()
        self.resumed_at = time.perf_counter()
        return "done"

    def _told(self, tell_them: Callable[[], None]) -> None:
        try:
            with self._timed("barrier"):
                tell_them()
        except DeltastoreError as error:  # a record that is damaged, too: the next pass says so again, and why
            tell_failure(error, "The engine serves for all that.")


_STEPS: Mapping[str, Callable[[_Run, Progress], Event]] = {
    "look": _Run._look,  # noqa: SLF001 - this module's own
    "ask": _Run._ask,  # noqa: SLF001
    "pause": _Run._pause,  # noqa: SLF001
    "load": _Run._load,  # noqa: SLF001
    "confirm": _Run._confirm,  # noqa: SLF001
    "probe": _Run._probe,  # noqa: SLF001
    "settle": _Run._settle,  # noqa: SLF001
    "resume": _Run._resume,  # noqa: SLF001
    "release": _Run._resume,  # noqa: SLF001
    "report": _Run._report,  # noqa: SLF001
}


def _stage(progress: Progress) -> str:
    """Return the stage that a step's seconds belong to."""
    if progress.step in ("ask", "settle", "report"):
        return "barrier"
    if progress.step == "pause" and progress.in_flight == "wait":
        return "drain"
    if progress.step == "release":
        return "resume"
    if progress.step == "look":
        return "resume" if progress.state == "resuming" else "pause"
    return progress.step
