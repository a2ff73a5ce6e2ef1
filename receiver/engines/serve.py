"""A torch module served over HTTP on this machine: the in-process engine and generation, behind endpoints.

``python -m receiver.engines.serve --model pkg.mod:factory --checkpoint DIR --scheme bf16|fp8_block``

=====================  =====================================  ================================================
call                   body                                   answer
=====================  =====================================  ================================================
``GET /health``                                               ``{"status": "ok"}``
``GET /info``                                                 incarnation, version, paused, weights_digest,
                                                              tokens_total, first_token_seconds (after the
                                                              last resume)
``POST /pause``        in_flight (wait, abort, keep) and      ``{"paused": true}`` once no forward pass runs
                       timeout (s, of wait); or nothing
``POST /load``         checkpoint (absolute), version,        ``{"version", "weights_digest"}``
                       keep_kv
``POST /probe``                                               ``{"logprobs": [hex], "tokens": [id]}``
``POST /confirm``      version                                ``{"version", "weights_digest"}``
``POST /resume``                                              ``{"paused": false}``
``POST /generate``     prompt or tokens, max_tokens,          a JSON line a token: index, token, logprob (hex
                       temperature, seed                      of the float32's bits), version, digest_before,
                                                              digest_after; then a last line: finish_reason
                                                              (length, abort), spans
=====================  =====================================  ================================================

``spans`` say which version made which tokens: ``[{"version", "start", "end"}]``, in order, without gaps.
An error is ``{"kind", "message", "key", "hint"}``: 400 for a call that makes no sense, 409 where the engine
refused or failed. Inside a stream it is a last line ``{"error": {...}}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deltastore.errors import DeltastoreError, EngineError, UsageError
from receiver.engines.gate import StreamAborted
from receiver.engines.torch_module import TorchModuleEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from types import FrameType

    from starlette.requests import Request

    from receiver.engines.gate import Stream
    from receiver.engines.served_model import Generation, ServedModel

__all__ = ["EngineApp", "main", "serve", "serve_in_thread"]

_CONTROL_THREADS = 4
_MAX_STREAMS = 32  # streams that generate at once; more wait for their turn
_LINES_AHEAD = 256  # of a stream whose listener reads more slowly than it generates
_MAX_BODY = 1 << 20  # bytes
_T = TypeVar("_T")


class _PauseRequest(msgspec.Struct, forbid_unknown_fields=True):
    in_flight: Literal["wait", "abort", "keep"] = "wait"
    timeout: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    checkpoint: str
    version: str
    keep_kv: bool = False


class _ConfirmRequest(msgspec.Struct, forbid_unknown_fields=True):
    version: str


class _GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    tokens: list[int] | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0


class EngineApp:
    """The endpoints over one engine and its model.

    Generation and control have threads of their own: streams held by a pause never keep a resume from being
    heard.
    """

    def __init__(self, engine: TorchModuleEngine, model: ServedModel, *, streams: int = _MAX_STREAMS) -> None:
        self.engine = engine
        self._model = model
        self._control = ThreadPoolExecutor(_CONTROL_THREADS, thread_name_prefix="control")
        self._streams = ThreadPoolExecutor(streams, thread_name_prefix="stream")
        self._count_lock = threading.Lock()
        self._tokens_total = 0
        self._resumed_at: float | None = None
        self._first_token_seconds: float | None = None
        routes = [
            Route("/health", self._health),
            Route("/info", self._info),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/load", self._load, methods=["POST"]),
            Route("/confirm", self._confirm, methods=["POST"]),
            Route("/probe", self._probe, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
        ]
        handlers: Any = {DeltastoreError: _refusal}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def stop(self) -> None:
        """End every stream at its next token, and those that wait for a resume; for shutting down."""
        self.engine.stop()

    def close(self) -> None:
        """Stop, and wait for the threads to end."""
        self.stop()
        self._streams.shutdown()
        self._control.shutdown()

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _info(self, request: Request) -> Response:
        del request
        info = self.engine.info()
        answer = {
            "incarnation": info.incarnation,
            "version": info.version,
            "paused": info.paused,
            "weights_digest": self.engine.served.digest,
            "tokens_total": self._tokens_total,
            "first_token_seconds": self._first_token_seconds,
        }
        return JSONResponse(answer)

    async def _pause(self, request: Request) -> Response:
        body = await _body(request, _PauseRequest, empty=b"{}")
        await self._call(lambda: self.engine.pause(body.in_flight, timeout=body.timeout))
        return JSONResponse({"paused": True})

    async def _load(self, request: Request) -> Response:
        body = await _body(request, _LoadRequest)
        checkpoint = Path(body.checkpoint)
        if not checkpoint.is_absolute():
            raise UsageError(
                f"checkpoint {body.checkpoint!r} is not an absolute path",
                key=body.checkpoint,
                hint="the whole path, as this server's file system has it.",
            )
        await self._call(lambda: self.engine.load(checkpoint, version=body.version, keep_kv=body.keep_kv))
        return self._held()

    async def _confirm(self, request: Request) -> Response:
        body = await _body(request, _ConfirmRequest)
        await self._call(lambda: self.engine.confirm(body.version))
        return self._held()

    async def _probe(self, request: Request) -> Response:
        del request
        probe = await self._call(self.engine.probe)
        if probe is None:
            return JSONResponse({"logprobs": None, "tokens": None})
        # JSON has no NaN, which is what a probe is there to tell.
        return JSONResponse({"logprobs": [value.hex() for value in probe.logprobs], "tokens": probe.tokens})

    async def _resume(self, request: Request) -> Response:
        del request
        with self._count_lock:
            self._resumed_at, self._first_token_seconds = time.monotonic(), None
        await self._call(self.engine.resume)
        return JSONResponse({"paused": False})

    async def _generate(self, request: Request) -> Response:
        body = await _body(request, _GenerateRequest)
        _check(body)
        tokens = self._model.encode(body.prompt) if body.prompt is not None else body.tokens or []
        generation = self._model.generate(tokens, temperature=body.temperature, seed=body.seed)
        return StreamingResponse(self._lines(generation, body.max_tokens), media_type="application/x-ndjson")

    async def _lines(self, generation: Generation, count: int) -> AsyncIterator[bytes]:
        pipe = _Pipe(asyncio.get_running_loop())
        self._streams.submit(self._produce, generation, count, pipe)
        try:
            while (line := await pipe.lines.get()) is not None:
                yield line
                pipe.room.release()
        finally:
            pipe.leave()

    def _produce(self, generation: Generation, count: int, pipe: _Pipe) -> None:
        """Generate in this thread until the count is reached, a pause ends it, or the listener has left."""
        spans: list[dict[str, object]] = []
        try:
            with self.engine.stream() as stream:
                for index in range(count):
                    token = self._one(generation, stream)
                    _extend(spans, token["version"], index)
                    if not pipe.send(_line({"index": index} | token)):
                        return
            pipe.send(_line({"finish_reason": "length", "spans": spans}))
        except StreamAborted:
            pipe.send(_line({"finish_reason": "abort", "spans": spans}))
        except EngineError as error:
            pipe.send(_line({"error": _described(error)}))
        except (RuntimeError, ValueError, IndexError) as error:
            pipe.send(_line({"error": _described(EngineError(f"the forward pass failed: {error}"))}))
        finally:
            pipe.end()

    def _one(self, generation: Generation, stream: Stream) -> dict[str, object]:
        """One pass through the gate, with the weights digested on both sides of it."""
        with self.engine.forward(stream) as weights:
            before = self.engine.weights_digest()
            token = generation.step(weights.caches)
            after = self.engine.weights_digest()
        with self._count_lock:
            self._tokens_total += 1
            if self._resumed_at is not None:
                self._first_token_seconds = time.monotonic() - self._resumed_at
                self._resumed_at = None
        return {
            "token": token.token,
            "logprob": struct.pack(">f", token.logprob).hex(),
            "version": weights.version,
            "digest_before": before,
            "digest_after": after,
        }

    def _held(self) -> Response:
        served = self.engine.served
        return JSONResponse({"version": served.version, "weights_digest": served.digest})

    async def _call(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._control, call)


class _Pipe:
    """Lines from a thread that generates to the coroutine that sends them, a bounded number ahead.

    A thread waits for room outside the gate, so a listener that does not read never holds up a pause.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.room = threading.Semaphore(_LINES_AHEAD)
        self._loop = loop
        self._left = False

    def send(self, line: bytes) -> bool:
        """Hand a line over from the thread; ``False`` once the listener has left."""
        self.room.acquire()
        self._put(line)
        return not self._left

    def end(self) -> None:
        """Tell the coroutine that there are no more lines."""
        self._put(None)

    def leave(self) -> None:
        """Tell the thread that nobody listens any more, wherever it waits."""
        self._left = True
        self.room.release()

    def _put(self, line: bytes | None) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody is listening
            self._loop.call_soon_threadsafe(self.lines.put_nowait, line)


def _extend(spans: list[dict[str, object]], version: object, index: int) -> None:
    """Let the last span reach over a token, or begin another one with it."""
    if not spans or spans[-1]["version"] != version:
        spans.append({"version": version, "start": index})
    spans[-1]["end"] = index + 1


async def _body(request: Request, kind: type[_T], *, empty: bytes = b"") -> _T:
    content = b""
    async for block in request.stream():
        content += block
        if len(content) > _MAX_BODY:
            raise UsageError("the body is over 1 MiB", hint="a shorter prompt.")
    try:
        return msgspec.json.decode(content or empty, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(f"the body is not what this call takes: {error}", hint="JSON.") from error


def _check(body: _GenerateRequest) -> None:
    if (body.prompt is None) == (body.tokens is None):
        wrong = "a generation takes a prompt or tokens, and not both"
    elif body.max_tokens < 1 or body.temperature < 0 or not 0 <= body.seed < 1 << 63:
        wrong = "max_tokens is 1 or more, temperature not negative, seed below 2**63"
    else:
        return
    raise UsageError(wrong, hint='{"prompt": "def f", "max_tokens": 16}.')


async def _refusal(request: Request, error: DeltastoreError) -> Response:
    del request
    # A checkpoint that is not there is the caller's mistake, though it is the engine that found it out.
    absent = isinstance(error.__cause__, FileNotFoundError)
    status = 400 if absent or isinstance(error, UsageError) else 409
    return JSONResponse(_described(error), status_code=status)


def _described(error: DeltastoreError) -> dict[str, str | None]:
    return {"kind": error.kind, "message": error.message, "key": error.key, "hint": error.hint}


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"


class _Server(uvicorn.Server):
    """Says when it listens, and lets held streams go when it is told to end."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Without this a stream that waits for a resume would keep the process for ever.
        self._stop()
        super().handle_exit(sig, frame)


def serve(app: EngineApp, *, port: int = 0, ready_file: Path | None = None) -> None:
    """Serve on 127.0.0.1 until SIGTERM or SIGINT.

    ``port`` 0 takes a free one; once requests are answered ``ready_file`` is written as ``{"url", "pid"}``.
    """
    # Bound here, so that the port is known, and nobody else's, before anything is told of it.
    with _listen(port) as listener:
        server = _Server(_config(app), ready=lambda: _announce(_url(listener), ready_file), stop=app.stop)
        # uvicorn raises the signal again after an orderly end; nothing is left for it to do then.
        previous = [(sig, signal.signal(sig, _ignore)) for sig in (signal.SIGTERM, signal.SIGINT)]
        try:
            server.run(sockets=[listener])
        finally:
            for sig, handler in previous:
                signal.signal(sig, handler)
            app.close()


@contextmanager
def serve_in_thread(app: EngineApp) -> Iterator[str]:
    """Serve on a free port of 127.0.0.1 from a thread of this process; yields its URL."""
    listening = threading.Event()
    with _listen(0) as listener:
        server = _Server(_config(app), ready=listening.set, stop=app.stop)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="engine server")
        thread.start()
        try:
            listening.wait()
            yield _url(listener)
        finally:
            app.stop()
            server.should_exit = True
            thread.join()
            app.close()


def _listen(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    # asyncio sets this only on sockets it made itself. Connections inherit it; without it an answer's
    # second write waits for the client's delayed acknowledgement, 40 ms, and the pause is longer by as much
    # for every call.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _config(app: EngineApp) -> uvicorn.Config:
    return uvicorn.Config(
        app.asgi, log_level="warning", log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=5
    )


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _announce(url: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        draft = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
        draft.write_bytes(_line({"url": url, "pid": os.getpid()}))
        draft.replace(ready_file)
    sys.stderr.write(f"serving on {url}\n")


def _ignore(sig: int, frame: FrameType | None) -> None:
    del sig, frame


def _factory(target: str) -> Callable[[Path, str], ServedModel]:
    module, _, attribute = target.partition(":")
    try:
        found: Callable[[Path, str], ServedModel] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"no model factory {target!r}: {error}", key=target, hint="package.module:function."
        ) from error
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="receiver.engines.serve", description="Serve a torch module.")
    parser.add_argument("--model", required=True, metavar="PKG.MOD:FACTORY")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR")
    parser.add_argument("--scheme", default="bf16", metavar="bf16|fp8_block")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ready-file", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads for one operation")
    parser.add_argument("--pause-timeout", type=float, default=60.0, metavar="SECONDS")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server from the command line; return the exit code."""
    options = _options(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        model = _factory(options.model)(options.checkpoint, options.scheme)
        engine = TorchModuleEngine(
            model.module,
            scheme=options.scheme,
            mapping=model.mapping,
            probe=model.probe,
            pause_timeout=options.pause_timeout,
        )
        engine.prime(options.checkpoint)
        serve(EngineApp(engine, model), port=options.port, ready_file=options.ready_file)
    except (DeltastoreError, OSError) as error:
        hint = getattr(error, "hint", None)
        sys.stderr.write(f"Error: {error}\nTry: {hint}\n" if hint else f"Error: {error}\n")
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
