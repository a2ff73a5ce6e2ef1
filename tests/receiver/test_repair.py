"""Damage to a live slot is found and mended chunk by chunk, from the nearest place that has the bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import deltastore.attempt
import receiver.repair
from deltastore import Writer, open_store
from deltastore.errors import CorruptObject, DamagedSlot, DeltastoreError, SlotError, StreamMismatch
from deltastore.limits import Bandwidth, within_budget
from receiver.patcher import Patcher
from receiver.repair import repair
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.reader import Store
    from receiver.repair import Repaired

Snapshot = dict[str, np.ndarray]
SIZE = 5 << 20  # three chunks
CHANGED = "t1"  # between versions 1 and 2 only this one, and the tiny ones, change


def save(directory: Path, snapshot: Snapshot) -> Path:
    """Two shards and their index."""
    directory.mkdir(parents=True)
    names = sorted(snapshot)
    weight_map = {}
    for number, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: snapshot[name] for name in chosen}, directory / file)
        weight_map |= dict.fromkeys(chosen, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module", params=["anchored", "not anchored"])
def history(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Snapshot], bool]:
    root = tmp_path_factory.mktemp("repair")
    anchored = request.param == "anchored"
    rng = np.random.default_rng(7)
    first: Snapshot = {f"t{number}": rng.integers(0, 255, SIZE, np.uint8) for number in range(3)}
    first |= {f"tiny{number:03d}": rng.integers(0, 255, 100, np.uint8) for number in range(100)}
    snapshots = [first]
    for version in (1, 2):
        after = {name: data.copy() for name, data in snapshots[-1].items()}
        for name, data in after.items():
            if version == 1 or name == CHANGED or name.startswith("tiny"):
                data[rng.integers(0, len(data), max(1, len(data) // 1000))] += 1
        snapshots.append(after)
    base = save(root / "base", snapshots[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltastore.attempt, "_PART_BYTES", 6 << 20)
        with Writer(root / "store", base=base, upload_base=anchored) as writer:
            for snapshot in snapshots[1:]:
                writer.publish(snapshot).result()
    return root, snapshots, anchored


@pytest.fixture
def store(history: Any) -> Store:
    return open_store(history[0] / "store")


@pytest.fixture
def slots(store: Store, history: Any, tmp_path: Path) -> Slots:
    """Slots whose live one, ``b``, holds version 2, and the other one version 1."""
    made = Slots(tmp_path / "model")
    made.lock()
    patcher = Patcher(store, made, base=history[0] / "base", workers=1)
    for version in (1, 2):
        patcher.move_to(store.manifest(version))
    return made


def mend(store: Store, slots: Slots, history: Any, **options: Any) -> Repaired:
    return repair(store, slots, base=None if history[2] else history[0] / "base", workers=2, **options)


def place_of(directory: Path, name: str) -> tuple[Path, int]:
    """Return the file of a tensor, and where its bytes begin."""
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if name in header:
            return path, 8 + size + header[name]["data_offsets"][0]
    raise AssertionError(name)


def flip(directory: Path, name: str, offset: int) -> None:
    path, start = place_of(directory, name)
    with path.open("r+b") as stream:
        stream.seek(start + offset)
        byte = stream.read(1)
        stream.seek(start + offset)
        stream.write(bytes([byte[0] ^ 4]))


def assert_whole(slots: Slots, snapshot: Snapshot) -> None:
    found = {name: data for path in slots.link.glob("*.safetensors") for name, data in load_file(path).items()}
    assert found.keys() == snapshot.keys()
    assert all((found[name] == data).all() for name, data in snapshot.items())
    assert (slots.link / "config.json").read_text() == "{}"
    live = slots.live()
    assert live is not None
    checkpoint = slots.open(live)
    slots.verify(checkpoint, slots.digests(live, checkpoint.schema), _hash(live.record.hash), workers=1)
    assert not (slots.directory / "mend").exists()


def _hash(name: str) -> Any:
    from deltastore.digest import hasher  # noqa: PLC0415 - only here

    return hasher(name)


def test_a_whole_slot_is_left_alone(store: Store, slots: Slots, history: Any) -> None:
    before = sorted(path.stat().st_ino for path in slots.link.iterdir())
    found = mend(store, slots, history)
    assert not found.mended
    assert found.damaged == 0
    assert sorted(path.stat().st_ino for path in slots.link.iterdir()) == before
    assert slots.live_name() == "b"


def test_a_chunk_that_the_other_slot_has_too_comes_from_there(store: Store, slots: Slots, history: Any) -> None:
    flip(slots.link, "t0", SIZE - 1)
    path, _ = place_of(slots.link, "t0")
    damaged = path.read_bytes()
    with path.open("rb") as mapped:
        found = mend(store, slots, history)
        mapped.seek(0)
        assert mapped.read() == damaged  # for who has it mapped nothing changes
    assert (found.damaged, found.from_other, found.from_store, found.fetched_bytes) == (1, 1, 0, 0)
    assert found.tensors == ("t0",)
    assert found.files == (path.name,)
    assert slots.live_name() == "a"
    assert_whole(slots, history[1][2])
    assert slots.other(slots.live()) is None  # the damaged slot is no way back


def test_files_that_are_whole_are_not_written(store: Store, slots: Slots, history: Any) -> None:
    flip(slots.link, "t0", 5)
    whole = next(path for path in slots.link.glob("*.safetensors") if path != place_of(slots.link, "t0")[0])
    inode = whole.stat().st_ino
    mend(store, slots, history)
    assert (slots.link / whole.name).stat().st_ino == inode


def test_a_changed_chunk_comes_from_the_store_by_itself(store: Store, slots: Slots, history: Any) -> None:
    flip(slots.link, CHANGED, 3)
    found = mend(store, slots, history)
    assert (found.damaged, found.from_other, found.from_store) == (1, 0, 1)
    stored = sum(part.size for version in (1, 2) for part in store.manifest(version).model.parts)
    assert 0 < found.fetched_bytes < stored
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("other", ["gone", "damaged", "record damaged"])
def test_without_the_other_slot_the_store_has_every_chunk(other: str, store: Store, slots: Slots, history: Any) -> None:
    for name, offset in (("t0", 7), (CHANGED, 8), ("tiny050", 3), (CHANGED, SIZE - 2)):
        flip(slots.link, name, offset)
        if other == "damaged":
            flip(slots.directory / "a", name, offset)
    if other == "gone":
        shutil.rmtree(slots.directory / "a")
    elif other == "record damaged":
        (slots.directory / "a.json").write_bytes(b"")
    found = mend(store, slots, history)
    assert (found.damaged, found.from_other, found.from_store) == (4, 0, 4)
    assert set(found.tensors) == {"t0", CHANGED, "tiny050"}
    if history[2]:  # three chunks of 2 MiB, or a part of one, and tables: far from the anchor
        anchor = sum(part.size for part in store.base.model.parts)
        assert found.fetched_bytes < anchor
    assert_whole(slots, history[1][2])


def test_chunks_of_many_groups_are_mended(
    store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltastore.limits._GROUP_BYTES", 2 << 20)
    shutil.rmtree(slots.directory / "a")
    for path in slots.link.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as stream:
            stream.seek(size - (4 << 20))
            stream.write(bytes(1 << 20))
    mend(store, slots, history)
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("damage", ["gone", "empty", "other bytes", "a directory"])
@pytest.mark.parametrize("where", ["other slot", "store or base", "nowhere"])
def test_a_lost_config_is_found_and_had_again(
    damage: str, where: str, store: Store, slots: Slots, history: Any, commands: Any
) -> None:
    path = slots.link / "config.json"
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "gone":
        path.write_bytes(b"" if damage == "empty" else b"[]")
    if where != "other slot":
        (slots.directory / "a" / "config.json").unlink()
    live = slots.live()
    assert live is not None
    with pytest.raises(DamagedSlot, match=r"config\.json"):
        slots.source(live, workers=1)
    ended = commands.run("receiver", "verify", "--checkpoint", slots.link)
    assert (ended.code, "config.json" in ended.err) == (3, True)
    patcher = Patcher(store, slots, workers=1)
    with pytest.raises(DamagedSlot, match=r"config\.json"):
        patcher.move_to(store.manifest(0))  # it would be carried on
    if where == "nowhere":
        if history[2]:
            pytest.skip("this store holds its base")
        with pytest.raises(CorruptObject, match="nowhere"):
            repair(store, slots, workers=1)
        return
    weights = {path.stat().st_ino for path in slots.link.glob("*.safetensors")}
    found = mend(store, slots, history)
    assert (found.mended, found.damaged, found.files) == (True, 0, ("config.json",))
    assert {path.stat().st_ino for path in slots.link.glob("*.safetensors")} == weights
    assert_whole(slots, history[1][2])


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize("digests", ["there", "lost"])
def test_what_is_fetched_waits_for_bandwidth_and_keeps_to_a_budget(
    digests: str, store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(slots.directory / "a")
    if digests == "lost":
        (slots.directory / "b.digests").unlink()
    for path in slots.link.glob("*.safetensors"):
        with path.open("r+b") as stream:
            stream.seek(path.stat().st_size - (5 << 20))
            stream.write(bytes(5 << 20))
    clock, asked, groups = Clock(), [], []
    rate = 10 << 20
    limits = within_budget(
        256 << 20, workers=1, cores=1, whole_parts=False, bandwidth=Bandwidth(rate, clock=clock, sleep=clock.sleep)
    )
    again, read_range = receiver.repair._Repair._again, type(store.backend).read_range

    def seen_again(self: Any, numbers: np.ndarray, digests: Any) -> Any:
        groups.append(len(numbers))
        return again(self, numbers, digests)

    def seen_range(self: Any, key: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        return read_range(self, key, start, end)

    monkeypatch.setattr(receiver.repair._Repair, "_again", seen_again)
    monkeypatch.setattr(type(store.backend), "read_range", seen_range)
    found = mend(store, slots, history, limits=limits)
    assert found.from_store == found.damaged > 4
    assert sum(asked) == found.fetched_bytes
    assert max(asked) <= limits.piece_bytes < 1 << 20
    assert clock.seconds >= sum(asked) / rate - 0.051  # a twentieth of a second may have been saved up
    assert max(groups) * (2 << 20) <= max(limits.group_bytes, 2 << 20)
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("damage", ["cut", "gone", "header", "longer", "a directory"])
def test_whole_files_that_are_damaged_are_made_anew(damage: str, store: Store, slots: Slots, history: Any) -> None:
    path, _ = place_of(slots.link, CHANGED)
    data = path.read_bytes()
    if damage in {"gone", "a directory"}:
        path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "gone":
        content = {"cut": data[: SIZE // 2], "header": data[:9] + b"!" + data[10:], "longer": data + b"x"}[damage]
        path.write_bytes(content)
    found = mend(store, slots, history)
    assert found.files == (path.name,)
    if damage in {"longer", "header"}:
        assert found.damaged == 0  # its chunks are right
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("damage", [b"", b"torn", None])
@pytest.mark.parametrize("record", ["json", "digests"])
def test_records_are_made_anew(
    record: str, damage: bytes | None, store: Store, slots: Slots, history: Any, commands: Any
) -> None:
    path = slots.directory / f"b.{record}"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    ended = commands.run("receiver", "verify", "--checkpoint", slots.link)
    assert ended.code == 3
    assert "receiver repair" in ended.err
    found = mend(store, slots, history)
    assert record in found.records
    assert found.damaged == 0
    assert_whole(slots, history[1][2])
    commands.run("receiver", "verify", "--checkpoint", slots.link).ok()


def test_a_table_of_digests_and_chunks_together(store: Store, slots: Slots, history: Any) -> None:
    (slots.directory / "b.digests").write_bytes(b"")
    flip(slots.link, CHANGED, 3)
    found = mend(store, slots, history)
    assert (found.records, found.damaged) == (("digests",), 1)
    assert_whole(slots, history[1][2])


def test_a_record_and_chunks_together_are_told_with_a_way_out(store: Store, slots: Slots, history: Any) -> None:
    (slots.directory / "b.json").write_bytes(b"")
    flip(slots.link, CHANGED, 3)
    with pytest.raises(CorruptObject) as caught:
        mend(store, slots, history)
    assert str(slots.link) in (caught.value.hint or "")


def test_a_store_that_is_damaged_too_changes_nothing(store: Store, slots: Slots, history: Any, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(history[0] / "store", copy)
    for part in copy.glob("parts/**/*.safetensors"):
        data = bytearray(part.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        part.write_bytes(bytes(data))
    flip(slots.link, CHANGED, 3)
    before = {path.name: path.read_bytes() for path in slots.link.iterdir()}
    with pytest.raises(CorruptObject) as caught:
        mend(open_store(copy), slots, history)
    assert caught.value.exit_code == 3
    assert {path.name: path.read_bytes() for path in slots.link.iterdir()} == before
    other = slots.other(slots.live())
    assert other is not None  # the way back is still there
    assert not (slots.directory / "mend").exists()


def test_another_stream_mends_nothing(store: Store, slots: Slots, history: Any, tmp_path: Path) -> None:
    with Writer(tmp_path / "other", base=history[0] / "base"):
        pass
    with pytest.raises(StreamMismatch):
        mend(open_store(tmp_path / "other"), slots, history)


def test_a_file_system_without_second_names_gets_copies(
    store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    flip(slots.link, "t0", 5)
    mend(store, slots, history)
    assert_whole(slots, history[1][2])


def test_without_room_for_both_the_other_slot_is_given_up(
    store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("receiver.repair.free_bytes", lambda _: 0)
    flip(slots.link, "t0", 5)
    found = mend(store, slots, history)
    assert (found.from_other, found.from_store) == (0, 1)
    assert_whole(slots, history[1][2])


def test_a_bad_block_is_damage_and_no_signal(
    store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, start = place_of(slots.link, "t0")
    inode, preadv = path.stat().st_ino, os.preadv

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if os.fstat(descriptor).st_ino == inode and offset == start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    assert mend(store, slots, history).damaged == 1
    monkeypatch.undo()
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("instant", ["mend", "install", "swap"])
def test_a_repair_that_is_cut_off_can_be_repeated(
    instant: str, store: Store, slots: Slots, history: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(slots.link, CHANGED, 3)

    class CutOff(BaseException):
        pass

    def cut(*_: Any, **__: Any) -> None:
        raise CutOff

    where = {"mend": "receiver.repair._Repair._again", "install": "receiver.repair._link_or_copy"}
    monkeypatch.setattr(where.get(instant, "receiver.slots.Slots.swap"), cut)
    with pytest.raises(CutOff):
        mend(store, slots, history)
    monkeypatch.undo()
    mend(store, slots, history)
    assert_whole(slots, history[1][2])
    patcher = Patcher(store, slots, base=history[0] / "base", workers=1)
    patcher.adopt()
    patcher.move_to(store.manifest(1))
    assert_whole(slots, history[1][1])


def test_nothing_live_is_told(store: Store, tmp_path: Path, history: Any) -> None:
    with pytest.raises(SlotError):
        mend(store, Slots(tmp_path / "none"), history)


def test_the_command(store: Store, slots: Slots, history: Any, commands: Any) -> None:
    words: list[Any] = ["receiver", "repair", "--checkpoint", slots.link, "--store", history[0] / "store"]
    assert commands.run(*words).code == 1  # its receiver runs
    slots.unlock()
    flip(slots.link, "t0", 5)
    ended = commands.run("receiver", "verify", "--checkpoint", slots.link)
    assert ended.code == 3
    assert "t0" in ended.err
    record = commands.run(*words, "--json", "--max-bandwidth", "50MB", "--memory-budget", "512MiB").ok().json
    assert record["mended"]
    assert record["damaged"] == record["from_other"] == 1
    assert record["tensors"] == ["t0"]
    assert "whole" in commands.run(*words).ok().out
    commands.run("receiver", "verify", "--checkpoint", slots.link).ok()
    assert_whole(slots, history[1][2])


def test_once_mends_before_it_patches(slots: Slots, history: Any, commands: Any) -> None:
    slots.unlock()
    words: list[Any] = ["receiver", "once", "--checkpoint", slots.link, "--store", history[0] / "store"]
    where = [] if history[2] else ["--base", history[0] / "base"]
    flip(slots.link, "t0", 5)
    record = commands.run(*words, "--json").ok().json
    assert (record["ready"], record["last_repair"]["damaged"], record["last_repair"]["from_other"]) == (True, 1, 1)
    assert_whole(slots, history[1][2])
    # One that is met only while the slot is patched from: its file looks as it did.
    path, _ = place_of(slots.link, "t0")
    before = path.stat()
    flip(slots.link, "t0", 7)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    record = commands.run(*words, *where, "--target", 1, "--json").ok().json
    assert (record["version"], record["last_repair"]["damaged"]) == (1, 1)
    assert_whole(slots, history[1][1])


def test_once_tells_what_cannot_be_mended(slots: Slots, history: Any, commands: Any) -> None:
    if history[2]:
        pytest.skip("this store holds its base")
    slots.unlock()
    flip(slots.link, "t0", 5)
    shutil.rmtree(slots.directory / "a")
    ended = commands.run("receiver", "once", "--checkpoint", slots.link, "--store", history[0] / "store")
    assert ended.code == 3
    assert "--base" in ended.err
    words = ["receiver", "once", "--checkpoint", slots.link, "--store", history[0] / "store"]
    commands.run(*words, "--base", history[0] / "base").ok()
    assert_whole(slots, history[1][2])


def damages(rng: np.random.Generator, slots: Slots) -> Callable[[], object]:
    path = rng.choice(sorted(slots.link.glob("*.safetensors")))
    offset = int(rng.integers(0, path.stat().st_size))

    def damage() -> None:
        with path.open("r+b") as stream:
            stream.seek(offset)
            stream.write(rng.bytes(int(rng.integers(1, 3 << 20))))
            stream.truncate(max(0, path.stat().st_size - int(rng.integers(0, 2)) * int(rng.integers(0, 1000))))

    return damage


@pytest.mark.parametrize("seed", range(8))
def test_any_damage_is_mended(seed: int, store: Store, slots: Slots, history: Any) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(int(rng.integers(1, 4))):
        damages(rng, slots)()
    if seed % 2:
        (slots.directory / "b.digests").write_bytes(b"?")
    try:
        mend(store, slots, history)
    except DeltastoreError as error:
        raise AssertionError(error) from error
    assert_whole(slots, history[1][2])


@pytest.mark.parametrize("seed", range(6))
def test_a_lying_store_never_leads_to_wrong_bytes(
    seed: int, store: Store, slots: Slots, history: Any, tmp_path: Path
) -> None:
    """Parts are read by ranges, so their own digests prove nothing: what comes out of them has to be proven."""
    rng = np.random.default_rng(seed)
    copy = tmp_path / "store"
    shutil.copytree(history[0] / "store", copy)
    for part in copy.glob("parts/**/*.safetensors"):
        data = bytearray(part.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        for _ in range(int(rng.integers(1, 40))):
            place = int(rng.integers(0, (header, 4 * header, len(data))[seed % 3]))
            data[min(place, len(data) - 1)] ^= 1 << int(rng.integers(0, 8))
        part.write_bytes(bytes(data))
    if seed % 2:
        shutil.rmtree(slots.directory / "a")
    for name in ("t0", CHANGED, "tiny007"):
        flip(slots.link, name, 50)
    before = {path.name: path.read_bytes() for path in slots.link.iterdir()}
    try:
        mend(open_store(copy), slots, history)
    except CorruptObject:
        assert {path.name: path.read_bytes() for path in slots.link.iterdir()} == before
    else:
        assert_whole(slots, history[1][2])
