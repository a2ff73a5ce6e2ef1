"""The gateway's two addresses, in one event loop: one for clients, one for the receiver that updates the engine.

On the control address: `GET /gate` how it stands · `POST /gate/shut`, `/gate/settle`, `/gate/open` · `/healthz` the
process is up · `/readyz` the gate is open · `/metrics` Prometheus.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deltastore.errors import DeltastoreError, UsageError
from receiver.config import shown_url
from receiver.http_server import KEEP_ALIVE, HttpServer

from .gate import Gate
from .metrics import GatewayMetrics
from .proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp
    from typing_extensions import Self

__all__ = ["CLIENT_TOKEN_NAME", "GatewayServer"]

_log = logging.getLogger("receiver")
_T = TypeVar("_T")

CLIENT_TOKEN_NAME: Final = "RECEIVER_GATEWAY_TOKEN"  # noqa: S105 - a name
_CONNECTIONS: Final = 8192
_MAX_ORDER: Final = 1024
_LONGEST: Final = 3600.0
_AGAIN_SECONDS: Final = 1.0


_Label = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,256}$")]


class _Shut(msgspec.Struct, forbid_unknown_fields=True):
    deadline: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST)] = 0.0
    cut: bool = False


class _Settle(msgspec.Struct, forbid_unknown_fields=True):
    version: _Label


class _Open(msgspec.Struct, forbid_unknown_fields=True):
    version: _Label
    doubts: int | None = None


class GatewayServer(HttpServer):
    """Serves while its block lasts. ``engine`` and ``receiver`` are URLs; the latter is woken by a gate in doubt.

    Clients need ``token`` where ``listen`` is not loopback, the receiver ``control_token`` where ``control`` is not.
    Raises ``UsageError``.
    """

    # Longer than clients keep one: a request must not arrive just as its connection is closed.
    _idle_seconds = 75

    def __init__(
        self,
        engine: str,
        listen: str,
        *,
        control: str,
        token: str | None = None,
        control_token: str | None = None,
        receiver: str | None = None,
        hold: float = 30.0,
        most_body: int = 32 << 20,
        salt: bool = False,
    ) -> None:
        self._engine = _http_url(engine, "--engine-url")
        self._receiver = None if receiver is None else _http_url(receiver, "--receiver-url")
        super().__init__(
            listen, token=token, token_name=CLIENT_TOKEN_NAME, name="gateway", most_connections=_CONNECTIONS
        )
        try:
            self._control = _ControlServer(control, token=control_token)
        except BaseException:
            self._socket.close()
            raise
        self._control_token = control_token
        self._options: dict[str, Any] = {"hold": hold, "most_body": most_body, "salt": salt}
        self.control_url = self._control.url

    def __enter__(self) -> Self:
        self.gate, self.metrics = Gate(), GatewayMetrics()
        self._control.prepare(self.gate, self.metrics)
        self._proxy = Proxy(str(self._engine), self.gate, self.metrics, **self._options)
        return super().__enter__()

    def _app(self) -> ASGIApp:
        return self._proxy

    def _run(self) -> None:
        asyncio.run(self._serve())

    def _end(self) -> None:
        super()._end()
        self._control.end()

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._wake_receiver())]
        try:
            # A server of its own for the receiver: no number of clients' requests keeps an update from its turn.
            await asyncio.gather(self._server.serve(sockets=[self._socket]), self._control.serve())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._proxy.close()

    async def _watch_engine(self) -> None:
        """Keep one connection to the engine on which nothing is ever said: it ends when the engine does."""
        port = self._engine.port or (443 if self._engine.scheme == "https" else 80)
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    self._engine.host, port, ssl=True if self._engine.scheme == "https" else None
                )
            except OSError:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            for option in KEEP_ALIVE:
                writer.get_extra_info("socket").setsockopt(*option)
            self.gate.watching = True
            try:
                with suppress(OSError):
                    await reader.read(1)
            finally:
                writer.close()
            if not self.gate.doubted:
                _log.warning("The engine closed a connection: the gate is shut until the receiver has looked at it.")
            self.gate.doubt()

    async def _wake_receiver(self) -> None:
        if self._receiver is None:
            return
        headers = {"Authorization": f"Bearer {self._control_token}"} if self._control_token else {}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0, headers=headers) as client:
            while True:
                if self.gate.doubted and self.gate.watching:
                    with suppress(httpx.HTTPError):  # it looks by itself, by and by
                        await client.post(self._receiver.copy_with(path="/wake"))
                await asyncio.sleep(_AGAIN_SECONDS)


class _ControlServer(HttpServer):
    """What the receiver tells the gate."""

    def __init__(self, listen: str, *, token: str | None) -> None:
        super().__init__(listen, token=token, token_name="RECEIVER_TOKEN", name="gate")  # noqa: S106 - a name

    def prepare(self, gate: Gate, metrics: GatewayMetrics) -> None:
        """Make the server, for one gate."""
        self._gate, self._metrics = gate, metrics
        self._server = self._made()

    async def serve(self) -> None:
        """Serve until ``end``, in the loop that the gate's requests are served in."""
        await self._server.serve(sockets=[self._socket])

    def end(self) -> None:
        """End it soon."""
        self._end()

    def _app(self) -> ASGIApp:
        async def healthz(_request: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def readyz(_request: Request) -> Response:
            return JSONResponse({"ready": not self._gate.shut}, status_code=503 if self._gate.shut else 200)

        async def metrics(_request: Request) -> Response:
            return PlainTextResponse(self._metrics.text(self._gate.state))

        async def state(_request: Request) -> Response:
            return JSONResponse(asdict(self._gate.state))

        def order(path: str, kind: type[_T], obey: Callable[[_T], Awaitable[None]]) -> Route:
            async def endpoint(request: Request) -> Response:
                try:
                    await obey(await _order(request, kind))
                except DeltastoreError as error:
                    status = 400 if isinstance(error, UsageError) else 409
                    told = {"kind": error.kind, "message": error.message, "hint": error.hint}
                    return JSONResponse({"error": told}, status_code=status)
                return JSONResponse(asdict(self._gate.state))

            return Route(path, endpoint, methods=["POST"])

        return Starlette(
            routes=[
                Route("/healthz", healthz),
                Route("/readyz", readyz),
                Route("/metrics", metrics),
                Route("/gate", state),
                order("/gate/shut", _Shut, self._shut),
                order("/gate/settle", _Settle, self._settle),
                order("/gate/open", _Open, self._open),
            ]
        )

    async def _shut(self, order: _Shut) -> None:
        await self._gate.shut_for(order.deadline, cut=order.cut)

    async def _settle(self, order: _Settle) -> None:
        await self._gate.settle(order.version)

    async def _open(self, order: _Open) -> None:
        shut_at, was_shut = self._gate.shut_at, self._gate.shut
        self._gate.open(order.version, doubts=order.doubts)
        if was_shut:
            self._metrics.shut_seconds.observe(time.monotonic() - shut_at)


async def _order(request: Request, kind: type[_T]) -> _T:
    if "origin" in request.headers:
        raise UsageError("Web pages give no orders.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_ORDER:
            raise UsageError("That is too long.")
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"That is no order: {error}.", hint='{"version": "STREAM/NUMBER"}.') from error


def _http_url(url: str, option: str) -> httpx.URL:
    shown, hint = shown_url(url), f"{option} http://127.0.0.1:8000."
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{shown!r} is no URL: {error}.", key=shown, hint=hint) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{shown!r} is not an HTTP URL.", key=shown, hint=hint)
    return parsed
