"""A TCP proxy that speaks enough HTTP to know one request from the next, and does to it what a script says.

A connection to the server is made for each request, so that a broken one troubles nobody else. A client that asks
for ``100 Continue`` gets it here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from deltastore.storage.faults import FaultKind

from .rules import Script

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from .rules import Rule

__all__ = ["ChaosProxy", "Traffic", "running_proxy"]

_PIECE: Final = 64 << 10
_SLOW_PIECE: Final = 8 << 10
_HEAD_LIMIT: Final = 64 << 10
_ANSWERS: Final = {
    FaultKind.INTERNAL_ERROR: (500, "InternalError", "We encountered an internal error. Please try again."),
    FaultKind.BUSY: (503, "SlowDown", "Please reduce your request rate."),
    FaultKind.DENY: (403, "AccessDenied", "The credentials have expired."),
}
# What happens to a body on its way, as opposed to the whole request.
_ON_THE_WAY: Final = frozenset({FaultKind.RESET, FaultKind.STALL, FaultKind.TRUNCATE, FaultKind.FLIP, FaultKind.SLOW})


class _Broken(Exception):
    """The connection to the client ends here, by a reset."""


@dataclass(slots=True)
class Traffic:
    """Requests and the bytes of their bodies that went through, up to the server and down to the client."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def up(self, size: int) -> None:
        """Count bytes on their way to the server."""
        self.bytes_up += size

    def down(self, size: int) -> None:
        """Count bytes on their way to the client."""
        self.bytes_down += size


@dataclass(slots=True)
class _Head:
    """The first line and the headers of a request or an answer."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def put(self, name: str, value: str | None) -> None:
        """Replace a header, or take it out."""
        self.headers = [(key, old) for key, old in self.headers if key.lower() != name]
        if value is not None:
            self.headers.append((name, value))

    def encode(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def length(self) -> int | None:
        """The body's length, where it is told."""
        text = self.get("content-length")
        return int(text) if text is not None else None

    @property
    def chunked(self) -> bool:
        return "chunked" in (self.get("transfer-encoding") or "").lower()


@dataclass(slots=True)
class ChaosProxy:
    """One listener in front of one server. ``play`` changes the script while it runs; ``traffic`` is by kind."""

    host: str
    port: int
    seed: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    _script: Script = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._script = Script((), seed=self.seed)

    def play(self, rules: Sequence[Rule]) -> None:
        """Use these rules for every request that comes from now on."""
        self._script = Script(rules, seed=self.seed)

    async def listen(self, port: int = 0) -> asyncio.Server:
        """Accept connections on the loopback address."""
        return await asyncio.start_server(self._accept, "127.0.0.1", port, limit=_HEAD_LIMIT)

    def hang_up(self) -> None:
        """End all that is on its way."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
            writer.close()
        except (_Broken, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Carry one request and its answer; returns whether the connection goes on."""
        request = await _read_head(reader)
        if request is None:
            return False
        method, path, _ = request.first.split(" ", 2)
        rule, dice = self._script.draw(method, path)
        count = self.traffic.setdefault(rule.kind.value if rule else "none", Traffic())
        count.requests += 1
        if rule is not None and rule.kind is FaultKind.REFUSE:
            raise _Broken
        if request.get("expect") is not None:
            request.put("expect", None)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if rule is not None and rule.kind in _ANSWERS:
            async for _ in _body(reader, request):
                pass
            writer.write(_answer(rule.kind, method))
            await writer.drain()
            return True
        upload = bool(request.length) or request.chunked
        mishap = _Mishap(rule, dice) if rule is not None and rule.kind in _ON_THE_WAY else None
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port, limit=_HEAD_LIMIT)
        try:
            await _carry(reader, server_writer, request, mishap if upload else None, count.up)
            answer = await _read_answer(server_reader)
            if rule is not None and rule.kind is FaultKind.LOSE_ANSWER:
                raise _Broken
            bodiless = method == "HEAD" or answer.first.split(" ")[1] in {"204", "304"}
            await _carry(server_reader, writer, answer, None if upload else mishap, count.down, bodiless=bodiless)
        finally:
            server_writer.close()
        return answer.length is not None or answer.chunked or bodiless


class _Mishap:
    """What happens to one body on its way, piece by piece."""

    def __init__(self, rule: Rule, dice: random.Random) -> None:
        self._rule = rule
        self._dice = dice
        self._at = 0
        self._bit = dice.randrange(8)

    def begin(self, head: _Head) -> _Head:
        """Choose the place, now that the length is known, and return the head that the other side is told."""
        length = head.length or 0
        self._at = self._dice.randrange(max(length, 1)) if self._rule.at is None else self._rule.at
        told = _Head(head.first, [*head.headers])
        if self._rule.kind is FaultKind.TRUNCATE and length > self._at:
            told.put("content-length", str(self._at))
        return told

    @property
    def piece(self) -> int:
        """How many bytes to take at a time."""
        return _SLOW_PIECE if self._rule.kind is FaultKind.SLOW else _PIECE

    async def shape(self, data: bytes, start: int, send: Callable[[bytes], None]) -> None:
        """Send a piece that starts at a byte of the body, or what becomes of it."""
        here = self._at - start
        kind = self._rule.kind
        if kind is FaultKind.SLOW:
            await asyncio.sleep(len(data) / self._rule.bytes_per_second)
        elif kind is FaultKind.TRUNCATE:
            data = data[: max(here, 0)]
        elif 0 <= here < len(data):
            if kind is FaultKind.FLIP:
                data = data[:here] + bytes([data[here] ^ (1 << self._bit)]) + data[here + 1 :]
            else:
                send(data[:here])
                await self.end()
        send(data)

    async def end_without_body(self) -> None:
        """Break off or fall silent where there is no body to do it in."""
        if self._rule.kind in {FaultKind.RESET, FaultKind.STALL}:
            await self.end()

    async def end(self) -> None:
        """Break off or fall silent; does not return."""
        if self._rule.kind is FaultKind.STALL:
            await asyncio.sleep(self._rule.seconds)
        raise _Broken


async def _carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    head: _Head,
    mishap: _Mishap | None,
    count: Callable[[int], None],
    *,
    bodiless: bool = False,
) -> None:
    """Carry a head and its body from one side to the other."""
    told = mishap.begin(head) if mishap is not None else head
    if mishap is not None and (bodiless or not (head.length or head.chunked)):
        await mishap.end_without_body()
    # Begun with the length that the other side is told; what is read has the one that was sent.
    writer.write(told.encode())
    carried = 0
    async for piece in _body(reader, head, bodiless=bodiless, piece=mishap.piece if mishap else _PIECE):
        count(len(piece))
        if mishap is None or head.chunked:
            writer.write(piece)
        else:
            await mishap.shape(piece, carried, writer.write)
        carried += len(piece)
        await writer.drain()
    await writer.drain()


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Read a head; None where the connection ends before it."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = text.rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return _Head(first, [(name, value.strip()) for name, _, value in pairs])


async def _read_answer(reader: asyncio.StreamReader) -> _Head:
    while True:
        head = await _read_head(reader)
        if head is None:
            raise _Broken
        if head.first.split(" ")[1] != "100":
            return head


async def _body(
    reader: asyncio.StreamReader, head: _Head, *, bodiless: bool = False, piece: int = _PIECE
) -> AsyncIterator[bytes]:
    """Yield the body as it travels, its framing included."""
    if bodiless:
        return
    if head.chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            yield await reader.readexactly(size + 2)
            if not size:
                return
    left = head.length or 0
    while left:
        data = await reader.read(min(piece, left))
        if not data:
            raise _Broken
        left -= len(data)
        yield data


def _answer(kind: FaultKind, method: str) -> bytes:
    status, code, message = _ANSWERS[kind]
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    head = _Head(f"HTTP/1.1 {status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return head.encode() + (b"" if method == "HEAD" else body.encode())


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST, as a machine does that has gone away."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def running_proxy(endpoint: str, *, seed: int = 0) -> Iterator[tuple[ChaosProxy, str]]:
    """Run a proxy in a thread in front of ``http://HOST:PORT``; yields it and its own endpoint."""
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    proxy = ChaosProxy(host, int(port), seed=seed)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="chaos-proxy")
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(proxy.listen(), loop).result()
        try:
            yield proxy, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:

            async def stop() -> None:
                server.close()
                proxy.hang_up()
                while proxy._tasks:  # noqa: SLF001
                    await asyncio.wait(proxy._tasks)  # noqa: SLF001

            asyncio.run_coroutine_threadsafe(stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
