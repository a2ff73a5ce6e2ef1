"""Object storage without a real one: memory, and a server that answers what it is told."""

from __future__ import annotations

import _thread
import gc
import itertools
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
import training
from aiobotocore.client import AioBaseClient

from deltastore.errors import AccessDenied, CorruptObject, ObjectExists, ObjectNotFound, StorageError, UsageError
from deltastore.storage import close_backend
from deltastore.storage.obstore import open_obstore
from deltastore.storage.remote import open_fsspec
from deltastore.testing.storage_contract import StorageContract

if TYPE_CHECKING:
    from collections.abc import Iterator

_names = itertools.count()


class TestMemory(StorageContract):
    @pytest.fixture(autouse=True)
    def _threads_change_often(self):
        # Without this, threads hardly ever meet between fsspec's check and its store.
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(usual)

    @pytest.fixture
    def open_another(self):
        url = f"memory://contract-{next(_names)}/run"
        return lambda: open_fsspec(url, storage_options={})


OPEN = {"s3fs": open_fsspec, "obstore": open_obstore}


@pytest.fixture(scope="module", params=OPEN)
def client(request) -> str:
    return request.param


class Stub:
    """An S3 server that gives the answers it was told, in order, and remembers what it was asked."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.answers: list[tuple[int, bytes, dict[str, str]]] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def will_answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.answers.append((status, body, headers))

    def will_refuse(self, status: int, code: str, message: str = "because") -> None:
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.will_answer(status, body)

    def open(self, client: str = "s3fs", *, timeout: float = 10.0, **options: object):
        options = {"endpoint_url": self.endpoint, "key": "an-access-key", "secret": "a-secret-key", **options}
        return OPEN[client]("s3://bucket/run", storage_options=options, timeout=timeout)


@pytest.fixture(scope="module")
def running_stub() -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            server.requests.append((self.command, self.path, dict(self.headers)))
            status, body, headers = server.answers.pop(0)
            self.send_response(status)
            usual = {"Content-Length": str(len(body)), "ETag": '"x"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
            for name, value in (usual | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815 - called by these names

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Stub(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def stub(running_stub) -> Iterator[Stub]:
    running_stub.requests.clear()
    yield running_stub
    assert running_stub.answers == []


@pytest.fixture(scope="module")
def backend(running_stub, client):
    # Making a client takes longer than anything that is tested with it.
    backend = running_stub.open(client)
    yield backend
    close_backend(backend)


@pytest.fixture(scope="module")
def by_s3fs(running_stub):
    with closing(running_stub.open()) as backend:
        yield backend


def test_a_poll_is_one_request(stub, backend):
    for _ in range(3):
        stub.will_refuse(404, "NoSuchKey")
    stub.will_answer(200, b"here")
    for _ in range(3):
        with pytest.raises(ObjectNotFound):
            backend.read("a", limit=99)
    assert backend.read("a", limit=99) == b"here"
    assert [(method, path.partition("?")[0]) for method, path, _ in stub.requests] == [("GET", "/bucket/run/a")] * 4


def test_no_more_is_asked_for_than_the_limit_and_one(stub, by_s3fs):
    stub.will_answer(206, b"x" * 10)
    with pytest.raises(CorruptObject):
        by_s3fs.read("a", limit=9)
    assert stub.requests[0][2]["Range"] == "bytes=0-9"


def test_a_large_object_is_one_put(stub, backend):
    stub.will_answer(200, ETag='"x"')
    backend.write("a", bytes(101 << 20))
    assert [method for method, _, _ in stub.requests] == ["PUT"]


def test_create_is_conditional(stub, backend):
    stub.will_answer(200, ETag='"x"')
    backend.create("a", b"x")
    headers = {name.lower(): value for name, value in stub.requests[0][2].items()}
    assert headers["if-none-match"] == "*"
    assert [name for name in headers if name.startswith("x-amz-checksum-")], "damage on the way must be seen"
    with pytest.raises(UsageError):
        backend.create("a", bytes((16 << 20) + 1))
    assert len(stub.requests) == 1


def test_empty_object(stub, by_s3fs):
    stub.will_refuse(416, "InvalidRange")
    stub.will_answer(200, ETag='"x"', **{"Content-Length": "0"})
    assert by_s3fs.read("a", limit=9) == b""


def test_range_refused_for_an_object_with_bytes(stub, by_s3fs):
    stub.will_refuse(416, "InvalidRange")
    stub.will_answer(200, ETag='"x"', **{"Content-Length": "5"})
    with pytest.raises(StorageError):
        by_s3fs.read("a", limit=9)


def test_a_range_is_one_request(stub, backend):
    stub.will_answer(206, b"cde", **{"Content-Range": "bytes 2-4/9"})
    assert backend.read_range("a", 2, 5) == b"cde"
    assert [(method, headers.get("Range", headers.get("range"))) for method, _, headers in stub.requests] == [
        ("GET", "bytes=2-4")
    ]


def test_a_server_that_ignores_ranges(stub, backend):
    stub.will_answer(200, b"abcdefghi")
    with pytest.raises(StorageError) as caught:
        backend.read_range("a", 2, 5)
    assert not caught.value.transient


def test_renewed_credentials_are_found(stub, tmp_path, monkeypatch):
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with closing(open_fsspec("s3://bucket/run", storage_options={})) as backend:
        for status, code in ((403, "InvalidAccessKeyId"), (400, "ExpiredToken")):
            stub.will_refuse(status, code)
            with pytest.raises(AccessDenied) as caught:
                backend.read("a", limit=9)
            assert "renew" in caught.value.hint
        file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = x\n")
        stub.will_answer(200, b"x")
        assert backend.read("a", limit=9) == b"x"
    used = [headers["Authorization"].partition("Credential=")[2].partition("/")[0] for *_, headers in stub.requests]
    assert used == ["old", "old", "new"]


def test_the_client_of_refused_credentials_is_closed_after_its_last_request(stub, monkeypatch):
    closed = threading.Event()
    with closing(stub.open()) as backend:
        stub.will_refuse(403, "AccessDenied")
        with pytest.raises(AccessDenied):
            backend.read("a", limit=9)
        old = backend._connection
        old.requests += 1  # as if another thread's were still on its way
        close = old.file_system._s3.close

        async def tell() -> None:
            await close()
            closed.set()

        monkeypatch.setattr(old.file_system._s3, "close", tell)
        stub.will_answer(200, b"x")
        assert backend.read("a", limit=9) == b"x"
        assert backend._connection is not old
        assert not closed.is_set()
        old.requests -= 1
        old.file_system.loop.call_soon_threadsafe(backend._close_left, old)
        assert closed.wait(10)


def test_refusals_over_and_over_leave_no_clients_behind(stub, request):
    """Nor is it left to the interpreter when to free them: garbage of several at once is memory that stays taken."""

    def clients() -> int:
        return sum(issubclass(type(found), AioBaseClient) for found in gc.get_objects())

    gc.collect()
    before = clients()
    gc.disable()
    request.addfinalizer(gc.enable)
    with closing(stub.open()) as backend:
        for _ in range(6):
            stub.will_refuse(403, "AccessDenied")
            with pytest.raises(AccessDenied):
                backend.read("a", limit=9)
        stub.will_answer(200, b"x")
        assert backend.read("a", limit=9) == b"x"
        training.until(lambda: clients() <= before + 2)


def test_clients_share_what_botocore_knows_of_s3(stub):
    """Each by itself would take some 13 MiB: that of a heartbeat, and of each look for new credentials."""

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    backends = []
    for _ in range(3):
        before = objects()
        backends.append(stub.open())
        stub.will_answer(206, b"x")
        assert backends[-1].read("a", limit=9) == b"x"
        made = objects() - before
    for backend in backends:
        backend.close()
    assert made < 10_000


def test_a_profile_tells_its_own_credentials_and_region(stub, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "config"
    profiles = [("default", "a", "eu-one"), ("profile other", "b", "eu-two")]
    keys = "[{0}]\naws_access_key_id = {1}\naws_secret_access_key = x\nregion = {2}\n"
    file.write_text("".join(keys.format(*profile) for profile in profiles))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.endpoint)
    for options in ({}, {"profile": "other"}):
        with closing(open_fsspec("s3://bucket/run", storage_options=options)) as backend:
            stub.will_answer(206, b"x")
            assert backend.read("a", limit=9) == b"x"
    used = [headers["Authorization"].partition("Credential=")[2].split("/")[0:3:2] for *_, headers in stub.requests]
    assert used == [["a", "eu-one"], ["b", "eu-two"]]
    with pytest.raises(UsageError, match="absent"):
        open_fsspec("s3://bucket/run", storage_options={"profile": "absent"})


def test_expired_credentials_by_obstore(stub):
    stub.will_refuse(400, "ExpiredToken")
    with pytest.raises(AccessDenied, match="because"):
        stub.open("obstore").read("a", limit=9)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (412, "PreconditionFailed", ObjectExists),
        (409, "ConditionalRequestConflict", StorageError),
        (409, "OperationAborted", StorageError),
        (503, "SlowDown", StorageError),
        (500, "InternalError", StorageError),
        (403, "AccessDenied", AccessDenied),
        (404, "NoSuchBucket", StorageError),
    ],
)
def test_answers_to_create(stub, backend, status, code, kind):
    stub.will_refuse(status, code)
    with pytest.raises(StorageError) as caught:
        backend.create("a", b"x")
    # obstore takes a 409 for a taken key; whoever creates reads back in any case.
    assert type(caught.value) in {kind, ObjectExists} if status == 409 else type(caught.value) is kind
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("status", "code", "transient"),
    [
        (503, "SlowDown", True),
        (503, "ServiceUnavailable", True),
        (500, "InternalError", True),
        (429, "TooManyRequests", True),
        (409, "OperationAborted", True),
        (403, "AccessDenied", False),
        (403, "SignatureDoesNotMatch", False),
        (400, "InvalidArgument", False),
        (400, "BadDigest", True),
        (400, "RequestTimeout", True),
        (501, "NotImplemented", False),
    ],
)
def test_what_is_worth_repeating(stub, backend, status, code, transient):
    for call in (
        lambda: backend.read("a", limit=9),
        lambda: backend.write("a", b"x"),
        lambda: backend.delete("a"),
    ):
        stub.requests.clear()
        stub.will_refuse(status, code, "an-access-key is not\nwelcome")
        with pytest.raises(StorageError) as caught:
            call()
        assert type(caught.value) is (AccessDenied if status == 403 else StorageError)
        assert caught.value.transient is transient
        assert caught.value.hint
        assert "an-access-key" not in str(caught.value)
        assert "*** is not welcome" in str(caught.value)
        assert len(stub.requests) == 1


def test_missing_bucket(stub, backend):
    stub.will_refuse(404, "NoSuchBucket")
    with pytest.raises(ObjectNotFound, match="bucket") as caught:
        backend.read("a", limit=9)
    assert "create the bucket" in caught.value.hint
    stub.will_refuse(404, "NoSuchBucket")
    with pytest.raises(StorageError, match="bucket"):
        [*backend.list("")]


def test_body_cut_short(stub, backend):
    stub.will_answer(200, b"only this", **{"Content-Length": "1000", "Connection": "close"})
    with pytest.raises(StorageError) as caught:
        backend.read("a", limit=9999)
    assert caught.value.transient


def test_refused_connection(client):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        backend = Stub(endpoint).open(client)
        with pytest.raises(StorageError) as caught:
            backend.read("a", limit=9)
        close_backend(backend)
    assert caught.value.transient


@contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections, and never say a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=32) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("operation", ["read", "read_range", "write", "create", "list", "delete"])
def test_a_silent_server_does_not_hold_us(client, operation):
    calls = {
        "read": lambda backend: backend.read("a", limit=9),
        "read_range": lambda backend: backend.read_range("a", 0, 9),
        "write": lambda backend: backend.write("a", b"x"),
        "create": lambda backend: backend.create("a", b"x"),
        "list": lambda backend: [*backend.list("")],
        "delete": lambda backend: backend.delete("a"),
    }
    # A listing has a longer deadline, and is ended by the time that one answer may take.
    names = {"s3fs": {"config_kwargs": {"read_timeout": 0.2}}, "obstore": {"client_options.read_timeout": "200ms"}}
    patience = names[client] if operation == "list" else {}
    with silent_server() as endpoint:
        backend = Stub(endpoint).open(client, timeout=0.2, **patience)
        started = time.monotonic()
        with pytest.raises(StorageError) as caught:
            calls[operation](backend)
        assert time.monotonic() - started < 5
        close_backend(backend)
    assert type(caught.value) is StorageError
    assert caught.value.transient


def test_an_interruption_ends_the_wait(client):
    with silent_server() as endpoint:
        backend = Stub(endpoint).open(client)
        timer = threading.Timer(0.3, _thread.interrupt_main)
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            backend.create("a", b"x")
        assert time.monotonic() - started < 5
        timer.join()
        close_backend(backend)


def test_not_carried_over_a_fork(monkeypatch, backend):
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(StorageError, match="another process") as caught:
        backend.read("a", limit=9)
    assert not caught.value.transient
    monkeypatch.undo()


def test_regions_and_nested_options_reach_the_library(stub):
    options = {
        "region": "eu-north-7",
        "config_kwargs.user_agent_extra": "nested/1",
        "token": "a-session-token",
    }
    with closing(stub.open(**options)) as backend:
        stub.will_answer(200, ETag='"x"')
        backend.write("a", b"x")
    headers = stub.requests[0][2]
    assert "/eu-north-7/s3/" in headers["Authorization"]
    assert "nested/1" in headers["User-Agent"]
    assert headers["X-Amz-Security-Token"] == "a-session-token"


def test_anonymous(stub, client):
    backend = stub.open(client, anon="true")
    stub.will_answer(200, b"x")
    backend.read("a", limit=9)
    close_backend(backend)
    assert "authorization" not in {name.lower() for name in stub.requests[0][2]}


def test_environment(stub, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", stub.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with closing(open_fsspec("s3://bucket/run", storage_options={})) as backend:
        stub.will_answer(206, b"x")
        assert backend.read("a", limit=9) == b"x"
    assert "from-the-environment/" in stub.requests[0][2]["Authorization"]


def test_fsspec_environment(stub):
    stub.will_answer(206, b"x")
    code = (
        "from deltastore.storage.remote import open_fsspec;"
        "b = open_fsspec('s3://bucket/run', storage_options={}); print(b.read('a', limit=9)); b.close()"
    )
    environment = {
        "FSSPEC_S3_ENDPOINT_URL": stub.endpoint,
        "FSSPEC_S3_KEY": "from-fsspec",
        "FSSPEC_S3_SECRET": "x",
        "FSSPEC_S3_CLIENT_KWARGS": '{"region_name": "eu-north-7"}',
        "PYTHONPATH": ":".join(sys.path),
    }
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "b'x'\n"
    assert "from-fsspec/" in stub.requests[0][2]["Authorization"]
    assert "/eu-north-7/s3/" in stub.requests[0][2]["Authorization"]


def test_credentials_in_the_url(stub, client):
    url = "s3://AKID:SECRET%2F1@bucket/run"
    backend = OPEN[client](url, storage_options={"endpoint_url": stub.endpoint})
    stub.will_refuse(400, "InvalidArgument", "AKID and SECRET/1 are wrong")
    with pytest.raises(StorageError) as caught:
        backend.read("a", limit=9)
    close_backend(backend)
    headers = {name.lower(): value for name, value in stub.requests[0][2].items()}
    assert "AKID/" in headers["authorization"]
    assert "*** and *** are wrong" in str(caught.value)


def test_closed_and_used_again(stub, backend):
    close_backend(backend)
    for _ in range(2):
        stub.will_answer(200, b"x")
        assert backend.read("a", limit=9) == b"x"
        close_backend(backend)
        close_backend(backend)


@pytest.mark.parametrize("options", [{"nonsense": "1"}, {"client_options": "5"}, {"client_options.nonsense": "1"}])
def test_options_that_obstore_does_not_have(stub, options):
    with pytest.raises(UsageError) as caught:
        stub.open("obstore", **options)
    assert caught.value.hint
    assert "a-secret-key" not in str(caught.value)
