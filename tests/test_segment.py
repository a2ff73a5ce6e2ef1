"""Log segments: a long history in few reads, and never another history than the manifests'."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import training
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltastore import Writer, open_store
from deltastore.compact import compact
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DeltastoreError
from deltastore.fsck import check
from deltastore.manifest import LATEST_KEY, LatestHint, Manifest, encode_latest, encode_manifest, manifest_key
from deltastore.segment import (
    MAX_CONTENT_BYTES,
    build_segment,
    complete_segments,
    parse_segment,
    segment_key,
    segment_of,
)
from deltastore.storage.local import LocalBackend

XXH3 = hasher("xxh3-128")
VERSIONS = 20_000


def following(parent: Manifest, version: int, stem: str = "a") -> Manifest:
    name = f"{stem}{version:031x}"
    return msgspec.structs.replace(
        parent,
        version=version,
        commit_id=name,
        attempt_id=name,
        parent_version=parent.version,
        parent_commit_id=parent.commit_id,
        parent_snapshot_id=parent.snapshot_id,
        components={"model": msgspec.structs.replace(parent.model, parts=())},
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A store of 20,000 versions, and its manifests as they are stored."""
    root = tmp_path_factory.mktemp("segments")
    with Writer(root / "store", base=training.save(root / "base", training.small_snapshot(0))) as writer:
        writer.publish(training.small_snapshot(1)).result()
        stream_id, parent = writer.store.stream_id, writer.head
    manifests = [(root / "store" / manifest_key(version)).read_bytes() for version in (0, 1)]
    for version in range(2, VERSIONS + 1):
        parent = following(parent, version)
        manifests.append(encode_manifest(parent, hash_function=XXH3))
        (root / "store" / manifest_key(version)).write_bytes(manifests[-1])
    (root / "store" / LATEST_KEY).write_bytes(encode_latest(LatestHint(stream_id, VERSIONS)))
    for first in complete_segments(VERSIONS):
        data = build_segment(manifests[first : first + 1000])
        assert data is not None
        path = root / "store" / segment_key(first)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return root / "store", manifests


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    keys: list[str] = []
    read = LocalBackend.read
    monkeypatch.setattr(
        LocalBackend, "read", lambda self, key, *, limit: keys.append(key) or read(self, key, limit=limit)
    )
    return keys


def test_twenty_thousand_versions_are_read_in_few_objects(stored, asked) -> None:
    history = open_store(stored[0]).log()
    assert [manifest.version for manifest in history] == list(range(VERSIONS + 1))
    assert [encode_manifest(manifest, hash_function=XXH3) for manifest in history[::999]] == stored[1][::999]
    assert len(asked) < 40
    assert sum(key.startswith("segments/") for key in asked) == VERSIONS // 1000


def test_the_log_of_twenty_thousand_versions_is_there_soon(stored) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-m", "deltastore", "log", str(stored[0])],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(ended.stdout.splitlines()) == VERSIONS + 2
    # Processor time, so that other work on the machine does not count: about 2.3 seconds.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8


def test_a_few_of_the_newest_versions_are_read_by_themselves(stored, asked) -> None:
    assert open_store(stored[0]).log(last=15)[0].version == VERSIONS - 14
    assert not [key for key in asked if key.startswith("segments/")]


def part_of(stored: tuple[Path, list[bytes]], tmp_path: Path) -> Path:
    """Return a store of the first 1,100 versions and the first segment."""
    path = tmp_path / "store"
    shutil.copytree(stored[0] / "parts", path / "parts")
    (path / "manifests").mkdir()
    (path / "segments").mkdir()
    for version in range(1100):
        (path / manifest_key(version)).write_bytes(stored[1][version])
    shutil.copy(stored[0] / segment_key(0), path / segment_key(0))
    return path


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def other_history(manifests: list[bytes]) -> list[bytes]:
    """Return manifests that agree with each other, and from 500 on are not those of the store."""
    from deltastore.manifest import parse_manifest  # noqa: PLC0415 - only here

    changed = manifests[:500]
    parent = parse_manifest(changed[-1], version=499)
    for version in range(500, 1000):
        parent = following(parent, version, stem="b")
        changed.append(encode_manifest(parent, hash_function=XXH3))
    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifests: None,
        lambda manifests: b"",
        lambda manifests: b"nonsense",
        lambda manifests: flipped(build_segment(manifests)),
        lambda manifests: build_segment(manifests)[:-5],
        lambda manifests: build_segment(manifests) + b"x",
        lambda manifests: build_segment(manifests[:999]),
        lambda manifests: build_segment([*manifests[:999], manifests[0]]),
        lambda manifests: build_segment([flipped(manifests[0]), *manifests[1:]]),
        lambda manifests: build_segment(other_history(manifests)),
        lambda manifests: zstandard.ZstdCompressor(write_content_size=False).compress(b"".join(manifests)),
    ],
)
def test_an_absent_or_damaged_segment_is_done_without(damage, stored, tmp_path, asked) -> None:
    path = part_of(stored, tmp_path)
    data = damage(stored[1][:1000])
    (path / segment_key(0)).unlink()
    if data is not None:
        (path / segment_key(0)).write_bytes(data)
    store = open_store(path)
    store.manifest(1000)  # known from its own key, as it is to whoever follows
    store.manifest(700)
    assert [encode_manifest(manifest, hash_function=XXH3) for manifest in store.log()] == stored[1][:1100]
    report = check(store.backend)
    assert [problem.key for problem in report.problems] == ([segment_key(0)] if data is not None else [])


def test_a_frame_that_declares_too_much_is_refused_before_it_is_inflated() -> None:
    bomb = zstandard.ZstdCompressor().compressobj(size=MAX_CONTENT_BYTES + 1)
    with pytest.raises(CorruptObject, match="declares"):
        parse_segment(bomb.compress(b"{}") + bomb.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), first=0)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_segment(data: bytes) -> None:
    for given_bytes in (data, zstandard.compress(data)):
        with pytest.raises(DeltastoreError) as caught:
            parse_segment(given_bytes, first=3000)
        assert caught.value.key == segment_key(3000) or data == b""


def test_segments_are_complete_thousands() -> None:
    assert list(complete_segments(998)) == []
    assert list(complete_segments(999)) == [0]
    assert list(complete_segments(1998)) == [0]
    assert list(complete_segments(3000)) == [0, 1000, 2000]
    assert [segment_of(version) for version in (0, 999, 1000, 2345)] == [0, 0, 1000, 2000]


def test_a_compaction_adds_the_segments_that_are_missing_and_replaces_none(stored, tmp_path, monkeypatch) -> None:
    import deltastore.compact  # noqa: PLC0415 - only here

    monkeypatch.setattr(deltastore.compact, "SPANS", ())
    path = part_of(stored, tmp_path)
    wanted = (path / segment_key(0)).read_bytes()
    (path / segment_key(0)).unlink()
    assert compact(open_store(path)).segments == (0,)
    assert (path / segment_key(0)).read_bytes() == wanted
    (path / segment_key(0)).write_bytes(b"damaged, but there")
    assert compact(open_store(path)).segments == ()
    assert (path / segment_key(0)).read_bytes() == b"damaged, but there"
