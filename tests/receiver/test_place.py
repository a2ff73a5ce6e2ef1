"""Places that slots cannot live on are refused by name; room is looked at before anything is given up for it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import training

import receiver.place
import receiver.room
import receiver.slots
from deltastore import Writer, open_store
from deltastore.errors import BaseMismatch, DiskFull, SlotError, StorageError
from receiver.patcher import Patcher
from receiver.room import allocated_bytes, holders
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.reader import Store

SNAPSHOTS = [training.small_snapshot(seed) for seed in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", SNAPSHOTS[0])) as writer:
        for snapshot in SNAPSHOTS[1:]:
            writer.publish(snapshot).result()
    return open_store(tmp_path / "store")


@pytest.fixture
def slots(store: Store, tmp_path: Path) -> Iterator[Slots]:
    """Slots whose live one holds version 1, and the other one version 0."""
    made = Slots(tmp_path / "model", sleep=lambda _: None)
    made.lock()
    for version in (0, 1):
        Patcher(store, made, workers=1).move_to(store.manifest(version))
    yield made
    made.unlock()


def move(store: Store, slots: Slots, version: int) -> None:
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    patcher.move_to(store.manifest(version))


@pytest.mark.parametrize(("number", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x65735546, "FUSE")])
def test_file_systems_that_others_share_are_refused_by_name(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver.place, "_statfs_type", lambda _: number)
    slots = Slots(tmp_path / "model")
    for _ in range(2):  # the lock is let go of
        with pytest.raises(SlotError, match=f"it is on {name}") as caught:
            slots.lock()
        assert "--unsafe-file-system" in (caught.value.hint or "")
    forced = Slots(tmp_path / "model", any_place=True)
    forced.lock()
    forced.unlock()


def test_the_kind_of_file_system_is_read_right() -> None:
    assert receiver.place._statfs_type(Path("/proc")) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        receiver.place._statfs_type(Path("/nowhere"))


def test_locks_that_lock_nobody_out_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(SlotError, match="taken twice"):
        Slots(tmp_path / "model").lock()


def test_links_that_cannot_be_replaced_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as failing:
        failing.setattr(os, "symlink", refuse)
        with pytest.raises(SlotError, match="link"):
            Slots(tmp_path / "model").lock()
    with monkeypatch.context() as failing:
        failing.setattr(os, "replace", lambda *_: None)
        with pytest.raises((SlotError, StorageError)):
            Slots(tmp_path / "model").lock()
    Slots(tmp_path / "model").lock()


# -- room ---------------------------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], int]) -> None:
    monkeypatch.setattr(receiver.room, "free_bytes", lambda _: answer())


def test_what_is_missing_is_told_before_anything_is_given_up(
    store: Store, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = training.tree(slots.directory)
    with monkeypatch.context() as short:
        free(short, lambda: 100)
        short.setattr(receiver.room, "allocated_bytes", lambda _: 50)
        with pytest.raises(DiskFull, match=r"lacks \d+ bytes") as caught:
            move(store, slots, 3)
        assert str(slots.directory) in str(caught.value)
        now = training.tree(slots.directory)
        assert {name: data for name, data in now.items() if name != "probe"} == {
            name: data for name, data in before.items() if name != "probe"
        }
    move(store, slots, 3)
    training.assert_holds(slots.link, SNAPSHOTS[3])


def test_the_room_of_the_spare_slot_counts(store: Store, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocated_bytes(slots.directory / "a") > 0
    free(monkeypatch, lambda: 0)
    monkeypatch.setattr(receiver.room, "allocated_bytes", lambda _: 1 << 30)
    move(store, slots, 3)


@pytest.fixture
def mapper(slots: Slots) -> Iterator[subprocess.Popen[str]]:
    """A process that maps the spare slot's file until it is told to end."""
    path = slots.directory / "a" / "model.safetensors"
    code = (
        "import mmap,sys; f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,access=1); print('up',flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    if process.poll() is None:
        process.communicate("\n", timeout=30)


def test_who_maps_a_slot_is_found(slots: Slots, mapper: subprocess.Popen[str]) -> None:
    found = {holder.pid: holder for holder in holders(slots.directory / "a")}
    assert found[mapper.pid].nbytes == (slots.directory / "a" / "model.safetensors").stat().st_blocks * 512
    assert found[mapper.pid].name
    assert mapper.pid not in {holder.pid for holder in holders(slots.directory / "b")}


def test_with_room_nobody_waits_for_who_maps_the_spare_slot(
    store: Store, slots: Slots, mapper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(slots, "_sleep", fail)
    move(store, slots, 3)
    assert mapper.poll() is None


def test_without_room_who_maps_the_spare_slot_is_waited_for_and_told(
    store: Store, slots: Slots, mapper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    released = allocated_bytes(slots.directory / "a")
    monkeypatch.setattr(slots, "_sleep", waits.append)
    # Short of just so much that the mapped file's blocks are needed.
    free(monkeypatch, lambda: _needed(store) - released)
    with pytest.raises(DiskFull, match=f"process {mapper.pid}"):
        move(store, slots, 3)
    assert sum(waits) >= receiver.room._HELD_SECONDS
    assert slots.other(slots.live()) is not None

    def let_go(_: float) -> None:
        mapper.communicate("\n", timeout=30)

    monkeypatch.setattr(slots, "_sleep", let_go)
    move(store, slots, 3)
    training.assert_holds(slots.link, SNAPSHOTS[3])


def _needed(store: Store) -> int:
    from deltastore.restore import outline  # noqa: PLC0415 - only here

    plan = store.plan(1, 3)
    return outline(store, None).nbytes + plan.stored_bytes


# -- bad days -----------------------------------------------------------------------------------------------


def test_a_model_cache_is_read_and_never_written_through(store: Store, tmp_path: Path) -> None:
    """As the Hugging Face cache lays them out: a snapshot directory of links to blobs."""
    repository = tmp_path / "cache" / "models--org--name"
    plain = training.save(tmp_path / "plain", SNAPSHOTS[1])
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        blob, place = repository / "blobs" / f"{number:064x}", snapshot / path.relative_to(plain)
        path.replace(blob)
        blob.chmod(0o444)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(blob, place.parent))
    before = training.tree(repository)
    times = {path: path.stat().st_mtime_ns for path in (repository / "blobs").iterdir()}
    for name, given in (("as base", True), ("in place", False)):
        live = tmp_path / name if given else tmp_path / "link"
        if not given:
            live.symlink_to(snapshot)
        slots = Slots(live)
        for version in (2, 3, 1):
            patcher = Patcher(store, slots, base=snapshot if given else None, workers=1)
            patcher.adopt()
            patcher.move_to(store.manifest(version))
            training.assert_holds(live, SNAPSHOTS[version])
        assert not any(path.is_symlink() for path in slots.live().directory.rglob("*"))
    assert training.tree(repository) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("name", ["consolidated.safetensors", "lora/adapter.safetensors", "pytorch_model.bin", "a*b"])
def test_an_adopted_directory_with_files_that_no_version_has_stays_beside(
    name: str, store: Store, tmp_path: Path
) -> None:
    live = training.save(tmp_path / "live", SNAPSHOTS[1])
    (live / name).parent.mkdir(exist_ok=True)
    (live / name).write_bytes(b"somebody's")
    before = training.tree(live)
    slots = Slots(live)
    patcher = Patcher(store, slots, workers=1)
    assert patcher.adopt() is None
    assert training.tree(live) == before
    for version in (2, 3, 1):
        patcher.move_to(store.manifest(version))
        training.assert_holds(live, SNAPSHOTS[version])
    assert training.tree(tmp_path / "live.original") == before


def test_an_empty_directory_is_as_good_as_none(store: Store, tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    slots = Slots(live)
    slots.lock()
    patcher = Patcher(store, slots, workers=1)
    assert patcher.adopt() is None
    patcher.move_to(store.manifest(2))
    slots.unlock()
    training.assert_holds(live, SNAPSHOTS[2])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("live")) == ["live", "live.slots"]


def test_slots_on_another_file_system_than_the_link_are_refused_before_the_work(tmp_path: Path) -> None:
    other = Path("/dev/shm")  # noqa: S108 - another file system
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=other) as elsewhere:
        (tmp_path / "model.slots").symlink_to(elsewhere)
        slots = Slots(tmp_path / "model")
        for any_place in (False, True):
            slots = Slots(tmp_path / "model", any_place=any_place)
            for _ in range(2):  # the lock is given back
                with pytest.raises(SlotError, match="another file system") as caught:
                    slots.lock()
            assert "--checkpoint" in (caught.value.hint or "")


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "model")
    with pytest.raises(SlotError, match="mount point"):
        Slots(tmp_path / "model").lock()


def test_another_model_in_the_bases_place_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    other = training.save(tmp_path / "other", training.small_snapshot(99))
    slots = Slots(tmp_path / "model")
    with pytest.raises(BaseMismatch, match=r"a\.weight") as caught:
        Patcher(store, slots, base=other, workers=1).move_to(store.manifest(3))
    assert caught.value.exit_code == 12
    assert not slots.link.exists()


def test_a_checkpoint_that_may_not_be_written_is_told_and_taken_as_a_base(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.save(tmp_path / "plain", SNAPSHOTS[1])
    before = training.tree(plain)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    slots = Slots(plain)
    slots.lock()
    with monkeypatch.context() as read_only:
        read_only.setattr(receiver.slots, "_exchange", refuse)
        with pytest.raises(StorageError) as caught:
            Patcher(store, slots, workers=1).adopt()
    slots.unlock()
    assert "--base" in (caught.value.hint or "")
    assert training.tree(plain) == before
    live = tmp_path / "live"
    Patcher(store, Slots(live), base=plain, workers=1).move_to(store.manifest(3))
    training.assert_holds(live, SNAPSHOTS[3])
    assert training.tree(plain) == before


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_is_waited_for_unless_told_otherwise(
    durable: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    slots = Slots(tmp_path / "model", durable=durable)
    slots.lock()
    for version in (1, 2, 3):
        move(store, slots, version)
    slots.unlock()
    assert bool(synced) == durable
    training.assert_holds(slots.link, SNAPSHOTS[3])


# -- times ---------------------------------------------------------------------------------------------------


def test_a_write_in_the_same_instant_as_the_record_shows(store: Store, slots: Slots) -> None:
    """Modification times are coarse: a file system may give two writes the same one."""
    live = slots.live()
    assert live is not None
    path = live.directory / "model.safetensors"
    recorded = live.record.files[0].modified_ns
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert path.stat().st_mtime_ns - recorded > 2 * 10**9
    with pytest.raises(Exception, match="damaged"):
        slots.source(live, workers=1)


def test_a_write_while_a_slot_is_hashed_shows_the_next_time(
    store: Store, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = slots.live()
    assert live is not None
    path = live.directory / "model.safetensors"
    path.touch()
    verify = slots.verify

    def changed_meanwhile(*words: Any, **named: Any) -> None:
        verify(*words, **named)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))

    with monkeypatch.context() as racing:
        racing.setattr(slots, "verify", changed_meanwhile)
        slots.source(live, workers=1)
    with pytest.raises(Exception, match="damaged"):
        slots.source(slots.live(), workers=1)
