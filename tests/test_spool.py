from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DiskFull, StorageError
from deltastore.manifest import PartRef
from deltastore.spool import Spool, disk_error, read_object

if TYPE_CHECKING:
    from pathlib import Path

XXH3 = hasher("xxh3-128")
DATA = bytes(range(256)) * 4


def reference_to(data: bytes = DATA, **changes: Any) -> PartRef:
    fields = {"key": "parts/0000000001/x/model-00000.safetensors", "size": len(data), "digest": XXH3.of(data)}
    return PartRef(**{**fields, "chunks": 1, "first": 0, "last": 0, **changes})


class OneObject:
    """A backend with one object that counts its reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    def read(self, key: str, *, limit: int) -> bytes:
        self.reads += 1
        return self.data


def test_what_was_put_is_opened_again_as_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a" / "spool")
    spool.put(DATA, XXH3.of(DATA))
    with spool.open(reference_to()) as view:
        assert view.readonly
        assert bytes(view) == DATA
    assert [path.suffix for path in spool.directory.iterdir()] == [""]


def test_what_is_not_here_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Spool(tmp_path).open(reference_to())


@pytest.mark.parametrize("damage", [b"", DATA[:-1], DATA + b"\0", b"\1" + DATA[1:], DATA[:-1] + b"\0"])
def test_a_torn_or_changed_file_is_not_believed_and_is_fetched_anew(tmp_path: Path, damage: bytes) -> None:
    spool = Spool(tmp_path)
    spool.put(DATA, XXH3.of(DATA))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    with pytest.raises(CorruptObject):
        spool.open(reference_to())
    backend = OneObject(DATA)
    assert spool.fetch(backend, reference_to()) == len(DATA)  # type: ignore[arg-type]
    with spool.open(reference_to()) as view:
        assert bytes(view) == DATA


def test_a_part_is_downloaded_once(tmp_path: Path) -> None:
    backend = OneObject(DATA)
    spool = Spool(tmp_path)
    assert spool.fetch(backend, reference_to()) == len(DATA)  # type: ignore[arg-type]
    assert Spool(tmp_path).fetch(backend, reference_to()) == 0  # type: ignore[arg-type]
    assert backend.reads == 1
    spool.remove(reference_to())
    spool.remove(reference_to())
    assert list(tmp_path.iterdir()) == []
    spool.put(DATA, XXH3.of(DATA))
    spool.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stored", [b"", DATA[:-1], DATA + b"\0", b"\1" + DATA[1:]])
def test_an_object_of_another_size_or_digest_is_refused_and_not_spooled(tmp_path: Path, stored: bytes) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(CorruptObject) as caught:
        spool.fetch(OneObject(stored), reference_to())  # type: ignore[arg-type]
    assert caught.value.key == reference_to().key
    assert list(tmp_path.iterdir()) == []


def test_an_object_over_the_limit_is_refused_before_it_is_read() -> None:
    backend = OneObject(DATA)
    with pytest.raises(CorruptObject):
        read_object(backend, reference_to(), limit=len(DATA) - 1)  # type: ignore[arg-type]
    assert backend.reads == 0
    assert read_object(backend, reference_to(), limit=len(DATA)) == DATA  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_made_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError) as caught:
        Spool(tmp_path / "file" / "spool")
    assert str(tmp_path / "file") in str(caught.value)


def test_a_full_disk_is_told_apart_from_other_failures(tmp_path: Path) -> None:
    assert isinstance(disk_error(OSError(28, os.strerror(28)), tmp_path), DiskFull)
    assert not isinstance(disk_error(OSError(5, os.strerror(5)), tmp_path), DiskFull)
