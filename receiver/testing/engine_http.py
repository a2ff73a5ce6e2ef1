"""HTTP as a stand-in's server speaks it, and an answer that fails once part of it is sent."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Protocol

from receiver.testing.engine_faults import AnswerFault, AnswerFaultKind
from receiver.testing.stand_in import Died

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from receiver.testing.engine_calls import Answer

__all__ = ["EngineHttp", "Handler", "Owner"]

_CLOSING_SECONDS: Final = 30.0  # never needed, unless a test's hook waits
_ERROR: Final = {"error": {"message": "it failed", "type": "InternalServerError", "param": None, "code": 500}}


class Owner(Protocol):
    """Whose requests these are."""

    def handle(self, handler: Handler) -> None:
        """Answer a request."""
        ...

    def hang(self, handler: Handler) -> None:
        """Say nothing until the client has left."""
        ...

    def die(self) -> None:
        """Break every connection."""
        ...


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    # Without it an answer's second write waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: EngineHttp

    def do_GET(self) -> None:
        """Answer whatever is asked, unless the engine died: connections break one after the other."""
        if self.server.broken:
            self.break_off()
            return
        try:
            self.server.owner.handle(self)
        except (Died, OSError):
            self.break_off()

    do_POST = do_HEAD = do_OPTIONS = do_GET  # noqa: N815 - the base class's names

    def reply(self, answer: Answer, fault: AnswerFault | None = None) -> None:
        """Send an answer, a stream's events one by one, as far as ``fault`` lets it."""
        if answer.events is not None:
            with closing(answer.events) as events:
                self._stream(events, answer.headers, fault)
            return
        plain = isinstance(answer.content, str)
        content = str(answer.content).encode() if plain else json.dumps(answer.content).encode()
        headers = {"Content-Type": "text/plain" if plain else "application/json", **answer.headers}
        if fault is not None:
            self._spoilt(answer.status, content, headers, fault)
            return
        self._begin(answer.status, headers | {"Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def left(self) -> bool:
        """Tell whether the client has gone."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def break_off(self) -> None:
        """Break the connection at once, unread data and all."""
        self.close_connection = True
        _reset(self.connection)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(
        self, events: Generator[object, None, None], headers: Mapping[str, str], fault: AnswerFault | None
    ) -> None:
        kinds = {"Content-Type": "text/event-stream; charset=utf-8", "Transfer-Encoding": "chunked"}
        self._begin(200, {**kinds, **headers})
        for sent, event in enumerate(events):
            line = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            if fault is None or sent != fault.after:
                self._chunk(line)
                continue
            if fault.hook is not None:
                fault.hook()
            if fault.kind is AnswerFaultKind.PAUSE_HERE:
                self._chunk(line)
            elif fault.kind is AnswerFaultKind.BROKEN:
                self._chunk(line[: len(line) // 2] + b"\n\n")
            elif fault.kind is AnswerFaultKind.END_EARLY:
                self._chunk(line[: len(line) // 2])
                break
            elif fault.kind is AnswerFaultKind.ERROR_EVENT:
                self._chunk(f"data: {json.dumps(_ERROR)}\n\ndata: [DONE]\n\n".encode())
                break
            else:
                self._fail(fault.kind)
                return
        self._chunk(b"")

    def _spoilt(self, status: int, content: bytes, headers: Mapping[str, str], fault: AnswerFault) -> None:
        half = content[: len(content) // 2]
        told = {AnswerFaultKind.BROKEN: half + b"}", AnswerFaultKind.END_EARLY: half}.get(fault.kind, content)
        self._begin(status, {**headers, "Content-Length": str(len(told))})
        self.wfile.write(half)
        if fault.hook is not None:
            fault.hook()
        if told is not content or fault.kind in (AnswerFaultKind.PAUSE_HERE, AnswerFaultKind.ERROR_EVENT):
            self.wfile.write(told[len(half) :])
        else:
            self._fail(fault.kind)

    def _fail(self, kind: AnswerFaultKind) -> None:
        """Fail in the middle of an answer, for good."""
        self.close_connection = True
        if kind is AnswerFaultKind.RESET:
            self.break_off()
        elif kind is AnswerFaultKind.HANG:
            self.server.owner.hang(self)
        elif kind is AnswerFaultKind.DIE:
            self.server.owner.die()

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))


class EngineHttp(ThreadingHTTPServer):
    """Listens on a port of 127.0.0.1, a thread a connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, owner: Owner, port: int) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        self.broken = False
        self._listens = True
        super().__init__(("127.0.0.1", port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note the connection."""
        with self._changed:
            self._open.add(request)
            broken = self.broken
        if broken:
            _reset(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection."""
        super().shutdown_request(request)
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that broke; tell of all else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def break_off(self) -> None:
        """Listen no more, and break every connection."""
        with self._changed:
            if self.broken:
                return
            self.broken = True
        self.shutdown()
        self.server_close()
        with self._changed:
            self._listens = False
            for connection in self._open:
                _reset(connection)
            self._changed.notify_all()

    def wait_until_closed(self) -> None:
        """After ``break_off``: wait until every thread has closed its connection."""
        with self._changed:
            self._changed.wait_for(lambda: not self._listens and not self._open, _CLOSING_SECONDS)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
