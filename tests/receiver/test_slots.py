"""The slots by themselves: who holds them, what is believed without hashing, and the swap."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import training

import receiver.lock
import receiver.patcher
import receiver.slots
from deltastore import Writer, open_store
from deltastore.checkpoint import open_checkpoint
from deltastore.errors import CorruptObject, DamagedSlot, SlotError, StorageError, VersionNotFound
from deltastore.restore import identify
from receiver.patcher import Patcher
from receiver.slots import Slots

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.manifest import Manifest
    from deltastore.reader import Store
    from deltastore.restore import Source

SNAPSHOTS = [training.small_snapshot(0)]
SNAPSHOTS.append(training.step(SNAPSHOTS[0], 1))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    base = training.save(tmp_path / "base", SNAPSHOTS[0])
    with Writer(tmp_path / "store", base=base) as writer:
        writer.publish(SNAPSHOTS[1]).result()
    return open_store(tmp_path / "store")


@pytest.fixture
def slots(store: Store, tmp_path: Path) -> Slots:
    """Slots whose live one holds version 1, and the other one version 0."""
    made = Slots(tmp_path / "model")
    patcher = Patcher(store, made, workers=1)
    patcher.move_to(store.manifest(0))
    patcher.move_to(store.manifest(1))
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def count_hashes(monkeypatch: pytest.MonkeyPatch, slots: Slots) -> list[object]:
    seen: list[object] = []
    verify = slots.verify
    monkeypatch.setattr(slots, "verify", lambda *words, **named: seen.append(words) or verify(*words, **named))
    return seen


def test_the_live_slot_and_the_other_one_tell_what_they_hold(slots: Slots) -> None:
    live = slots.live()
    assert live is not None
    assert (live.name, live.record.version) == ("b", 1)
    other = slots.other(live)
    assert other is not None
    assert (other.name, other.record.version) == ("a", 0)
    training.assert_holds(slots.link, SNAPSHOTS[1])
    training.assert_holds(other.directory, SNAPSHOTS[0])
    assert slots.link.readlink().as_posix() == "model.slots/b"  # relative: the parent may be mounted elsewhere


def test_untouched_bytes_are_believed_under_the_kernel_that_hashed_them(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = count_hashes(monkeypatch, slots)
    assert slots.source(slots.live(), workers=1).version == 1
    assert hashed == []


@pytest.mark.parametrize("boot_id", ["another boot", ""])
def test_after_a_boot_or_without_a_boot_id_everything_is_hashed(
    boot_id: str, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver.slots, "_boot_id", lambda: boot_id)
    hashed = count_hashes(monkeypatch, slots)
    slots.source(slots.live(), workers=1)
    slots.source(slots.live(), workers=1)
    assert len(hashed) == (1 if boot_id else 2)  # a boot that is known is believed from then on


def test_damage_that_a_boot_hid_is_named(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    live = slots.live()
    path = live.directory / "model.safetensors"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    slots.source(live, workers=1)  # nothing shows it: the same file, size and time
    monkeypatch.setattr(receiver.slots, "_boot_id", lambda: "another boot")
    with pytest.raises(CorruptObject, match="1 of"):
        slots.source(live, workers=1)


def test_a_file_that_was_written_or_replaced_is_hashed(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = count_hashes(monkeypatch, slots)
    path = slots.live().directory / "model.safetensors"
    path.write_bytes(path.read_bytes())
    slots.source(slots.live(), workers=1)
    assert len(hashed) == 1
    flip(path)
    with pytest.raises(CorruptObject):
        slots.source(slots.live(), workers=1)


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "future", "gone", "foreign"])
def test_a_record_that_cannot_be_used_is_told_with_a_way_out(damage: str, slots: Slots) -> None:
    path = slots.directory / "b.json"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        future = data.replace(b'"format":1', b'"format":2')
        changed = {
            "empty": b"",
            "torn": data[: len(data) // 2],
            "flipped": bytes([data[0] ^ 1]) + data[1:],
            "future": future,
            "foreign": b"{}\n",
        }
        path.write_bytes(changed[damage])
    with pytest.raises(SlotError) as caught:
        slots.live()
    assert caught.value.key == str(path)
    assert caught.value.hint
    assert str(slots.link) in caught.value.hint


def test_a_damaged_digest_table_is_never_believed(slots: Slots) -> None:
    path = slots.directory / "b.digests"
    for damage in (flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.unlink()):
        data = path.read_bytes()
        damage(path)
        with pytest.raises((SlotError, StorageError)):
            slots.source(slots.live(), workers=1)
        path.write_bytes(data)


def test_only_one_holds_the_lock_and_the_second_is_told_who(slots: Slots, tmp_path: Path) -> None:
    slots.lock(url="http://127.0.0.1:1")
    second = Slots(tmp_path / "model")
    with pytest.raises(SlotError, match=rf"process {os.getpid()} on \S+, since 20\S+Z, at http://127.0.0.1:1"):
        second.lock()
    slots.unlock()
    second.lock()
    assert msgspec.json.decode((slots.directory / "lock").read_bytes())["url"] is None
    second.unlock()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"pid":"x","host":1}'])
def test_a_holder_that_does_not_say_who_it_is_still_holds(slots: Slots, tmp_path: Path, damage: bytes) -> None:
    slots.lock()
    (slots.directory / "lock").write_bytes(damage)
    with pytest.raises(SlotError, match="did not say who it is"):
        Slots(tmp_path / "model").lock()
    slots.unlock()


def test_a_place_that_cannot_be_locked_is_told(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(receiver.lock.fcntl, "flock", refuse)
    with pytest.raises(SlotError, match="cannot be locked"):
        slots.lock()


def test_where_two_paths_cannot_be_exchanged_a_directory_is_left_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(receiver.slots, "_exchange", refuse)
    plain = training.save(tmp_path / "plain", SNAPSHOTS[0])
    before = training.tree(plain)
    slots = Slots(plain)
    slots.directory.mkdir()
    with pytest.raises(StorageError) as caught:
        slots.adopt(identify(store, plain, workers=1), store.manifest(0), store.hash)
    assert "--base" in (caught.value.hint or "")
    assert training.tree(plain) == before


@pytest.mark.parametrize("age", [0, 3600], ids=["new files", "old files"])
@pytest.mark.parametrize("written", [False, True], ids=["left alone", "written to while it is hashed"])
def test_what_changed_while_it_was_adopted_is_not_believed(
    written: bool, age: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.save(tmp_path / "plain", SNAPSHOTS[0])
    weights = plain / "model.safetensors"
    os.utime(weights, (weights.stat().st_atime, weights.stat().st_mtime - age))

    def identify_late(*words: Any, **named: Any) -> Source:
        found = identify(*words, **named)
        if written:
            flip(weights)  # behind what was hashed already, as a copy that still runs writes
        return found

    monkeypatch.setattr(receiver.patcher, "identify", identify_late)
    slots = Slots(plain)
    slots.lock()
    hashed = count_hashes(monkeypatch, slots)
    patcher = Patcher(store, slots, workers=1)
    if written:
        with pytest.raises(DamagedSlot):
            patcher.adopt()
    else:
        assert patcher.adopt() is not None
        assert len(hashed) == (age == 0)  # not again, but for files whose times may hide a write
        training.assert_holds(plain, SNAPSHOTS[0])
    slots.unlock()


def test_a_slot_is_emptied_without_touching_what_a_process_maps(slots: Slots) -> None:
    other = slots.other(slots.live())
    mapped = open_checkpoint(other.directory)
    before = {spec.name: mapped.tensor(spec.name).tobytes() for spec in mapped.schema}
    name, directory = slots.prepare()
    assert (name, list(directory.iterdir())) == ("a", [])
    assert slots.other(slots.live()) is None
    assert {spec.name: mapped.tensor(spec.name).tobytes() for spec in mapped.schema} == before
    training.assert_holds(slots.link, SNAPSHOTS[1])


def test_a_link_that_leads_to_nothing_of_ours_is_not_ours(slots: Slots, tmp_path: Path) -> None:
    slots.link.unlink()
    assert slots.live() is None
    slots.link.symlink_to(tmp_path / "base")
    assert slots.live() is None
    assert not slots.is_plain()


@pytest.mark.parametrize("spelling", ["absolute", "over a link", "dots"])
def test_a_live_slot_is_never_the_spare_one_however_its_path_is_spelled(
    spelling: str, slots: Slots, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "way").symlink_to(tmp_path)
    ways = {
        "absolute": slots.directory / "b",
        "over a link": tmp_path / "way" / slots.directory.name / "b",
        "dots": f"{slots.directory.name}/../{slots.directory.name}/b",
    }
    slots.link.unlink()
    slots.link.symlink_to(ways[spelling])
    live = slots.live()
    assert live is not None
    assert (live.name, live.record.version) == ("b", 1)
    patcher = Patcher(store, slots, workers=1)
    assert patcher.adopt() == live
    assert slots.prepare()[0] == "a"
    training.assert_holds(slots.link, SNAPSHOTS[1])
    assert patcher.move_to(store.manifest(0)).start == 1
    assert slots.link.readlink().as_posix() == "model.slots/a"


@pytest.mark.parametrize("damage", ["cut", "gone", "header"])
def test_a_live_slot_that_cannot_be_opened_is_damage_with_a_way_out(damage: str, slots: Slots) -> None:
    live = slots.live()
    assert live is not None
    path = live.directory / "model.safetensors"
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:100] if damage == "cut" else data[:8] + b"!" + data[9:])
    with pytest.raises(CorruptObject, match="damaged") as caught:
        slots.source(live, workers=1)
    assert caught.value.hint is not None
    assert "Remove" in caught.value.hint


def test_where_a_full_chunk_does_not_lead_back_the_given_base_leads_forward(tmp_path: Path) -> None:
    first, other = (training.small_snapshot(seed, elements=100_000) for seed in (0, 1))
    base = training.save(tmp_path / "base", first)
    with Writer(tmp_path / "store", base=base, upload_base=False) as writer:
        writer.publish(other).result()
        assert not writer.head.model.invertible
    store = open_store(tmp_path / "store")
    made = Slots(tmp_path / "model")
    made.lock()
    Patcher(store, made, base=base, workers=1).move_to(store.manifest(1))
    patcher = Patcher(store, made, workers=1)
    patcher.adopt()
    with pytest.raises(VersionNotFound):
        patcher.move_to(store.manifest(0))
    patcher = Patcher(store, made, base=base, workers=1)
    patcher.adopt()
    patcher.move_to(store.manifest(0))
    training.assert_holds(tmp_path / "model", first)
    made.unlock()


def test_going_back_to_the_version_before_needs_no_store(slots: Slots, store: Store, tmp_path: Path) -> None:
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    target = store.manifest(0)
    (tmp_path / "store").rename(tmp_path / "gone")
    patched = patcher.move_to(target)
    assert (patched.start, patched.end, patched.fetched_bytes) == (1, 0, 0)
    training.assert_holds(slots.link, SNAPSHOTS[0])
    again = patcher.move_to(store_manifest(tmp_path, 1))
    assert (again.start, again.end, again.fetched_bytes) == (0, 1, 0)
    training.assert_holds(slots.link, SNAPSHOTS[1])


def store_manifest(tmp_path: Path, version: int) -> Manifest:
    return open_store(tmp_path / "gone").manifest(version)


def test_a_damaged_slot_is_no_way_back(slots: Slots, store: Store) -> None:
    flip(slots.other(slots.live()).directory / "model.safetensors")
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    patched = patcher.move_to(store.manifest(0))
    assert "patch" in patched.stages
    training.assert_holds(slots.link, SNAPSHOTS[0])


def test_a_live_slot_that_rotted_unseen_is_damage_and_no_wrong_base(slots: Slots, store: Store) -> None:
    live = slots.live()
    path = live.directory / "model.safetensors"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (slots.directory / "a.json").unlink()  # no way back but through the damage
    patcher = Patcher(store, slots, workers=1)
    patcher.adopt()
    with pytest.raises(CorruptObject) as caught:
        patcher.move_to(store.manifest(0))
    assert str(slots.link) in (caught.value.hint or "")
    assert slots.live().name == live.name
