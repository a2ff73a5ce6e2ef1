"""Objects in S3 through obstore, a client in Rust: less of our processor for the same bytes than s3fs.

The same rules as for fsspec: one object is one request, the library's own retries are off, every call runs under a
deadline of ours, errors become ours.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlunsplit

from deltastore.errors import DeltastoreError, StorageError, UsageError
from deltastore.storage.base import ObjectInfo
from deltastore.storage.failures import is_absence, is_empty_range, too_large, too_short, translate
from deltastore.storage.keys import check_key, check_prefix, check_range, is_key
from deltastore.storage.options import clean, parse_options, secrets_of, split_url
from deltastore.storage.waiting import BASE_TIMEOUT, CREATE_LIMIT, LIST_TIMEOUT, patience, run_on

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from deltastore.storage.base import Buffer

__all__ = ["ObstoreBackend", "open_obstore"]

# How s3fs names what obstore names otherwise: one spelling serves both clients.
_NAMES: Final = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
    "region_name": "region",
}
_CLIENT: Final[dict[str, Any]] = {
    "allow_http": True,  # an endpoint that is written with http:// is meant so
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=20),
    "timeout": timedelta(hours=1),  # of a whole request: ours is shorter, and grows with the bytes
}
_PIECE: Final = 4 << 20
_NO_RETRIES: Final = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}


def open_obstore(url: str, *, storage_options: Mapping[str, object], timeout: float = BASE_TIMEOUT) -> ObstoreBackend:
    """Open an s3:// URL; no request is sent yet. Raises ``UsageError`` for what can never work."""
    try:
        from obstore.store import S3Store  # noqa: PLC0415 - an extra, imported only where it is used
    except ImportError:
        raise UsageError("obstore is not installed", hint="pip install 'deltastore[obstore]'") from None
    parts, credentials = split_url(url)
    options = parse_options({**credentials, **storage_options})
    secrets = secrets_of(options)
    client = options.pop("client_options", {})
    if not isinstance(client, dict):
        raise UsageError("the storage option client_options is not a mapping", hint="write client_options.NAME=VALUE")
    # The digest in the signature is not checked by every service; this one is, so that damage on the way is refused.
    config = {"checksum_algorithm": "SHA256", **{_NAMES.get(name, name): value for name, value in options.items()}}

    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,  # type: ignore[arg-type]
            client_options={**_CLIENT, **client},  # type: ignore[arg-type]
            retry_config=_NO_RETRIES,  # type: ignore[arg-type]
        )
    except Exception as error:
        text = clean(str(error).partition("\n\n")[0], secrets)
        raise UsageError(
            f"the storage options do not fit obstore: {text}",
            hint="give key, secret, token, endpoint_url, region, anon, or an option by obstore's own name",
        ) from error
    return ObstoreBackend(store, url=urlunsplit(parts), timeout=timeout, secrets=secrets)


class ObstoreBackend:
    """One prefix of a bucket: the library's ``store``.

    ``timeout`` bounds one small request; large ones get more by their size.
    ``secrets`` are texts that messages are cleaned of.
    """

    def __init__(
        self, store: Any, *, url: str, timeout: float = BASE_TIMEOUT, secrets: frozenset[str] = frozenset()
    ) -> None:
        from fsspec.asyn import get_loop  # noqa: PLC0415 - its thread waits for every client's answers

        self._store = store
        self._loop = get_loop()
        self._url = url
        self._timeout = timeout
        self._secrets = secrets
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"ObstoreBackend({self._url!r})"

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._url

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object in one request, whose answer tells the size before any byte is taken."""
        check_key(key)

        async def get() -> Any:
            answer = await self._store.get_async(key)
            if answer.meta["size"] > limit:
                raise too_large(key, limit)
            # In pieces that are joined once: whole, the object would be copied twice into fresh memory.
            return [piece async for piece in answer.stream(min_chunk_size=_PIECE)]

        return b"".join(self._call(get, "read", key, size=limit))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object, in one request."""
        check_range(key, start, end)
        try:
            data = self._call(
                lambda: self._store.get_range_async(key, start=start, end=end), "read", key, size=end - start
            )
        except StorageError as error:
            if isinstance(error.__cause__, Exception) and is_empty_range(error.__cause__):
                raise too_short(key, end) from error
            raise
        if len(data) != end - start:
            raise too_short(key, end)
        return bytes(data)

    def write(self, key: str, data: Buffer) -> None:
        """Store an object in one request, replacing what is there."""
        check_key(key)
        self._call(lambda: self._store.put_async(key, _whole(data), use_multipart=False), "write", key, size=len(data))

    def create(self, key: str, data: Buffer) -> None:
        """Store a small object in one conditional request, if and only if the key is free."""
        check_key(key)
        if len(data) > CREATE_LIMIT:
            raise UsageError(f"{key} is too large to be created exclusively: {len(data)} bytes", key=key)
        self._call(
            lambda: self._store.put_async(key, _whole(data), mode="create", use_multipart=False),
            "create",
            key,
            size=len(data),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix``; anything that has no valid key is left out."""
        check_prefix(prefix)

        async def collect() -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            async for page in self._store.list(prefix or None):
                found += [ObjectInfo(each["path"], each["size"]) for each in page]
            return found

        for info in self._call(collect, "list", prefix or None, timeout=LIST_TIMEOUT):
            # The library's prefix is whole components, ours ends in a slash: an object of that very name is not below.
            if is_key(info.key) and info.key.startswith(prefix):
                yield info

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is none the worse."""
        check_key(key)
        try:
            self._call(lambda: self._store.delete_async(key), "delete", key)
        except StorageError as error:
            if not (isinstance(error.__cause__, Exception) and is_absence(error.__cause__)):
                raise

    def _call(
        self,
        call: Callable[[], Awaitable[Any]],
        verb: str,
        key: str | None,
        *,
        size: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Run a request under a deadline that grows with the bytes that are to travel."""
        if self._process != os.getpid():
            raise StorageError(
                f"{self._url} was opened in another process",
                transient=False,
                hint="open the store after the fork, or start workers by spawn",
            )
        try:
            return run_on(self._loop, call, timeout if timeout is not None else patience(self._timeout, size))
        except DeltastoreError:
            raise
        except Exception as error:
            raise translate(error, verb, key, url=self._url, clean=lambda text: clean(text, self._secrets)) from error


def _whole(data: Buffer) -> Any:
    """Return what the library takes: flat bytes of any kind."""
    return data if isinstance(data, bytes) else memoryview(data).cast("B")
