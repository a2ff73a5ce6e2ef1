"""Reading a store: finding versions without a listing, remembering few of them, and noticing when history changed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import training

import deltastore.reader
from deltastore import Writer, open_store
from deltastore.errors import CorruptObject, StreamMismatch, UsageError, VersionNotFound
from deltastore.manifest import LATEST_KEY, LatestHint, encode_latest, manifest_key

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = 9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of ten versions."""
    root = tmp_path_factory.mktemp("reader")
    snapshot = training.small_snapshot(0)
    with Writer(root / "store", base=training.save(root / "base", snapshot)) as writer:
        for number in range(VERSIONS):
            snapshot = training.step(snapshot, number)
            writer.publish(snapshot, step=number).result()
    return root / "store"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, place: Path) -> list[str]:
    """The keys that were read since the store was opened."""
    keys: list[str] = []
    backend = type(open_store(place).backend)
    read = backend.read
    monkeypatch.setattr(backend, "read", lambda self, key, *, limit: keys.append(key) or read(self, key, limit=limit))
    return keys


@pytest.mark.parametrize("hint", [None, 0, 4, VERSIONS, VERSIONS + 5, 10**9])
def test_the_newest_version_is_found_whatever_the_hint_says(hint: int | None, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "store")
    store = open_store(tmp_path / "store")
    if hint is None:
        store.backend.delete(LATEST_KEY)
    else:
        store.backend.write(LATEST_KEY, encode_latest(LatestHint(store.stream_id, hint)))
    assert store.latest().version == VERSIONS


def test_a_good_hint_costs_one_read_more_than_the_answer(place: Path, asked: list[str]) -> None:
    store = open_store(place)
    asked.clear()
    assert store.latest().version == VERSIONS
    assert asked == [LATEST_KEY, manifest_key(VERSIONS), manifest_key(VERSIONS + 1)]


def test_manifests_that_are_known_are_not_read_again(place: Path, asked: list[str]) -> None:
    store = open_store(place)
    store.log()
    asked.clear()
    assert store.manifest(3).version == 3
    assert store.plan(2, 5).end == 5
    assert asked == ["retention/0000000001.json"]  # whether anything was forgotten


def test_only_so_many_manifests_are_remembered_and_none_is_missed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.reader, "_REMEMBERED", 3)
    store = open_store(place)
    assert [manifest.version for manifest in store.log()] == list(range(VERSIONS + 1))
    assert len(store._recent) <= 3
    assert [step.end for step in store.plan(0, VERSIONS).steps] == list(range(1, VERSIONS + 1))
    assert store.manifest(1).step == 0


def test_manifests_that_name_many_parts_are_remembered_in_small_number(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltastore.reader, "_REMEMBERED_PARTS", 2)
    store = open_store(place)
    assert [manifest.version for manifest in store.log()] == list(range(VERSIONS + 1))
    assert (
        sum(len(manifest.model.parts) for manifest in store._recent.values() if manifest.version) == store._parts <= 2
    )
    monkeypatch.setattr(deltastore.reader, "_REMEMBERED_PARTS", 0)
    newest = store.latest()
    assert list(store._recent) == [0, newest.version], "the newest is kept, whatever it takes"


def test_the_last_few_versions_are_read_alone(place: Path, asked: list[str]) -> None:
    store = open_store(place)
    assert [manifest.version for manifest in store.log(last=2)] == [VERSIONS - 1, VERSIONS]
    assert manifest_key(3) not in asked


@pytest.mark.parametrize(("word", "version"), [("latest", VERSIONS), ("0", 0), ("007", 7), (4, 4)])
def test_words_for_versions(word: str | int, version: int, place: Path) -> None:
    assert open_store(place).resolve(word).version == version


@pytest.mark.parametrize("word", ["", "-1", "newest", "1.0", "٣", "1 "])
def test_what_is_no_version_is_wrong_use(word: str, place: Path) -> None:
    with pytest.raises(UsageError):
        open_store(place).resolve(word)


@pytest.mark.parametrize("word", ["10", "99999999999999999999", "tag:best", -1, 10])
def test_versions_that_there_are_not_are_not_found(word: str | int, place: Path) -> None:
    with pytest.raises(VersionNotFound):
        open_store(place).resolve(word)


def test_a_version_that_changed_or_went_is_noticed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "store")
    store = open_store(tmp_path / "store")
    newest = store.latest()
    store.recheck(newest)
    shutil.copy(place / manifest_key(5), tmp_path / "store" / manifest_key(VERSIONS))
    with pytest.raises((StreamMismatch, CorruptObject)):
        store.recheck(newest)
    (tmp_path / "store" / manifest_key(VERSIONS)).unlink()
    with pytest.raises(StreamMismatch, match="rolled back"):
        store.recheck(newest)


def test_a_snapshot_is_found_by_its_id_and_the_newest_of_equals_wins(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert store.find_snapshot(store.manifest(4).snapshot_id) == store.manifest(4)
    assert store.find_snapshot("xxh3-128:" + "0" * 32) is None
    store.restore(4, tmp_path / "four")
    with Writer(tmp_path / "store") as writer:
        writer.publish(training.load(tmp_path / "four")).result()
    again = open_store(tmp_path / "store")
    assert again.find_snapshot(again.manifest(4).snapshot_id) == again.manifest(VERSIONS + 1)


def test_a_restore_keeps_the_mode_of_an_empty_directory_and_follows_a_link_to_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("private")
    open_store(place).restore(1, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "private" / "model.safetensors").exists()


def test_a_mount_point_is_refused_before_anything_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(type(tmp_path), "is_mount", lambda _: True)
    with pytest.raises(UsageError, match="is a mount point"):
        open_store(place).restore(1, tmp_path / "volume")
    assert [path.name for path in tmp_path.iterdir()] == ["volume"]
