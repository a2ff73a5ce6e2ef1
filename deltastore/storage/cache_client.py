"""The cache of a site, asked over HTTP (``receiver cache`` is its server).

Nothing that it answers is trusted, and nothing depends on it: an answer that is not whole and sealed, or does not
come in time, is as good as none, and the object is fetched from the store. A server that failed is left alone for a
while, each time twice as long, so that one that is down does not cost time at each object.
"""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx

from deltastore.errors import UsageError
from deltastore.storage.cache_directory import seal
from deltastore.tokens import read_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["TOKEN_NAME", "CacheClient", "open_cache_client"]

TOKEN_NAME: Final = "DELTASTORE_CACHE_TOKEN"  # noqa: S105 - the name, not the token

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 5.0
# As for the store's own requests. The server may have to fetch the object first.
_BASE_SECONDS: Final = 30.0
_SLOWEST_BYTES_A_SECOND: Final = 1 << 20
_REST_SECONDS: Final = 15.0
_MOST_DOUBLINGS: Final = 5
_BUSY_SECONDS: Final = (0.2, 1.0)


class CacheClient:
    """The cache server at ``url``. Thread-safe.

    ``patience`` is how many seconds a small object may take; large ones may take longer by their size. ``rest`` is how
    many seconds a server that failed is left alone at first.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        patience: float = _BASE_SECONDS,
        rest: float = _REST_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._patience = patience
        self._rest = rest
        self._sleep = sleep
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._resting_until = 0.0
        self._failures = 0

    def __repr__(self) -> str:
        return f"CacheClient({self._url!r})"

    def read(self, key: str, *, limit: int, fetch: Callable[[], bytes]) -> bytes:
        """Return what the server has for an object, or what ``fetch`` returns."""
        data = None
        if not self._rests():
            try:
                data = self._ask(key, limit)
            except (httpx.HTTPError, httpx.StreamError, _Unfit) as error:
                self._failed(error)
            else:
                self._failures = 0
        return fetch() if data is None else data

    def forget(self, key: str) -> None:
        """Tell the server that its copy is wrong."""
        if not self._rests():
            with suppress(httpx.HTTPError):
                self._connected().delete(f"{self._url}/{key}", timeout=_CONNECT_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                # No proxy of the environment stands between hosts of one site. Certificates are the system's.
                self._client = httpx.Client(headers=self._headers, trust_env=False, verify=ssl.create_default_context())
            return self._client

    def _ask(self, key: str, limit: int) -> bytes | None:
        """Ask until the server is not too busy to answer; ``None`` when it does not have the object."""
        seconds = self._patience + limit / _SLOWEST_BYTES_A_SECOND
        deadline = time.monotonic() + seconds
        timeout = httpx.Timeout(seconds, connect=min(_CONNECT_SECONDS, seconds))
        while True:
            connected: list[str] = []
            try:
                with self._get(key, timeout, connected) as answer:
                    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        return _body(answer, key, limit, deadline)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                # A server may close a connection that stood idle just when it is used again, which says nothing of
                # the server. The pool has dropped that connection now; only the failure of a new one counts.
                if connected or time.monotonic() > deadline:
                    raise
                continue
            pause = random.uniform(*_BUSY_SECONDS)  # noqa: S311 - jitter
            if time.monotonic() + pause > deadline:
                raise _Unfit("it is too busy")
            self._sleep(pause)

    def _get(self, key: str, timeout: httpx.Timeout, connected: list[str]) -> AbstractContextManager[httpx.Response]:
        """Ask once; ``connected`` is filled when that takes a new connection."""

        def note(event: str, _info: object) -> None:
            if event == "connection.connect_tcp.started":
                connected.append(event)

        return self._connected().stream("GET", f"{self._url}/{key}", timeout=timeout, extensions={"trace": note})

    def _rests(self) -> bool:
        return time.monotonic() < self._resting_until

    def _failed(self, error: Exception) -> None:
        """Leave the server alone for a while, and say so once."""
        with self._lock:
            if self._rests():
                return
            seconds = self._rest * 2 ** min(self._failures, _MOST_DOUBLINGS)
            self._failures += 1
            self._resting_until = time.monotonic() + seconds
        reason = str(error) or type(error).__name__
        _log.warning("The cache %s is not used for %.0f s: %s.", self._url, seconds, reason)


class _Unfit(Exception):
    """An answer that is of no use."""


def _body(answer: httpx.Response, key: str, limit: int, deadline: float) -> bytes | None:
    """Return the object in an answer, whole and sealed, or ``None`` if there is none that could be used."""
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    if answer.status_code != httpx.codes.OK or "content-encoding" in answer.headers:
        raise _Unfit(f"it answers {answer.status_code} {answer.reason_phrase}")
    length = answer.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        raise _Unfit("it answers without a length")
    if len(length) > len(str(limit)) or int(length) > limit:
        return None  # the store is asked what is wrong here
    pieces = []
    size = 0
    for piece in answer.iter_raw():
        pieces.append(piece)
        size += len(piece)
        if size > int(length):  # its length is only said where an answer comes in chunks
            raise _Unfit("it answers more than it said")
        if time.monotonic() > deadline:
            raise _Unfit("it is too slow")
    data = b"".join(pieces)
    if answer.headers.get("etag") != f'"{seal(key, data).hex()}"':
        raise _Unfit(f"what it answers for {key} is damaged")
    return data


def open_cache_client(url: str, *, sleep: Callable[[float], None]) -> CacheClient:
    """Make the client of a cache server's URL; no request is sent yet. Raises ``UsageError``."""
    hint = f"write http://HOST:PORT, and its token into {TOKEN_NAME}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError("the cache's URL cannot be used", hint=hint) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise UsageError("the cache is neither a directory nor an http:// or https:// URL", hint=hint)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError("the cache's URL takes no user, ? or #", hint=hint)
    return CacheClient(url, token=read_token(TOKEN_NAME), sleep=sleep)
