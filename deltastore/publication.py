"""A version on its way into the store, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

__all__ = ["Publication", "Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """A committed version. ``timings`` are seconds: encode (compare, encode, hash), upload, commit, advance, total."""

    version: int
    snapshot_id: str
    stored_bytes: int
    changed_elements: int
    total_elements: int
    timings: Mapping[str, float]


class Publication:
    """A version on its way: the tensors may change again, the commit goes on behind."""

    def __init__(self, version: int, future: Future[Published]) -> None:
        self.version = version
        self._future = future

    def result(self, timeout: float | None = None) -> Published:
        """Block until the version is committed, or ``timeout`` seconds (``TimeoutError``); raises what went wrong.

        ``VersionConflict``: another writer was first, and this one is fenced. ``CommitInDoubt``: the next publish
        settles it.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Tell whether ``result`` would return or raise at once."""
        return self._future.done()
