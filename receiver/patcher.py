"""Bringing the local checkpoint to a version: from the live slot into the other one, then the swap.

An engine may go on generating, and may restart, at any moment of it: what it finds under the link is one whole version.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from deltastore.codec.chunk import warm_up
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
    """What a patch did: versions, bytes downloaded, seconds of each stage (verify, fetch, patch, swap)."""

    start: int | None
    target: Manifest
    fetched_bytes: int
    stored_bytes: int
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The version that was patched to."""
        return self.target.version


class _Newer(Exception):
    """Raised out of a build for a plan to a newer version; ``fetched_bytes`` were downloaded before."""

    def __init__(self, target: Manifest, plan: Plan, fetched_bytes: int) -> None:
        super().__init__()
        self.target = target
        self.plan = plan
        self.fetched_bytes = fetched_bytes


class Patcher:
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
        self._store = store
        self._slots = slots
        self._base = base
        self._workers = workers
        self._limits = limits
        self._progress = progress
        self._source: Source | None = None
        warm_up(spec.width for spec in store.schema())

    @property
    def source(self) -> Source | None:
        """What the live slot holds; ``None`` before it was adopted, or where there is none."""
        return self._source

    def adopt(self) -> LiveSlot | None:
        """Take over what is at the checkpoint's path; returns the live slot, or ``None`` where there is nothing yet.

        A slot of ours must belong to this stream and history, and is verified if its bytes may have changed; a plain
        directory is hashed and must be a version of the stream. Raises ``StreamMismatch``, ``BaseMismatch``,
        ``CorruptObject``.
        """
        live = self._slots.live()
        if live is not None:
            check_history(self._store, self._slots, live)
            total = sum(file.size for file in live.record.files)
            verifying = counter(self._progress, "verify", total)
            self._source = self._slots.source(live, workers=self._workers, progress=verifying)
            return live
        self._slots.forget()
        if not self._slots.link.exists():
            return None
        if not self._slots.is_plain():
            # A link of somebody else's, or files that are links, as model caches make them: read, never written
            # through.
            self._base = self._slots.link.resolve()
            return None
        source = identify(self._store, self._slots.link, workers=self._workers, progress=self._progress)
        self._slots.adopt(source, self._store.manifest(source.version), self._store.hash)
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
        source = self._source or self._first_source()
        start = source.version if source else None
        if newest is not None:
            target = max(target, newest(), key=lambda manifest: manifest.version)  # hashing a base takes a while
        planner = Planner(self._store)
        spool = Spool(self._slots.parts)
        planned = time.perf_counter()

        def build(plan: Plan) -> tuple[Literal["a", "b"], Plan, Source, Replayed]:
            nonlocal planned
            planned = time.perf_counter()
            plain = outline(self._store, source)
            goal = Goal(FORMAT, self._store.stream_id, target.commit_id, plain.digest(self._store.hash))
            all_here = None if newest is None else partial(self._look_again, planner, target, newest)
            self._slots.check_room(plain.nbytes + spool.missing_bytes(plan.parts))
            try:
                with Fetch(
                    self._store, plan, spool, limits=self._limits, progress=self._progress, all_here=all_here
                ) as fetch:
                    begun = self._slots.begin(goal)
                    built, replayed = build_checkpoint(
                        fetch,
                        source,
                        plain,
                        begun.directory,
                        workers=self._workers,
                        resume=begun.resumed,
                        durable=self._slots.durable,
                        lost=partial(self._slots.give_up, begun.name),
                        progress=self._progress,
                    )
            except BaseMismatch as error:
                if source is not self._source:
                    raise
                raise DamagedSlot(  # no wrong base, but a live slot whose bytes changed
                    f"The live slot is damaged: {error}",
                    key=str(self._slots.link),
                    hint=f"Mend it with `receiver repair`, or remove {self._slots.link} (the link) to build it anew.",
                ) from error
            return begun.name, plan, built, replayed

        fetched_before = 0
        try:
            try:
                name, plan, built, replayed = planner.follow(planner.plan(start, target.version), build)
            except VersionNotFound:
                # A full chunk does not lead back, and without an anchor there is no other way: the base may have one.
                if source is None or self._base is None:
                    raise
                source = identify(self._store, self._base, workers=self._workers, progress=self._progress)
                name, plan, built, replayed = planner.follow(planner.plan(source.version, target.version), build)
        except _Newer as newer:
            target, newest, fetched_before = newer.target, None, newer.fetched_bytes
            name, plan, built, replayed = planner.follow(newer.plan, build)
        self._slots.finish(name, built, target, self._store.hash)
        patched = time.perf_counter()
        self._slots.swap(name)
        live = self._slots.live()
        if live is None or live.name != name:
            raise CorruptObject(f"{self._slots.link} was changed by somebody else.", key=str(self._slots.link))
        self._source = built
        spool.clear()
        swapped = time.perf_counter()
        return Patched(
            start=start,
            target=target,
            fetched_bytes=fetched_before + replayed.fetched_bytes,
            stored_bytes=plan.stored_bytes,
            stages={
                "verify": planned - started,
                "fetch": replayed.fetch_seconds,
                "patch": patched - planned,
                "swap": swapped - patched,
            },
        )

    def _look_again(self, planner: Planner, target: Manifest, newest: Callable[[], Manifest], fetch: Fetch) -> None:
        """Raise ``_Newer`` if there is a newer version now, and its parts are few against the model."""
        here = {part.key for step in fetch.plan.steps for part in step.parts}
        try:
            found = newest()
            if found.version <= target.version:
                return
            further = planner.plan(fetch.plan.start, found.version)
        except DeltastoreError as error:  # all that this patch needs is here: it is not given up for a question
            _log.info("Whether there is a newer version is not known: %s", error)
            return
        missing = sum(part.size for step in further.steps for part in step.parts if part.key not in here)
        if missing <= _FOLDED_SHARE * found.model.snapshot_bytes:
            _log.info("Version %d is folded into the patch to %d.", found.version, target.version)
            raise _Newer(found, further, fetch.downloaded())

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
            stages={"verify": verified - started, "swap": time.perf_counter() - verified},
        )

    def _first_source(self) -> Source | None:
        """Return the base to start from on a host that has nothing under the checkpoint's path."""
        if self._base is None:
            return None
        if self._base.resolve() == self._slots.link.resolve() and not self._slots.link.exists():
            raise UsageError(f"{self._base} is the checkpoint's own path.", hint="Give another directory as --base.")
        return identify(self._store, self._base, workers=self._workers, progress=self._progress)

    def previous(self) -> LiveSlot | None:
        """Return the slot that is not live if it holds its version, verified as a live slot is. Needs no store."""
        try:
            live = self._slots.live()
            other = self._slots.other(live) if live is not None else None
            if other is not None:
                self._slots.source(other, workers=self._workers)
        except DeltastoreError as error:
            _log.warning("The version before cannot be used: %s", error)
            return None
        return other

    def go_back(self) -> LiveSlot | None:
        """Make the version before live again if it is still there whole; returns it, or ``None``. Needs no store."""
        other = self.previous()
        if other is not None:
            self._slots.swap(other.name)
            self._source = self._slots.source(other, workers=self._workers)
        return other


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
