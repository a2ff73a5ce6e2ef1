"""Every kind of fault on the wire, in front of a real S3 server: right bytes or an error of ours, and no hanging."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from deltastore.commit import commit
from deltastore.digest import hasher
from deltastore.errors import AccessDenied, CorruptObject, ObjectNotFound, StorageError, UsageError, VersionConflict
from deltastore.manifest import ObjectRef
from deltastore.spool import read_object
from deltastore.storage import close_backend
from deltastore.storage.faults import FaultKind
from deltastore.storage.obstore import open_obstore
from deltastore.storage.remote import open_fsspec
from deltastore.storage.retry import RetryingBackend
from tools.chaos.proxy import running_proxy
from tools.chaos.rules import Rule, Script, read_rules

pytestmark = pytest.mark.s3

_names = itertools.count()
DATA = bytes(range(256)) * 4096
REFERENCE = ObjectRef("a/b", len(DATA), hasher("xxh3-128").of(DATA))
DEADLINE = 4.0 if os.environ.get("DELTASTORE_THOROUGH") == "1" else 1.0
# Time enough for a busy machine to make a client, which follows each refusal.
TIMEOUT = 4.0
PATIENCE = 60.0


@pytest.fixture(scope="module")
def link(s3):
    with running_proxy(s3.endpoint, seed=7) as (proxy, endpoint):
        yield proxy, endpoint


@pytest.fixture(scope="module", params=["s3fs", "obstore"])
def bare(request, s3, link):
    """A backend behind the proxy, with little patience."""
    options = {**s3.storage_options, "endpoint_url": link[1]}
    url = f"{s3.url}/chaos-{next(_names)}"
    if request.param == "s3fs":
        backend = open_fsspec(url, storage_options={**options, "config_kwargs.read_timeout": 0.5}, timeout=TIMEOUT)
    else:
        backend = open_obstore(
            url, storage_options={**options, "client_options.read_timeout": "500ms"}, timeout=TIMEOUT
        )
    yield backend
    close_backend(backend)


@pytest.fixture
def retrying(bare, link, request):
    link[0].play([])
    # What passes, or is only slow, is waited for.
    slow = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind") is FaultKind.SLOW
    lasts = request.node.originalname == "test_a_fault_that_lasts" and not slow
    yield RetryingBackend(bare, deadline=DEADLINE if lasts else PATIENCE, first_pause=0.05)
    link[0].play([])


def rule(kind, method, *, bytes_per_second=4e6, **settings):
    return Rule(kind=kind, method=method, path="/a/", seconds=30, bytes_per_second=bytes_per_second, **settings)


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_that_passes(kind, retrying, link):
    link[0].play([rule(kind, "PUT", times=1)])
    write(retrying)
    link[0].play([rule(kind, "GET", times=1)])
    try:
        assert read_object(retrying, REFERENCE, limit=1 << 30) == DATA
    except CorruptObject:
        assert kind in {FaultKind.TRUNCATE, FaultKind.FLIP}
    except AccessDenied:
        assert kind is FaultKind.DENY
    assert read_object(retrying, REFERENCE, limit=1 << 30) == DATA
    link[0].play([rule(kind, "GET", times=1)])
    try:
        found = retrying.read_range("a/b", 1000, 5000)
        assert found == DATA[1000:5000] or kind is FaultKind.FLIP
        assert len(found) == 4000
    except CorruptObject:
        assert kind is FaultKind.TRUNCATE
    except AccessDenied:
        assert kind is FaultKind.DENY


def write(backend):
    """Write, and again where the credentials were refused: they are renewed by then."""
    try:
        backend.write("a/b", DATA)
    except AccessDenied:
        backend.write("a/b", DATA)


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_that_lasts(kind, retrying, link):
    retrying.write("a/b", DATA)
    for method, call in (
        ("GET", lambda: read_object(retrying, REFERENCE, limit=1 << 30)),
        ("PUT", lambda: retrying.write("a/b", DATA)),
        ("HEAD|DELETE|POST", lambda: retrying.delete("a/never-there")),
    ):
        times = 1 if kind is FaultKind.SLOW else None  # a busy machine may take it for a stall, and asks again
        link[0].play([rule(kind, method, times=times)])
        started = time.monotonic()
        caught = None
        try:
            result = call()
            assert result in (None, DATA)
        except (StorageError, CorruptObject) as error:
            caught = error
        if kind is FaultKind.SLOW:
            assert caught is None
            continue
        assert time.monotonic() - started < DEADLINE + TIMEOUT + 5
        if method == "GET" and kind in {FaultKind.TRUNCATE, FaultKind.FLIP}:
            assert isinstance(caught, CorruptObject)
        elif kind is FaultKind.DENY and method != "HEAD|DELETE|POST":
            assert isinstance(caught, AccessDenied)
            assert caught.hint
        elif method in {"GET", "PUT"} and kind not in {FaultKind.TRUNCATE, FaultKind.FLIP}:
            assert isinstance(caught, StorageError)
            assert caught.transient
    link[0].play([])
    assert read_object(retrying, REFERENCE, limit=1 << 30) == DATA


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.DENY])
def test_a_commit_under_each_fault(kind, bare, link):
    key = f"a/commit-{next(_names)}"
    backend = RetryingBackend(bare, deadline=PATIENCE, first_pause=0.05)
    link[0].play([rule(kind, "PUT", times=2), rule(kind, "GET", times=1, at=0)])
    data = DATA[:2000]
    for _ in range(3):
        try:
            commit(backend, key, data, limit=1 << 20, sleep=lambda _: None)
            break
        except VersionConflict:
            # Damage to what is read back looks like somebody else's object; nothing else may end a commit.
            assert kind in {FaultKind.TRUNCATE, FaultKind.FLIP}
    link[0].play([])
    assert backend.read(key, limit=1 << 20) == data


def test_expired_credentials_and_their_renewal(retrying, link):
    retrying.write("a/b", DATA)
    link[0].play([rule(FaultKind.DENY, "GET", times=3)])
    for _ in range(3):
        with pytest.raises(AccessDenied) as caught:
            retrying.read("a/b", limit=1 << 30)
        assert "renew" in caught.value.hint
    assert retrying.read("a/b", limit=1 << 30) == DATA


def test_nobody_listens(bare, s3):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = {**s3.storage_options, "endpoint_url": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        with ExitStack() as stack:
            for opener in (open_fsspec, open_obstore):
                backend = opener(f"{s3.url}/x", storage_options=options)
                stack.callback(close_backend, backend)
                with pytest.raises(StorageError) as caught:
                    RetryingBackend(backend, deadline=0.5).read("a", limit=1)
                assert caught.value.transient


def test_an_absent_object_stays_absent(retrying, link):
    link[0].play([rule(FaultKind.BUSY, "GET", times=1), rule(FaultKind.RESET, "GET", times=1)])
    with pytest.raises(ObjectNotFound):
        retrying.read("a/missing", limit=1)


def test_traffic_is_counted_by_kind(retrying, link):
    proxy = link[0]
    proxy.traffic.clear()
    proxy.play([rule(FaultKind.SLOW, "PUT", times=1, bytes_per_second=1e9)])
    retrying.write("a/b", DATA)
    retrying.read("a/b", limit=1 << 30)
    assert proxy.traffic["slow"].bytes_up == len(DATA)
    assert proxy.traffic["none"].bytes_down == len(DATA)


def test_the_same_seed_deals_the_same():
    rules = [Rule(kind=FaultKind.RESET, share=0.3), Rule(kind=FaultKind.BUSY, method="GET", share=0.3)]

    def run(seed, requests):
        script = Script(rules, seed=seed)
        return sorted((request, str(script.draw(*request)[0])) for request in requests)

    requests = [(method, f"/{number % 7}") for number in range(100) for method in ("GET", "PUT")]
    assert run(1, requests) == run(1, requests)
    assert run(1, requests) != run(2, requests)
    # Another order of other requests in between changes nothing.
    assert run(1, requests) == run(1, sorted(requests))


@pytest.mark.parametrize("text", ["", "{}", '[{"kind": "nonsense"}]', '[{"kind": "reset", "unknown": 1}]'])
def test_a_script_that_is_none(tmp_path, text):
    (tmp_path / "script").write_text(text)
    with pytest.raises(UsageError):
        read_rules(tmp_path / "script")


def test_the_command(s3, tmp_path):
    script = tmp_path / "script.json"
    script.write_text('[{"kind": "503", "method": "PUT", "path": "/command/", "times": 1}]')
    command = [sys.executable, "-m", "tools.chaos", "--target", s3.endpoint.removeprefix("http://"), "--script", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        endpoint = running.stderr.readline().strip()
        backend = open_obstore(f"{s3.url}/command", storage_options={**s3.storage_options, "endpoint_url": endpoint})
        RetryingBackend(backend, first_pause=0.01).write("a", b"x")
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=10)
    assert running.returncode == 0, err
    assert {kind: count["requests"] for kind, count in json.loads(out).items()} == {"503": 1, "none": 1}
