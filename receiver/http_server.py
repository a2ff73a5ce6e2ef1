"""What the package's HTTP servers share: an address, a token, and a thread that serves."""

from __future__ import annotations

import hmac
import socket
import threading
from typing import TYPE_CHECKING, Final

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send
    from typing_extensions import Self

__all__ = ["KEEP_ALIVE", "HttpServer"]

_BACKLOG: Final = 1024
_PORT_DIGITS: Final = 5
# A client that takes nothing for so long is cut off.
_STALLED_MILLISECONDS: Final = 120_000
#: Socket options, by which it is found within half a minute that the other host is gone.
KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, option), value)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, option)  # not on every system
    ),
]


class HttpServer:
    """Serves an application of a subclass while its block lasts. ``listen`` is HOST:PORT; port 0 takes a free one.

    Loopback is open; any other address needs a ``token``, which clients send as ``Authorization: Bearer``. With
    ``most_connections`` open, others are answered 503. Raises ``UsageError``.
    """

    _idle_seconds = 5  # then a connection is closed that nothing is asked on

    def __init__(
        self, listen: str, *, token: str | None, token_name: str, name: str, most_connections: int | None = None
    ) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if not host or not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS):
            raise UsageError(f"{listen!r} is no address.", hint="Give HOST:PORT, such as 127.0.0.1:9310.")
        if host not in ("127.0.0.1", "::1", "localhost") and not token:
            raise UsageError(f"Listening on {host} needs a token.", hint=f"Set {token_name}, or listen on 127.0.0.1.")
        self._token = token
        self._name = name
        self._most_connections = most_connections
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio leaves Nagle's delay on for a listener that it did not make itself.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MILLISECONDS)
        # A client whose host is gone says nothing, and nothing may be on its way to it for long.
        for option in KEEP_ALIVE:
            self._socket.setsockopt(*option)
        try:
            self._socket.bind((host, int(port)))
            self._socket.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UsageError(f"{listen} is not free: {error}.", hint="Give another address with --listen.") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._server = self._made()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        return self

    def _made(self) -> uvicorn.Server:
        import uvicorn  # noqa: PLC0415 - only a daemon serves

        from .patience import Patient  # noqa: PLC0415 - likewise

        config = uvicorn.Config(
            self._guarded(self._app()),
            http=Patient,
            ws="none",
            log_config=None,  # it is said in the process's own log, in its format
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=self._idle_seconds,
            limit_concurrency=self._most_connections,
        )
        return uvicorn.Server(config)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._thread.join(timeout=5)
        self._socket.close()

    def _end(self) -> None:
        self._server.should_exit = True

    def _app(self) -> ASGIApp:
        """Return what is served."""
        raise NotImplementedError

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        from starlette.responses import PlainTextResponse  # noqa: PLC0415 - only a daemon serves

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self._allows(scope):
                await app(scope, receive, send)
            else:
                await PlainTextResponse("A token is needed.\n", status_code=401)(scope, receive, send)

        return guarded

    def _allows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return self._token is None or hmac.compare_digest(given, f"Bearer {self._token}".encode())
