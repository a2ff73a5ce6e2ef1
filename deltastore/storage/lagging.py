"""A decorator whose listings are old, as those of some object stores are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from deltastore.storage.base import close_backend
from deltastore.storage.keys import check_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.base import Backend, Buffer, ObjectInfo

__all__ = ["LaggingBackend"]


class LaggingBackend:
    """Lists what was there when it last caught up: at first nothing. All else is as it is inside."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._seen: list[ObjectInfo] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The inner backend's URL."""
        return self.inner.url

    def catch_up(self) -> None:
        """Let listings show what is there now, until the next call."""
        seen = [*self.inner.list("")]
        with self._lock:
            self._seen = seen

    def read(self, key: str, *, limit: int) -> bytes:
        """Read at once."""
        return self.inner.read(key, limit=limit)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Read a range at once."""
        return self.inner.read_range(key, start, end)

    def write(self, key: str, data: Buffer) -> None:
        """Write at once."""
        self.inner.write(key, data)

    def create(self, key: str, data: Buffer) -> None:
        """Create at once."""
        self.inner.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield what was there below ``prefix`` at the time of the last ``catch_up``."""
        check_prefix(prefix)
        with self._lock:
            seen = self._seen
        yield from (info for info in seen if info.key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove at once."""
        self.inner.delete(key)

    def close(self) -> None:
        """Close the inner backend's connections, where it has any."""
        close_backend(self.inner)
