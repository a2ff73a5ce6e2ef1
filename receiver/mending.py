"""Keeping the live slot whole: damage that was met is mended, and damage that nobody met yet is looked for."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from deltastore.errors import DamagedSlot, DeltastoreError
from deltastore.patch import default_workers

from .logs import tell, tell_failure
from .repair import repair
from .scrub import Scrub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.limits import Limits
    from deltastore.reader import Store

    from .patcher import Patcher
    from .priority import Priority
    from .repair import Repaired
    from .serving import Serving
    from .slots import LiveSlot, Slots
    from .status import Status

__all__ = ["Mending"]


class Mending:
    """Mends one checkpoint's live slot, and reads it over at ``scrub_rate`` bytes a second (0: never).

    ``leave`` is called to end the work when its caller is interrupted. ``progress`` may raise to leave it off.
    """

    def __init__(
        self,
        slots: Slots,
        status: Status,
        serving: Serving,
        *,
        base: Path | None,
        limits: Limits,
        priority: Priority,
        scrub_rate: int,
        leave: Callable[[], object],
        progress: Callable[[str, int, int], object],
    ) -> None:
        self._slots = slots
        self._status = status
        self._serving = serving
        self._base = base
        self._limits = limits
        self._priority = priority
        self._scrub = Scrub(slots.directory / "scrub.json", rate=scrub_rate) if scrub_rate else None
        self._leave = leave
        self._progress = progress
        self._passed_at = self._scrub.record.passed_at if self._scrub else None
        self._going_on = False
        self._problem: DeltastoreError | None = None

    @property
    def going_on(self) -> bool:
        """Whether the live slot is being mended: an operator's orders wait for that."""
        return self._going_on

    def mend(self, store: Store, problem: DeltastoreError, adopt: Callable[[], object]) -> None:
        """Mend the live slot, then ``adopt`` it again; raises as ``repair`` does.

        The engine may have loaded what was damaged: it loads and confirms again. Where it cannot be mended now the
        engine goes on with what it has, until ``go_on`` succeeds; whoever comes after this process finds the damage
        again.
        """
        self._problem = problem
        with suppress(DeltastoreError):  # no record, or no room for one: this life knows, and the next may not
            self._slots.suspect()
        tell("damaged", f"{problem} It is mended.", level=logging.WARNING, key=problem.key)
        self._status.enter("repairing")
        self._serving.doubt()
        self._going_on = True
        try:
            repaired = self._priority.run(lambda: self._repair(store), leave=self._leave)
            self._status.repaired(repaired)
            tell(
                "mended",
                f"Mended {repaired.damaged} chunks of version {repaired.version}; files made anew: "
                f"{', '.join(repaired.files) or 'none'}.",
                version=repaired.version,
                files=list(repaired.files),
                damaged=repaired.damaged,
                from_other=repaired.from_other,
                from_store=repaired.from_store,
                fetched_bytes=repaired.fetched_bytes,
            )
            adopt()
            self._problem = None
        finally:
            self._going_on = False

    def go_on(self, store: Store, adopt: Callable[[], object]) -> None:
        """Mend what could not be mended before; raises as ``mend``. Before anybody loads the slot, or builds on it."""
        if self._problem is None:
            return
        if self._slots.live_name() is not None:
            self.mend(store, self._problem, adopt)
            return
        adopt()  # somebody took the link away, to have the slot built anew
        self._problem = None

    def _repair(self, store: Store) -> Repaired:
        return repair(
            store,
            self._slots,
            base=self._base,
            workers=self._limits.workers or default_workers(),
            limits=self._limits,
            progress=self._progress,
        )

    def read_over(self, store: Store, patcher: Patcher, *, stopped: Callable[[], bool]) -> bool:
        """Read a few of the live slot's chunks over, as far as the rate allows; tells whether something was mended."""
        scrub = self._scrub
        if scrub is None:
            return False
        live, source = self._slots.live(), patcher.source
        if live is None or source is None:
            return False
        try:
            found = self._priority.run(lambda: scrub.step(live, source, store.hash, stopped=stopped), leave=self._leave)
            record, schema = scrub.record, source.checkpoint.schema
            passed = record.passed_at != self._passed_at
            self._passed_at = record.passed_at
            self._status.scrubbed(passed_at=record.passed_at, chunk=record.chunk, chunks=schema.chunks)
            problem = self._other_files(live) if passed else None
            if len(found):
                number = int(found[0])
                name = schema.tensors[int(schema.first_chunk.searchsorted(number, side="right")) - 1].name
                key = str(live.directory)
                problem = DamagedSlot(f"A chunk of {name!r} in {key} is damaged.", key=key)
            if problem is not None:
                self.mend(store, problem, patcher.adopt)
                return True
        except DeltastoreError as error:  # it goes on being served; the next pass tries again
            self._status.failed(error)
            tell_failure(error, "The next pass tries again.")
        return False

    def _other_files(self, live: LiveSlot) -> DamagedSlot | None:
        """Return what is wrong with the files beside the weights."""
        try:
            self._slots.check_other_files(live)
        except DamagedSlot as error:
            return error
        return None
