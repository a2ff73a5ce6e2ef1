"""Bringing the local checkpoint to a version: from the live slot into the other one, then the swap.

An engine may go on generating, and may restart, at any moment of it: what it finds under the link is one whole version.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from deltastore.codec.applying import warm_up_applying
from deltastore.errors import (
    BaseMismatch,
    CorruptObject,
    DamagedSlot,
    DeltastoreError,
    StreamMismatch,
    UsageError,
    VersionNotFound,
)
from deltastore.limits import UNLIMITED
from deltastore.manifest import manifest_key
from deltastore.planner import Planner
from deltastore.replay import Fetch, counter
from deltastore.restore import Source, build_checkpoint, identify, outline
from deltastore.spool import Spool

from .records import FORMAT, Goal
from .rollback import Rollback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deltastore.limits import Limits
    from deltastore.manifest import Manifest
    from deltastore.plan import Plan
    from deltastore.reader import Store
    from deltastore.replay import Replayed

    from .slots import LiveSlot, Slots

    Progress = Callable[[str, int, int], object]

__all__ = ["Patched", "Patcher", "check_history"]

_log = logging.getLogger("receiver")

#: A newer version is folded into a patch if it adds at most this share of the model to what is fetched.
_FOLDED_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Patched:
    """What a patch did: versions, bytes downloaded; seconds of each stage, and the bytes that went through it.

    ``plan`` (with hashing a base), ``fetch``, ``patch`` and ``swap`` are times on the clock; fetching and patching
    overlap. ``decode`` and ``verify`` are parts of ``patch``, added up over its threads.
    """

    start: int | None
    target: Manifest
    fetched_bytes: int
    stored_bytes: int
    stages: Mapping[str, float] = field(default_factory=dict)
    stage_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The version that was patched to."""
        return self.target.version


@dataclass(frozen=True, slots=True)
class _Way:
    """What a patch starts from, and what it is to reach; ``newest`` may name another target once."""

    source: Source | None
    target: Manifest
    newest: Callable[[], Manifest] | None
    planner: Planner
    spool: Spool

    def plan(self) -> Plan:
        """Return the cheapest plan; raises ``VersionNotFound`` where there is none."""
        return self.planner.plan(self.source.version if self.source else None, self.target.version)


@dataclass(frozen=True, slots=True)
class _Built:
    """A slot that holds what a plan ends at; ``begun_at`` is the monotonic time after planning, in seconds."""

    name: Literal["a", "b"]
    plan: Plan
    source: Source
    replayed: Replayed
    begun_at: float


class _Newer(Exception):
    """Raised out of a build for a plan to a newer version; ``fetched_bytes`` were downloaded before."""

    def __init__(self, way: _Way, plan: Plan, fetched_bytes: int) -> None:
        super().__init__()
        self.way = way
        self.plan = plan
        self.fetched_bytes = fetched_bytes


class Patcher(Rollback):
    """Keeps one local checkpoint. The lock of ``slots`` must be held."""

    def __init__(
        self,
        store: Store,
        slots: Slots,
        *,
        base: Path | None = None,
        workers: int,
        limits: Limits = UNLIMITED,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(slots, workers=workers)
        self._store = store
        self._base = base
        self._limits = limits
        self._progress = progress
        warm_up_applying(spec.width for spec in store.schema())

    def adopt(self) -> LiveSlot | None:
        """Take over what is at the checkpoint's path; returns the live slot, or ``None`` where there is nothing yet.

        A slot of ours must belong to this stream and history, and is verified if its bytes may have changed; a plain
        directory is hashed and must be a version of the stream. Raises ``StreamMismatch``, ``BaseMismatch``,
        ``CorruptObject``.
        """
        self._source = None  # what was adopted before may be gone
        live = self._slots.live()
        if live is not None:
            check_history(self._store, self._slots, live)
            total = sum(file.size for file in live.record.files)
            verifying = counter(self._progress, "verify", total)
            self._source = self._slots.source(live, workers=self._workers, progress=verifying)
            return live
        self._slots.forget()
        if not self._slots.link.exists() or self._slots.is_empty():
            return None
        if not self._slots.is_plain():
            # A link of somebody else's, or files that are links, as model caches make them: read, never written
            # through.
            self._base = self._slots.link.resolve()
            return None
        seen = self._slots.seen()  # before they are hashed: somebody may still write to them
        source = identify(self._store, self._slots.link, workers=self._workers, progress=self._progress)
        if others := source.checkpoint.left_behind():
            # No version has them, and a slot is emptied sooner or later: they are not ours to delete.
            _log.info(
                "%s has files that no version carries on, such as %s: it stays beside.", self._slots.link, others[0]
            )
            self._base = self._slots.link
            return None
        self._slots.adopt(source, self._store.manifest(source.version), self._store.hash, seen=seen)
        return self.adopt()

    def move_to(self, target: Manifest, *, newest: Callable[[], Manifest] | None = None) -> Patched:
        """Build ``target`` in the other slot, durably, and make it live. The live slot is only read.

        Parts that were fetched before a kill are found again. Whatever fails, the live slot stays as it was. A
        version that the other slot still holds whole needs no store. ``newest`` is asked for a newer target when the
        way is planned, and once more when the parts are here; from then on the target is fixed.
        """
        started = time.perf_counter()
        if (back := self._swap_back(target, started)) is not None:
            return back
        live = self._slots.live()
        if live is not None:
            self._slots.check_other_files(live)  # they are carried on as they are
        else:
            self._source = None  # somebody took the link away, and the slot that it led to may be the spare one now
        source = self._source or self._first_source()
        if newest is not None:
            target = max(target, newest(), key=lambda manifest: manifest.version)  # hashing a base takes a while
        way = _Way(source, target, newest, Planner(self._store), Spool(self._slots.parts))
        fetched_before = 0
        try:
            built = self._build_by(way)
        except _Newer as newer:
            way, fetched_before = newer.way, newer.fetched_bytes
            built = way.planner.follow(newer.plan, partial(self._build, way))
        self._slots.finish(built.name, built.source, way.target, self._store.hash)
        patched = time.perf_counter()
        self._slots.swap(built.name)
        live = self._slots.live()
        if live is None or live.name != built.name:
            raise CorruptObject(
                f"{self._slots.link} was changed by somebody else.",
                key=str(self._slots.link),
                hint="Have nothing but this receiver change it.",
            )
        self._source = built.source
        way.spool.clear()
        swapped = time.perf_counter()
        spent = built.replayed.spent
        return Patched(
            start=source.version if source else None,
            target=way.target,
            fetched_bytes=fetched_before + built.replayed.fetched_bytes,
            stored_bytes=built.plan.stored_bytes,
            stages={
                "plan": built.begun_at - started,
                "fetch": built.replayed.fetch_seconds,
                "decode": spent.decode_seconds,
                "verify": spent.verify_seconds,
                "patch": patched - built.begun_at,
                "swap": swapped - patched,
            },
            stage_bytes={
                "fetch": built.plan.stored_bytes,
                "decode": spent.decoded_bytes,
                "verify": spent.verified_bytes,
                "patch": built.source.checkpoint.schema.nbytes,
            },
        )

    def _build_by(self, way: _Way) -> _Built:
        """Build a way's target by the cheapest plan."""
        try:
            return way.planner.follow(way.plan(), partial(self._build, way))
        except VersionNotFound:
            # A full chunk does not lead back, and without an anchor there is no other way: the base may have one.
            if way.source is None or self._base is None:
                raise
            way = replace(way, source=identify(self._store, self._base, workers=self._workers, progress=self._progress))
            return way.planner.follow(way.plan(), partial(self._build, way))

    def _build(self, way: _Way, plan: Plan) -> _Built:
        """Build a way's target in the spare slot by a plan; raises ``_Newer`` for a plan to a newer version."""
        begun_at = time.perf_counter()
        plain = outline(self._store, way.source)
        goal = Goal(FORMAT, self._store.stream_id, way.target.commit_id, plain.digest(self._store.hash))
        all_here = None if way.newest is None else partial(_look_again, way, way.newest)
        self._slots.check_room(plain.nbytes + way.spool.missing_bytes(plan.parts))
        try:
            with Fetch(
                self._store,
                plan,
                way.spool,
                limits=self._limits,
                fronts=plain.fronts(self._workers),
                progress=self._progress,
                all_here=all_here,
            ) as fetch:
                begun = self._slots.begin(goal)
                built, replayed = build_checkpoint(
                    fetch,
                    way.source,
                    plain,
                    begun.directory,
                    workers=self._workers,
                    resume=begun.resumed,
                    durable=self._slots.durable,
                    lost=partial(self._slots.give_up, begun.name),
                    progress=self._progress,
                )
        except BaseMismatch as error:
            if way.source is not self._source:
                raise
            raise DamagedSlot(  # no wrong base, but a live slot whose bytes changed
                f"The live slot is damaged: {error}",
                key=str(self._slots.link),
                hint=f"Mend it with `receiver repair`, or remove {self._slots.link} (the link) to build it anew.",
            ) from error
        return _Built(begun.name, plan, built, replayed, begun_at)

    def _swap_back(self, target: Manifest, started: float) -> Patched | None:
        """Make the other slot live if it holds ``target``, verified; else return ``None``."""
        live = self._slots.live()
        try:
            other = self._slots.other(live) if live is not None else None
        except DeltastoreError:  # a record that cannot be used: the slot is built anew
            other = None
        if live is None or other is None or other.record.commit_id != target.commit_id or self.previous() is None:
            return None
        verified = time.perf_counter()
        self.go_back()
        return Patched(
            start=live.record.version,
            target=target,
            fetched_bytes=0,
            stored_bytes=0,
            stages={"plan": verified - started, "swap": time.perf_counter() - verified},
        )

    def _first_source(self) -> Source | None:
        """Return the base to start from on a host that has nothing under the checkpoint's path."""
        if self._base is None:
            return None
        if self._base.resolve() == self._slots.link.resolve() and not self._slots.link.exists():
            raise UsageError(f"{self._base} is the checkpoint's own path.", hint="Give another directory as --base.")
        return identify(self._store, self._base, workers=self._workers, progress=self._progress)


def check_history(store: Store, slots: Slots, live: LiveSlot) -> None:
    """Raise ``StreamMismatch`` unless what a slot holds is a version of the store's stream and history."""
    record = live.record
    if record.stream_id != store.stream_id:
        raise StreamMismatch(
            f"{slots.link} follows the stream {record.stream_id}; {store.backend.url} holds {store.stream_id}.",
            key=str(slots.link),
            hint="Give this stream's store, or a checkpoint path of its own.",
        )
    try:
        same = store.manifest(record.version).commit_id == record.commit_id
    except VersionNotFound:
        same = False
    if not same:
        raise StreamMismatch(
            f"Version {record.version} in {store.backend.url} is not the one in {slots.link}: "
            "the store was rolled back or replaced.",
            key=manifest_key(record.version),
            hint=f"Remove {slots.link} to start again from the store.",
        )


def _look_again(way: _Way, newest: Callable[[], Manifest], fetch: Fetch) -> None:
    """Raise ``_Newer`` if there is a newer version now, and its parts are few against the model."""
    here = {part.key for step in fetch.plan.steps for part in step.parts}
    try:
        found = newest()
        if found.version <= way.target.version:
            return
        further = way.planner.plan(fetch.plan.start, found.version)
    except DeltastoreError as error:  # all that this patch needs is here: it is not given up for a question
        _log.info("Whether there is a newer version is not known: %s", error)
        return
    missing = sum(part.size for step in further.steps for part in step.parts if part.key not in here)
    if missing <= _FOLDED_SHARE * found.model.snapshot_bytes:
        _log.info("Version %d is folded into the patch to %d.", found.version, way.target.version)
        raise _Newer(replace(way, target=found, newest=None), further, fetch.downloaded())
