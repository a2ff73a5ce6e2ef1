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
_REMOTE: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
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
    protocol's usual environment (``AWS_*``, ``FSSPEC_*``). ``sleep`` waits between tries of a call that
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

    from deltastore.storage.remote import open_fsspec  # noqa: PLC0415 - fsspec only where it is used
    from deltastore.storage.retry import RetryingBackend  # noqa: PLC0415

    return RetryingBackend(open_fsspec(url, storage_options=storage_options or {}), sleep=sleep)


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
