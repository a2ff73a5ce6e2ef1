"""A site's cache over HTTP: one fetch from the store for any number of hosts.

`GET /KEY` an immutable object, or a range of it · `DELETE /KEY` drop a copy that is wrong (never the store's object) ·
`/healthz` the process is up · `/metrics` Prometheus.

An answer's ETag is the object's seal, which the client compares with the bytes that it got. Anything but 200 and 206
sends it to the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from deltastore.errors import CorruptObject, DeltastoreError, ObjectNotFound
from deltastore.manifest import MAX_TABLE_BYTES
from deltastore.storage.cache import is_kept
from deltastore.storage.cache_client import TOKEN_NAME

from .http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from deltastore.storage import Backend
    from deltastore.storage.cache_directory import CacheDirectory, CachedObject

__all__ = ["CacheServer"]

_log = logging.getLogger("receiver")

_RANGE: Final = re.compile(r"bytes=(\d{0,12})-(\d{0,12})")
_PIECE: Final = 1 << 20
_ATTEMPTS: Final = 3
_IN_VAIN_SECONDS: Final = 30.0
_REMEMBERED: Final = 10_000
#: Connections at once; fetches from the store at once; copies read from the disk and sent at once.
_CONNECTIONS: Final = 8192
_FETCHES: Final = 16
_TRANSFERS: Final = 256
# A transfer may take so long, and longer by its bytes at the slowest rate that still counts as alive. The client has
# given up by then.
_BASE_SECONDS: Final = 30.0
_SLOWEST_BYTES_A_SECOND: Final = 1 << 20


class CacheServer(HttpServer):
    """Serves a store's immutable objects through a cache directory, for reading only."""

    def __init__(
        self,
        backend: Backend,
        directory: CacheDirectory,
        listen: str,
        *,
        token: str | None,
        transfers: int = _TRANSFERS,
        patience: float = _BASE_SECONDS,
    ) -> None:
        super().__init__(listen, token=token, token_name=TOKEN_NAME, name="cache", most_connections=_CONNECTIONS)
        self._backend = backend
        self._directory = directory
        self._patience = patience
        self._transfers = asyncio.Semaphore(transfers)
        # Fewer than the threads there are, so that copies are read while the store is waited for.
        self._fetches = asyncio.Semaphore(_FETCHES)
        self._fetching: dict[str, asyncio.Future[bool]] = {}
        self._not_kept: dict[str, float] = {}
        self.registry = CollectorRegistry()
        self.hits = Counter("cache_hits", "Requests served from a copy.", registry=self.registry)
        self.misses = Counter("cache_misses", "Requests that waited for the store.", registry=self.registry)
        self.failures = Counter("cache_failures", "Fetches that failed.", registry=self.registry)
        self.store_bytes = Counter("cache_store_bytes", "Bytes fetched from the store.", registry=self.registry)
        self.served_bytes = Counter("cache_served_bytes", "Bytes of objects sent.", registry=self.registry)

    def _app(self) -> ASGIApp:
        async def healthz(_request: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def metrics(_request: Request) -> Response:
            return PlainTextResponse(generate_latest(self.registry))

        return Starlette(
            routes=[
                Route("/healthz", healthz),
                Route("/metrics", metrics),
                Route("/{key:path}", self._get, methods=["GET"]),
                Route("/{key:path}", self._forget, methods=["DELETE"]),
            ]
        )

    async def _forget(self, request: Request) -> Response:
        key = request.path_params["key"]
        if is_kept(key):
            await run_in_threadpool(self._directory.forget, key)
        return Response(status_code=204)

    async def _get(self, request: Request) -> Response:
        key = request.path_params["key"]
        if not is_kept(key):
            return PlainTextResponse("No key of an object that is kept here.\n", status_code=404)
        return _Transfer(self, key)

    # What a transfer needs

    @asynccontextmanager
    async def copy(self, key: str) -> AsyncIterator[CachedObject | None]:
        """Open a copy for as long as the block lasts, in turn with other transfers."""
        async with self._transfers:
            copy = await run_in_threadpool(self._directory.open, key)
            try:
                yield copy
            finally:
                if copy is not None:
                    copy.close()

    async def fetch(self, key: str) -> bool:
        """Fetch an object into the directory, once for all who ask meanwhile; tells whether it was kept."""
        if time.monotonic() < self._not_kept.get(key, 0.0):
            return False
        task = self._fetching.get(key)
        if task is None:
            task = self._fetching[key] = asyncio.ensure_future(self._fill(key))
            task.add_done_callback(lambda done: self._fetched_or_failed(key, done))
        return await asyncio.shield(task)

    def _fetched_or_failed(self, key: str, task: asyncio.Future[bool]) -> None:
        del self._fetching[key]
        if task.cancelled() or task.exception() is not None:
            self.failures.inc()
        elif not task.result():
            # The disk is full, or the object larger than the bound: it is not fetched in vain again for a while.
            if len(self._not_kept) >= _REMEMBERED:
                self._not_kept.clear()
            self._not_kept[key] = time.monotonic() + _IN_VAIN_SECONDS

    async def _fill(self, key: str) -> bool:
        def fetch() -> bytes:
            data = self._backend.read(key, limit=MAX_TABLE_BYTES)
            self.store_bytes.inc(len(data))
            return data

        def fill() -> bool:
            self._directory.read(key, limit=MAX_TABLE_BYTES, fetch=fetch)
            return self._directory.holds(key)

        async with self._fetches:
            return await run_in_threadpool(fill)

    def seconds(self, size: int) -> float:
        """Return how long sending so many bytes may take."""
        return self._patience + size / _SLOWEST_BYTES_A_SECOND


class _Transfer(Response):
    """The answer to a request for an object that may be kept."""

    def __init__(self, server: CacheServer, key: str) -> None:
        super().__init__()
        self._server = server
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope, send)
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send) -> Response | None:
        """Send the object; returns what is to be said instead where that is not possible."""
        server = self._server
        for attempt in range(_ATTEMPTS):
            async with server.copy(self._key) as copy:
                if copy is not None:
                    if not attempt:
                        server.hits.inc()
                    return await self._send(copy, scope, send)
            if not attempt:
                server.misses.inc()
            try:
                if not await server.fetch(self._key):
                    return PlainTextResponse("There is no room for it here.\n", status_code=404)
            except (ObjectNotFound, CorruptObject) as error:
                return PlainTextResponse(f"{error}\n", status_code=404)
            except DeltastoreError as error:
                _log.warning("%s", error)
                return PlainTextResponse(f"{error}\n", status_code=502)
        return PlainTextResponse("It was dropped before it could be sent.\n", status_code=503)

    async def _send(self, copy: CachedObject, scope: Scope, send: Send) -> Response | None:
        wanted = _wanted(Headers(scope=scope).get("range"), copy.size)
        if wanted is None:
            return PlainTextResponse(status_code=416, headers={"Content-Range": f"bytes */{copy.size}"})
        start, end = wanted
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Length": str(end - start),
            "Content-Type": "application/octet-stream",
            "ETag": f'"{copy.seal.hex()}"',
        }
        whole = (start, end) == (0, copy.size)
        if not whole:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{copy.size}"
        head = Response(status_code=200 if whole else 206, headers=headers)
        await send({"type": "http.response.start", "status": head.status_code, "headers": head.raw_headers})
        if scope["method"] == "HEAD":
            end = start
        # One that takes too long, or is cut short, is left without its end: the connection is closed.
        with suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._send_bytes(copy, start, end, send), self._server.seconds(end - start))
        return None

    async def _send_bytes(self, copy: CachedObject, start: int, end: int, send: Send) -> None:
        for place in range(start, end, _PIECE):
            stop = min(place + _PIECE, end)
            piece = await run_in_threadpool(copy.read, place, stop)
            if len(piece) != stop - place:
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._server.served_bytes.inc(len(piece))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _wanted(header: str | None, size: int) -> tuple[int, int] | None:
    """Return start and end of the bytes asked for; ``None`` when there are none such. What is no range means all."""
    found = _RANGE.fullmatch(header) if header else None
    if found is None or found[0] == "bytes=-":
        return 0, size
    first, last = found.groups()
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return 0, size
    return (start, end) if start < end else None
