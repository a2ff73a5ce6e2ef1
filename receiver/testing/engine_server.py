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
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from receiver.testing.engine_calls import Answer, Call
from receiver.testing.engine_faults import AnswerFault, EngineFault, EngineFaultKind
from receiver.testing.engine_http import EngineHttp
from receiver.testing.engine_routes import Routes
from receiver.testing.stand_in import StandIn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from receiver.testing.engine_http import Handler

__all__ = ["EngineServer", "main"]

Kind = Literal["vllm", "sglang"]
_LIFETIME: Final = 900.0  # seconds, of a process

_BEFORE: Final = {
    EngineFaultKind.BAD_REQUEST: (400, {"error": {"message": "not like this", "type": "BadRequestError", "code": 400}}),
    EngineFaultKind.TOO_MANY_REQUESTS: (
        429,
        {"error": {"message": "too many", "type": "TooManyRequests", "code": 429}},
    ),
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
        faults: Iterable[EngineFault | AnswerFault] = (),
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
        self._http: EngineHttp | None = None
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

    def add(self, *faults: EngineFault | AnswerFault) -> None:
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
        if self._http is not None:
            self._http.wait_until_closed()

    def die(self) -> None:
        """End the engine as SIGKILL does: every connection breaks, and new ones are refused."""
        self.engine.die()

    def restart(self) -> None:
        """Start a fresh engine on the checkpoint of the start, at the same address."""
        http = EngineHttp(self, self._port)
        self._http, self._port = http, http.server_address[1]
        self.engine = StandIn(
            self._checkpoint,
            seconds_per_token=self._seconds_per_token,
            sick_after_reload=self._sick_after_reload,
            on_death=http.break_off,
        )
        self._routes = Routes(self.engine, self.kind, extension=self.extension)
        threading.Thread(target=http.serve_forever, args=(0.02,), name="engine server", daemon=True).start()

    def handle(self, handler: Handler) -> None:
        """Answer one request, or fail as the script says."""
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        content = handler.rfile.read(length)
        try:
            body = json.loads(content) if content else {}
        except ValueError:
            handler.reply(Answer({"error": {"message": "JSON decode error"}}, status=400))
            return
        call = Call(
            handler.command,
            parts.path,
            dict(parse_qsl(parts.query)),
            body if isinstance(body, dict) else {},
            {name.lower(): value for name, value in handler.headers.items()},
            handler.left,
        )
        fault = self._take(call)
        if isinstance(fault, AnswerFault):
            handler.reply(self._routes.answer(call), fault)
        else:
            self._answer(handler, call, fault)

    def _answer(self, handler: Handler, call: Call, fault: EngineFault | None) -> None:
        kind = fault.kind if fault is not None else None
        if fault is not None and fault.hook is not None:
            fault.hook()
        if kind in _BEFORE:
            status, said = _BEFORE[kind]
            again = {"Retry-After": "2"} if kind is EngineFaultKind.TOO_MANY_REQUESTS else {}
            handler.reply(Answer(said, status=status, headers=again))
            return
        if self._spoilt(handler, kind):
            return
        answer = self._routes.answer(call)
        if kind is EngineFaultKind.DIE_AFTER:
            self.die()
        elif kind is EngineFaultKind.LOSE_ANSWER:
            handler.break_off()
        elif kind is EngineFaultKind.HANG_AFTER:
            self.hang(handler)
        else:
            handler.reply(answer)
            if kind is EngineFaultKind.CLOSE_IDLE:
                handler.close_connection = True

    def _spoilt(self, handler: Handler, kind: EngineFaultKind | None) -> bool:
        """Fail before anything is done, where it is a fault of that kind."""
        if kind is EngineFaultKind.RESET:
            handler.break_off()
        elif kind is EngineFaultKind.HANG:
            self.hang(handler)
        elif kind is EngineFaultKind.DIE:
            self.die()
        elif kind is EngineFaultKind.GARBAGE:
            handler.reply(Answer("<html>"))
        else:
            self.engine.fail_next_load = kind is EngineFaultKind.HALF_LOAD
            return False
        return True

    def hang(self, handler: Handler) -> None:
        """Say nothing until the client has left or everything ends."""
        handler.connection.settimeout(0.05)
        while not self._ended.is_set() and not self.engine.dead:
            with suppress(TimeoutError):
                if not handler.connection.recv(1):
                    break
        handler.break_off()

    def _take(self, call: Call) -> EngineFault | AnswerFault | None:
        with self._lock:
            self.calls.append(call)
            for index, fault in enumerate(self._left):
                if fault.path == call.path:
                    return self._left.pop(index)
            return None


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
