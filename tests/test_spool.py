from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from descriptors import open_under

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DiskFull, StorageError
from deltastore.limits import Limits
from deltastore.manifest import PartRef
from deltastore.spool import Spool, TemporarySpool, disk_error, read_object
from deltastore.storage.cache import CachedBackend
from deltastore.storage.cache_directory import CacheDirectory

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
    with pytest.raises(StorageError, match="No such file") as caught:
        Spool(tmp_path).open(reference_to())
    assert str(caught.value.key).startswith(str(tmp_path))


def test_a_directory_that_was_cleaned_away_is_made_anew(tmp_path: Path) -> None:
    with TemporarySpool(tmp_path) as spool:
        spool.directory.rmdir()  # as cleaners of /tmp do after days without use
        spool.clear()
        spool.remove(reference_to())
        spool.put(DATA, XXH3.of(DATA))
        with spool.open(reference_to()) as view:
            assert bytes(view) == DATA
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_cannot_be_removed_costs_room_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    spool = Spool(tmp_path)
    spool.put(DATA, XXH3.of(DATA))
    monkeypatch.setattr(Path, "unlink", refuse)
    spool.remove(reference_to())


def test_a_part_that_cannot_be_opened_is_told_with_its_path(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(DATA, XXH3.of(DATA))
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        with pytest.raises(StorageError, match="open files") as caught:
            spool.open(reference_to())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert str(caught.value.key).startswith(str(tmp_path))


def test_open_parts_take_no_descriptors_and_their_maps_go_with_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(DATA, XXH3.of(DATA))
    (path,) = tmp_path.iterdir()
    arrays = [np.frombuffer(spool.open(reference_to()), np.uint8)[1:] for _ in range(50)]
    assert not open_under(tmp_path)
    assert Path("/proc/self/maps").read_text().count(str(path)) == 50
    del arrays[1:]
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    assert arrays[0].tobytes() == DATA[1:]
    with spool.open(reference_to()) as view:
        assert (view.readonly, view.format, view.nbytes) == (True, "B", len(DATA))


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


class Pieces(OneObject):
    """A backend with one object that notes which ranges were asked for, and may do something at one of them."""

    def __init__(self, data: bytes, hooks: dict[int, Any] | None = None) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []
        self.hooks = hooks or {}

    def read_range(self, key: str, start: int, end: int) -> bytes:
        self.ranges.append((start, end))
        hook = self.hooks.get(len(self.ranges))
        data = self.data[start:end]
        return hook(data) if hook else data


PIECE = 100
IN_PIECES = Limits(largest_piece=PIECE)


def fail(_: bytes) -> bytes:
    raise StorageError("the connection was lost")


def fetch(spool: Spool, backend: Any, **changes: Any) -> int:
    return spool.fetch(backend, reference_to(**changes), limits=IN_PIECES)


def test_a_large_part_comes_in_pieces_and_a_small_one_whole(tmp_path: Path) -> None:
    backend = Pieces(DATA)
    assert fetch(Spool(tmp_path), backend) == len(DATA)
    assert backend.ranges == [(start, min(start + PIECE, len(DATA))) for start in range(0, len(DATA), PIECE)]
    assert backend.reads == 0
    small = DATA[:PIECE]
    backend = Pieces(small)
    assert fetch(Spool(tmp_path), backend, size=PIECE, digest=XXH3.of(small)) == PIECE
    assert (backend.reads, backend.ranges) == (1, [])
    with Spool(tmp_path).open(reference_to()) as view:
        assert bytes(view) == DATA
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_is_gone_on_with_where_it_was_left(tmp_path: Path) -> None:
    backend = Pieces(DATA, {4: fail})
    with pytest.raises(StorageError):
        fetch(Spool(tmp_path), backend)
    assert fetch(Spool(tmp_path), backend) == len(DATA) - 3 * PIECE
    assert backend.ranges[3] == backend.ranges[4] == (300, 400)
    assert backend.ranges[-1][1] == len(DATA)
    assert len(backend.ranges) == 12  # eleven pieces, and the one that failed
    assert fetch(Spool(tmp_path), backend) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_a_part_is_gone_on_with_where_pieces_have_grown_since(tmp_path: Path) -> None:
    backend = Pieces(DATA, {2: fail})
    with pytest.raises(StorageError):
        fetch(Spool(tmp_path), backend)
    assert Spool(tmp_path).fetch(backend, reference_to()) == len(DATA) - PIECE  # type: ignore[arg-type]
    assert backend.ranges[-1] == (PIECE, len(DATA))


def test_who_is_told_to_leave_off_leaves_a_part_to_go_on_with(tmp_path: Path) -> None:
    backend = Pieces(DATA)

    def proceed() -> None:
        if len(backend.ranges) == 5:
            raise KeyError

    with pytest.raises(KeyError):
        Spool(tmp_path).fetch(backend, reference_to(), limits=IN_PIECES, proceed=proceed)  # type: ignore[arg-type]
    assert fetch(Spool(tmp_path), backend) == len(DATA) - 5 * PIECE


SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_spool import DATA, IN_PIECES, Pieces, reference_to
from deltastore.spool import Spool

def die(data):
    os.kill(os.getpid(), signal.SIGKILL)

class Logging(Pieces):
    def read_range(self, key, start, end):
        data = super().read_range(key, start, end)
        with open(sys.argv[2], "a") as log:
            print(start, end, file=log)
        return data

fetched = Spool(Path(sys.argv[1])).fetch(Logging(DATA, {int(sys.argv[3]): die}), reference_to(), limits=IN_PIECES)
print(fetched)
"""


def test_no_byte_that_arrived_is_fetched_again_after_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number, code in ((3, -signal.SIGKILL), (1, -signal.SIGKILL), (5, -signal.SIGKILL), (99, 0)):
        words = [sys.executable, "-c", SCRIPT, tmp_path / "spool", log, str(number), os.path.dirname(__file__)]  # noqa: PTH120
        ended = subprocess.run(words, check=False, capture_output=True, text=True)
        assert ended.returncode == code, ended.stderr
    arrived = [tuple(int(word) for word in line.split()) for line in log.read_text().splitlines()]
    assert arrived == [(start, min(start + PIECE, len(DATA))) for start in range(0, len(DATA), PIECE)]
    assert int(ended.stdout) == len(DATA) - 6 * PIECE


@pytest.mark.parametrize("torn", [bytes(300), DATA[:299] + b"\1", DATA + b"\0", bytes(len(DATA))])
def test_a_torn_partial_file_is_dropped_and_the_part_fetched_anew(tmp_path: Path, torn: bytes) -> None:
    backend = Pieces(DATA, {4: fail})
    with pytest.raises(StorageError):
        fetch(Spool(tmp_path), backend)
    (partial,) = tmp_path.iterdir()
    partial.write_bytes(torn)
    fetch(Spool(tmp_path), backend)
    with Spool(tmp_path).open(reference_to()) as view:
        assert bytes(view) == DATA
    assert len(list(tmp_path.iterdir())) == 1


def test_a_piece_that_came_wrong_is_fetched_anew_once(tmp_path: Path) -> None:
    backend = Pieces(DATA, {2: lambda data: bytes(len(data))})
    assert fetch(Spool(tmp_path), backend) == 2 * len(DATA)
    with pytest.raises(CorruptObject):
        fetch(Spool(tmp_path / "other"), Pieces(DATA[::-1]))
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("hook", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_piece_of_another_length_is_refused(tmp_path: Path, hook: Any) -> None:
    backend = Pieces(DATA, {2: hook})
    with pytest.raises(CorruptObject, match="bytes instead of 100"):
        fetch(Spool(tmp_path), backend)
    assert fetch(Spool(tmp_path), backend) == len(DATA) - PIECE


def test_half_fetched_parts_that_nobody_wants_are_removed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for key in ("parts/a", "parts/b"):
        with pytest.raises(StorageError):
            fetch(spool, Pieces(DATA, {2: fail}), key=key)
    spool.put(b"whole", XXH3.of(b"whole"))
    spool.drop_partials([reference_to(key="parts/b")])
    assert len(list(tmp_path.iterdir())) == 2
    assert fetch(spool, Pieces(DATA), key="parts/b") == len(DATA) - PIECE
    spool.drop_partials([])
    assert len(list(tmp_path.iterdir())) == 2
    assert fetch(spool, Pieces(DATA), key="parts/a") == 0


def test_a_cache_is_asked_for_whole_parts(tmp_path: Path) -> None:
    key = f"parts/0000000001/{'0' * 32}/model-00000.safetensors"
    store = Pieces(DATA)
    cached = CachedBackend(store, CacheDirectory(tmp_path / "cache", max_bytes=1 << 20))  # type: ignore[arg-type]
    assert fetch(Spool(tmp_path / "one"), cached, key=key) == len(DATA)
    assert fetch(Spool(tmp_path / "two"), cached, key=key) == len(DATA)
    assert (store.reads, store.ranges) == (1, [])
    cached.forget(key)
    fetch(Spool(tmp_path / "three"), cached, key=key)
    assert (store.reads, len(store.ranges)) == (1, 11)


def test_what_arrived_of_a_part_is_not_missing(tmp_path: Path) -> None:
    spool, reference = Spool(tmp_path), reference_to()
    assert spool.missing_bytes([reference]) == len(DATA)
    with pytest.raises(StorageError):
        fetch(spool, Pieces(DATA, {2: fail}))
    assert spool.missing_bytes([reference]) == len(DATA) - PIECE
    fetch(spool, Pieces(DATA))
    assert spool.missing_bytes([reference]) == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_told_as_such(tmp_path: Path, number: int) -> None:
    error = disk_error(OSError(number, os.strerror(number)), tmp_path)
    assert "ulimit" in (error.hint or "")
