"""A slot that was left half written: what the next attempt goes on with, and what it makes anew."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deltastore import Writer, open_store
from deltastore.errors import DeltastoreError, StorageError
from receiver.patcher import Patcher
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.reader import Store

TENSORS, SIZE = 6, 3 << 20  # chunks of 2 and of 1 MiB
MODEL = TENSORS * SIZE


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    root = tmp_path_factory.mktemp("begun")
    rng = np.random.default_rng(1)
    snapshots = [{f"t{number}": rng.integers(0, 255, SIZE, np.uint8) for number in range(TENSORS)}]
    for _ in range(3):
        after = {name: data.copy() for name, data in snapshots[-1].items()}
        for data in after.values():
            data[rng.integers(0, SIZE, 500)] += 1
        snapshots.append(after)
    (root / "base").mkdir()
    save_file(snapshots[0], root / "base" / "model.safetensors")
    (root / "base" / "config.json").write_text("{}")
    with Writer(root / "store", base=root / "base") as writer:
        for snapshot in snapshots[1:]:
            writer.publish(snapshot).result()
    return root, snapshots


@pytest.fixture
def store(history: Any) -> Store:
    return open_store(history[0] / "store")


@pytest.fixture
def slots(store: Store, tmp_path: Path) -> Slots:
    """Slots whose live one, ``a``, holds version 1."""
    made = Slots(tmp_path / "model")
    Patcher(store, made, workers=1).move_to(store.manifest(1))
    return made


class CutOff(BaseException):
    """What ends an attempt in the middle, as a kill does."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Count the bytes written at offsets; ``written(cut=n)`` has the write after n bytes fail."""
    pwrite, total, limit = os.pwrite, 0, None

    def counted(descriptor: int, data: Any, offset: int) -> int:
        nonlocal total
        if limit is not None and total >= limit:
            raise CutOff
        total += memoryview(data).nbytes
        return pwrite(descriptor, data, offset)

    def restart(cut: int | None = None) -> int:
        nonlocal total, limit
        before, total, limit = total, 0, cut
        return before

    monkeypatch.setattr(os, "pwrite", counted)
    return restart


def patch(store: Store, slots: Slots, version: int) -> None:
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    patcher.move_to(store.manifest(version))


def cut_off(store: Store, slots: Slots, version: int, written: Any, *, at: int = MODEL // 2) -> None:
    written(at)
    with pytest.raises(CutOff):
        patch(store, slots, version)
    written()


def assert_holds(slots: Slots, snapshot: dict[str, np.ndarray]) -> None:
    found = load_file(slots.link / "model.safetensors")
    assert found.keys() == snapshot.keys()
    assert all((found[name] == data).all() for name, data in snapshot.items())
    assert (slots.link / "config.json").read_text() == "{}"


def test_what_was_written_is_not_written_again(store: Store, slots: Slots, written: Any, history: Any) -> None:
    cut_off(store, slots, 2, written)
    file = slots.directory / "b" / "model.safetensors"
    inode = file.stat().st_ino
    patch(store, slots, 2)
    assert written() < 0.6 * MODEL
    assert file.stat().st_ino == inode
    assert_holds(slots, history[1][2])
    assert not list(slots.directory.glob("*.goal"))


def test_what_lies_there_is_compared_and_never_believed(store: Store, slots: Slots, written: Any, history: Any) -> None:
    cut_off(store, slots, 2, written)
    path = slots.directory / "b" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[3] ^= 1  # of the header
    data[2000] ^= 1
    data[MODEL - 7] ^= 1
    path.write_bytes(bytes(data))
    (slots.directory / "b" / "config.json").write_text("other")
    patch(store, slots, 2)
    assert written() < 0.75 * MODEL
    assert_holds(slots, history[1][2])


def damaged_goals() -> dict[str, Callable[[bytes], bytes]]:
    return {
        "empty": lambda _: b"",
        "torn": lambda data: data[: len(data) // 2],
        "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
        "future": lambda data: data.replace(b'"format":1', b'"format":2'),
        "foreign": lambda _: b"{}\nxxh3-128:00\n",
        "not text": lambda _: b"\xff\xfe\n\xff",
    }


@pytest.mark.parametrize("damage", damaged_goals())
def test_a_goal_that_cannot_be_used_means_a_slot_built_anew(
    damage: str, store: Store, slots: Slots, written: Any, history: Any
) -> None:
    cut_off(store, slots, 2, written)
    path = slots.directory / "b.goal"
    path.write_bytes(damaged_goals()[damage](path.read_bytes()))
    patch(store, slots, 2)
    assert written() >= MODEL
    assert_holds(slots, history[1][2])


def test_another_version_is_built_anew(store: Store, slots: Slots, written: Any, history: Any) -> None:
    cut_off(store, slots, 2, written)
    patch(store, slots, 3)
    assert written() >= MODEL
    assert_holds(slots, history[1][3])


@pytest.mark.parametrize("change", ["gone", "cut", "longer", "linked", "a link", "a directory"])
def test_files_that_are_not_as_they_were_made_are_made_anew(
    change: str, store: Store, slots: Slots, written: Any, history: Any, tmp_path: Path
) -> None:
    cut_off(store, slots, 2, written)
    path = slots.directory / "b" / "model.safetensors"
    data = path.read_bytes()
    kept = tmp_path / "kept"
    if change == "cut":
        path.write_bytes(data[:-1])
    elif change == "longer":
        path.write_bytes(data + b"x")
    elif change == "linked":
        kept.hardlink_to(path)
    else:
        path.unlink()
    if change == "a link":
        kept.write_bytes(data)
        path.symlink_to(kept)
    if change == "a directory":
        path.mkdir()
        with pytest.raises(StorageError):
            patch(store, slots, 2)
        assert_holds(slots, history[1][1])
        return
    patch(store, slots, 2)
    assert written() >= MODEL
    assert_holds(slots, history[1][2])
    if kept.exists():
        assert kept.read_bytes() == data


def test_a_slot_that_was_whole_once_is_never_written_in_place(
    store: Store, slots: Slots, written: Any, history: Any
) -> None:
    """An engine may have it mapped: not even a goal that came back from the dead changes that."""
    cut_off(store, slots, 2, written)
    goal = (slots.directory / "b.goal").read_bytes()
    patch(store, slots, 2)  # into b
    path = slots.directory / "b" / "model.safetensors"
    patch(store, slots, 3)  # into a
    (slots.directory / "b.goal").write_bytes(goal)
    with path.open("rb") as mapped:
        before = mapped.read()
        (slots.directory / "b" / "config.json").write_text("changed")
        path.touch()
        damaged = bytearray(before)
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        inode = path.stat().st_ino
        patch(store, slots, 2)
        assert path.stat().st_ino != inode
        mapped.seek(0)
        assert mapped.read() == bytes(damaged)
    assert_holds(slots, history[1][2])


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_what_the_disk_could_not_keep_is_written_again(
    call: str, store: Store, slots: Slots, written: Any, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells such a failure once, and may go on showing bytes that never reached the disk."""
    monkeypatch.setattr("deltastore.materialize._FLUSH_BYTES", 1 << 20)
    path = slots.directory / "b" / "model.safetensors"

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, call, fail)
        with pytest.raises(StorageError):
            patch(store, slots, 2)
    written()
    patch(store, slots, 2)
    assert written() >= MODEL
    assert_holds(slots, history[1][2])


def test_a_bad_block_is_written_over(
    store: Store, slots: Slots, written: Any, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(store, slots, 2, written)
    preadv = os.preadv

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        begun = str(slots.directory / "b") in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - no real path
        if begun and offset < 1 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    patch(store, slots, 2)
    assert 2 << 20 < written() < 0.75 * MODEL
    assert_holds(slots, history[1][2])


def test_parts_that_lead_elsewhere_leave_nothing_that_is_believed(
    store: Store, slots: Slots, written: Any, history: Any
) -> None:
    """The same goal by another route: what a wrong one wrote does not have the digests of the right one."""
    cut_off(store, slots, 2, written)
    path = slots.directory / "b" / "model.safetensors"
    rng = np.random.default_rng(9)
    path.write_bytes(path.read_bytes()[:200] + rng.bytes(path.stat().st_size - 200))
    patch(store, slots, 2)
    assert_holds(slots, history[1][2])


def test_errors_are_ours(store: Store, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "statvfs", refuse)
    with pytest.raises(DeltastoreError):
        patch(store, slots, 2)
