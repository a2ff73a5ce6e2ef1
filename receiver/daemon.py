"""The receiver's loop: follow, patch, activate; back off when something fails, and go on serving what is there."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from msgspec import structs

from deltastore.errors import (
    DamagedSlot,
    DeltastoreError,
    EngineError,
    SlotError,
    StorageError,
    StoreNotFound,
    UsageError,
    VersionForgotten,
    VersionNotFound,
)
from deltastore.heartbeat import Heartbeat, is_receiver_id, is_word
from deltastore.limits import Bandwidth, Limits, within_budget
from deltastore.patch import default_workers
from deltastore.reader import open_store

from .activation import Weights, activate
from .control import Control, read_control, write_control
from .engines import make_engine
from .fleet import Heartbeats, own_id
from .follower import Follower, check_target
from .logs import tell
from .patcher import Patcher
from .priority import Priority
from .repair import repair
from .scrub import Scrub
from .slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deltastore.manifest import Manifest
    from deltastore.reader import Store

    from .engines import Engine, EngineInfo
    from .repair import Repaired
    from .slots import LiveSlot
    from .status import Status

__all__ = ["Options", "Receiver", "Stopped", "wait_unless"]

_LONGEST_PAUSE = 60.0
_WAIT_STEP = 0.1
#: Far beyond the longest pause, and far below where a float overflows: a store may be gone for days.
_MOST_DOUBLINGS = 32


class Stopped(Exception):
    """Raised out of a patch when the receiver was told to stop; the live slot is untouched."""


class _Overtaken(Exception):
    """Raised out of a patch when an operator wants something else now; the live slot is untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an operator decides. Sizes are in bytes; ``max_bandwidth``, ``scrub_rate`` (0: never) in bytes a second.

    ``poll`` is in seconds, and so is ``heartbeat`` (``None``: no heartbeats are sent).
    """

    store: str
    checkpoint: Path
    base: Path | None = None
    target: str = "latest"
    poll: float = 1.0
    engine: str = "none"
    engine_url: str | None = None
    engine_options: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, object] = field(default_factory=dict)
    cache: str | Path | None = None
    cache_bytes: int | None = None
    trusted_keys: tuple[str, ...] | None = None
    workers: int | None = None
    max_bandwidth: int | None = None
    memory_budget: int | None = None
    nice: int | None = None
    io_priority: str | None = None
    durability: str = "version"
    unsafe_file_system: bool = False
    scrub_rate: int = 0
    group: str | None = None
    receiver_id: str | None = None
    heartbeat: float | None = None


class Receiver:
    """One checkpoint, one engine.

    ``once`` makes one pass; ``run`` follows until ``stop`` is called (from any thread).
    """

    def __init__(self, options: Options, status: Status) -> None:
        check_target(options.target)
        if options.receiver_id is not None and not is_receiver_id(options.receiver_id):
            raise UsageError(
                f"{options.receiver_id!r} is no id of a receiver.",
                hint="Use letters, digits, dots, dashes: 128 at most.",
            )
        if options.group is not None and not is_word(options.group):
            raise UsageError(
                f"{options.group!r} is no group's name.", hint="Use printable ASCII, at most 255 characters."
            )
        self._options = options
        self._status = status
        self._status.group = options.group
        self._slots = Slots(
            options.checkpoint,
            durable=options.durability == "version",
            any_place=options.unsafe_file_system,
            sleep=self._throttle,
        )
        self._engine: Engine = make_engine(options.engine, url=options.engine_url, options=options.engine_options)
        rate = options.scrub_rate
        self._scrub = Scrub(self._slots.directory / "scrub.json", rate=rate) if rate else None
        # A signal's handler sets both, in the thread that waits for them: an Event's lock would not bear that.
        self._stopping = False
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._confirmed: tuple[str, str] | None = None  # incarnation and version that the engine last confirmed
        self._refused: set[str] = set()  # commit ids that the engine could not load
        self._activating = threading.Lock()  # held while an activation goes on
        self._control_lock = threading.Lock()
        self._control: Control | SlotError = Control()  # an error while it cannot be known
        self._heeded: Control | SlotError | None = None  # the one that the follower was made for
        self._begun = False
        self._in_touch = False
        self._mending = False
        self._priority = Priority(nice=options.nice, io=options.io_priority)
        self._limits = self._share_out()

    def _share_out(self) -> Limits:
        options = self._options
        rate = options.max_bandwidth
        bandwidth = None if rate is None else Bandwidth(rate, sleep=self._throttle)
        if options.memory_budget is None:
            return Limits(workers=options.workers, bandwidth=bandwidth)
        return within_budget(
            options.memory_budget,
            workers=options.workers,
            cores=default_workers(),
            whole_parts=options.cache is not None,
            bandwidth=bandwidth,
        )

    def _throttle(self, seconds: float) -> None:
        """Wait for bandwidth, or for room, unless something else is wanted by then."""
        wait_unless(lambda: self._stopping, seconds)
        self._check()

    # From other threads

    def stop(self) -> None:
        """End ``run`` soon: a patch going on is left off, an activation is brought to its end, and none begins.

        May be called from a signal's handler.
        """
        self._stopping = True
        self._woken.put(None)

    def wake(self) -> None:
        """Look at the store now."""
        self._woken.put(None)

    def hold_activations(self) -> None:
        """Return when no activation is going on; none begins after this. For whoever is about to end the process."""
        self._activating.acquire()

    def pin(self, target: str) -> Control:
        """Follow another target from now on, also after a restart; the configured one takes the pin away.

        Raises ``UsageError``, ``StorageError`` when it cannot be written down, ``SlotError`` before the start.
        """
        check_target(target)
        return self._order(pinned=None if target == self._options.target else target)

    def pause_following(self) -> Control:
        """Stay at what is live until ``resume_following``, also after a restart; raises as ``pin`` does."""
        return self._order(paused=True)

    def resume_following(self) -> Control:
        """Follow again; raises as ``pin`` does, and ``SlotError`` while it is not known whether there is a pin."""
        return self._order(paused=False)

    def _order(self, **changes: str | bool | None) -> Control:
        with self._control_lock:
            if not self._begun:
                raise SlotError("The receiver has not begun yet.", hint="Say it again in a moment.")
            before = self._control
            if isinstance(before, SlotError):
                if "pinned" not in changes:
                    raise before
                before = Control()
            control = structs.replace(before, **changes)
            if control == before and not isinstance(self._control, SlotError):
                return control
            write_control(self._control_path, control)
            self._control = control
        self._status.controlled(control, wanted=control.pinned or self._options.target)
        tell(
            "control",
            f"An operator has it {'pause' if control.paused else 'follow'}, at "
            f"{control.pinned or self._options.target}{' (pinned)' if control.pinned else ''}.",
            pinned=control.pinned,
            paused=control.paused,
        )
        self._woken.put(None)
        return control

    @property
    def _control_path(self) -> Path:
        return self._slots.directory / "control.json"

    # The two ways to work

    def once(self) -> None:
        """Bring checkpoint and engine to the wanted version. Raises what stands in the way."""
        self._slots.lock()
        try:
            self._recall()
            self._begin(self._open_store())
            self._step()
            if self._status.error is not None:
                raise self._status.error
            if self._status.version is None:
                raise SlotError(
                    f"Following is paused, and there is nothing at {self._slots.link} yet.",
                    key=str(self._control_path),
                    hint="`receiver resume-following` on a running receiver, or remove that file.",
                )
        finally:
            self._let_go()

    def run(self, *, url: str | None = None) -> None:
        """Follow the stream until told to stop.

        Only what an operator has to mend is raised; all else is tried again.
        """
        self._slots.lock(url=url)
        heartbeats: Heartbeats | None = None
        clean = False
        try:
            self._recall()
            self._until_done(self._start)
            heartbeats = self._start_heartbeats()
            while not self._stopping:
                self._until_done(self._step_or_mend)
                self._read_over()
                self._wait(self._options.poll)
            clean = True
        except Stopped:
            clean = True
        finally:
            if heartbeats is not None:
                heartbeats.stop(remove=clean)
            self._let_go()
            if clean:
                tell("stopped", "Stopped.", version=self._status.version)

    def _recall(self) -> None:
        """Heed what an operator told the receiver before this one."""
        with self._control_lock:
            try:
                self._control = read_control(self._control_path)
            except SlotError as error:
                self._control = error
            else:
                self._status.controlled(self._control, wanted=self._control.pinned or self._options.target)
            self._begun = True
        self._status.receiver_id = self._options.receiver_id or own_id(self._slots.directory / "receiver-id")

    def _let_go(self) -> None:
        self._begun = False
        self._slots.unlock()
        self._engine.close()

    def _start_heartbeats(self) -> Heartbeats | None:
        if self._options.heartbeat is None or self._stopping:
            return None
        made = Heartbeats(
            self._store.backend, self._heartbeat, every=self._options.heartbeat, told=self._status.heartbeat
        )
        made.start()
        return made

    def _heartbeat(self) -> Heartbeat | None:
        """Say how it is; nothing while the store is out of reach: a mount that is gone must not be written to."""
        return self._status.heartbeat_record(every=self._options.heartbeat or 0.0) if self._in_touch else None

    def _until_done(self, action: Callable[[], None]) -> None:
        """Do something; after a failure that may pass by itself, again, ever more slowly."""
        failures = 0
        while not self._stopping:
            try:
                action()
            except _Overtaken:
                continue
            except (StorageError, StoreNotFound, VersionNotFound, EngineError) as error:
                self._status.failed(error)
            except DeltastoreError as error:
                if self._status.version is None:  # nothing is served yet: an operator has to look at it
                    raise
                self._status.failed(error)
            else:
                return
            failures += 1
            doubled = self._options.poll * 2.0 ** min(failures, _MOST_DOUBLINGS)
            pause = min(doubled, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
            self._status.retries("pass", pause=pause, failures=failures)
            self._tell_failure(f"Next try in {pause:.1f} s.", failures=failures, next_try_seconds=pause)
            self._wait(pause)

    def _tell_failure(self, what_next: str, **fields: object) -> None:
        error = self._status.error
        if error is not None:
            about = {"error_kind": error.kind, "key": error.key, "hint": error.hint}
            tell("failed", f"{error} {what_next}", level=logging.WARNING, **about, **fields)

    def _wait(self, seconds: float) -> None:
        if self._stopping:
            return
        with suppress(Empty):
            self._woken.get(timeout=seconds)
            while True:
                self._woken.get_nowait()

    # One pass

    def _start(self) -> None:
        store = self._open_store()
        try:
            self._begin(store)
        except (DamagedSlot, SlotError) as error:
            if self._slots.live_name() is None:
                raise
            self._mend(error, lambda: self._begin(store))

    def _step_or_mend(self) -> None:
        try:
            self._step()
        except DamagedSlot as error:
            self._mend(error, self._patcher.adopt)
            self._step()

    def _mend(self, problem: DeltastoreError, adopt: Callable[[], object]) -> None:
        """Mend the live slot and take it over again; an operator's orders wait for that.

        The engine may have loaded what was damaged: it loads and confirms again.
        """
        tell("damaged", f"{problem} It is mended.", level=logging.WARNING, key=problem.key)
        self._status.enter("repairing")
        self._confirmed = self._status.serving = None
        self._mending = True
        try:
            repaired = self._priority.run(self._repair, leave=self.stop)
            self._status.repaired(repaired)
            tell(
                "mended",
                f"Mended {repaired.damaged} chunks of version {repaired.version}.",
                version=repaired.version,
                damaged=repaired.damaged,
                from_other=repaired.from_other,
                from_store=repaired.from_store,
                fetched_bytes=repaired.fetched_bytes,
            )
            adopt()
        finally:
            self._mending = False

    def _repair(self) -> Repaired:
        return repair(
            self._store,
            self._slots,
            base=self._options.base,
            workers=self._limits.workers or default_workers(),
            progress=self._progress,
        )

    def _read_over(self) -> None:
        """Read a few of the live slot's chunks over, as far as the rate allows, and mend what is damaged."""
        live, source = self._slots.live(), self._patcher.source
        if self._scrub is None or live is None or source is None:
            return
        try:
            found = self._scrub.step(live, source, self._store.hash, stopped=lambda: not self._woken.empty())
            record, schema = self._scrub.record, source.checkpoint.schema
            self._status.scrubbed(passed_at=record.passed_at, chunk=record.chunk, chunks=schema.chunks)
            if len(found):
                number = int(found[0])
                name = schema.tensors[int(schema.first_chunk.searchsorted(number, side="right")) - 1].name
                key = str(live.directory)
                self._mend(DamagedSlot(f"A chunk of {name!r} in {key} is damaged.", key=key), self._patcher.adopt)
        except DeltastoreError as error:  # it goes on being served; the next pass tries again
            self._status.failed(error)
            self._tell_failure("The next pass tries again.")

    def _open_store(self) -> Store:
        options = self._options
        return open_store(
            options.store,
            storage_options=options.storage_options,
            cache=options.cache,
            cache_bytes=options.cache_bytes,
            trusted_keys=options.trusted_keys,
            sleep=self._pause,
        )

    def _pause(self, seconds: float) -> None:
        """Wait before the store is asked once more, unless told to stop."""
        self._status.retries("request", pause=seconds)
        wait_unless(lambda: self._stopping, seconds)
        if self._stopping:
            raise Stopped

    def _begin(self, store: Store) -> None:
        """Take over the local checkpoint, whatever state it is in."""
        self._store = store
        self._in_touch = True
        self._patcher = Patcher(
            store,
            self._slots,
            base=self._options.base,
            workers=self._limits.workers or default_workers(),
            limits=self._limits,
            progress=self._progress,
        )
        self._status.stream_id = store.stream_id
        self._status.enter("starting")
        live = self._priority.run(self._patcher.adopt, leave=self.stop)
        if live is not None:
            self._status.version = live.record.version
        self._status.succeeded()

    def _progress(self, what: str, done: int, total: int) -> None:
        self._status.progress(what, done, total)
        self._check()

    def _check(self) -> None:
        """Raise to leave a patch off, when it is not wanted any more."""
        if self._stopping:
            raise Stopped
        if not self._mending and self._heeded is not None and self._control is not self._heeded:
            raise _Overtaken

    def _step(self) -> None:
        """One look at the store, and everything that follows from it.

        Whatever stands in the way of another version, an engine that restarted gets the live one.
        """
        try:
            wanted = self._approach()
        except DamagedSlot:
            raise  # no engine is to load it
        except DeltastoreError:
            live = self._slots.live()
            if live is not None:
                self._serve(live)
            raise
        live = self._slots.live()
        if live is not None:
            self._serve(live)
        self._rest(wanted)

    def _approach(self) -> Manifest | None:
        """Bring the live slot to the wanted version and return that; ``None`` when it is not to move."""
        control = self._heed()
        if isinstance(control, SlotError):
            return None
        started = time.perf_counter()
        self._in_touch = False
        wanted = self._follower.wanted()
        self._in_touch = True
        self._status.polled(time.perf_counter() - started)
        self._status.aims(wanted.version, wanted.created_at)
        if control.paused:
            return None
        live = self._slots.live()
        if live is None or (live.record.commit_id != wanted.commit_id and wanted.commit_id not in self._refused):
            try:
                return self._patch(wanted)
            except VersionForgotten:
                if self._follower.wanted().version == wanted.version:  # a fixed target
                    raise
                return self._approach()  # the newest one goes on existing
        return wanted

    def _heed(self) -> Control | SlotError:
        """Return what an operator told last; a new target begins afresh."""
        control = self._control
        if control is not self._heeded:
            if not isinstance(control, SlotError):
                self._follower = Follower(self._store, control.pinned or self._options.target)
                self._refused.clear()
            self._heeded = control
        return control

    def _rest(self, wanted: Manifest | None) -> None:
        """Say how it stands until the next look."""
        control = self._heeded
        if isinstance(control, SlotError):
            if self._status.error is not control:
                self._status.failed(control)
                self._tell_failure("Following waits.")
            self._status.enter("held")
        elif wanted is not None and wanted.commit_id in self._refused:
            self._status.enter("degraded")
        else:
            self._status.enter("following" if wanted is not None else "paused")
            self._status.succeeded()

    def _patch(self, wanted: Manifest) -> Manifest:
        """Patch to the wanted version, or to one that is newer by then; returns the one that it came to be."""
        self._status.enter("patching")
        patched = self._priority.run(
            lambda: self._patcher.move_to(wanted, newest=self._follower.wanted), leave=self.stop
        )
        self._status.aims(patched.end, patched.target.created_at)
        self._status.patched(patched)
        tell(
            "patched",
            f"Version {patched.end} is in place (from {'nothing' if patched.start is None else patched.start}, "
            f"{patched.fetched_bytes} bytes fetched; {_seconds(patched.stages)}).",
            version=patched.end,
            from_version=patched.start,
            fetched_bytes=patched.fetched_bytes,
            stages=dict(patched.stages),
        )
        return patched.target

    def _serve(self, live: LiveSlot) -> None:
        """Make sure that the engine serves the live slot.

        A restarted or paused engine is loaded and confirmed again.
        """
        info = self._ask()
        version = str(live.record.version)
        if info.paused or info.version != version or self._confirmed != (info.incarnation, version):
            self._confirmed = None
            self._status.serving = None
            with self._activating:
                if self._stopping:
                    raise Stopped
                self._activate(live)
            info = self._ask()
        if info.version is not None and not info.paused:
            self._confirmed = (info.incarnation, info.version)
            self._status.serving = int(info.version)

    def _ask(self) -> EngineInfo:
        """Ask the engine how it is; one that does not answer serves nothing that we know of."""
        try:
            return self._engine.info()
        except EngineError:
            self._confirmed = None
            self._status.serving = None
            raise

    def _activate(self, live: LiveSlot) -> None:
        self._status.enter("activating")
        other = self._patcher.previous()
        result = activate(
            self._engine,
            Weights(live.record.version, live.directory),
            fallback=Weights(other.record.version, other.directory) if other else None,
        )
        self._status.activated(result)
        tell(
            "activated",
            f"Engine: {result.outcome}, version {result.version} ({_seconds(result.stages)}).",
            level=logging.INFO if result.outcome == "activated" else logging.WARNING,
            outcome=result.outcome,
            version=result.version,
            paused_seconds=result.paused_seconds,
            stages=dict(result.stages),
        )
        if result.outcome == "rolled-back":
            self._refused.add(live.record.commit_id)
            self._patcher.go_back()
            self._status.version = result.version
        if result.outcome == "latched" and result.error is not None:
            raise result.error
        if result.error is not None:
            self._status.failed(result.error)
            self._tell_failure("That version is left alone.", version=live.record.version)


def wait_unless(stopped: Callable[[], bool], seconds: float) -> None:
    """Wait so long, or until ``stopped``, which a signal's handler may bring about."""
    until = time.monotonic() + seconds
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _WAIT_STEP))


def _seconds(stages: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stages.items())
