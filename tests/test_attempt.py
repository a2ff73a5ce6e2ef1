"""One try to publish a version: rows become parts, parts are uploaded, and an abandoned try leaves nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest

import deltastore.attempt
from deltastore.attempt import Attempt
from deltastore.codec import EncodedChunk, Encoding
from deltastore.digest import hasher
from deltastore.errors import StorageError
from deltastore.manifest import MAX_MANIFEST_BYTES, MAX_PART_BYTES, PartRef, part_key
from deltastore.part import ChunkRow
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec
from deltastore.spool import Spool
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend

if TYPE_CHECKING:
    from pathlib import Path

XXH3 = hasher("xxh3-128")
SCHEMA = Schema(TensorSpec(f"t{number:02d}", "U8", (100,)) for number in range(20))


def rows(numbers: range, size: int = 1000) -> list[ChunkRow]:
    return [
        ChunkRow(number, 0, EncodedChunk(Encoding.FULL, 100, bytes(size)), bytes(16), bytes([number] * 16))
        for number in numbers
    ]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return made(LocalBackend(tmp_path / "store"), tmp_path)


def made(backend: LocalBackend | FaultyBackend, tmp_path: Path, *, pool: ThreadPoolExecutor | None = None) -> Attempt:
    spool = Spool(tmp_path / "spool")
    return Attempt(backend, spool, stream_id="1" * 32, version=3, hash_function=XXH3, pool=pool)


def objects(tmp_path: Path) -> dict[str, int]:
    return {info.key: info.size for info in LocalBackend(tmp_path / "store").list("parts/")}


def test_parts_are_closed_when_they_are_full_and_tell_their_range(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 3000)
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(5)))
    attempt.add(rows(range(5, 7)))
    parts = attempt.end()
    attempt.wait_uploaded()
    assert [(part.chunks, part.first, part.last) for part in parts] == [(3, 0, 2), (3, 3, 5), (1, 6, 6)]
    assert objects(tmp_path) == {part.key: part.size for part in parts}
    assert all(part.key.startswith(f"parts/0000000003/{attempt.attempt_id}/model-") for part in parts)
    for part in parts:
        assert XXH3.of((tmp_path / "store" / part.key).read_bytes()) == part.digest
    read = list(attempt.parts(SCHEMA))
    assert [number for part in read for number in part.numbers.tolist()] == list(range(7))


def test_many_tiny_rows_close_a_part_too(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.attempt, "_PART_ROWS", 4)
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(10), size=1))
    assert [part.chunks for part in attempt.end()] == [4, 4, 2]
    attempt.wait_uploaded()


def test_parts_get_smaller_towards_the_end(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.attempt, "_FIRST_PART_BYTES", 2000)
    attempt.begin("model", Schema(TensorSpec(f"t{number:02}", "U8", (4000,)) for number in range(100)))
    for number in range(100):
        attempt.add(rows(range(number, number + 1), size=1000), expected=1000 * (99 - number))
    sizes = [part.chunks for part in attempt.end()]
    attempt.wait_uploaded()
    assert sum(sizes) == 100
    top = sizes.index(max(sizes))
    assert sizes[:top] == sorted(sizes[:top])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)
    assert sizes[0] == 1
    assert sizes[-1] <= 2
    assert max(sizes) > 10


def test_one_manifest_can_name_the_parts_of_two_trillion_bytes(attempt: Attempt) -> None:
    closed, parts = 0, 0
    while closed < 2 * 10**12:
        attempt._closed_bytes = closed
        largest = attempt._part_bytes(2 * 10**12 - closed)
        closed += largest
        parts += 1
    reference = PartRef(
        key=part_key(2**62, "f" * 32, f"model-{parts}.safetensors"),
        size=MAX_PART_BYTES,
        digest="blake3:" + 64 * "f",
        chunks=1 << 20,
        first=1 << 20,
        last=1 << 20,
    )
    assert parts * len(msgspec.json.encode(reference)) < 0.9 * MAX_MANIFEST_BYTES
    # The largest part that there may be, with the chunk that fills it and a table of the most rows.
    row = 4 * 4 + 1 + 2 * 32
    assert largest + CHUNK_BYTES + deltastore.attempt._PART_ROWS * row <= MAX_PART_BYTES


def test_components_do_not_mix(attempt: Attempt) -> None:
    attempt.begin("files", SCHEMA)
    attempt.add(rows(range(2)))
    files = attempt.end()
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(3)))
    model = attempt.end()
    attempt.wait_uploaded()
    assert [part.chunks for part in files + model] == [2, 3]
    assert [part.key.rpartition("/")[2] for part in files + model] == [
        "files-00000.safetensors",
        "model-00000.safetensors",
    ]


def test_nothing_changed_makes_no_part(attempt: Attempt) -> None:
    attempt.begin("model", SCHEMA)
    assert attempt.end() == ()
    attempt.wait_uploaded()


def test_an_abandoned_attempt_leaves_nothing_in_store_and_spool(attempt: Attempt, tmp_path: Path) -> None:
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(3)))
    attempt.end()
    attempt.put_object("model-schema.json", SCHEMA.to_json())
    attempt.wait_uploaded()
    assert len(objects(tmp_path)) == 2
    attempt.abandon()
    assert objects(tmp_path) == {}
    assert list((tmp_path / "spool").iterdir()) == []


def test_parts_that_are_not_kept_wait_on_disk_and_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 2000)
    seen: list[int] = []
    write = LocalBackend.write

    def watched(self: LocalBackend, key: str, data: bytes | memoryview) -> None:
        seen.append(sum(path.is_file() for path in (tmp_path / "spool").rglob("*")))
        write(self, key, data)

    monkeypatch.setattr(LocalBackend, "write", watched)
    attempt = Attempt(
        LocalBackend(tmp_path / "store"),
        Spool(tmp_path / "spool"),
        stream_id="1" * 32,
        version=3,
        hash_function=XXH3,
        keep_parts=False,
    )
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(10)))
    parts = attempt.end()
    attempt.wait_uploaded()
    assert len(parts) > 2
    assert min(seen) >= 1
    assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]
    assert objects(tmp_path).keys() == {part.key for part in parts}


def test_an_abandoned_attempt_waits_for_its_uploads_and_leaves_the_threads_to_others(tmp_path: Path) -> None:
    writing, goes_on = threading.Event(), threading.Event()
    local = LocalBackend(tmp_path / "store")

    def held() -> None:
        writing.set()
        goes_on.wait(30)

    backend = FaultyBackend(local, [Fault(operation="write", effect=Effect.NONE, hook=held)])
    with ThreadPoolExecutor(1) as pool:
        attempt = made(backend, tmp_path, pool=pool)
        attempt.begin("model", SCHEMA)
        attempt.add(rows(range(3)))
        attempt.end()
        attempt.add(rows(range(3, 6)))
        attempt.end()
        assert writing.wait(30)
        abandoning = threading.Thread(target=attempt.abandon)
        abandoning.start()
        assert abandoning.is_alive()
        goes_on.set()
        abandoning.join(30)
        assert objects(tmp_path) == {}
        other = made(local, tmp_path, pool=pool)
        other.begin("model", SCHEMA)
        other.add(rows(range(3)))
        parts = other.end()
        other.wait_uploaded()
        assert objects(tmp_path).keys() == {part.key for part in parts}


def test_what_an_upload_raised_is_raised_by_who_waits(tmp_path: Path) -> None:
    script = [Fault(operation="write", error=lambda: StorageError("no route"))]
    attempt = made(FaultyBackend(LocalBackend(tmp_path / "store"), script), tmp_path)
    attempt.begin("model", SCHEMA)
    attempt.add(rows(range(3)))
    attempt.end()
    with pytest.raises(StorageError, match="no route"):
        attempt.wait_uploaded()
    attempt.abandon()
    assert objects(tmp_path) == {}
