"""A disk that is full or read-only, at any call: a clear error, nothing lost, and on it goes when there is room."""

# ruff: noqa: PT017 - whether an error comes at all is part of what is tried

from __future__ import annotations

import errno
import itertools
import os
import subprocess

import pytest
import torch
import training

import deltastore.attempt
from deltastore import Writer, open_store
from deltastore.errors import DeltastoreError, DiskFull, StorageError
from deltastore.fsck import check
from deltastore.storage.local import LocalBackend
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.status import Status

SNAPSHOTS = [training.small_snapshot(seed) for seed in range(4)]
#: How far to go from one call to the next.
STEP = 1 if os.environ.get("DELTASTORE_THOROUGH") == "1" else 3
CALLS = ("pwrite", "write", "posix_fallocate", "fsync", "link", "replace", "rename", "mkdir", "open")


class Failing:
    """Within it the n-th call of one kind fails; ``met`` tells whether it came to that."""

    def __init__(self, monkeypatch, name, number, code):
        self.name, self.met = name, False
        self._monkeypatch, self._number, self._code = monkeypatch, number, code

    def __enter__(self):
        self._patch = self._monkeypatch.context()
        self._patch.__enter__().setattr(os, self.name, self._wrapped(getattr(os, self.name)))

    def __exit__(self, *error):
        self._patch.__exit__(*error)

    def _wrapped(self, call):
        numbers = itertools.count()

        def changed(*arguments, **options):
            needs_room = self.name != "open" or (len(arguments) > 1 and arguments[1] & os.O_CREAT)
            if needs_room and next(numbers) == self._number:
                self.met = True
                raise OSError(self._code, os.strerror(self._code))
            return call(*arguments, **options)

        return changed


@pytest.fixture
def full(monkeypatch):
    """Have each of the calls that need room fail, one at a time, however threads take turns: by kind and number."""

    def failures(code=errno.ENOSPC, *, step=1):
        for name in CALLS:
            for number in itertools.count(0, step):
                failing = Failing(monkeypatch, name, number, code)
                yield failing
                if not failing.met:
                    break

    return failures


@pytest.fixture
def base(tmp_path):
    return training.save(tmp_path / "base", SNAPSHOTS[0])


def once(store, live, **options):
    status = Status(store=str(store), checkpoint=str(live), target="latest")
    Receiver(Options(store=str(store), checkpoint=live, **options), status).once()


def told(error):
    assert isinstance(error, DeltastoreError)
    assert error.hint, error
    return True


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_publish_without_room_at_any_call_loses_nothing(code, base, tmp_path, full):
    seen = set()
    for number, failing in enumerate(full(code)):
        store = tmp_path / f"store{number}"
        contents = [SNAPSHOTS[0]]
        with Writer(store, base=base, spool=tmp_path) as writer:
            with failing:
                try:
                    writer.publish(SNAPSHOTS[1]).result()
                except DeltastoreError as error:
                    assert told(error)
            if failing.met:
                seen.add(failing.name)
            # Committed in spite of it, or not at all; the next one is right either way.
            writer.publish(SNAPSHOTS[2]).result()
            contents += [SNAPSHOTS[1]] * (writer.version == 2) + [SNAPSHOTS[2]]
        opened = open_store(store)
        assert len(opened.log()) == len(contents)
        for version, snapshot in enumerate(contents):
            opened.restore(version, tmp_path / f"out{number}" / str(version))
            training.assert_holds(tmp_path / f"out{number}" / str(version), snapshot)
        assert check(LocalBackend(store), read_data=True).ok
    assert seen >= {"fsync", "link", "replace", "mkdir"}


def test_an_init_without_room_at_any_call_can_be_repeated(base, tmp_path, full):
    for number, failing in enumerate(full(step=STEP)):
        store = tmp_path / f"store{number}"
        with failing:
            try:
                Writer(store, base=base).close()
            except DeltastoreError as error:
                assert told(error)
        with Writer(store, base=base) as writer:
            writer.publish(SNAPSHOTS[1]).result()
        open_store(store).restore(1, tmp_path / "out" / str(number))
        training.assert_holds(tmp_path / "out" / str(number), SNAPSHOTS[1])
        assert check(LocalBackend(store), read_data=True).ok
    assert number > 10


@pytest.fixture
def store(base, tmp_path):
    with Writer(tmp_path / "store", base=base) as writer:
        for snapshot in SNAPSHOTS[1:]:
            writer.publish(snapshot).result()
    return tmp_path / "store"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_restore_without_room_at_any_call_leaves_nothing(code, store, tmp_path, full):
    seen = set()
    for number, failing in enumerate(full(code)):
        target = tmp_path / "out" / f"restored{number}"
        with failing:
            try:
                open_store(store).restore(3, target)
            except StorageError as error:
                assert told(error)
                assert isinstance(error, DiskFull) == (code == errno.ENOSPC)
                if target.exists():
                    training.assert_holds(target, SNAPSHOTS[3])  # only the last sync failed
                assert not [path for path in target.parent.glob("*") if path != target and number == 0]
        left = [path.name for path in target.parent.glob(".*")] if target.parent.exists() else []
        assert left == []
        if failing.met:
            seen.add(failing.name)
        else:
            training.assert_holds(target, SNAPSHOTS[3])
    assert seen >= {"pwrite", "posix_fallocate", "fsync", "mkdir", "open"}


@pytest.mark.parametrize("kind", ["patch", "adoption", "new"])
def test_a_receiver_without_room_at_any_call_keeps_its_version(kind, store, tmp_path, full):
    seen = set()
    for number, failing in enumerate(full(step=STEP)):
        live = tmp_path / f"host{number}" / "live"
        if kind == "patch":
            once(store, live, target="1")
        elif kind == "adoption":
            training.save(live, SNAPSHOTS[1])
        else:
            live.parent.mkdir()
        with failing:
            try:
                once(store, live)
            except DeltastoreError as error:
                assert told(error)
                assert isinstance(error, StorageError)
        if live.exists():
            found = training.load(live)
            assert any(training.differences(found, SNAPSHOTS[version]) == [] for version in (1, 3))
        else:
            assert kind == "new"
        once(store, live)
        training.assert_holds(live, SNAPSHOTS[3])
        if failing.met:
            seen.add(failing.name)
    assert seen >= {"pwrite", "posix_fallocate", "fsync", "replace", "mkdir", "open"}


# -- a real small disk ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB, and a way to make it read-only."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(directory)],  # noqa: S607 - the system's
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")

    def remount(mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(directory)], check=True)  # noqa: S607

    yield directory, remount
    subprocess.run(["umount", "-l", str(directory)], check=True)  # noqa: S607


def noise(seed, size=3 << 20):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)}


def fill(directory, spare=0):
    """Take all room but ``spare`` bytes."""
    state = os.statvfs(directory)
    path = directory / "filler"
    with path.open("wb") as stream:
        stream.write(bytes(state.f_bavail * state.f_frsize - spare))
    return path


def test_a_store_on_a_full_disk(small_disk, tmp_path):
    disk, _ = small_disk
    base = training.save(tmp_path / "base", noise(0))
    with Writer(disk / "store", base=base) as writer:
        filler = fill(disk, spare=1 << 20)
        with pytest.raises(DiskFull) as caught:
            writer.publish(noise(1)).result()
        assert told(caught.value)
        assert writer.version == 0
        filler.unlink()
        writer.publish(noise(2)).result()
    open_store(disk / "store").restore(1, tmp_path / "one")
    training.assert_holds(tmp_path / "one", noise(2))
    assert check(LocalBackend(disk / "store"), read_data=True).ok


def test_a_spool_on_a_full_disk(small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(deltastore.attempt, "_MEMORY_BYTES", 1 << 20)
    disk, _ = small_disk
    base = training.save(tmp_path / "base", noise(0))
    with Writer(tmp_path / "store", base=base, spool=disk) as writer:
        filler = fill(disk, spare=1 << 20)
        with pytest.raises(DiskFull) as caught:
            writer.publish(noise(1)).result()
        assert str(disk) in str(caught.value)
        filler.unlink()
        writer.publish(noise(2)).result()
        assert writer.version == 1
    open_store(tmp_path / "store").restore(1, tmp_path / "one")
    training.assert_holds(tmp_path / "one", noise(2))
    assert list(disk.iterdir()) == []


def test_a_receiver_on_a_full_disk(small_disk, tmp_path):
    disk, remount = small_disk
    base = training.save(tmp_path / "base", noise(0, 1 << 20))
    with Writer(tmp_path / "store", base=base) as writer:
        for seed in (1, 2):
            writer.publish(noise(seed, 1 << 20)).result()
    live = disk / "live"
    once(tmp_path / "store", live, target="1")
    filler = fill(disk, spare=1 << 19)
    with pytest.raises(DiskFull) as caught:
        once(tmp_path / "store", live)
    assert str(disk) in str(caught.value)
    training.assert_holds(live, noise(1, 1 << 20))
    filler.unlink()
    remount("ro")
    try:
        with pytest.raises(StorageError) as caught:
            once(tmp_path / "store", live)
        assert told(caught.value)
        training.assert_holds(live, noise(1, 1 << 20))
        with pytest.raises(StorageError):
            open_store(tmp_path / "store").restore(1, disk / "restored")
        with pytest.raises(StorageError):
            Writer(disk / "new", base=base)
        with pytest.raises(StorageError):
            Writer(tmp_path / "store", spool=disk)
    finally:
        remount("rw")
    once(tmp_path / "store", live)
    training.assert_holds(live, noise(2, 1 << 20))


def test_a_restore_on_a_full_disk(small_disk, tmp_path):
    disk, _ = small_disk
    base = training.save(tmp_path / "base", noise(0))
    with Writer(tmp_path / "store", base=base):
        pass
    filler = fill(disk, spare=1 << 20)
    with pytest.raises(DiskFull):
        open_store(tmp_path / "store").restore(0, disk / "restored")
    assert [path.name for path in disk.iterdir()] == ["filler"]
    filler.unlink()
    open_store(tmp_path / "store").restore(0, disk / "restored")
    training.assert_holds(disk / "restored", noise(0))


# -- paths that cannot be used ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file as parent", "file in place", "proc"])
def test_places_that_cannot_be_used_are_told(place, store, base, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    path = {"file as parent": file / "below", "file in place": file, "proc": __import__("pathlib").Path("/proc/x")}[
        place
    ]
    for attempt in (
        lambda: Writer(path, base=base),
        lambda: open_store(store).restore(0, path),
        lambda: Writer(store, spool=path),
        lambda: once(store, path if place != "file in place" else path / "deeper"),
    ):
        with pytest.raises(DeltastoreError) as caught:
            attempt()
        assert told(caught.value)
    assert file.read_bytes() == b""


def test_a_file_where_the_checkpoint_should_be_is_left_alone(store, tmp_path):
    live = tmp_path / "live"
    live.write_bytes(b"precious")
    with pytest.raises(DeltastoreError) as caught:
        once(store, live)
    assert told(caught.value)
    assert live.read_bytes() == b"precious"


@pytest.mark.parametrize("where", ["LATEST", "manifests/0000000002.json", "part"])
def test_a_directory_where_an_object_should_be_is_told(where, store, tmp_path):
    key = open_store(store).manifest(2).model.parts[0].key if where == "part" else where
    (store / key).unlink()
    (store / key).mkdir()
    if where == "LATEST":
        # A hint only: nobody needs it.
        assert open_store(store).latest().version == 3
        return
    with pytest.raises(DeltastoreError) as caught:
        open_store(store).restore(3, tmp_path / "restored")
    assert told(caught.value)
    assert key in f"{caught.value} {caught.value.key}"
    assert not (tmp_path / "restored").exists()
