"""Requests passed on to the engine, and its answers back: the gateway's public side."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from deltastore.errors import UsageError
from receiver.http_server import KEEP_ALIVE

from .gate import AnswerLost, Gate, NotServed, Running, StillShut
from .rewrite import PassedOn, writer_for
from .wanted import ANY_VERSION, RequestBody, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Message, Receive, Scope, Send

    from .metrics import GatewayMetrics
    from .rewrite import Writer

__all__ = ["Proxy"]

_log = logging.getLogger("receiver")

#: Calls that generate: what is known of versions is added to their answers.
_GENERATE: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
_SALTED: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
#: Calls that change nothing and generate nothing: they need not wait.
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: A path with a segment that begins with such a word is the receiver's to call, whatever the engine: it may change
#: weights, caches or the pause behind the gate.
_CONTROL: Final = re.compile(
    r"/(clear|collective|configure|confirm|continue|convert|destroy|dump|finish|flush|init|load|pause|post|pull|release|"
    r"reload|reset|resume|scale|set|sleep|slow|start|stop|unload|update|wake|weights?)(_\w*)?(/|$)",
    re.IGNORECASE,
)
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OURS: Final = frozenset({"host", "content-length", "x-min-version", "x-exact-version", "x-weight-version"})
#: The server sets them.
_SERVERS: Final = frozenset({"date", "server", "x-weight-version"})
#: Why the gateway itself ends a stream; what the engine broke off stays broken off.
_ENDED: Final = frozenset({"weights_updated", "slow_reader"})
_CONNECT_SECONDS: Final = 10.0
#: Bodies of requests that wait take so many bytes at most, all together.
_MOST_HELD_BYTES: Final = 1 << 30


class _Left(Exception):
    """The client is gone."""


class _Refused(Exception):
    """A request is answered by the gateway itself."""

    def __init__(self, status: int, code: str, message: str, *, version: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.version = version

    @property
    def answer(self) -> Response:
        """The answer, as OpenAI's clients take errors."""
        headers = {"Retry-After": "1"} if self.status in (409, 503) else {}
        body = {"error": {"message": str(self), "type": "gateway", "param": None, "code": self.code}}
        if self.version is not None:
            headers["X-Weight-Version"] = self.version
        return Response(msgspec.json.encode(body), self.status, headers, "application/json")


class Proxy:
    """An ASGI application before the engine at ``url``.

    ``hold`` is how many seconds a request waits for the gate, ``most_body`` the bytes of a request; with ``salt`` the
    engine's prefix cache is kept apart per version.
    """

    def __init__(
        self, url: str, gate: Gate, metrics: GatewayMetrics, *, hold: float, most_body: int, salt: bool
    ) -> None:
        self._url = httpx.URL(url)
        self._gate = gate
        self._metrics = metrics
        self._hold = hold
        self._most_body = most_body
        self._salt = salt
        self._held_bytes = 0
        self._client = httpx.AsyncClient(
            trust_env=False,
            # Generation may take any time: a request ends when its client leaves, an update cuts it, or its engine's
            # host is gone, which only the kernel can find out.
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            transport=httpx.AsyncHTTPTransport(
                trust_env=False,
                socket_options=KEEP_ALIVE,
                # A connection a request: one that is kept may be closed just as it is used, and no call be repeated.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            ),
        )

    async def close(self) -> None:
        """Close the connections to the engine."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends its request in the engine, too."""
        if scope["type"] != "http":
            with suppress(KeyError):
                await send({"type": "websocket.close", "code": 1003})
            return
        request = _Request(scope, receive, send)
        try:
            await self._answer(request)
        except _Refused as refused:
            self._metrics.refused.labels(refused.code).inc()
            await request.answer(refused)
        except _Left:
            self._metrics.left.inc()
        except asyncio.CancelledError:
            if not request.left:
                raise
            self._metrics.left.inc()
        finally:
            request.close()

    async def _answer(self, request: _Request) -> None:
        if _CONTROL.search(re.sub(r"/(\.?/)*", "/", request.path)):
            raise _Refused(403, "control", f"{request.path} is for the receiver to call, at the engine itself.")
        content = await request.body(self._most_body)
        request.watch()
        if request.method in _READING:
            await self._exchange(request, Running(self._gate, "", ANY_VERSION), content, generates=False)
            return
        body = RequestBody(content)
        generates = request.path.rstrip("/") in _GENERATE
        try:
            wanted = body.take_wanted(request.headers) if generates else ANY_VERSION
        except UsageError as error:
            raise _Refused(400, "bad_version", f"{error} {error.hint}") from error
        running = await self._admit(wanted, len(content))
        try:
            if self._salt and request.path.rstrip("/") in _SALTED:
                body.salt(running.start)
            await self._exchange(request, running, body.encode() if generates else content, generates=generates)
        finally:
            self._gate.leave(running)

    async def _admit(self, wanted: Wanted, size: int) -> Running:
        if self._gate.shut and self._held_bytes + size > _MOST_HELD_BYTES:
            raise _Refused(503, "held", "Too many requests wait for an update of the weights.")
        self._held_bytes += size
        try:
            running = await self._gate.admit(wanted, hold=self._hold)
        except StillShut:
            raise _Refused(503, "held", "The weights are being updated, or are not known yet.") from None
        except NotServed:
            served = self._gate.version
            message = f"Not the version asked for: {served} is served now."
            raise _Refused(409, "version_not_served", message, version=served) from None
        finally:
            self._held_bytes -= size
        self._metrics.requests.inc()
        return running

    async def _exchange(self, request: _Request, running: Running, content: bytes, *, generates: bool) -> None:
        exchange = _Exchange(self._client, request, running)
        try:
            await exchange.run(self._passed_on(request, content, plain=generates), generates=generates)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise _Refused(400, "bad_path", f"No path: {error}.") from error
        except AnswerLost as lost:
            self._metrics.lost.labels(lost.code).inc()
            _log.warning("An answer to %s was lost: %s", request.path, lost)
            await exchange.break_off(lost)
        if running.made_by != running.start:
            self._metrics.over_updates.inc()

    def _passed_on(self, request: _Request, content: bytes, *, plain: bool = False) -> httpx.Request:
        """Return a request as the engine gets it: as it came, but for what concerns the connection, and versions."""
        headers = _end_to_end(request.headers.raw, _OURS)
        if plain:
            headers = [(name, value) for name, value in headers if name.lower() != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        base = self._url.raw_path.rstrip(b"/")
        return httpx.Request(
            request.method,
            self._url.copy_with(raw_path=base + request.target),
            headers=headers,
            content=content if content or request.method not in _READING else None,
        )


class _Request:
    """A client's request, and whether the client is still there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send = send
        self._scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query = scope.get("query_string", b"")
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers = Headers(scope=scope)
        self.left = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None

    async def body(self, most: int) -> bytes:
        """Return the whole body. Nothing is waited for on behalf of a client that is still sending it."""
        content = bytearray()
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Left
            content += message.get("body", b"")
            if len(content) > most:
                raise _Refused(413, "too_large", f"The body is over {most} bytes.")
            if not message.get("more_body", False):
                return bytes(content)

    async def answer(self, refused: _Refused) -> None:
        """Answer it here."""
        self.close()
        await refused.answer(self._scope, self._receive, self.send)

    def watch(self) -> None:
        """Cancel this task as soon as the client has left."""
        task = asyncio.current_task()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.left = True
            if task is not None:
                task.cancel()

        self._watcher = asyncio.create_task(watch())

    def close(self) -> None:
        """Watch no more: all is said, or about to be."""
        if self._watcher is not None:
            self._watcher.cancel()


class _Exchange:
    """One request to the engine and its answer; the engine's side is read in a task of its own."""

    def __init__(self, client: httpx.AsyncClient, request: _Request, running: Running) -> None:
        self._client = client
        self._request = request
        self._running = running
        self._writer: Writer | None = None  # once the answer has begun

    async def run(self, passed_on: httpx.Request, *, generates: bool) -> None:
        """Pass it all on; raises ``AnswerLost``."""
        pump = asyncio.create_task(self._pump(passed_on))
        self._running.cancel = pump.cancel
        try:
            while (taken := await self._running.take()) is not None:
                piece, label = taken
                if isinstance(piece, httpx.Response):
                    await self._begin(piece, generates=generates)
                elif self._writer is not None and isinstance(piece, bytes):
                    await self._send(self._writer.feed(piece, label))
            if self._writer is not None:
                await self._send(self._writer.end(), more=False)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def break_off(self, lost: AnswerLost) -> None:
        """Tell the client that the rest does not come, as far as that can be told."""
        if self._writer is None:
            await self._request.answer(_Refused(lost.status, lost.code, str(lost), version=self._running.start or None))
            return
        error = {"error": {"message": str(lost), "type": "gateway", "param": None, "code": lost.code}}
        rest = self._writer.broken(msgspec.json.encode(error))
        if rest is not None:
            await self._send(rest, more=lost.code not in _ENDED)
        # An answer that is left without its end is broken off by the server, as it would be without the gateway.

    async def _pump(self, passed_on: httpx.Request) -> None:
        running = self._running
        try:
            response = await self._client.send(passed_on, stream=True)
            try:
                await running.put(response)
                async for data in response.aiter_raw():
                    await running.put(data, len(data))
            finally:
                await response.aclose()
            running.end()
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            unreachable = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            code = "engine_unreachable" if unreachable else "engine_failed"
            what = "cannot be reached" if unreachable else "broke off"
            running.lose(AnswerLost(f"The engine {what}: {str(error) or type(error).__name__}.", code=code, status=502))
        except Exception as error:
            running.lose(AnswerLost(f"The gateway failed: {error!r}.", code="gateway_failed", status=500))
            raise

    async def _begin(self, response: httpx.Response, *, generates: bool) -> None:
        headers = _end_to_end(response.headers.raw, _SERVERS)
        plain = response.headers.get("content-encoding", "identity") == "identity"
        if generates and plain and response.is_success:
            self._writer = writer_for(response.headers.get("content-type", ""), self._running.start)
        else:
            self._writer = PassedOn()
        if self._writer.changes:
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        if self._running.start:
            headers.append((b"x-weight-version", self._running.start.encode()))
        await self._request.send(
            {"type": "http.response.start", "status": response.status_code, "headers": _lower(headers)}
        )

    async def _send(self, data: bytes, *, more: bool = True) -> None:
        if not more:
            self._request.close()
        if data or not more:
            await self._request.send({"type": "http.response.body", "body": data, "more_body": more})


def _lower(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[str]) -> list[tuple[bytes, bytes]]:
    """Return the headers that concern more than the connection they came by."""
    headers = list(headers)
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.decode("latin-1").split(",")
    }
    gone = _HOP_BY_HOP | without | named
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in gone]
