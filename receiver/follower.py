"""Which version comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import UsageError, VersionNotFound

if TYPE_CHECKING:
    from deltastore.manifest import Manifest
    from deltastore.reader import Store

__all__ = ["Follower"]

#: Every so many polls the version that we are at is read again: a store rolled back would look as if nothing were new.
_RECHECK_POLLS = 30


class Follower:
    """Decides the wanted version: the newest one, or a fixed one. A steady poll is one read of the store."""

    def __init__(self, store: Store, target: str) -> None:
        if target != "latest" and not target.startswith("tag:") and not (target.isascii() and target.isdigit()):
            raise UsageError(f"{target!r} is no target.", hint="Give latest, a version's number, or tag:NAME.")
        self._store = store
        self._target = target
        self._known: Manifest | None = None
        self._polls = 0

    def wanted(self) -> Manifest:
        """Return the manifest of the version to be at; raises ``VersionNotFound`` while there is none such."""
        if self._target != "latest":
            return self._store.resolve(self._target)
        if self._known is None:
            self._known = self._store.latest()
        else:
            self._polls += 1
            if self._polls % _RECHECK_POLLS == 0:
                self._store.recheck(self._known)
            following = self._store.next(self._known.version)
            if following is not None:
                self._known = self._store.latest(at_least=following.version)
        return self._known

    def waits(self, error: VersionNotFound) -> bool:
        """Tell whether a missing version may still come: a fixed target that is not published yet."""
        return self._target != "latest" and isinstance(error, VersionNotFound)
