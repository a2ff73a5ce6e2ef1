"""A site's cache over HTTP: one fetch for all who ask, and receivers that do without it when it fails them."""

from __future__ import annotations

import itertools
import logging
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import training
from caching import CountingStore, content, part
from hypothesis import given, settings
from hypothesis import strategies as st

import receiver.cache_server
from deltastore import Writer, open_store
from deltastore.digest import hasher
from deltastore.errors import StorageError, UsageError
from deltastore.manifest import ObjectRef, manifest_key
from deltastore.spool import read_object
from deltastore.storage.cache import CachedBackend
from deltastore.storage.cache_client import CacheClient
from deltastore.storage.cache_directory import CacheDirectory, seal
from receiver.cache_server import CacheServer, _wanted

LIMIT = 1 << 24


@pytest.fixture
def store():
    return CountingStore({part(number): content(number, 50_000) for number in range(20)} | {manifest_key(0): b"base"})


@pytest.fixture
def directory(tmp_path):
    return CacheDirectory(tmp_path / "cache", max_bytes=1 << 30)


@pytest.fixture
def server(store, directory):
    with CacheServer(store, directory, "127.0.0.1:0", token=None) as made:
        yield made


@pytest.fixture
def client(server):
    made = CacheClient(server.url)
    yield made
    made.close()


def never():
    raise AssertionError("the store was asked")


def get(server, key, **options):
    return httpx.get(f"{server.url}/{key}", trust_env=False, timeout=30, **options)


def metrics(server):
    text = get(server, "metrics").text
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}


def test_an_object_is_fetched_once_and_served_with_its_seal(server, store):
    for _ in range(3):
        answer = get(server, part(3))
        assert answer.status_code == 200
        assert answer.content == store.objects[part(3)]
        assert answer.headers["etag"] == f'"{seal(part(3), answer.content).hex()}"'
        assert answer.headers["content-length"] == "50000"
    assert store.reads == [part(3)]
    found = metrics(server)
    assert found["cache_hits_total"] == 2
    assert found["cache_misses_total"] == 1
    assert found["cache_store_bytes_total"] == 50_000
    assert found["cache_served_bytes_total"] == 150_000
    assert get(server, "healthz").text == "ok\n"


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-99", 5, 100),
        ("bytes=49990-", 49_990, 50_000),
        ("bytes=49990-99999", 49_990, 50_000),
        ("bytes=-10", 49_990, 50_000),
        ("bytes=-99999", 0, 50_000),
        ("bytes=0-", 0, 50_000),
    ],
)
def test_ranges(server, store, header, start, end):
    answer = get(server, part(3), headers={"Range": header})
    assert answer.content == store.objects[part(3)][start:end]
    if end - start < 50_000:
        assert answer.status_code == 206
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/50000"
    else:
        assert answer.status_code == 200


@pytest.mark.parametrize("header", ["bytes=50000-", "bytes=60000-70000", "bytes=-0"])
def test_ranges_without_a_byte(server, header):
    answer = get(server, part(3), headers={"Range": header})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == "bytes */50000"


@given(st.text("bytes=-, 0123456789", max_size=20) | st.none(), st.integers(0, 10**6))
def test_any_range_header(header, size):
    found = _wanted(header, size)
    assert found is None or 0 <= found[0] <= found[1] <= size


def test_an_empty_object(server, store):
    store.objects[part(3)] = b""
    answer = get(server, part(3))
    assert (answer.status_code, answer.content) == (200, b"")
    assert get(server, part(3)).status_code == 200


def test_head(server, store):
    answer = httpx.head(f"{server.url}/{part(3)}", trust_env=False)
    assert answer.headers["content-length"] == "50000"
    assert answer.content == b""


@pytest.mark.parametrize(
    "path",
    [
        manifest_key(0),
        "LATEST",
        "tags/best.json",
        "",
        "/",
        "parts/",
        "../etc/passwd",
        "..%2f..%2fetc/passwd",
        f"{part(3)}/../../../../LATEST",
        f"{part(3)}%00",
        f"{part(3)}%2f..",
        f"/{part(3)}",
        "parts/%c3%a9",
    ],
)
def test_only_keys_of_what_is_kept(server, store, path):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:  # httpx would tidy up the path
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404")
    assert store.reads == []


def test_nothing_can_be_written(server, store):
    for method in ("PUT", "POST", "PATCH"):
        assert httpx.request(method, f"{server.url}/{part(3)}", content=b"x", trust_env=False).status_code == 405
    assert store.objects[part(3)] == content(3, 50_000)


def test_an_absent_object_and_a_failing_store(server, store):
    assert get(server, part(99)).status_code == 404
    store.objects[part(99)] = b"now"
    assert get(server, part(99)).content == b"now"
    store.error = StorageError("out of order")
    answer = get(server, part(4))
    assert answer.status_code == 502
    assert "out of order" in answer.text
    store.error = None
    assert get(server, part(4)).status_code == 200
    assert metrics(server)["cache_failures_total"] == 2


def test_thirty_clients_make_one_fetch_of_each_object(server, store):
    clients = [CacheClient(server.url) for _ in range(30)]
    store.held.clear()

    def read_all(client):
        return [client.read(part(number), limit=LIMIT, fetch=never) for number in range(20)]

    with ThreadPoolExecutor(30) as pool:
        futures = [pool.submit(read_all, client) for client in clients]
        assert store.entered.acquire(timeout=30)
        store.held.set()
        for future in futures:
            assert future.result(60) == [content(number, 50_000) for number in range(20)]
    assert sorted(store.reads) == sorted(part(number) for number in range(20))
    for client in clients:
        client.close()


def test_hits_do_not_wait_for_the_store(server, store, client):
    client.read(part(0), limit=LIMIT, fetch=never)
    store.held.clear()
    with ThreadPoolExecutor(19) as pool:
        waiting = [pool.submit(get, server, part(number)) for number in range(1, 20)]
        for _ in range(16):
            assert store.entered.acquire(timeout=30)
        assert client.read(part(0), limit=LIMIT, fetch=never) == content(0, 50_000)
        store.held.set()
        assert [future.result().status_code for future in waiting] == [200] * 19


def test_many_who_wait_for_one_object_leave_room_for_another(server, store, monkeypatch):
    read, go, asked = store.read, threading.Event(), threading.Event()

    def held(key, *, limit):
        if key == part(1):
            asked.set()
            assert go.wait(30)
        return read(key, limit=limit)

    monkeypatch.setattr(store, "read", held)
    with ThreadPoolExecutor(30) as pool:
        waiting = [pool.submit(get, server, part(1)) for _ in range(30)]
        assert asked.wait(30)
        training.until(lambda: server.misses._value.get() == 30)
        assert get(server, part(2)).status_code == 200
        go.set()
        assert [future.result(30).status_code for future in waiting] == [200] * 30
    assert store.reads.count(part(1)) == 1


def test_a_slow_client_holds_nobody_up_and_is_cut_off(store, directory, monkeypatch):
    monkeypatch.setattr(receiver.cache_server, "_SLOWEST_BYTES_A_SECOND", 1 << 40)
    size = 30_000_000
    store.objects[part(1)] = content(1, size)
    with CacheServer(store, directory, "127.0.0.1:0", token=None, transfers=4, patience=3.0) as server:
        client = CacheClient(server.url)
        host, port = server.url.removeprefix("http://").split(":")
        slow = []
        for _ in range(3):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(f"GET /{part(1)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            slow.append(connection)
        for number in range(2, 12):
            assert client.read(part(number), limit=LIMIT, fetch=never) == content(number, 50_000)
        training.until(lambda: server._transfers._value == 4, what="cutting off")
        for connection in slow:
            connection.settimeout(30)
            received = 100
            with connection:
                while data := connection.recv(1 << 20):
                    received += len(data)
            assert received < size
        client.close()


def test_a_wrong_copy_is_dropped_at_the_server_too(server, store, directory, client):
    directory.read(part(3), limit=LIMIT, fetch=lambda: content(4, 50_000))
    reference = ObjectRef(part(3), 50_000, hasher("xxh3-128").of(content(3, 50_000)))
    direct = CountingStore(store.objects)
    backend = CachedBackend(direct, client)
    assert read_object(backend, reference, limit=LIMIT) == content(3, 50_000)
    assert direct.reads == [part(3)]
    assert get(server, part(3)).content == content(3, 50_000)
    assert store.reads == [part(3)]


def test_a_rotten_copy_is_never_served(server, store, directory, client):
    client.read(part(3), limit=LIMIT, fetch=never)
    path = directory._path(part(3))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert client.read(part(3), limit=LIMIT, fetch=never) == content(3, 50_000)
    assert store.reads == [part(3)] * 2


def test_a_directory_that_keeps_nothing_sends_clients_to_the_store(store, tmp_path):
    (tmp_path / "file").touch()
    with CacheServer(store, CacheDirectory(tmp_path / "file", max_bytes=LIMIT), "127.0.0.1:0", token=None) as server:
        client = CacheClient(server.url)
        for number in (0, 1, 0, 1, 0):
            assert client.read(part(number), limit=LIMIT, fetch=lambda: b"from the store") == b"from the store"
        client.close()
    assert store.reads == [part(0), part(1)]


def test_an_object_over_the_bound_is_the_clients_to_fetch(store, tmp_path):
    store.objects[part(1)] = content(1, 500_000)
    with CacheServer(store, CacheDirectory(tmp_path, max_bytes=100_000), "127.0.0.1:0", token=None) as server:
        client = CacheClient(server.url)
        for _ in range(3):
            assert client.read(part(1), limit=LIMIT, fetch=lambda: b"from the store") == b"from the store"
            assert client.read(part(2), limit=LIMIT, fetch=never) == content(2, 50_000)
        client.close()
    assert sorted(store.reads) == [part(1), part(2)]


def test_a_token(store, directory, caplog):
    with pytest.raises(UsageError, match="needs a token"):
        CacheServer(store, directory, "0.0.0.0:0", token=None)
    with CacheServer(store, directory, "127.0.0.1:0", token="right") as server:  # noqa: S106 - of this test
        for token in (None, "wrong", "right\u00e9"):
            headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
            for path in (part(3), "metrics", "healthz"):
                assert get(server, path, headers=headers).status_code == 401
        wrong, right = CacheClient(server.url, token="wrong"), CacheClient(server.url, token="right")  # noqa: S106
        with caplog.at_level(logging.WARNING, "deltastore"):
            assert wrong.read(part(3), limit=LIMIT, fetch=lambda: b"direct") == b"direct"
        assert "401" in caplog.text
        assert store.reads == []
        assert right.read(part(3), limit=LIMIT, fetch=never) == content(3, 50_000)
        wrong.close()
        right.close()


# A client and servers that fail it


class BadServer:
    """Answers each connection with the next of some bytes, and closes it; ``None`` hangs until the end."""

    def __init__(self, *answers):
        self._answers = iter(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._hanging = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        for answer in self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if answer is None:
                self._hanging.append(connection)
                continue
            connection.recv(65536)
            connection.sendall(answer)
            connection.close()

    def close(self):
        self._listener.close()
        for connection in self._hanging:
            connection.close()


@contextmanager
def against(*answers, **options):
    server = BadServer(*answers)
    client = CacheClient(server.url, **options)
    try:
        yield client, server
    finally:
        client.close()
        server.close()


def answer(status="200 OK", body=b"x" * 1000, key=None, **headers):
    tag = seal(key or part(1), body).hex()
    given = {"Content_Length": str(len(body)), "ETag": f'"{tag}"'} | headers
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value is not None]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + body


BAD = {
    "nothing": b"",
    "rubbish": b"SSH-2.0-OpenSSH_9.6\r\n",
    "cut": answer()[:-500],
    "cut in the head": answer()[:30],
    "longer": answer(Content_Length="999"),
    "no length": answer(Content_Length=None),
    "odd length": answer(Content_Length="1_000"),
    "no seal": answer(ETag=None),
    "wrong seal": answer(body=b"y" * 1000, ETag='"0"'),
    "seal of another key": answer(key=part(2)),
    "compressed": answer(Content_Encoding="gzip"),
    "redirect": answer("302 Found", Location="http://127.0.0.1:1/"),
    "error": answer("500 Internal Server Error"),
    "partial": answer("206 Partial Content"),
    "no content": answer("204 No Content", b""),
    "html": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\nlog in",
}


def test_an_answer_in_chunks_is_held_to_its_length(caplog):
    body = bytes(1000)
    head, _, _ = answer(body=body, Content_Length="999", Transfer_Encoding="chunked").partition(body)
    with against(head + b"3e8\r\n" + body + b"\r\n0\r\n\r\n") as (client, _):
        assert client.read(part(1), limit=LIMIT, fetch=lambda: b"right") == b"right"
    assert "more than it said" in caplog.text


def test_threads_that_fail_together_warn_once(caplog):
    with against(*[None] * 8, patience=0.3) as (client, _), ThreadPoolExecutor(8) as pool:
        client._connected()
        futures = [pool.submit(client.read, part(1), limit=0, fetch=lambda: b"right") for _ in range(8)]
        assert [future.result(30) for future in futures] == [b"right"] * 8
    assert len(caplog.records) == 1
    assert client._failures == 1


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_rubbish_sends_the_client_to_the_store(bad, caplog):
    with against(bad, answer()) as (client, server), caplog.at_level(logging.WARNING, "deltastore"):
        for _ in range(3):
            assert client.read(part(1), limit=LIMIT, fetch=lambda: b"right") == b"right"
        assert server.connections == 1
    assert len(caplog.records) == 1
    assert server.url in caplog.text


@pytest.mark.parametrize("bad", [answer("404 Not Found"), answer(body=bytes(1001))], ids=["absent", "over the limit"])
def test_what_is_about_one_object_keeps_the_cache_in_use(bad, caplog):
    with against(bad, answer()) as (client, _):
        assert client.read(part(1), limit=1000, fetch=lambda: b"right") == b"right"
        assert client.read(part(1), limit=1000, fetch=never) == b"x" * 1000
    assert caplog.records == []


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=30)
def test_any_answer_at_all(noise, head):
    with against(answer()[:40] + noise if head else noise) as (client, _):
        assert client.read(part(1), limit=LIMIT, fetch=lambda: b"right") == b"right"


def test_nobody_there(caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = CacheClient(url)
    for _ in range(5):
        assert client.read(part(1), limit=LIMIT, fetch=lambda: b"right") == b"right"
    client.forget(part(1))
    client.close()
    assert len(caplog.records) == 1


def test_a_server_that_hangs():
    with against(None, None, None, patience=0.1) as (client, server):
        for _ in range(3):
            assert client.read(part(1), limit=0, fetch=lambda: b"right") == b"right"
        assert server.connections == 1


def test_a_server_that_trickles():
    class Trickle(BadServer):
        def _serve(self):
            connection, _ = self._listener.accept()
            connection.recv(65536)
            whole = answer(body=bytes(1 << 20))
            try:
                for at in itertools.count():
                    connection.sendall(whole[at * 1000 : at * 1000 + 1000])
                    threading.Event().wait(0.01)
            except OSError:
                connection.close()

    server = Trickle()
    client = CacheClient(server.url, patience=0.3 - 1)
    assert client.read(part(1), limit=1 << 20, fetch=lambda: b"right") == b"right"
    client.close()
    server.close()


def test_a_busy_server_is_asked_again_and_one_that_stays_busy_is_left():
    busy = answer("503 Service Unavailable", b"")
    pauses = []
    with against(busy, busy, answer(), sleep=pauses.append) as (client, _):
        assert client.read(part(1), limit=LIMIT, fetch=never) == b"x" * 1000
        assert len(pauses) == 2
    with against(*[busy] * 50, patience=0.1) as (client, _):
        assert client.read(part(1), limit=0, fetch=lambda: b"right") == b"right"


def test_a_server_that_comes_back_is_used_again(caplog):
    with against(b"", b"", answer(), answer(), rest=0.0) as (client, server):
        for _ in range(2):
            assert client.read(part(1), limit=LIMIT, fetch=lambda: b"right") == b"right"
        for _ in range(2):
            assert client.read(part(1), limit=LIMIT, fetch=never) == b"x" * 1000
    assert server.connections == 4
    assert len(caplog.records) == 2


def test_a_connection_closed_while_it_stood_idle_is_no_failure(caplog):
    class Closing(BadServer):
        """Closes each connection at the second request on it, which no client can see coming."""

        def _serve(self):
            for whole in self._answers:
                connection, _ = self._listener.accept()
                self.connections += 1
                connection.recv(65536)
                connection.sendall(whole)
                connection.recv(65536)
                connection.close()

    server = Closing(*[answer()] * 3)
    client = CacheClient(server.url)
    for _ in range(3):
        assert client.read(part(1), limit=LIMIT, fetch=never) == b"x" * 1000
    assert server.connections == 3
    assert caplog.records == []
    client.close()
    server.close()


def test_what_the_store_raises_is_raised():
    def fail():
        raise StorageError("out of order")

    with against(b"") as (client, _), pytest.raises(StorageError, match="out of order"):
        client.read(part(1), limit=LIMIT, fetch=fail)


# Two receivers of one site


@pytest.fixture
def stream(tmp_path):
    url = tmp_path / "store"
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    with Writer(url, base=base) as writer:
        for number in (1, 2):
            writer.publish(training.small_snapshot(number)).result()
    return url


def once(commands, stream, live, cache):
    given = () if cache is None else ("--cache", cache)
    return commands.run("receiver", "once", "--store", stream, "--checkpoint", live, "--json", *given)


def first_then_second_without_parts(commands, stream, tmp_path, cache):
    once(commands, stream, tmp_path / "first", cache).ok()
    (stream / "parts").rename(tmp_path / "away")
    assert once(commands, stream, tmp_path / "third", None).code == 10
    once(commands, stream, tmp_path / "second", cache).ok()
    for name in ("first", "second"):
        training.assert_holds(tmp_path / name, training.small_snapshot(2))


def test_receivers_that_share_a_directory(commands, stream, tmp_path):
    first_then_second_without_parts(commands, stream, tmp_path, tmp_path / "cache")
    words = ("deltastore", "restore", stream, "latest", tmp_path / "out", "--cache", tmp_path / "cache")
    commands.run(*words, "--cache-size", "1GiB").ok()
    training.assert_holds(tmp_path / "out", training.small_snapshot(2))


def serve(commands, stream, tmp_path, *more, env=None):
    words = ("--store", stream, "--cache", tmp_path / "cache", "--listen", "127.0.0.1:0", *more)
    server = commands.start("receiver", "cache", *words, env=env)
    training.until(lambda: "Listening on " in server.err or server.ends_within(0), what="the cache server")
    assert "Listening on " in server.err
    return server, server.err.partition("Listening on ")[2].split()[0].rstrip(".")


def test_receivers_that_share_a_server(commands, stream, tmp_path):
    server, url = serve(commands, stream, tmp_path, "--cache-size", "100 MB")
    first_then_second_without_parts(commands, stream, tmp_path, url)
    (tmp_path / "away").rename(stream / "parts")
    server.send(signal.SIGTERM)
    assert server.end().code == 0
    # A cache that is gone is no reason to stop.
    ended = once(commands, stream, tmp_path / "fourth", url).ok()
    assert "is not used for" in ended.err
    training.assert_holds(tmp_path / "fourth", training.small_snapshot(2))


def test_a_server_killed_in_the_middle(commands, tmp_path):
    big = {f"w{number}": training.torch.randn(1 << 20) for number in range(8)}
    url = tmp_path / "store"
    with Writer(url, base=training.save(tmp_path / "base", big)):
        pass
    server, address = serve(commands, url, tmp_path)
    opened = open_store(url, cache=address)
    keys = [entry.key for entry in opened.base.model.parts]
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /{keys[0]} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(10) == b"HTTP/1.1 2"
        server.send(signal.SIGKILL)
        while connection.recv(1 << 20):
            pass
    opened.restore(0, tmp_path / "out")
    training.assert_holds(tmp_path / "out", big)
    opened.backend.close()
    # What the killed server left is as good as ever.
    shutil.rmtree(url / "parts")
    again = open_store(url, cache=tmp_path / "cache")
    assert again.backend.read(keys[0], limit=1 << 30)


def test_a_store_that_comes_later(commands, stream, tmp_path):
    stream.rename(tmp_path / "later")
    server, url = serve(commands, stream, tmp_path)
    training.until(lambda: "There is no store" in server.err)
    (tmp_path / "later").rename(stream)
    once(commands, stream, tmp_path / "live", url).ok()
    server.send(signal.SIGINT)
    assert server.end().code == 130


@pytest.mark.parametrize("size", ["0", "much", "-1GiB", "1.5.2GB", "9999999999GiB", "1XB"])
def test_sizes_that_are_none(commands, stream, tmp_path, size):
    words = ("--store", stream, "--checkpoint", tmp_path / "live", "--cache", tmp_path / "cache", "--cache-size", size)
    assert commands.run("receiver", "once", *words).code == 2


def test_a_server_for_all_hosts_needs_a_token(commands, stream, tmp_path):
    words = ("receiver", "cache", "--store", stream, "--cache", tmp_path / "cache", "--listen", "0.0.0.0:0")
    ended = commands.run(*words)
    assert ended.code == 2
    assert "DELTASTORE_CACHE_TOKEN" in ended.err
    token = {"DELTASTORE_CACHE_TOKEN": "word"}
    server, url = serve(commands, stream, tmp_path, env=token)
    words = ("--store", stream, "--checkpoint", tmp_path / "live", "--cache", url)
    assert "is not used for" in commands.run("receiver", "once", *words).ok().err
    ended = commands.run("receiver", "once", *words[:3], tmp_path / "other", *words[4:], env=token).ok()
    assert "is not used for" not in ended.err
    server.send(signal.SIGTERM)
    assert server.end().code == 0
    assert [*(tmp_path / "cache" / "objects").iterdir()]
