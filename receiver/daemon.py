"""The receiver's loop: follow, patch, activate; back off when something fails, and go on serving what is there."""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.errors import (
    DamagedSlot,
    DeltastoreError,
    EngineError,
    SlotError,
    StorageError,
    StoreNotFound,
    VersionNotFound,
)
from deltastore.patch import default_workers
from deltastore.reader import open_store

from .activation import Weights, activate
from .engines import make_engine
from .follower import Follower
from .patcher import Patcher
from .repair import repair
from .scrub import Scrub
from .slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deltastore.manifest import Manifest
    from deltastore.reader import Store

    from .engines import Engine, EngineInfo
    from .slots import LiveSlot
    from .status import Status

__all__ = ["Options", "Receiver", "Stopped"]

_log = logging.getLogger("receiver")

_LONGEST_PAUSE = 60.0
#: Far beyond the longest pause, and far below where a float overflows: a store may be gone for days.
_MOST_DOUBLINGS = 32


class Stopped(Exception):
    """Raised out of a patch when the receiver was told to stop; the live slot is untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an operator decides. ``poll`` is in seconds, ``scrub_rate`` in bytes a second (0: never)."""

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
    durability: str = "version"
    any_place: bool = False
    scrub_rate: int = 0


class Receiver:
    """One checkpoint, one engine.

    ``once`` makes one pass; ``run`` follows until ``stop`` is called (from any thread).
    """

    def __init__(self, options: Options, status: Status) -> None:
        self._options = options
        self._status = status
        self._slots = Slots(
            options.checkpoint,
            durable=options.durability == "version",
            any_place=options.any_place,
            sleep=self._pause,
        )
        self._engine: Engine = make_engine(options.engine, url=options.engine_url, options=options.engine_options)
        rate = options.scrub_rate
        self._scrub = Scrub(self._slots.directory / "scrub.json", rate=rate) if rate else None
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._confirmed: tuple[str, str] | None = None  # incarnation and version that the engine last confirmed
        self._refused: set[str] = set()  # commit ids that the engine could not load

    # From other threads

    def stop(self) -> None:
        """End ``run`` soon; a patch going on is left off, an activation is brought to its end."""
        self._stopping.set()
        self._woken.set()

    def wake(self) -> None:
        """Look at the store now."""
        self._woken.set()

    # The two ways to work

    def once(self) -> None:
        """Bring checkpoint and engine to the wanted version. Raises what stands in the way."""
        self._slots.lock()
        try:
            self._begin(self._open_store())
            self._step()
            if self._status.error is not None:
                raise self._status.error
        finally:
            self._slots.unlock()
            self._engine.close()

    def run(self, *, url: str | None = None) -> None:
        """Follow the stream until told to stop.

        Only what an operator has to mend is raised; all else is tried again.
        """
        self._slots.lock(url=url)
        try:
            self._until_done(self._start)
            while not self._stopping.is_set():
                self._until_done(self._step_or_mend)
                self._read_over()
                self._wait(self._options.poll)
        except Stopped:
            pass
        finally:
            self._slots.unlock()
            self._engine.close()

    def _until_done(self, action: Callable[[], None]) -> None:
        """Do something; after a failure that may pass by itself, again, ever more slowly."""
        failures = 0
        while not self._stopping.is_set():
            try:
                action()
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
            _log.warning("%s Next try in %.1f s.", self._status.error, pause)
            self._wait(pause)

    def _wait(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    # One pass

    def _start(self) -> None:
        store = self._open_store()
        try:
            self._begin(store)
        except (DamagedSlot, SlotError) as error:
            if self._slots.live_name() is None:
                raise
            self._mend(store, error)
            self._begin(store)

    def _step_or_mend(self) -> None:
        try:
            self._step()
        except DamagedSlot as error:
            self._mend(self._store, error)
            self._patcher.adopt()
            self._step()

    def _mend(self, store: Store, problem: DeltastoreError) -> None:
        """Mend the live slot. The engine may have loaded what was damaged: it loads and confirms again."""
        _log.warning("%s It is mended.", problem)
        self._status.enter("repairing")
        self._confirmed = self._status.serving = None
        repaired = repair(
            store,
            self._slots,
            base=self._options.base,
            workers=self._options.workers or default_workers(),
            progress=self._progress,
        )
        self._status.repaired(repaired)
        _log.info("Mended %d chunks of version %d.", repaired.damaged, repaired.version)

    def _read_over(self) -> None:
        """Read a few of the live slot's chunks over, as far as the rate allows, and mend what is damaged."""
        live, source = self._slots.live(), self._patcher.source
        if self._scrub is None or live is None or source is None:
            return
        try:
            found = self._scrub.step(live, source, self._store.hash, stopped=self._woken.is_set)
            record, schema = self._scrub.record, source.checkpoint.schema
            self._status.scrubbed(passed_at=record.passed_at, chunk=record.chunk, chunks=schema.chunks)
            if len(found):
                number = int(found[0])
                name = schema.tensors[int(schema.first_chunk.searchsorted(number, side="right")) - 1].name
                key = str(live.directory)
                self._mend(self._store, DamagedSlot(f"A chunk of {name!r} in {key} is damaged.", key=key))
                self._patcher.adopt()
        except DeltastoreError as error:  # it goes on being served; the next pass tries again
            self._status.failed(error)
            _log.warning("%s", error)

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
        if self._stopping.wait(seconds):
            raise Stopped

    def _begin(self, store: Store) -> None:
        """Take over the local checkpoint, whatever state it is in."""
        self._store = store
        self._follower = Follower(store, self._options.target)
        self._patcher = Patcher(
            store,
            self._slots,
            base=self._options.base,
            workers=self._options.workers or default_workers(),
            progress=self._progress,
        )
        self._status.stream_id = store.stream_id
        self._status.enter("starting")
        live = self._patcher.adopt()
        if live is not None:
            self._status.version = live.record.version
        self._status.succeeded()

    def _progress(self, what: str, done: int, total: int) -> None:
        self._status.progress(what, done, total)
        if self._stopping.is_set():
            raise Stopped

    def _step(self) -> None:
        """One look at the store, and everything that follows from it."""
        wanted = self._follower.wanted()
        self._status.target = wanted.version
        live = self._slots.live()
        if live is None or (live.record.commit_id != wanted.commit_id and wanted.commit_id not in self._refused):
            live = self._patch(wanted)
        self._serve(live, wanted)

    def _patch(self, wanted: Manifest) -> LiveSlot:
        self._status.enter("patching")
        patched = self._patcher.move_to(wanted)
        live = self._slots.live()
        assert live is not None  # noqa: S101 - move_to has just made it live
        self._status.patched(patched)
        _log.info(
            "Version %d is in place (from %s, %d bytes fetched; %s).",
            patched.end,
            "nothing" if patched.start is None else patched.start,
            patched.fetched_bytes,
            ", ".join(f"{name} {seconds:.3f} s" for name, seconds in patched.stages.items()),
        )
        return live

    def _serve(self, live: LiveSlot, wanted: Manifest) -> None:
        """Make sure that the engine serves the live slot.

        A restarted or paused engine is loaded and confirmed again.
        """
        info = self._ask()
        version = str(live.record.version)
        if info.paused or info.version != version or self._confirmed != (info.incarnation, version):
            self._confirmed = None
            self._status.serving = None
            self._activate(live, wanted)
            info = self._ask()
        if info.version is not None and not info.paused:
            self._confirmed = (info.incarnation, info.version)
            self._status.serving = int(info.version)
        if wanted.commit_id in self._refused:
            self._status.enter("degraded")
        else:
            self._status.enter("following")
            self._status.succeeded()

    def _ask(self) -> EngineInfo:
        """Ask the engine how it is; one that does not answer serves nothing that we know of."""
        try:
            return self._engine.info()
        except EngineError:
            self._confirmed = None
            self._status.serving = None
            raise

    def _activate(self, live: LiveSlot, wanted: Manifest) -> None:
        self._status.enter("activating")
        other = self._patcher.previous()
        result = activate(
            self._engine,
            Weights(live.record.version, live.directory),
            fallback=Weights(other.record.version, other.directory) if other else None,
        )
        self._status.activated(result)
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result.stages.items())
        _log.info("Engine: %s, version %s (%s).", result.outcome, result.version, stages)
        if result.outcome == "rolled-back":
            self._refused.add(wanted.commit_id)
            self._patcher.go_back()
            self._status.version = result.version
        if result.outcome == "latched" and result.error is not None:
            raise result.error
        if result.error is not None:
            self._status.failed(result.error)
