"""How much work a thread is handed at a time."""

from __future__ import annotations

from .snapshot import CHUNK_BYTES

__all__ = ["Shares"]

_MOST = 8 << 20


class Shares:
    """Shares of ``nbytes`` bytes of work, small at both ends.

    A large one costs less to hand over. But with a small one the first result is there early, and at the end nobody
    waits long for the last. ``most``: bytes that a share has at the most, a chunk at the least. Used from one thread.
    """

    __slots__ = ("_left", "_most", "_taken", "_workers")

    def __init__(self, nbytes: int, *, workers: int, most: int = _MOST) -> None:
        self._left = nbytes
        self._taken = 0
        self._most = most
        self._workers = workers

    @property
    def size(self) -> int:
        """The bytes that the next share may have, but for the chunk that fills it."""
        most = min(self._most, self._taken)
        if self._workers > 1:
            most = min(most, self._left // (2 * self._workers))
        return max(most, CHUNK_BYTES)

    def take(self, nbytes: int) -> None:
        """Count a share that was handed over."""
        self._left -= nbytes
        self._taken += nbytes
