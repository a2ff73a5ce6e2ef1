"""A check finds what is damaged, names it, and finds nothing where nothing is."""

from __future__ import annotations

import pytest
import training

from deltastore import Writer, open_store
from deltastore.compact import anchor
from deltastore.errors import StoreNotFound
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.manifest import manifest_key
from deltastore.policy import Policy
from deltastore.storage.local import LocalBackend
from deltastore.tags import set_tag


@pytest.fixture
def url(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        for seed in (1, 2, 3):
            writer.publish(training.small_snapshot(seed)).result()
    return tmp_path / "store"


def found(url, **options):
    return {(problem.kind, problem.key) for problem in check(LocalBackend(url), **options).problems}


def test_a_whole_store_has_no_problems_and_every_byte_is_read(url):
    report = check(LocalBackend(url), read_data=True)
    history = open_store(url).log()
    assert report.ok
    assert report.bytes_read == sum(manifest.stored_bytes for manifest in history)
    assert check(LocalBackend(url)).bytes_read == 0
    assert check(LocalBackend(url), subset_percent=100).bytes_read == report.bytes_read


def test_orphans_and_foreign_parts_are_no_damage(url):
    LocalBackend(url).write("parts/0000000009/x/y", b"orphan")
    LocalBackend(url).write("elsewhere/z", b"foreign")
    assert found(url, read_data=True) == set()


def test_every_object_that_is_missing_or_of_another_size_is_named(url):
    backend = LocalBackend(url)
    for key in [info.key for info in backend.list("parts/")]:
        data = (url / key).read_bytes()
        backend.delete(key)
        assert ("missing-object", key) in found(url)
        backend.write(key, data + b"x")
        assert ("wrong-size", key) in found(url)
        backend.write(key, data)
    assert found(url, read_data=True) == set()


def test_a_gap_in_the_history_is_named(url):
    (url / manifest_key(2)).unlink()
    assert found(url) == {("missing-manifest", manifest_key(2))}


def test_a_lost_first_manifest_is_named(url):
    (url / manifest_key(0)).unlink()
    assert ("missing-manifest", manifest_key(0)) in found(url)


@pytest.mark.parametrize("key", ["manifests/readme.txt", "manifests/4.json", "manifests/a/0000000004.json"])
def test_a_foreign_manifest_is_named(url, key):
    LocalBackend(url).write(key, b"hello")
    assert found(url) == {("foreign-object", key)}


def test_a_stray_manifest_with_a_large_number_is_named_and_not_counted_up_to(url):
    key = manifest_key(9_999_999_999)
    LocalBackend(url).write(key, b"hello")
    assert found(url) == {("missing-manifest", manifest_key(4)), ("corrupt-object", key)}


def test_where_there_is_no_store_it_says_so(tmp_path):
    with pytest.raises(StoreNotFound):
        check(LocalBackend(tmp_path / "nothing"))


@pytest.fixture
def rich(url):
    """The same store with every other kind of object: an anchor, a tag, a retention record."""
    store = open_store(url)
    anchor(store, 2)
    set_tag(store, "good", 1)
    forget(store, Policy(keep_last=2))
    return url


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "remove"])
def test_a_check_tells_of_any_one_damaged_object_and_raises_nothing(how, rich):
    assert found(rich, read_data=True) == set()
    let_go = {doomed.key for doomed in collect(open_store(rich), dry_run=True, grace=0).objects}
    for path in sorted(path for path in rich.rglob("*") if path.is_file() and path.name != "LATEST"):
        key, content = path.relative_to(rich).as_posix(), path.read_bytes()
        if how == "remove":
            path.unlink()
        else:
            flipped = bytes([content[0] ^ 4]) + content[1:]
            path.write_bytes({"flip": flipped, "cut": content[:-1], "empty": b""}[how])
        problems = found(rich, read_data=True)
        path.write_bytes(content)
        # A record that is gone whole never was; a note for people proves nothing.
        records = ("retention/", "tags/", manifest_key(3))
        never_was = how == "remove" and (key.startswith(records) or key.endswith("route.json"))
        if not never_was and not key.endswith("begun.json") and key not in let_go:
            assert problems, key
