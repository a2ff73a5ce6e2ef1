"""Where objects are kept: one small protocol, its backends, and decorators round them.

``open_backend`` is the one place that knows storage protocols by name. Importing this package imports no
backend; a local store never imports fsspec.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from deltastore.errors import UsageError
from deltastore.storage.base import Backend, Buffer, ObjectInfo, close_backend, forget_copy, reads_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deltastore.storage.cache import Cache

__all__ = ["Backend", "Buffer", "ObjectInfo", "close_backend", "forget_copy", "open_backend", "reads_whole"]

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_S3: Final = ("s3", "s3a")
_S3_CLIENTS: Final = ("s3fs", "obstore")
_REMOTE: Final = (*_S3, "gs", "gcs", "az", "abfs", "abfss", "memory")
_KNOWN: Final = "use a path, or a URL that starts with " + ", ".join(f"{s}://" for s in ("file", *_REMOTE))


def open_backend(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    cache: str | Path | None = None,
    cache_bytes: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Backend:
    """Open the backend of a path or URL; nothing is read or made yet.

    ``storage_options`` go to the file system of a remote protocol: ``endpoint_url``, ``key``, ``secret``,
    ``token``, ``anon``, ``region`` and whatever else it takes, as text or as values; a nested option is a
    mapping, a JSON object, or dotted (``client_kwargs.verify=false``). What is not given comes from the
    protocol's usual environment (``AWS_*``, ``FSSPEC_*``). For S3, ``client`` names the library: ``s3fs``, or
    ``obstore`` (the extra of that name). ``cache`` is a directory for copies of immutable objects, bounded by
    ``cache_bytes`` (50 GiB unless given), or the URL of a site's cache server (``http://HOST:PORT``;
    ``DELTASTORE_CACHE_TOKEN`` holds its token). ``sleep`` waits between tries of a call that failed for the
    moment, and may raise to give up. Raises ``UsageError`` for a URL that cannot be used.
    """
    backend = _open_store(url, storage_options, sleep)
    if cache is None:
        if cache_bytes is not None:
            raise UsageError("a cache's size is given, and no cache", hint="say where it is")
        return backend

    from deltastore.storage.cache import CachedBackend  # noqa: PLC0415 - only where one is used

    return CachedBackend(backend, _open_cache(str(cache), cache_bytes, sleep))


def _open_cache(cache: str, max_bytes: int | None, sleep: Callable[[float], None]) -> Cache:
    if not cache:
        raise UsageError("the cache's place is empty", hint="give a directory, or the http:// URL of a cache server")
    if "://" in cache:
        from deltastore.storage.cache_client import open_cache_client  # noqa: PLC0415 - brings httpx

        if max_bytes is not None:
            raise UsageError("a cache server's size is not its readers' to set", hint="give it to `receiver cache`")
        return open_cache_client(cache, sleep=sleep)
    from deltastore.storage.cache import DEFAULT_CACHE_BYTES  # noqa: PLC0415
    from deltastore.storage.cache_directory import CacheDirectory  # noqa: PLC0415

    return CacheDirectory(Path(cache), max_bytes=DEFAULT_CACHE_BYTES if max_bytes is None else max_bytes, sleep=sleep)


def _open_store(url: str, storage_options: Mapping[str, object] | None, sleep: Callable[[float], None]) -> Backend:
    if not url:
        raise UsageError("the store's URL is empty", hint=_KNOWN)
    scheme = _SCHEME.match(url)
    if scheme is None and "://" not in url:
        return _open_local(Path(url), storage_options)
    protocol = scheme[1].lower() if scheme else ""
    if protocol == "file":
        return _open_local(_file_path(url), storage_options)
    if protocol not in _REMOTE:
        # Only the scheme is repeated: the rest of a URL may hold a password.
        name = f"{protocol}://" if protocol else "a chain of protocols"
        raise UsageError(f"{name} is not a kind of storage that is known here", hint=_KNOWN)

    from deltastore.storage.retry import RetryingBackend  # noqa: PLC0415 - a local store does without

    return RetryingBackend(_open_remote(url, protocol, dict(storage_options or {})), sleep=sleep)


def _open_remote(url: str, protocol: str, options: dict[str, object]) -> Backend:
    client = options.pop("client", None)
    if client is not None and (protocol not in _S3 or client not in _S3_CLIENTS):
        known = " or ".join(f"client={name}" for name in _S3_CLIENTS)
        raise UsageError(f"{protocol}:// has no client {client!r}", hint=f"for s3:// write {known}, or leave it out")
    if client == "obstore":
        from deltastore.storage.obstore import open_obstore  # noqa: PLC0415 - only where it is asked for

        return open_obstore(url, storage_options=options)
    from deltastore.storage.remote import open_fsspec  # noqa: PLC0415 - fsspec only where it is used

    return open_fsspec(url, storage_options=options)


def _open_local(root: Path, storage_options: Mapping[str, object] | None) -> Backend:
    from deltastore.storage.local import LocalBackend  # noqa: PLC0415 - a remote store does without

    if storage_options:
        given = ", ".join(sorted(storage_options))
        raise UsageError(f"a local path takes no storage options ({given} given)", hint="leave them out")
    return LocalBackend(root)


def _file_path(url: str) -> Path:
    """Return the path of a ``file://`` URL of this machine."""
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path or parts.query or parts.fragment:
        raise UsageError("a file:// URL needs an absolute path and no host", hint="write file:///the/path")
    return Path(unquote(parts.path))
