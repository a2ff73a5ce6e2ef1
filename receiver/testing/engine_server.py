"""A server that answers as vLLM or SGLang does, with a stand-in behind it, and that fails as it is told to.

::

    with EngineServer(checkpoint, kind="vllm") as server:
        server.add(EngineFault(path="/pause", kind=EngineFaultKind.HANG))
        engine = make_engine("vllm", url=server.url)

It listens on a free port of 127.0.0.1. As a process of its own:
``python -m receiver.testing.engine_server --kind vllm --checkpoint DIR --ready-file FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from receiver.testing.engine_faults import EngineFault, EngineFaultKind
from receiver.testing.engine_routes import Answer, Call, Routes
from receiver.testing.stand_in import Died, StandIn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["EngineServer", "main"]

Kind = Literal["vllm", "sglang"]
_LIFETIME: Final = 900.0  # seconds, of a process

_BEFORE: Final = {
    EngineFaultKind.BAD_REQUEST: (400, {"error": {"message": "not like this", "type": "BadRequestError", "code": 400}}),
    EngineFaultKind.INTERNAL_ERROR: (500, {"error": {"message": "it failed", "type": "InternalServerError"}}),
    EngineFaultKind.NOT_SUCCESS: (200, {"success": False, "message": "it could not"}),
}


class EngineServer:
    """Serves a stand-in while its block lasts. ``calls`` tells what was asked for, in order.

    ``extension``: as if started with the receiver's worker extension (vLLM). The rest is the stand-in's.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        kind: Kind,
        faults: Iterable[EngineFault] = (),
        extension: bool = False,
        seconds_per_token: float = 0.001,
        sick_after_reload: bool = False,
        port: int = 0,
    ) -> None:
        self.kind = kind
        self.extension = extension
        self.calls: list[Call] = []
        self._checkpoint = checkpoint
        self._seconds_per_token = seconds_per_token
        self._sick_after_reload = sick_after_reload
        self._left = [*faults]
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._http: _Http | None = None
        self._port = port
        self.engine: StandIn
        self._routes: Routes

    @property
    def url(self) -> str:
        """Where it listens, also after ``restart``."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def remaining(self) -> int:
        """How many faults were not met yet."""
        return len(self._left)

    def add(self, *faults: EngineFault) -> None:
        """Append to the script: each call takes the first fault left that is for its path."""
        with self._lock:
            self._left += faults

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self.engine.die()

    def die(self) -> None:
        """End the engine as SIGKILL does: every connection breaks, and new ones are refused."""
        self.engine.die()

    def restart(self) -> None:
        """Start a fresh engine on the checkpoint of the start, at the same address."""
        http = _Http(self, self._port)
        self._http, self._port = http, http.server_address[1]
        self.engine = StandIn(
            self._checkpoint,
            seconds_per_token=self._seconds_per_token,
            sick_after_reload=self._sick_after_reload,
            on_death=http.break_off,
        )
        self._routes = Routes(self.engine, self.kind, extension=self.extension)
        threading.Thread(target=http.serve_forever, args=(0.02,), name="engine server", daemon=True).start()

    def handle(self, handler: _Handler) -> None:
        """Answer one request, or fail as the script says."""
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        content = handler.rfile.read(length)
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            handler.reply(Answer({"error": {"message": "JSON decode error"}}, status=400))
            return
        call = Call(handler.command, parts.path, dict(parse_qsl(parts.query)), body if isinstance(body, dict) else {})
        fault = self._take(call)
        kind = fault.kind if fault is not None else None
        if fault is not None and fault.hook is not None:
            fault.hook()
        if kind in _BEFORE:
            status, said = _BEFORE[kind]
            handler.reply(Answer(said, status=status))
            return
        if self._spoilt(handler, kind):
            return
        answer = self._routes.answer(call)
        if kind is EngineFaultKind.DIE_AFTER:
            self.die()
        elif kind is EngineFaultKind.LOSE_ANSWER:
            handler.break_off()
        elif kind is EngineFaultKind.HANG_AFTER:
            self._hang(handler)
        else:
            handler.reply(answer)
            if kind is EngineFaultKind.CLOSE_IDLE:
                handler.close_connection = True

    def _spoilt(self, handler: _Handler, kind: EngineFaultKind | None) -> bool:
        """Fail before anything is done, where it is a fault of that kind."""
        if kind is EngineFaultKind.RESET:
            handler.break_off()
        elif kind is EngineFaultKind.HANG:
            self._hang(handler)
        elif kind is EngineFaultKind.DIE:
            self.die()
        elif kind is EngineFaultKind.GARBAGE:
            handler.reply(Answer("<html>"))
        else:
            self.engine.fail_next_load = kind is EngineFaultKind.HALF_LOAD
            return False
        return True

    def _hang(self, handler: _Handler) -> None:
        """Say nothing until the client has left or everything ends."""
        handler.connection.settimeout(0.05)
        while not self._ended.is_set() and not self.engine.dead:
            with suppress(TimeoutError):
                if not handler.connection.recv(1):
                    break
        handler.break_off()

    def _take(self, call: Call) -> EngineFault | None:
        with self._lock:
            self.calls.append(call)
            for index, fault in enumerate(self._left):
                if fault.path == call.path:
                    return self._left.pop(index)
            return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without it an answer's second write waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _Http

    def do_GET(self) -> None:
        try:
            self.server.owner.handle(self)
        except (Died, OSError):
            self.break_off()

    do_POST = do_GET  # noqa: N815 - the base class's name

    def reply(self, answer: Answer) -> None:
        """Send an answer; a stream's events one by one."""
        if answer.events is not None:
            self._stream(answer.events)
            return
        text = answer.content if isinstance(answer.content, str) else json.dumps(answer.content)
        content = text.encode()
        self.send_response(answer.status)
        plain = isinstance(answer.content, str)
        self.send_header("Content-Type", "text/plain" if plain else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def break_off(self) -> None:
        """Break the connection at once, unread data and all."""
        self.close_connection = True
        _reset(self.connection)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""

    def _stream(self, events: Iterator[object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self._chunk(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, owner: EngineServer, port: int) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._broken = False
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
            broken = self._broken
        if broken:
            _reset(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that broke; tell of all else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def break_off(self) -> None:
        """Listen no more, and break every connection."""
        with self._open_lock:
            if self._broken:
                return
            self._broken = True
        self.shutdown()
        self.server_close()
        with self._open_lock:
            for connection in self._open:
                _reset(connection)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="receiver.testing.engine_server", description="Serve a stand-in.")
    parser.add_argument("--kind", required=True, choices=["vllm", "sglang"])
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path, metavar="FILE")
    parser.add_argument("--extension", action="store_true")
    parser.add_argument("--seconds-per-token", type=float, default=0.001)
    parser.add_argument("--lifetime", type=float, default=_LIFETIME, metavar="SECONDS")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, *, wait: Callable[[float], object] = time.sleep) -> int:
    """Serve from the command line until SIGTERM, or until the lifetime is over."""
    options = _options(arguments)
    with EngineServer(
        options.checkpoint,
        kind=options.kind,
        port=options.port,
        extension=options.extension,
        seconds_per_token=options.seconds_per_token,
    ) as server:
        if options.ready_file is not None:
            draft = options.ready_file.with_name(f"{options.ready_file.name}.{os.getpid()}")
            draft.write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
            draft.replace(options.ready_file)
        sys.stderr.write(f"serving on {server.url}\n")
        sys.stderr.flush()
        wait(options.lifetime)
    return 0


if __name__ == "__main__":
    sys.exit(main())
