"""A gateway before an engine whose every answer is said by the test."""

from __future__ import annotations

import asyncio
import queue
import threading

import httpx
import pytest
import training

from receiver.engines.gated import GateClient
from receiver.gateway.server import GatewayServer
from receiver.http_server import HttpServer

SECONDS = 20


class Call:
    """One request that reached the engine; the test says what is answered."""

    def __init__(self, scope, body):
        self.method = scope["method"]
        self.target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.body = body
        self.left = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.said = asyncio.Queue()

    def _say(self, *message):
        self._loop.call_soon_threadsafe(self.said.put_nowait, message)

    def begin(self, content_type, status=200, **headers):
        named = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
        self._say("begin", status, [(name.encode(), value.encode()) for name, value in named.items()])

    def send(self, data):
        self._say("send", data)

    def end(self):
        self._say("end")

    def die(self):
        """Break the connection off."""
        self._say("die")

    def answer(self, data, content_type="application/json", status=200, **headers):
        self.begin(content_type, status, content_length=str(len(data)), **headers)
        self.send(data)
        self.end()


class TestEngine(HttpServer):
    """Hands each request to the test."""

    __test__ = False

    def __init__(self, listen="127.0.0.1:0"):
        super().__init__(listen, token=None, token_name="", name="engine")
        self.calls = queue.Queue()

    def call(self) -> Call:
        return self.calls.get(timeout=SECONDS)

    def _app(self):
        async def app(scope, receive, send):
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            call = Call(scope, body)

            async def watch():
                while (await receive())["type"] != "http.disconnect":
                    pass
                call.left.set()

            watcher = asyncio.create_task(watch())
            self.calls.put(call)
            try:
                await self._answer(call, send)
            finally:
                watcher.cancel()

        return app

    async def _answer(self, call, send):
        while True:
            leaving = asyncio.create_task(asyncio.to_thread(call.left.wait, 0.01))
            said = asyncio.create_task(call.said.get())
            await asyncio.wait({said, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                said.cancel()
                if call.left.is_set():
                    return
                continue
            what, *told = said.result()
            if what == "begin":
                await send({"type": "http.response.start", "status": told[0], "headers": told[1]})
            elif what == "send":
                await send({"type": "http.response.body", "body": told[0], "more_body": True})
            elif what == "end":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            else:
                return  # uvicorn closes a connection whose answer has no end


@pytest.fixture
def engine():
    with TestEngine() as made:
        yield made


@pytest.fixture
def options():
    """What the gateway is started with, beside the engine; a test may override it."""
    return {}


@pytest.fixture
def gateway(engine, options):
    with GatewayServer(engine.url, "127.0.0.1:0", control="127.0.0.1:0", **options) as made:
        yield made


@pytest.fixture
def gate(gateway):
    client = GateClient(gateway.control_url)
    training.until(lambda: client.state().watching)
    yield client
    client.close()


@pytest.fixture
def opened(gate):
    """The gate, open for version 1."""
    gate.open("s/1", doubts=gate.state().doubts)
    return gate


@pytest.fixture
def client(gateway):
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=SECONDS) as made:
        yield made
