"""A receiver that follows a store step by step, over a link as slow as is wanted. Imports no torch."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from deltastore.reader import store_at
from deltastore.replay import Fetch
from deltastore.spool import Spool
from deltastore.storage import open_backend
from receiver.patcher import Patcher
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.plan import Plan
    from deltastore.reader import Store
    from deltastore.storage import Backend, Buffer, ObjectInfo
    from receiver.patcher import Patched

__all__ = ["Follower", "SlowBackend"]


class SlowBackend:
    """A backend behind a link that carries ``bytes_per_second``, shared by all who read at a time; ``None``: any."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.bytes_per_second: float | None = None
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        """Where the store behind the link is."""
        return self._inner.url

    def read(self, key: str, *, limit: int) -> bytes:
        """Read an object; returns when its last byte would have come over the link."""
        data = self._inner.read(key, limit=limit)
        if self.bytes_per_second is None:
            return data
        with self._lock:
            arrival = self._free_at = max(time.monotonic(), self._free_at) + len(data) / self.bytes_per_second
        time.sleep(max(0.0, arrival - time.monotonic()))
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Read a range at once: nothing that is measured here reads one."""
        return self._inner.read_range(key, start, end)

    def write(self, key: str, data: Buffer) -> None:
        """Write at once: only reading is slow."""
        self._inner.write(key, data)

    def create(self, key: str, data: Buffer) -> None:
        """Create at once."""
        self._inner.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List at once."""
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        """Delete at once."""
        self._inner.delete(key)


class Follower:
    """A receiver's patcher that goes one version on at every call."""

    def __init__(self, home: Path, *, threads: int) -> None:
        self.link = SlowBackend(open_backend(str(home / "store")))
        self.store: Store = store_at(self.link)
        self._slots = Slots(home / "checkpoint")
        self._slots.lock()
        self._patcher = Patcher(self.store, self._slots, workers=threads)
        live = self._patcher.adopt()
        assert live is not None
        self.version = live.record.version
        self.last: Patched | None = None

    @property
    def plan(self) -> Plan:
        """The way to the next version."""
        return self.store.plan(self.version, self.version + 1)

    def fetch(self) -> None:
        """Fetch the next version's parts to where ``advance`` looks for them."""
        with Fetch(self.store, self.plan, Spool(self._slots.parts)) as fetch:
            fetch.downloaded()

    def forget(self) -> None:
        """Remove what ``fetch`` brought."""
        Spool(self._slots.parts).clear()

    def advance(self) -> None:
        """Fetch and apply the next version, durably, and make it live."""
        self.last = self._patcher.move_to(self.store.manifest(self.version + 1))
        self.version += 1

    def close(self) -> None:
        """Let another receiver work on the checkpoint."""
        self._slots.unlock()
