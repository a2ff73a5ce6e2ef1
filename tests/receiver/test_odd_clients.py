"""Clients of the status server that say nothing, little or nonsense, and servers that are no receiver."""

from __future__ import annotations

import http.server
import json
import logging
import os
import socket
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
import training

import receiver.status
from deltastore.errors import StorageError
from receiver.http_server import HttpServer
from receiver.patience import Patient
from receiver.status import Status, StatusServer


def fresh_status(checkpoint="c"):
    return Status(store="s", checkpoint=checkpoint, target="latest")


@contextmanager
def serving(status=None):
    told = SimpleNamespace(wake=lambda: None)
    with StatusServer(status or fresh_status(), "127.0.0.1:0", token=None, receiver=told) as server:
        yield server


def connected(server):
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)
    made.settimeout(60)
    return made


def closed(connection):
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"", b"GET /status HT", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HTTP/1.1\r\n"]
)
def test_a_connection_on_which_nothing_whole_is_asked_is_closed(said, monkeypatch):
    monkeypatch.setattr(Patient, "asking_seconds", 0.2)
    monkeypatch.setattr(HttpServer, "_idle_seconds", 0.2)
    with serving() as server, connected(server) as connection:
        connection.sendall(said)
        assert closed(connection)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(receiver.status, "_BODY_SECONDS", 0.2)
    with serving() as server, connected(server) as connection:
        connection.sendall(b"POST /wake HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in connection.recv(4096)
        assert closed(connection)


def test_silent_connections_leave_others_room(monkeypatch):
    monkeypatch.setattr(receiver.status, "_CONNECTIONS", 4)
    with serving() as server:
        silent = [connected(server) for _ in range(40)]
        ended = set()

        def all_but_eight_are_closed():
            for connection in silent:
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    closed(connection)
                    ended.add(connection)
            return len(ended) == 32

        training.until(all_but_eight_are_closed)
        for connection in silent:
            connection.close()

        def answers():
            try:
                return httpx.get(f"{server.url}/healthz", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        training.until(answers)


@pytest.mark.parametrize(
    "said",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"POST /wake HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{",
    ],
)
def test_what_the_server_has_to_say_of_them_is_in_the_log_and_no_traceback(said, capfd, caplog):
    with caplog.at_level(logging.INFO), serving() as server:
        with connected(server) as connection:
            connection.sendall(said)
            if b"{" not in said:
                assert connection.recv(4096)
        assert httpx.get(f"{server.url}/healthz", trust_env=False).status_code == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert capfd.readouterr().err == ""


def test_status_is_shown_whatever_a_path_or_a_number_holds():
    status = fresh_status(os.fsdecode(b"/models/\xff\xe9"))
    status.failed(StorageError(os.fsdecode(b"/models/\xff is odd.")))
    status._stages = {"load": float("nan")}
    with serving(status) as server:
        answer = httpx.get(f"{server.url}/status", trust_env=False)
    assert answer.status_code == 200
    record = json.loads(answer.content)
    assert (record["checkpoint"], record["error"]["message"]) == ("/models/??", "/models/? is odd.")
    assert record["stages"]["load"] is None


# -- what answers is no receiver --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (200, b'{"a": 1}'),
        (200, b'{"state": "following"}'),
        (200, b"[1]"),
        (200, b"[" * 100_000),
        (200, b"\xff"),
        (400, b'{"error": {"kind": "usage"}}'),
        (400, b'{"error": "no"}'),
        (500, b"{}"),
    ],
)
def test_another_server_is_told_from_a_receiver(code, body, commands):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = ("--url", f"http://127.0.0.1:{server.server_port}")
        for words in (("status",), ("pin", "3"), ("pause-following", "--json")):
            ended = commands.run("receiver", *words, *url)
            assert (ended.code, ended.out) == (1, "")
            assert "receiver" in ended.err.partition("Try:")[0]
            assert "Try:" in ended.err
            assert "Traceback" not in ended.err
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
