"""Which version comes next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from deltastore.manifest import Manifest
    from deltastore.reader import Store

__all__ = ["Follower", "check_target"]

#: Every so many polls the version that we are at is read again: a store rolled back would look as if nothing were new.
_RECHECK_POLLS = 30

_TARGET = re.compile(r"latest|[0-9]{1,10}|tag:[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


def check_target(target: str) -> None:
    """Raise ``UsageError`` unless a text is a target: ``latest``, a version's number, or ``tag:NAME``."""
    if not _TARGET.fullmatch(target):
        raise UsageError(f"{target!r} is no target.", hint="Give latest, a version's number, or tag:NAME.")


class Follower:
    """Decides the wanted version: the newest one, or a fixed one. A steady poll is one read of the store."""

    def __init__(self, store: Store, target: str) -> None:
        check_target(target)
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
            if (self._polls + 1) % _RECHECK_POLLS == 0:
                self._store.recheck(self._known)  # as often as it fails, too
            self._polls += 1
            following = self._store.next(self._known.version)
            if following is not None:
                self._known = self._store.latest(at_least=following.version)
        return self._known
