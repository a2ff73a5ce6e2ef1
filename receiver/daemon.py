"""The receiver's loop: follow, patch, activate; back off when something fails, and go on serving what is there."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from deltastore.errors import (
    DamagedSlot,
    DeltastoreError,
    SlotError,
    VersionForgotten,
)
from deltastore.limits import chosen_limits
from deltastore.patch import default_workers
from deltastore.reader import open_store

from .control import Orders
from .coordination import Coordinated
from .engines import make_engine
from .engines.gated import behind_gateway
from .fleet import Heartbeats, own_id
from .follower import Follower
from .logs import seconds_text, tell, tell_failure
from .mending import Mending
from .passes import Passes
from .patcher import Patcher
from .priority import Priority
from .probing import read_expected
from .recovery import Recovery
from .rollback import Rollback
from .serving import Serving
from .slots import Slots
from .stopping import Overtaken, Stopped, Wakeups, wait_unless

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.heartbeat import Heartbeat
    from deltastore.manifest import Manifest
    from deltastore.reader import Store

    from .control import Control
    from .options import Options
    from .status import Status

__all__ = ["Receiver"]

#: Seconds between two bits of the live slot that are read over: each is what the rate allows in that time.
_READ_OVER_EVERY = 0.5


class Receiver:
    """One checkpoint, one engine.

    ``once`` makes one pass; ``run`` follows until ``stop`` is called (from any thread).
    """

    def __init__(self, options: Options, status: Status) -> None:
        options.check()
        self._options = options
        self._status = status
        self._status.group = options.coordination.group
        self._slots = Slots(
            options.checkpoint,
            durable=options.durability == "version",
            any_place=options.unsafe_file_system,
            sleep=self._throttle,
        )
        self._wakeups = Wakeups()
        self._passes = Passes(self._slots, status, self._wakeups, poll=options.poll)
        self._coordinated = Coordinated(
            options.coordination,
            engine=options.engine != "none",
            poll=options.poll,
            available=lambda: self._serving.available(),  # noqa: PLW0108 - made below
            wait=self._wakeups.pause,
        )
        self._serving = Serving(
            behind_gateway(
                make_engine(options.engine, url=options.engine_url, options=options.engine_options),
                options.gateway_url,
            ),
            status,
            policy=options.policy,
            coordinator=self._coordinated,
            stopped=lambda: self._wakeups.stopped,
            changed=self._changed,
            expected=read_expected(options.probe_expect) if options.probe_expect else None,
            link=options.checkpoint if options.coordination.size is not None else None,
        )
        self._untested = options.self_test
        self._orders = Orders(
            self._slots.directory / "control.json",
            target=options.target,
            told=lambda control, target: status.controlled(control, wanted=target),
        )
        self._heeded: Control | SlotError | None = None  # the one that the follower was made for
        self._waiting = False  # for the first version of a group, or of a canary
        self._target = options.target
        self._in_touch = False
        self._priority = Priority(nice=options.nice, io=options.io_priority)
        self._limits = chosen_limits(
            workers=options.workers,
            cores=default_workers(),
            max_bandwidth=options.max_bandwidth,
            memory_budget=options.memory_budget,
            whole_parts=options.cache is not None,
            sleep=self._throttle,
        )
        self._mending = Mending(
            self._slots,
            status,
            self._serving,
            base=options.base,
            limits=self._limits,
            priority=self._priority,
            scrub_rate=options.scrub_rate,
            leave=self.stop,
            progress=self._progress,
        )
        workers = self._limits.workers or default_workers()
        self._rollback: Rollback = Rollback(self._slots, workers=workers)  # until there is a store to patch from
        self._opening = self._begun = self._adopting = False
        wanted = options.coordination
        self._recovery = Recovery(
            self._slots,
            status,
            self._serving,
            orders=self._orders,
            priority=self._priority,
            workers=workers,
            grouped=wanted.size is not None,
            rolling=wanted.max_unavailable is not None or wanted.canary is not None,
            serve=self._serve,
            leave=self.stop,
        )

    def _throttle(self, seconds: float) -> None:
        """Wait for bandwidth, or for room, unless something else is wanted by then."""
        wait_unless(lambda: self._wakeups.stopped, seconds)
        self._check()

    # From other threads

    def stop(self) -> None:
        """End ``run`` soon: a patch going on is left off, an activation is brought to its end, and none begins.

        May be called from a signal's handler.
        """
        self._wakeups.stop()

    def wake(self) -> None:
        """Look at the store now."""
        self._wakeups.wake()

    def hold_activations(self) -> None:
        """Return when no activation is going on; none begins after this. For whoever is about to end the process."""
        self._serving.hold()

    def pin(self, target: str) -> Control:
        """Follow another target from now on; see ``Orders.pin``."""
        self._slots.check_held()
        return self._ordered(self._orders.pin(target))

    def pause_following(self) -> Control:
        """Stay at what is live; see ``Orders.pause_following``."""
        self._slots.check_held()
        return self._ordered(self._orders.pause_following())

    def resume_following(self) -> Control:
        """Follow again; see ``Orders.resume_following``."""
        self._slots.check_held()
        return self._ordered(self._orders.resume_following())

    def _ordered(self, control: Control) -> Control:
        self.wake()
        return control

    # The two ways to work

    def once(self) -> None:
        """Bring checkpoint and engine to the wanted version; a damaged live slot is mended first.

        Raises what stands in the way.
        """
        self._slots.lock()
        try:
            self._recall()
            self._start()
            self._step_or_mend()
            if self._status.error is not None:
                raise self._status.error
            if self._status.version is None:
                raise SlotError(
                    f"Following is paused, and there is nothing at {self._slots.link} yet.",
                    key=str(self._orders.path),
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
            self._passes.until_done(self._start)
            heartbeats = self._start_heartbeats()
            while not self._wakeups.stopped:
                self._passes.until_done(self._step_or_mend)
                self._read_over_until_next_look()
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
        self._orders.begin()
        self._status.receiver_id = self._options.receiver_id or own_id(self._slots.directory / "receiver-id")

    def _let_go(self) -> None:
        self._orders.end()
        self._slots.unlock()
        self._serving.close()

    def _start_heartbeats(self) -> Heartbeats | None:
        if self._options.heartbeat is None or self._wakeups.stopped:
            return None
        made = Heartbeats(
            self._store.backend, self._heartbeat, every=self._options.heartbeat, told=self._status.heartbeat
        )
        made.start()
        return made

    def _heartbeat(self) -> Heartbeat | None:
        """Say how it is; nothing while the store is out of reach: a mount that is gone must not be written to."""
        return self._status.heartbeat_record(every=self._options.heartbeat or 0.0) if self._in_touch else None

    def _read_over_until_next_look(self) -> None:
        """Wait until a look at the store is due or wanted, and read the live slot over meanwhile, bit by bit."""
        until = time.monotonic() + self._options.poll
        while True:
            if self._mending.read_over(self._store, self._patcher, stopped=lambda: self._wakeups.woken):
                return  # the engine is to load what was mended
            left = until - time.monotonic()
            if self._wakeups.rest(min(left, _READ_OVER_EVERY)) or left <= _READ_OVER_EVERY:
                return

    # One pass

    def _start(self) -> None:
        """Reach the store and begin; while it is away the engine gets what is in place here."""
        try:
            self._opening = True
            store = self._open_store()
            self._opening = False
            self._begin_or_mend(store)
        except DeltastoreError as error:
            if self._passes.may_pass(error):
                self._recovery.attempt()
            raise
        finally:
            self._opening = False

    def _begin_or_mend(self, store: Store) -> None:
        self._or_mend(store, lambda: self._begin(store))

    def _or_mend(self, store: Store, take_over: Callable[[], object]) -> None:
        try:
            take_over()
        except (DamagedSlot, SlotError) as error:
            if self._slots.live_name() is None:
                raise
            self._mending.mend(store, error, take_over)

    def _step_or_mend(self) -> None:
        if self._slots.hold_on():
            tell("lost", f"{self._slots.directory} was removed or replaced. It is begun anew.", level=logging.WARNING)
            self._serving.doubt()
            self._or_mend(self._store, self._adopt)
        self._take_over_relinked()
        self._mending.go_on(self._store, self._patcher.adopt)
        try:
            self._step()
        except DamagedSlot as error:
            self._mending.mend(self._store, error, self._patcher.adopt)
            self._step()

    def _take_over_relinked(self) -> None:
        """Adopt the slot that somebody else led the link to: nobody has looked at its bytes since it was left."""
        source, name = self._rollback.source, self._slots.live_name()
        if not self._begun or name is None:
            return
        if source is None or source.checkpoint.directory != self._slots.directory / name:
            tell("relinked", f"Somebody led {self._slots.link} to the slot {name}.", level=logging.WARNING)
            self._or_mend(self._store, self._adopt)

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
        if self._opening:  # the tries to reach it take a minute, which an engine left paused need not wait for
            self._opening = False
            self._recovery.attempt()
        self._wakeups.pause(seconds)

    def _begin(self, store: Store) -> None:
        """Take over the local checkpoint, whatever state it is in."""
        self._store = store
        self._in_touch = self._begun = True
        self._patcher = Patcher(
            store,
            self._slots,
            base=self._options.base,
            workers=self._limits.workers or default_workers(),
            limits=self._limits,
            progress=self._progress,
        )
        self._rollback = self._patcher
        self._status.stream_id = store.stream_id
        self._status.enter("starting")
        self._coordinated.begin(store, self._status.receiver_id or "")
        self._adopt()
        self._status.assumes(None)
        self._status.succeeded()

    def _adopt(self) -> None:
        self._adopting = True
        try:
            live = self._priority.run(self._patcher.adopt, leave=self.stop)
        finally:
            self._adopting = False
        if live is not None:
            self._status.version = live.record.version

    def _progress(self, what: str, done: int, total: int) -> None:
        self._status.progress(what, done, total)
        self._check()

    def _check(self) -> None:
        """Raise to leave a patch off, when it is not wanted any more."""
        if self._wakeups.stopped:
            raise Stopped
        busy = self._adopting or self._mending.going_on  # nothing is served before it was looked at: orders wait
        if not busy and self._heeded is not None and self._orders.control is not self._heeded:
            raise Overtaken
        self._slots.check_held()

    def _step(self) -> None:
        """One look at the store, and everything that follows from it.

        Whatever stands in the way of another version, an engine that restarted gets the live one.
        """
        if self._untested:
            self._serve()
        try:
            wanted = self._approach()
        except DamagedSlot:
            raise  # no engine is to load it
        except DeltastoreError:
            self._serve()
            raise
        self._serve()
        self._rest(wanted)

    def _serve(self) -> None:
        """Have the engine serve the live slot, if there is one; the first time it may have to prove itself."""
        self._take_over_relinked()
        live = self._slots.live()
        if live is None:
            return
        if self._untested:
            self._serving.self_test(live, self._rollback)
            self._untested = False
        self._serving.serve(live, self._rollback)

    def _changed(self, one: int, other: int) -> float | None:
        """Tell in which share of their elements two versions differ: by the last of the changes between them."""
        if not self._begun:
            return None
        try:
            model = self._store.manifest(max(one, other)).model
        except DeltastoreError:
            return None
        return model.changed_elements / max(1, model.total_elements)

    def _approach(self) -> Manifest | None:
        """Bring the live slot to the wanted version and return that; ``None`` when it is not to move."""
        control = self._heed()
        if isinstance(control, SlotError):
            return None
        started = time.perf_counter()
        self._in_touch = False
        wanted = self._follower.wanted() if control.paused else self._wanted()  # who is paused begins nothing
        self._in_touch = True
        self._status.polled(time.perf_counter() - started)
        self._waiting = wanted is None
        if wanted is None:
            return None
        self._status.aims(wanted.version, wanted.created_at)
        if control.paused:
            return None
        live = self._slots.live()
        if live is None or (live.record.commit_id != wanted.commit_id and not self._has_refused(wanted)):
            try:
                return self._patch(wanted)
            except VersionForgotten:
                again = self._wanted()
                if again is not None and again.version == wanted.version:  # a fixed target
                    raise
                return self._approach()  # the newest one goes on existing
        return wanted

    def _wanted(self) -> Manifest | None:
        """Return the version to be at, by the target and by whoever it is coordinated with."""
        return self._coordinated.wanted(self._target, self._follower.wanted)

    def _heed(self) -> Control | SlotError:
        """Return what an operator told last; a new target begins afresh."""
        control = self._orders.control
        if control is not self._heeded:
            if not isinstance(control, SlotError):
                self._target = self._orders.target_of(control)
                self._follower = Follower(self._store, self._target)
                self._serving.forget_refusals()
            self._heeded = control
        return control

    def _has_refused(self, manifest: Manifest) -> bool:
        return self._serving.has_refused(manifest.commit_id) or self._coordinated.refuses(manifest.commit_id)

    def _rest(self, wanted: Manifest | None) -> None:
        """Say how it stands until the next look."""
        control = self._heeded
        if isinstance(control, SlotError):
            if self._status.error is not control:
                self._status.failed(control)
                tell_failure(control, "Following waits.")
            self._status.enter("held")
        elif wanted is not None and self._has_refused(wanted):
            self._status.enter("degraded")
        else:
            held_up = self._waiting or self._status.serving != self._status.version
            self._status.enter("waiting" if held_up else "following" if wanted is not None else "paused")
            self._status.succeeded()

    def _patch(self, wanted: Manifest) -> Manifest:
        """Patch to the wanted version, or to one that is newer by then; returns the one that it came to be."""
        self._status.enter("patching")
        with self._serving.preparing():
            patched = self._priority.run(
                lambda: self._patcher.move_to(wanted, newest=lambda: self._wanted() or wanted), leave=self.stop
            )
        self._status.aims(patched.end, patched.target.created_at)
        self._status.patched(patched)
        tell(
            "patched",
            f"Version {patched.end} is in place (from {'nothing' if patched.start is None else patched.start}, "
            f"{patched.fetched_bytes} bytes fetched; {seconds_text(patched.stages)}).",
            version=patched.end,
            from_version=patched.start,
            fetched_bytes=patched.fetched_bytes,
            stages=dict(patched.stages),
        )
        return patched.target
