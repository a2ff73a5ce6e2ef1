"""The contract against a real S3 server."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from deltastore.errors import AccessDenied, StorageError
from deltastore.storage import open_backend
from deltastore.testing.s3_server import s3_server
from deltastore.testing.storage_contract import StorageContract

pytestmark = pytest.mark.s3

_names = itertools.count()


class TestS3(StorageContract):
    """By both clients; two writers of one contract may use one each."""

    # This server takes about two seconds to turn seven writers away.
    race_rounds = 1000 if os.environ.get("DELTASTORE_THOROUGH") == "1" else 3

    @pytest.fixture(params=["s3fs", "obstore", "s3fs and obstore"])
    def open_another(self, request, s3):
        url = f"{s3.url}/contract-{next(_names)}/run"
        clients = itertools.cycle(request.param.split(" and "))
        with ExitStack() as stack:

            def open_one():
                options = {**s3.storage_options, "client": next(clients)}
                return stack.enter_context(closing(open_backend(url, storage_options=options)))

            yield open_one


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_largest_part(s3, client):
    options = {**s3.storage_options, "client": client}
    with closing(open_backend(f"{s3.url}/large-{client}", storage_options=options)) as backend:
        data = bytes(range(256)) * (1 << 18)
        backend.write("a", data)
        assert backend.read("a", limit=len(data)) == data
        assert backend.read_range("a", 1 << 20, 2 << 20) == data[1 << 20 : 2 << 20]
        backend.delete("a")


def test_many_objects_are_listed_page_by_page(s3):
    with closing(open_backend(f"{s3.url}/many", storage_options=s3.storage_options)) as backend:
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(lambda number: backend.write(f"d/{number:05d}", b"x"), range(1100))]
        assert len([*backend.list("")]) == 1100
    options = {**s3.storage_options, "client": "obstore"}
    assert len([*open_backend(f"{s3.url}/many", storage_options=options).list("")]) == 1100


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_wrong_secret(s3, client):
    options = {**s3.storage_options, "secret": "not-the-secret", "client": client}
    backend = open_backend(f"{s3.url}/x", storage_options=options)
    with closing(backend), pytest.raises(AccessDenied) as caught:
        backend.read("a", limit=1)
    assert "not-the-secret" not in str(caught.value)


def test_another_process_reaches_it_by_the_environment(s3):
    with closing(open_backend(f"{s3.url}/env", storage_options=s3.storage_options)) as backend:
        backend.write("a", b"from here")
    code = (
        "import sys; from deltastore.storage import open_backend;"
        "backend = open_backend(sys.argv[1]); print(backend.read('a', limit=99)); backend.close()"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, f"{s3.url}/env"],
        env={**s3.environment, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "b'from here'"
    assert ran.stderr == ""


@pytest.mark.slow
def test_server_that_goes_away(tmp_path):
    with s3_server(tmp_path) as server:
        backend = open_backend(f"{server.url}/x", storage_options=server.storage_options)
        backend.write("a", b"x")
    with closing(backend), pytest.raises(StorageError) as caught:
        backend.create("b", b"x")
    assert caught.value.transient
