"""A decorator that reads immutable objects through a cache that a host, a rack or a site shares.

Only what can never be anything else under its key is kept: parts, schemas and tables below ``parts/`` and the
parts of routes. Their keys carry the random id of the attempt that wrote them, so one cache may serve any number
of stores, and a store that another stream replaced meets none of its predecessor's copies. Manifests, retention
records and log segments have no such id in their keys, hints and tags change, and absence ends: all of these, and
listings, are asked of the store each time.

fsspec's own caches are no help: they believe what they find on disk, have no bound, and do not keep two processes
from fetching the same object.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

from deltastore.storage.base import close_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.storage.base import Backend, Buffer, ObjectInfo

__all__ = ["DEFAULT_CACHE_BYTES", "Cache", "CachedBackend", "is_kept"]

DEFAULT_CACHE_BYTES: Final = 50 << 30

_OWNED: Final = r"[0-9]{10}/[0-9a-f]{32}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEPT: Final = re.compile(rf"parts/{_OWNED}|routes/{_OWNED}(?<=\.safetensors)")


def is_kept(key: str) -> bool:
    """Whether the object of a key may be kept: it is immutable, and no other store has another under this key."""
    return _KEPT.fullmatch(key) is not None


class Cache(Protocol):
    """Copies of immutable objects. A cache that fails in any way must ``fetch`` instead: it never fails a read."""

    def read(self, key: str, *, limit: int, fetch: Callable[[], bytes]) -> bytes:
        """Return the copy of an object, at most ``limit`` bytes, or what ``fetch`` returns or raises."""
        ...

    def forget(self, key: str) -> None:
        """Drop the copy of an object if there is one and it can be dropped."""
        ...

    def close(self) -> None:
        """Give back connections; they are opened again when they are needed."""
        ...


class CachedBackend:
    """Reads immutable objects through a cache; everything else goes to the inner backend.

    A copy is checked to be what the cache stored, not to be what the store's records say: their digests are the
    caller's to compare (``read_object`` does). A caller that finds a wrong one says ``forget``; from then on this
    backend reads that object from the store.
    """

    __slots__ = ("_cache", "_forgotten", "_inner")

    def __init__(self, inner: Backend, cache: Cache) -> None:
        self._inner = inner
        self._cache = cache
        self._forgotten: set[str] = set()

    def __repr__(self) -> str:
        return f"CachedBackend({self._inner!r}, {self._cache!r})"

    @property
    def url(self) -> str:
        """The inner backend's URL."""
        return self._inner.url

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object, from the cache where it may be kept there."""
        if not self.reads_whole(key):
            return self._inner.read(key, limit=limit)
        return self._cache.read(key, limit=limit, fetch=lambda: self._inner.read(key, limit=limit))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes of an object, from the store: a copy's seal is over the whole object."""
        return self._inner.read_range(key, start, end)

    def reads_whole(self, key: str) -> bool:
        """Tell whether an object is read through the cache, which is done whole."""
        return is_kept(key) and key not in self._forgotten

    def forget(self, key: str) -> bool:
        """Drop the copy of an object and do without one; tells whether the next read is the first without."""
        if not self.reads_whole(key):
            return False
        # Remembered too, because a copy in a directory that cannot be written to stays where it is.
        self._forgotten.add(key)
        self._cache.forget(key)
        return True

    def write(self, key: str, data: Buffer) -> None:
        """Store an object; a copy of what was there is dropped."""
        self._inner.write(key, data)
        self.forget(key)

    def create(self, key: str, data: Buffer) -> None:
        """Create an object."""
        self._inner.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects that the store has below ``prefix``."""
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object, and its copy here; copies elsewhere may be read on."""
        self._inner.delete(key)
        self.forget(key)

    def close(self) -> None:
        """Close the connections of the cache and of the inner backend."""
        self._cache.close()
        close_backend(self._inner)
