"""A receiver among others: its id, and the heartbeats that it leaves in the store."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError
from deltastore.heartbeat import encode_heartbeat, heartbeat_key, is_receiver_id
from deltastore.materialize import write_file

from .logs import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.heartbeat import Heartbeat
    from deltastore.storage import Backend

__all__ = ["LEAST_SECONDS", "Heartbeats", "own_id"]

#: Never more often than this, in seconds, however fast versions follow each other.
LEAST_SECONDS = 5.0
_TOLD_EVERY = 600.0
_LOOK_EVERY = 1.0
#: A stop does not wait longer than this, in seconds, for a store that hangs.
_LAST_WORDS = 3.0


def own_id(path: Path) -> str:
    """Return this receiver's id, made once and kept in a file."""
    with suppress(OSError, UnicodeDecodeError):
        kept = path.read_text(encoding="ascii").strip()
        if is_receiver_id(kept):
            return kept
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname(), flags=re.ASCII)[:64] or "host"
    made = f"{host}-{secrets.token_hex(4)}"
    # With no room for it there is another one after the next start: nothing depends on it.
    with suppress(DeltastoreError):
        write_file(path, f"{made}\n".encode())
    return made


class Heartbeats:
    """Sends what ``look`` returns from a thread of its own: every so many seconds, and at each change, rate-limited.

    ``look`` returns ``None`` while there is nothing to say. Nothing that goes wrong here is raised; ``told`` hears
    whether a heartbeat arrived.
    """

    def __init__(
        self,
        backend: Backend,
        look: Callable[[], Heartbeat | None],
        *,
        every: float,
        told: Callable[[bool], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._look = look
        self._every = max(every, LEAST_SECONDS)
        self._told = told
        self._clock = clock
        self._ended = threading.Event()
        self._remove = False
        self._thread: threading.Thread | None = None
        self._tried_at: float | None = None
        self._complained_at: float | None = None
        self._failed = False
        self._last: Heartbeat | None = None
        self._key: str | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self, *, remove: bool) -> None:
        """End, and take the heartbeat out of the store if ``remove``; a store that hangs is not waited for."""
        self._remove = remove
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_WORDS)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_EVERY if self._tried_at is not None else 0.05):
            self.beat()
        if self._remove and self._key is not None:
            self._try("removed", self._backend.delete)

    def beat(self) -> bool:
        """Send a heartbeat if one is due; tells whether it was tried."""
        heartbeat = self._look()
        if heartbeat is None:
            return False
        now = self._clock()
        # After a failure changes do not hurry it: a store that is down or read-only is not pestered.
        changed = not self._failed and (self._last is None or _face(heartbeat) != _face(self._last))
        wait = LEAST_SECONDS if changed else self._every
        if self._tried_at is not None and now - self._tried_at < wait:
            return False
        self._tried_at, self._last = now, heartbeat
        self._key = heartbeat_key(heartbeat.receiver_id)
        self._failed = not self._try("sent", lambda key: self._backend.write(key, encode_heartbeat(heartbeat)))
        self._told(not self._failed)
        return True

    def _try(self, what: str, action: Callable[[str], object]) -> bool:
        assert self._key is not None  # noqa: S101 - told to the type checker
        try:
            action(self._key)
        except Exception as error:  # noqa: BLE001 - a heartbeat never disturbs
            now = self._clock()
            if not self._ended.is_set() and (self._complained_at is None or now - self._complained_at >= _TOLD_EVERY):
                self._complained_at = now
                tell(
                    "heartbeat-failed",
                    f"The heartbeat {self._key} was not {what}: {error}",
                    level=logging.WARNING,
                    key=self._key,
                    error_kind=error.kind if isinstance(error, DeltastoreError) else type(error).__name__,
                )
            return False
        return True


def _face(heartbeat: Heartbeat) -> tuple[object, ...]:
    """Return what makes a heartbeat news."""
    return (heartbeat.version, heartbeat.state, heartbeat.pinned, heartbeat.paused)
