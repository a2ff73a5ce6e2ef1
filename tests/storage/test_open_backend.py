"""From a URL to a backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deltastore.errors import UsageError
from deltastore.storage import close_backend, open_backend
from deltastore.storage.local import LocalBackend
from deltastore.storage.retry import RetryingBackend


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_local(tmp_path, form):
    backend = open_backend(form.format(tmp_path))
    assert isinstance(backend, LocalBackend)
    assert backend.url == str(tmp_path)


def test_escapes_in_file_urls(tmp_path):
    assert open_backend(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://m/run", "memory://m/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("S3://bucket", "s3://bucket"),
        ("s3a://bucket/a/b", "s3a://bucket/a/b"),
        ("s3://AKID:SECRET@bucket/run", "s3://bucket/run"),
    ],
)
def test_remote(url, shown):
    backend = open_backend(url)
    assert isinstance(backend, RetryingBackend)
    assert backend.url == shown
    assert "SECRET" not in repr(backend)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://host/path",
        "http://u:SECRET@host/",
        "simplecache::s3://bucket/SECRET",
        "file://host/path",
        "file://",
        "s3://",
        "s3:///path",
        "memory://",
        "s3://bucket/run?token=SECRET",
        "s3://bucket/run#SECRET",
        "s3://SECRET@bucket/run",
        "gs://user:SECRET@bucket/run",
    ],
)
def test_refused(url):
    with pytest.raises(UsageError) as caught:
        open_backend(url)
    assert caught.value.hint
    assert "SECRET" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3a://bucket/run"])
def test_the_client_of_s3_is_chosen_by_an_option(url):
    for client in ("s3fs", "obstore"):
        assert client_of(open_backend(url, storage_options={"client": client})) == client
    assert client_of(open_backend(url)) == "s3fs"


def client_of(backend):
    return {"FsspecBackend": "s3fs", "ObstoreBackend": "obstore"}[type(backend._inner).__name__]


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://m/run", "gs://bucket/run"])
def test_no_such_client(url):
    with pytest.raises(UsageError, match="client") as caught:
        open_backend(url, storage_options={"client": "obstore" if "s3" not in url else "curl"})
    assert "client=obstore" in caught.value.hint


def test_obstore_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError) as caught:
        open_backend("s3://bucket/run", storage_options={"client": "obstore"})
    assert "pip install" in caught.value.hint


def test_one_client_does_not_import_the_other():
    code = (
        "import sys; from deltastore.storage import open_backend;"
        "open_backend('s3://bucket/run', storage_options={'client': sys.argv[1], 'key': 'a', 'secret': 'b'});"
        "print(*sorted({'obstore', 's3fs', 'botocore'} & set(sys.modules)))"
    )
    for client, imported in (("obstore", "obstore"), ("s3fs", "botocore s3fs")):
        ran = subprocess.run([sys.executable, "-c", code, client], capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == imported


def test_what_is_known_is_named():
    with pytest.raises(UsageError) as caught:
        open_backend("ftp://host/path")
    for scheme in ("file://", "s3://", "gs://", "az://", "memory://"):
        assert scheme in caught.value.hint


def test_a_path_takes_no_options(tmp_path):
    with pytest.raises(UsageError, match="key") as caught:
        open_backend(str(tmp_path), storage_options={"key": "SECRET"})
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run"])
def test_missing_packages_are_named(url, monkeypatch):
    def absent(protocol: str) -> None:
        raise ImportError("no module")

    monkeypatch.setattr("fsspec.get_filesystem_class", absent)
    with pytest.raises(UsageError) as caught:
        open_backend(url)
    assert "pip install" in caught.value.hint


def test_options_that_do_not_fit():
    with pytest.raises(UsageError) as caught:
        open_backend("s3://bucket", storage_options={"client_kwargs": "SECRET"})
    assert "client_kwargs" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        open_backend("s3://bucket", storage_options={"key": "a-secret", "username": "b", "x_token": "SECRET"})
    assert "a-secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["/nowhere", "memory://closing", "s3://never-used"])
def test_any_backend_can_be_closed(url):
    backend = open_backend(url)
    close_backend(backend)
    close_backend(backend)
