"""Anchors made in the background from a writer's shadow, which holds the newest version's bytes anyway.

The shadow usually runs ahead of the store while a version is encoded, so it has to be held meanwhile: a publish that
begins while an anchor is ``busy`` changes nothing in the shadow, and its own parts lead it on after ``wait``. An anchor
begins only between a commit and the next publish, so that whether it is busy cannot change to yes under an encoding.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from .compact import windows
from .draft import RouteDraft
from .errors import VersionNotFound

if TYPE_CHECKING:
    from .manifest import AnchorPolicy, Manifest
    from .reader import Store
    from .shadow import Shadow
    from .spool import Spool

__all__ = ["Anchoring"]

_log = logging.getLogger("deltastore")
#: What a new receiver has to fetch where it has no way at all.
_NO_WAY = 1 << 62


class Anchoring:
    """Makes the anchors that the stream's policy asks for, one at a time, in a thread of its own.

    The shadow must stay as it is until ``wait`` returns: versions may be encoded against it meanwhile, but it must
    neither run ahead nor advance. Nothing here fails a publish: what goes wrong is logged and kept in ``error``.
    """

    def __init__(self, store: Store, shadow: Shadow, spool: Spool, *, workers: int) -> None:
        self.error: BaseException | None = None
        self._store = store
        self._shadow = shadow
        self._spool = spool
        self._workers = workers
        #: Bytes that a new receiver fetches for the newest version: found by a plan once, then kept in step.
        self._cost: int | None = None
        self._running: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="anchor")

    @property
    def busy(self) -> bool:
        """Whether the shadow may be read. Never becomes true but in ``follow``."""
        return self._running is not None and not self._running.done()

    def follow(self, manifest: Manifest) -> None:
        """Begin an anchor of the version that the shadow just came to hold, if it is due or if that is not known yet.

        Called after each commit, when ``wait`` has returned.
        """
        policy = self._store.stream.anchors
        if policy is None:
            return
        if self._cost is not None:
            self._cost += manifest.stored_bytes
        if self._unknown(policy) or self._due(policy, manifest):
            self._running = self._pool.submit(self._make, policy, manifest)

    def _unknown(self, policy: AnchorPolicy) -> bool:
        return policy.when is not None and self._cost is None

    def _due(self, policy: AnchorPolicy, manifest: Manifest) -> bool:
        return policy.due(manifest.version, cost=self._cost or 0, snapshot_bytes=manifest.model.snapshot_bytes)

    def _make(self, policy: AnchorPolicy, manifest: Manifest) -> None:
        try:
            if self._unknown(policy):
                self._cost = self._planned(manifest)
            if self._due(policy, manifest):
                self._cost = self._anchor(manifest)
                self.error = None
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on: an anchor is never needed
            self.error = error
            _log.warning("Version %d got no anchor: %s", manifest.version, error)

    def _planned(self, manifest: Manifest) -> int:
        try:
            return self._store.plan(None, manifest.version).stored_bytes
        except VersionNotFound:
            return _NO_WAY

    def _anchor(self, manifest: Manifest) -> int:
        """Make an anchor from the shadow; returns its bytes."""
        shadow = self._shadow
        draft = RouteDraft(
            self._store, self._spool, start=None, end=manifest, level=shadow.level, workers=self._workers
        )
        try:
            for window in windows(shadow.schema):
                draft.add(window, None, shadow.chunk, old_digests=None, new_digests=shadow.digests)
            return draft.commit().stored_bytes
        except BaseException:
            draft.abandon()
            raise

    def wait(self) -> None:
        """Block until the shadow is free to advance."""
        if self._running is not None:
            wait([self._running])

    def close(self) -> None:
        """Finish the anchor that is under way."""
        self._pool.shutdown()
