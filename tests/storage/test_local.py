"""Objects as files: the contract, and what a file system can do to it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import AccessDenied, CorruptObject, DiskFull, ObjectExists, ObjectNotFound, StorageError
from deltastore.storage.local import LocalBackend
from deltastore.testing.storage_contract import StorageContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class TestLocalBackend(StorageContract):
    @pytest.fixture
    def open_another(self, tmp_path: Path) -> Callable[[], LocalBackend]:
        return lambda: LocalBackend(tmp_path / "made" / "when needed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backend(root: Path) -> LocalBackend:
    return LocalBackend(root)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int = 1) -> None:
    real = getattr(os, name)
    left = [times]

    def fail(*args: object, **options: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(os, name, fail)


def test_reading_makes_nothing(backend, root):
    with pytest.raises(ObjectNotFound):
        backend.read("a", limit=1)
    assert [*backend.list("")] == []
    backend.delete("a")
    assert not root.exists()


@pytest.mark.parametrize("call", ["write", "create"])
@pytest.mark.parametrize("fault", [("write", errno.ENOSPC), ("fsync", errno.ENOSPC), ("fsync", errno.EDQUOT)])
def test_full_disk(backend, root, monkeypatch, call, fault):
    failing(monkeypatch, *fault)
    with pytest.raises(DiskFull) as caught:
        getattr(backend, call)("a/b", b"data")
    assert caught.value.key == "a/b"
    assert caught.value.hint
    assert not caught.value.transient
    assert files(root) == []
    getattr(backend, call)("a/b", b"data")
    assert files(root) == ["a/b"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "create"])
def test_no_permission(backend, monkeypatch, call, number):
    failing(monkeypatch, "open", number)
    with pytest.raises(AccessDenied) as caught:
        getattr(backend, call)("a", b"data")
    assert not caught.value.transient
    assert "permission" in caught.value.hint


def test_a_passing_failure_is_transient(backend, monkeypatch):
    backend.write("a", b"x")
    failing(monkeypatch, "open", errno.ESTALE)
    with pytest.raises(StorageError) as caught:
        backend.read("a", limit=1)
    assert caught.value.transient
    assert backend.read("a", limit=1) == b"x"


def test_a_failed_write_keeps_the_old_object(backend, root, monkeypatch):
    backend.write("a", b"old")
    failing(monkeypatch, "write", errno.EIO)
    with pytest.raises(StorageError):
        backend.write("a", b"new")
    assert backend.read("a", limit=9) == b"old"
    assert files(root) == ["a"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_no_hard_links(backend, root, monkeypatch, number):
    failing(monkeypatch, "link", number)
    with pytest.raises(StorageError, match="hard links") as caught:
        backend.create("a", b"x")
    assert not isinstance(caught.value, ObjectExists)
    assert not caught.value.transient
    assert "hard links" in caught.value.hint
    assert files(root) == []


def test_create_that_cannot_sync_is_in_doubt(backend, root, monkeypatch):
    backend.write("other", b"")
    # The first sync is that of the file, the second that of the directory, when the name is already there.
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError) as caught:
        backend.create("a", b"x")
    assert type(caught.value) is StorageError
    assert files(root) == ["a", "other"]


def test_file_systems_that_sync_no_directories(backend, monkeypatch):
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    backend.create("a/b", b"x")
    assert backend.read("a/b", limit=1) == b"x"


def test_syncs_the_file_before_its_name_and_every_directory(backend, root, monkeypatch):
    events: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        events.append("link")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    backend.create("a/b/c", b"x")
    assert events[0] == str(root.parent)
    (temporary,) = [number for number, event in enumerate(events) if "/.tmp/" in event]
    linked = events.index("link")
    assert temporary < linked
    assert {str(root), str(root / "a")} <= set(events[:linked])
    assert events[linked + 1 :] == [str(root / "a" / "b")]


def test_a_directory_is_no_object(backend, root):
    backend.write("a/b", b"x")
    for call in (
        lambda: backend.read("a", limit=1),
        lambda: backend.write("a", b"x"),
        lambda: backend.delete("a"),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert not caught.value.transient
    with pytest.raises(ObjectExists):
        backend.create("a", b"x")
    assert files(root) == ["a/b"]


def test_a_pipe_does_not_block(backend, root):
    root.mkdir()
    os.mkfifo(root / "pipe")
    with pytest.raises(StorageError, match="regular"):
        backend.read("pipe", limit=1)


def test_an_oversized_file_is_not_read(backend, root):
    root.mkdir()
    with (root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptObject):
        backend.read("huge", limit=1 << 20)


def test_listing_skips_what_is_not_ours(backend, root):
    backend.write("a", b"x")
    (root / ".tmp" / "left-over").write_bytes(b"x")
    (root / ".nfs0001").write_bytes(b"x")
    (root / "not a key").write_bytes(b"x")
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to(root / "nowhere")
    assert [info.key for info in backend.list("")] == ["a"]


def test_listing_survives_deletions(backend):
    for number in range(20):
        backend.write(f"d{number}/x", b"x")
    listing = backend.list("")
    first = next(listing).key
    for number in range(20):
        backend.delete(f"d{number}/x")
    assert [first, *(info.key for info in listing)] == [first]


def test_deleting_removes_empty_directories(backend, root):
    backend.write("a/b/c", b"x")
    backend.write("a/d", b"x")
    backend.delete("a/b/c")
    assert not (root / "a" / "b").exists()
    backend.delete("a/d")
    assert not (root / "a").exists()
    assert root.exists()
    backend.write("a/b/c", b"x")
    assert backend.read("a/b/c", limit=1) == b"x"


def test_directory_removed_while_writing(backend, root, monkeypatch):
    backend.write("a/b", b"x")
    other = LocalBackend(root)
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        other.delete("a/b")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    backend.write("a/c", b"y")
    assert files(root) == ["a/c"]


def test_the_root_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    backend = LocalBackend(link)
    backend.create("a/b", b"x")
    assert backend.read("a/b", limit=1) == b"x"
    assert [info.key for info in backend.list("")] == ["a/b"]
    backend.delete("a/b")
    assert link.is_symlink()


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend("here")
    backend.write("a", b"x")
    monkeypatch.chdir("/")
    assert backend.read("a", limit=1) == b"x"


def test_interrupted_write_leaves_nothing(backend, root, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    backend_made = root / ".tmp"
    backend_made.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        backend.write("a", b"x")
    assert files(root) == []


def test_a_name_believed_absent_is_asked_for_again(backend, root, monkeypatch):
    backend.write("a", b"x")
    # As an NFS client does: absent until the directory was opened.
    real, opened = os.open, []

    def stale(path: Path, flags: int, *args: object) -> int:
        opened.append(path)
        if path == root / "a" and root not in opened:
            raise FileNotFoundError(errno.ENOENT, "stale")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", stale)
    assert backend.read("a", limit=1) == b"x"


def test_sweep(backend, root):
    assert backend.sweep() == 0
    backend.write("a", b"x")
    for name, age in (("young", 10), ("old", 100)):
        path = root / ".tmp" / name
        path.write_bytes(b"left over")
        os.utime(path, (time.time() - age, time.time() - age))
    assert backend.sweep(older_than=50) == 9
    assert files(root) == [".tmp/young", "a"]
    assert backend.sweep(older_than=0) == 9
    assert files(root) == ["a"]


def test_killed_writers_leave_whole_objects(tmp_path):
    code = (
        "import sys; from pathlib import Path; from deltastore.storage.local import LocalBackend\n"
        "backend = LocalBackend(Path(sys.argv[1]))\n"
        "for number in range(10**6):\n"
        "    backend.write('a', bytes([number % 256]) * 300_000)\n"
        "    if not number: print('ready', flush=True)\n"
    )
    reader = LocalBackend(tmp_path)
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as writer:
            try:
                writer.stdout.readline()
                for _ in range(20):
                    assert len(set(reader.read("a", limit=1 << 20))) == 1
            finally:
                writer.kill()
        data = reader.read("a", limit=1 << 20)
        assert len(data) == 300_000
        assert len(set(data)) == 1
    assert [info.key for info in reader.list("")] == ["a"]


def test_imports_little():
    code = (
        "import sys; from deltastore.storage import open_backend; open_backend('/nowhere');"
        "print(*sorted({'numpy', 'torch', 'fsspec', 's3fs', 'tenacity'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
