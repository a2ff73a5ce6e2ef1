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
from deltastore.storage.base import Backend, Buffer, ObjectInfo, close_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Backend", "Buffer", "ObjectInfo", "close_backend", "open_backend"]

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_S3: Final = ("s3", "s3a")
_S3_CLIENTS: Final = ("s3fs", "obstore")
_REMOTE: Final = (*_S3, "gs", "gcs", "az", "abfs", "abfss", "memory")
_KNOWN: Final = "use a path, or a URL that starts with " + ", ".join(f"{s}://" for s in ("file", *_REMOTE))


def open_backend(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Backend:
    """Open the backend of a path or URL; nothing is read or made yet.

    ``storage_options`` go to the file system of a remote protocol: ``endpoint_url``, ``key``, ``secret``,
    ``token``, ``anon``, ``region`` and whatever else it takes, as text or as values; a nested option is a
    mapping, a JSON object, or dotted (``client_kwargs.verify=false``). What is not given comes from the
    protocol's usual environment (``AWS_*``, ``FSSPEC_*``). For S3, ``client`` names the library: ``s3fs``, or
    ``obstore`` (the extra of that name). ``sleep`` waits between tries of a call that
    failed for the moment, and may raise to give up. Raises ``UsageError`` for a URL that cannot be used.
    """
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
