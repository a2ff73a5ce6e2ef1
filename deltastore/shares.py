"""How much work a thread is handed at a time."""

from __future__ import annotations

from .snapshot import CHUNK_BYTES

__all__ = ["AHEAD", "Shares", "encoding_bytes"]

_LEAST = 2 * CHUNK_BYTES
_MOST = 8 << 20
#: Shares whose results nobody has taken yet, beyond one a thread.
AHEAD = 1
#: What is encoded waits in memory until those before it are done: so many bytes are expected of all shares that run,
#: and shares have so many together at the most, should everything change at once.
_WAITING_BYTES = 32 << 20
_TOGETHER_BYTES = 256 << 20
#: A share to encode has no more; and no less than any, however many threads there are: one thread collects them all.
_MOST_TO_ENCODE = 32 << 20


def encoding_bytes(come_to: float, *, workers: int) -> int:
    """Return how many bytes a share may have that is encoded, and expected to come to this part of them."""
    together = _WAITING_BYTES / max(come_to, _WAITING_BYTES / _TOGETHER_BYTES)
    return min(_MOST_TO_ENCODE, max(int(together / (workers + AHEAD)), _LEAST))


class Shares:
    """Shares of ``nbytes`` bytes of work, small at both ends.

    A large one costs less to hand over. But with a small one the first result is there early, and at the end nobody
    waits long for the last. ``most``: bytes that a share has at the most, two chunks at the least; it may be set anew
    between shares. Used from one thread.
    """

    __slots__ = ("_left", "_taken", "_workers", "most")

    def __init__(self, nbytes: int, *, workers: int, most: int = _MOST) -> None:
        self._left = nbytes
        self._taken = 0
        self.most = most
        self._workers = workers

    @property
    def size(self) -> int:
        """The bytes that the next share may have, but for the chunk that fills it."""
        most = min(self.most, self._taken)
        if self._workers > 1:
            most = min(most, self._left // (2 * self._workers))
        return max(most, _LEAST)

    def take(self, nbytes: int) -> None:
        """Count a share that was handed over."""
        self._left -= nbytes
        self._taken += nbytes
