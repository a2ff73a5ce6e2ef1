"""How much work a thread is handed at a time."""

from __future__ import annotations

from .snapshot import CHUNK_BYTES

__all__ = ["Shares"]

_MOST = 8 << 20


class Shares:
    """Shares of ``nbytes`` bytes of work: ever smaller towards the end, so that several threads come to it together.

    A large one costs less to hand over, a small one leaves less to wait for. ``most``: bytes that a share has at the
    most, a chunk at the least. Used from one thread.
    """

    __slots__ = ("_left", "_most", "_workers")

    def __init__(self, nbytes: int, *, workers: int, most: int = _MOST) -> None:
        self._left = nbytes
        self._most = most
        self._workers = workers

    @property
    def size(self) -> int:
        """The bytes that the next share may have, but for the chunk that fills it."""
        share = self._left // (2 * self._workers) if self._workers > 1 else self._most
        return max(min(self._most, share), CHUNK_BYTES)

    def take(self, nbytes: int) -> None:
        """Count a share that was handed over."""
        self._left -= nbytes
