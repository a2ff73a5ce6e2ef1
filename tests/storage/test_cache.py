"""What goes through a cache and what does not, and what is done with a copy that is wrong."""

from __future__ import annotations

import pytest
from caching import CountingStore, content, part

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, ObjectNotFound, UsageError
from deltastore.manifest import ObjectRef, manifest_key, part_key
from deltastore.spool import read_object
from deltastore.storage import open_backend
from deltastore.storage.cache import CachedBackend, is_kept
from deltastore.storage.cache_client import CacheClient
from deltastore.storage.cache_directory import CacheDirectory
from deltastore.storage.local import LocalBackend
from deltastore.testing.storage_contract import StorageContract

ATTEMPT = "0123456789abcdef" * 2
LIMIT = 1 << 20


class TestCachedBackend(StorageContract):
    @pytest.fixture
    def open_another(self, tmp_path):
        cache = CacheDirectory(tmp_path / "cache", max_bytes=LIMIT)
        return lambda: CachedBackend(LocalBackend(tmp_path / "store"), cache)


@pytest.mark.parametrize(
    "key",
    [
        part_key(7, ATTEMPT, "model-00000.safetensors"),
        part_key(0, ATTEMPT, "model.schema.json"),
        f"routes/0000000007/{ATTEMPT}/model-00000.safetensors",
    ],
)
def test_kept(key):
    assert is_kept(key)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "LATEST",
        manifest_key(0),
        "tags/best.json",
        "retention/0000000001.json",
        "segments/0000000000.zst",
        "fleet/host.json",
        "probes/x",
        f"routes/0000000007/{ATTEMPT}/route.json",
        f"parts/0000000007/{ATTEMPT}",
        f"parts/0000000007/{ATTEMPT}/",
        f"parts/0000000007/{ATTEMPT}/a/b",
        f"parts/0000000007/{ATTEMPT}/..",
        f"parts/0000000007/{ATTEMPT}/.hidden",
        f"parts/0000000007/{ATTEMPT}/a\n",
        f"parts/000000000७/{ATTEMPT}/a",
        f"parts/../{ATTEMPT}/a",
        f"/parts/0000000007/{ATTEMPT}/a",
        f"parts/0000000007/{ATTEMPT.upper()}/a",
    ],
)
def test_not_kept(key):
    assert not is_kept(key)


@pytest.fixture
def store():
    return CountingStore({part(1): content(1), manifest_key(1): b"first"})


@pytest.fixture
def directory(tmp_path):
    return CacheDirectory(tmp_path / "cache", max_bytes=LIMIT)


def reference(number=1):
    return ObjectRef(part(number), 1000, hasher("xxh3-128").of(content(number)))


def test_parts_are_asked_for_once_and_manifests_each_time(store, directory):
    for _ in range(2):
        backend = CachedBackend(store, directory)
        for _ in range(2):
            assert backend.read(part(1), limit=LIMIT) == content(1)
            assert backend.read(manifest_key(1), limit=LIMIT) == b"first"
    assert store.reads.count(part(1)) == 1
    assert store.reads.count(manifest_key(1)) == 4
    store.objects[manifest_key(1)] = b"second"
    assert backend.read(manifest_key(1), limit=LIMIT) == b"second"


def test_absence_is_not_remembered(store, directory):
    backend = CachedBackend(store, directory)
    for key in (part(2), manifest_key(2)):
        with pytest.raises(ObjectNotFound):
            backend.read(key, limit=LIMIT)
        store.objects[key] = b"now"
        assert backend.read(key, limit=LIMIT) == b"now"


def test_a_wrong_copy_is_dropped_and_the_store_asked_once_more(store, directory):
    directory.read(part(1), limit=LIMIT, fetch=lambda: content(2))  # sealed, and yet not what the record says
    backend = CachedBackend(store, directory)
    assert read_object(backend, reference(), limit=LIMIT) == content(1)
    assert store.reads == [part(1)]
    assert read_object(CachedBackend(store, directory), reference(), limit=LIMIT) == content(1)
    assert read_object(CachedBackend(store, directory), reference(), limit=LIMIT) == content(1)
    assert store.reads == [part(1)] * 2


def test_a_wrong_copy_that_cannot_be_dropped_is_not_read_again(store, directory, monkeypatch):
    directory.read(part(1), limit=LIMIT, fetch=lambda: content(2))
    monkeypatch.setattr(directory, "forget", lambda key: None)
    backend = CachedBackend(store, directory)
    for _ in range(2):
        assert read_object(backend, reference(), limit=LIMIT) == content(1)
    assert store.reads == [part(1)] * 2


@pytest.mark.parametrize("harm", [content(2), content(1, 999), content(1, 1001), b""])
def test_an_object_that_is_wrong_in_the_store_too_is_refused(store, directory, harm):
    store.objects[part(1)] = harm
    backend = CachedBackend(store, directory)
    with pytest.raises(CorruptObject) as caught:
        read_object(backend, reference(), limit=LIMIT)
    assert caught.value.key == part(1)
    assert len(store.reads) == 2
    with pytest.raises(CorruptObject):
        read_object(backend, reference(), limit=LIMIT)
    assert len(store.reads) == 3
    store.objects[part(1)] = content(1)
    assert read_object(backend, reference(), limit=LIMIT) == content(1)
    assert read_object(CachedBackend(store, directory), reference(), limit=LIMIT) == content(1)


def test_without_a_cache_a_damaged_object_is_read_once(store):
    store.objects[part(1)] = content(2)
    with pytest.raises(CorruptObject):
        read_object(store, reference(), limit=LIMIT)
    assert store.reads == [part(1)]


def test_writing_and_deleting_drop_the_copy(store, directory):
    backend = CachedBackend(store, directory)
    backend.read(part(1), limit=LIMIT)
    backend.write(part(1), b"other")
    assert backend.read(part(1), limit=LIMIT) == b"other"
    backend.delete(part(1))
    with pytest.raises(ObjectNotFound):
        backend.read(part(1), limit=LIMIT)
    assert directory.open(part(1)) is None


def test_from_a_url(tmp_path, monkeypatch):
    store = tmp_path / "store"
    (store / part(1)).parent.mkdir(parents=True)
    (store / part(1)).write_bytes(content(1))
    backend = open_backend(str(store), cache=tmp_path / "cache", cache_bytes=5000)
    assert backend.url == str(store)
    assert backend.read(part(1), limit=LIMIT) == content(1)
    (store / part(1)).unlink()
    assert open_backend(str(store), cache=str(tmp_path / "cache")).read(part(1), limit=LIMIT) == content(1)
    monkeypatch.setenv("DELTASTORE_CACHE_TOKEN", "secret")
    backend = open_backend("memory://x", cache="HTTP://cache.example:9320/")
    assert isinstance(backend._cache, CacheClient)
    assert "secret" not in repr(backend)
    backend.close()


@pytest.mark.parametrize(
    "options",
    [
        {"cache": ""},
        {"cache": "ftp://host/"},
        {"cache": "http://"},
        {"cache": "http://host:port/"},
        {"cache": "http://user:SECRET@host/"},
        {"cache": "http://host/?token=SECRET"},
        {"cache": "http://host/", "cache_bytes": 5000},
        {"cache_bytes": 5000},
    ],
)
def test_refused(tmp_path, options):
    with pytest.raises(UsageError) as caught:
        open_backend(str(tmp_path), **options)
    assert caught.value.hint
    assert "SECRET" not in str(caught.value) + caught.value.hint
