"""The contract against a real S3 server."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from deltastore.errors import StorageError
from deltastore.storage import open_backend
from deltastore.testing.s3_server import s3_server
from deltastore.testing.storage_contract import StorageContract

pytestmark = pytest.mark.s3

_names = itertools.count()


class TestS3(StorageContract):
    # This server takes about two seconds to turn seven writers away.
    race_rounds = 3

    @pytest.fixture
    def open_another(self, s3):
        url = f"{s3.url}/contract-{next(_names)}/run"
        with ExitStack() as stack:

            def open_one():
                backend = open_backend(url, storage_options=s3.storage_options)
                return stack.enter_context(closing(backend))

            yield open_one


def test_largest_part(s3):
    with closing(open_backend(f"{s3.url}/large", storage_options=s3.storage_options)) as backend:
        data = bytes(range(256)) * (1 << 18)
        backend.write("a", data)
        assert backend.read("a", limit=len(data)) == data


def test_many_objects_are_listed_page_by_page(s3):
    with closing(open_backend(f"{s3.url}/many", storage_options=s3.storage_options)) as backend:
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(lambda number: backend.write(f"d/{number:05d}", b"x"), range(1100))]
        assert len([*backend.list("")]) == 1100


def test_wrong_secret(s3):
    options = {**s3.storage_options, "secret": "not-the-secret"}
    backend = open_backend(f"{s3.url}/x", storage_options=options)
    with closing(backend), pytest.raises(StorageError) as caught:
        backend.read("a", limit=1)
    assert not caught.value.transient
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
