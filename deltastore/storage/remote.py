"""Objects in object storage, through fsspec: S3, Google Cloud Storage, Azure, and memory for tests.

What fsspec leaves open is settled here. No listing is cached. One object is one request, so that creating
it exclusively means something (a multipart upload that is "created" has several winners). The libraries'
own retries and waits are turned down, and every call runs under a deadline of ours: a PUT to a server
that has gone silent hangs outside each of their timeouts. Errors become ours.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlunsplit

from deltastore.errors import AccessDenied, DeltastoreError, StorageError, UsageError
from deltastore.storage.base import ObjectInfo
from deltastore.storage.failures import is_absence, is_empty_range, too_large, too_short, translate
from deltastore.storage.keys import check_key, check_prefix, check_range, is_key
from deltastore.storage.options import clean, parse_options, secrets_of, split_url
from deltastore.storage.waiting import BASE_TIMEOUT, CREATE_LIMIT, LIST_TIMEOUT, patience, run_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deltastore.storage.base import Buffer

__all__ = ["FsspecBackend", "open_fsspec"]

_CLOSE_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How a file system is told to put one object whole, and to put it only where there is none."""

    extra: str
    write: Mapping[str, Any] = field(default_factory=dict)
    create: Mapping[str, Any] = field(default_factory=lambda: {"mode": "create"})


# s3fs sends one PUT below twice its chunk size; beyond 5 GiB S3 takes no single PUT anyway. gcsfs sends one
# request below 5 MiB and a resumable upload above, which is whole or absent too.
_SINGLE_PUT: Final = {"chunksize": 5 << 30}
_S3: Final = _Dialect("", write=_SINGLE_PUT, create={**_SINGLE_PUT, "mode": "create"})
_GOOGLE: Final = _Dialect("gcs")
_AZURE: Final = _Dialect("azure", write={"overwrite": True}, create={"overwrite": False})
_DIALECTS: Final = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "memory": _Dialect(""),
}

# File systems that are not asynchronous are in-process ones that check and then set: one call at a time.
_SYNCHRONOUS: Final = threading.RLock()


def open_fsspec(url: str, *, storage_options: Mapping[str, object], timeout: float = BASE_TIMEOUT) -> FsspecBackend:
    """Open a remote URL; no request is sent yet. Raises ``UsageError`` for what can never work."""
    import fsspec  # noqa: PLC0415 - a local store must not wait for it
    from fsspec.config import apply_config  # noqa: PLC0415

    parts, credentials = split_url(url)
    protocol = parts.scheme
    options = parse_options({**credentials, **storage_options})
    plain_url = urlunsplit(parts)
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        extra = _DIALECTS[protocol].extra
        hint = f"pip install 'deltastore[{extra}]'" if extra else "install fsspec and s3fs"
        raise UsageError(f"what {protocol}:// needs is not installed", hint=hint) from None
    # FSSPEC_* and fsspec's configuration files, for what was not given.
    options = apply_config(kind, options)
    secrets = secrets_of(options)
    if _DIALECTS[protocol] is _S3:
        options = _s3_options(options)
    # Other processes write to the same store, so nothing seen once may be believed later; and a file
    # system shared with the rest of the program would carry somebody else's settings.
    options |= {"use_listings_cache": False, "skip_instance_cache": True}
    # What fsspec.url_to_fs does, less the instance cache and with one place for errors.
    from_url = kind._get_kwargs_from_urls(plain_url)  # noqa: SLF001 - the hook that fsspec itself calls
    root = kind._strip_protocol(plain_url).rstrip("/")  # noqa: SLF001

    def make() -> Any:
        file_system = kind(**{**from_url, **options})
        if _DIALECTS[protocol] is _S3:
            file_system.retries = 1
            if file_system.session is None:
                file_system.session = _session(file_system.kwargs)
        return file_system

    try:
        return FsspecBackend(make, root, url=plain_url, protocol=protocol, timeout=timeout, secrets=secrets)
    except Exception as error:
        raise UsageError(
            f"the storage options do not fit {protocol}://: {clean(str(error), secrets)}",
            hint="check the storage options and the environment of this kind of storage",
        ) from error


@dataclass(slots=True)
class _Connection:
    """A file system, and how many requests are on their way over it."""

    file_system: Any
    requests: int = 0


class FsspecBackend:
    """One prefix of a bucket (or container) behind the fsspec file system that ``make`` returns.

    ``timeout`` bounds one small request; large ones get more by their size. ``secrets`` are texts that
    messages are cleaned of. ``close`` gives the connections back; a closed backend opens new ones when it
    is used again.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        root: str,
        *,
        url: str,
        protocol: str,
        timeout: float = BASE_TIMEOUT,
        secrets: frozenset[str] = frozenset(),
    ) -> None:
        self._make = make
        self._connection = _Connection(make())
        self._root = root
        self._url = url
        self._dialect = _DIALECTS[protocol]
        self._timeout = timeout
        self._secrets = secrets
        self._process = os.getpid()
        self._connected = False
        self._denied = False
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"FsspecBackend({self._url!r})"

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._url

    def read(self, key: str, *, limit: int) -> bytes:
        """Return the whole object in one request, which asks for one byte more than ``limit`` at the most."""
        check_key(key)
        path = self._path(key)
        try:
            data = self._call("cat_file", path, start=0, end=limit + 1, size=limit)
        except Exception as error:
            # An empty object has no byte that a range could start at; only then a second request is needed.
            if is_empty_range(error) and self._size(key) == 0:
                return b""
            raise self._translated(error, "read", key) from error
        if len(data) > limit:
            raise too_large(key, limit)
        return bytes(data)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object, in one request."""
        check_range(key, start, end)
        wanted = end - start
        try:
            data = self._call("cat_file", self._path(key), start=start, end=end, size=wanted)
        except Exception as error:
            if is_empty_range(error):
                raise too_short(key, end) from error
            raise self._translated(error, "read", key) from error
        if len(data) > wanted:
            raise StorageError(
                f"{self._url} answers with more than the range asked for",
                transient=False,
                key=key,
                hint="use a service that answers ranged reads",
            )
        if len(data) < wanted:
            raise too_short(key, end)
        return bytes(data)

    def write(self, key: str, data: Buffer) -> None:
        """Store an object in one request, replacing what is there."""
        check_key(key)
        try:
            self._call("pipe_file", self._path(key), _bytes(data), size=len(data), **self._dialect.write)
        except Exception as error:
            raise self._translated(error, "write", key) from error

    def create(self, key: str, data: Buffer) -> None:
        """Store a small object in one conditional request, if and only if the key is free."""
        check_key(key)
        if len(data) > CREATE_LIMIT:
            raise UsageError(f"{key} is too large to be created exclusively: {len(data)} bytes", key=key)
        try:
            self._call("pipe_file", self._path(key), _bytes(data), size=len(data), **self._dialect.create)
        except Exception as error:
            raise self._translated(error, "create", key) from error

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix``; anything that has no valid key is left out."""
        check_prefix(prefix)
        path = self._path(prefix.rstrip("/")) if prefix else self._root
        try:
            found = self._call("find", path, detail=True, timeout=LIST_TIMEOUT)
        except Exception as error:
            if is_absence(error):
                return
            raise self._translated(error, "list", prefix or None) from error
        start = f"{self._root}/"
        for name, info in found.items():
            key = name.removeprefix(start)
            if name.startswith(start + prefix) and info["type"] == "file" and is_key(key):
                yield ObjectInfo(key, int(info["size"]))

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is none the worse."""
        check_key(key)
        try:
            self._call("rm_file", self._path(key))
        except Exception as error:
            if not is_absence(error):
                raise self._translated(error, "delete", key) from error

    def close(self) -> None:
        """Close the connections, where the library keeps any."""
        file_system = self._connection.file_system
        if not _renewable(file_system) or not self._connected or self._process != os.getpid():
            return
        run_on(file_system.loop, lambda: _close(file_system), _CLOSE_TIMEOUT)
        self._connected = False

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _size(self, key: str) -> int:
        """Return the size that the store gives for an object."""
        try:
            return int(self._call("info", self._path(key))["size"])
        except Exception as error:
            raise self._translated(error, "read", key) from error

    def _call(
        self, method: str, *arguments: object, size: int = 0, timeout: float | None = None, **options: Any
    ) -> Any:
        """Call the file system, under a deadline that grows with the bytes that are to travel."""
        if self._process != os.getpid():
            raise StorageError(
                f"{self._url} was opened in another process",
                transient=False,
                hint="open the store after the fork, or start workers by spawn",
            )
        file_system = self._connection.file_system
        if not file_system.async_impl:
            with _SYNCHRONOUS:
                return getattr(file_system, method)(*arguments, **options)
        self._connected = True
        seconds = timeout if timeout is not None else patience(self._timeout, size)
        return run_on(file_system.loop, lambda: self._ask(method, *arguments, **options), seconds)

    # In the event loop's thread, and there alone

    async def _ask(self, method: str, *arguments: object, **options: Any) -> Any:
        if self._denied and _renewable(self._connection.file_system):
            self._denied = False
            self._renew()
        connection = self._connection
        connection.requests += 1
        try:
            return await getattr(connection.file_system, f"_{method}")(*arguments, **options)
        finally:
            connection.requests -= 1
            self._close_left(connection)

    def _renew(self) -> None:
        """Look for credentials again: those of a file may be new ones.

        By a new file system: an s3fs that is given another client keeps all that it ever had, some 13 MiB each.
        """
        old, self._connection = self._connection, _Connection(self._make())
        self._close_left(old)

    def _close_left(self, connection: _Connection) -> None:
        """Close a connection that another one took the place of, once nothing is on its way over it."""
        if connection is self._connection or connection.requests:
            return
        task = asyncio.get_running_loop().create_task(_close(connection.file_system))
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        """Free what the closed connection was made of, thousands of objects that refer to each other.

        Left to itself the interpreter lets several such heaps come together, and memory that grew does not shrink.
        """
        self._closing.discard(task)
        asyncio.get_running_loop().call_soon(gc.collect)  # when the task itself is gone

    def _translated(self, error: Exception, verb: str, key: str | None) -> Exception:
        if isinstance(error, DeltastoreError):
            return error
        ours = translate(error, verb, key, url=self._url, clean=lambda text: clean(text, self._secrets))
        self._denied |= isinstance(ours, AccessDenied)
        return ours


def _renewable(file_system: Any) -> bool:
    """Whether a file system keeps a client of its own, which has credentials and can be closed."""
    return hasattr(file_system, "set_session")


async def _close(file_system: Any) -> None:
    client = await file_system.set_session()
    await client.close()


def _bytes(data: Buffer) -> bytes:
    """Return bytes, the one type that every library takes."""
    return data if isinstance(data, bytes) else bytes(data)


def _session(options: Mapping[str, Any]) -> Any:
    """Make the session that s3fs would, with what botocore knows of S3's requests shared by all sessions.

    Read anew for each client, that takes 12 of the 13 MiB that one takes, and most of the time to make it.
    """
    from aiobotocore.session import AioSession  # noqa: PLC0415 - s3fs is imported by now, and this with it

    session = AioSession(**options)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader  # noqa: PLC0415

    return create_loader(data_path)


def _s3_options(options: dict[str, object]) -> dict[str, object]:
    """Fit options to s3fs: regions where botocore looks for them, the libraries' patience turned down."""
    options = dict(options)
    client = _nested(options, "client_kwargs")
    for name in ("region", "region_name"):
        if name in options:
            client.setdefault("region_name", options.pop(name))
    config = {
        "connect_timeout": 5,
        "read_timeout": 20,
        "max_pool_connections": 32,
        **_nested(options, "config_kwargs"),
    }
    config.setdefault("retries", {"max_attempts": 0})
    return {**options, "client_kwargs": client, "config_kwargs": config}


def _nested(options: Mapping[str, object], name: str) -> dict[str, object]:
    value = options.get(name, {})
    if not isinstance(value, dict):
        raise UsageError(f"the storage option {name} is not a mapping", hint=f"write {name}.NAME=VALUE")
    return dict(value)
