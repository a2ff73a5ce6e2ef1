"""Power lost in the middle of a patch: what had not been synced is on the disk, or not, page by page, in any order.

A patch is recorded, call by call. A disk is then made as it may look after the power went at some call: of the writes
to a file since its last sync some pages are there and some are not; of the changes to a directory since its last sync
some are there and some are not. Names and contents are apart: a file that has its name may have nothing in it.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import training
from safetensors.torch import save_file

import receiver.slots
from deltastore import Writer, open_store
from deltastore.errors import CorruptObject, DeltastoreError, SlotError
from receiver.patcher import Patcher
from receiver.repair import repair
from receiver.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.reader import Store

PAGE = 4096


@dataclass
class Inode:
    """A file: what of it is safe, and the writes since it was synced; a directory has entries instead."""

    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class Disk:
    """Files and links below one root by name, as they are safely; and the changes of names since, in order."""

    names: dict[str, int | str] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)  # (directory, path, what it now is, or None)
    inodes: dict[int, Inode] = field(default_factory=dict)


class Recorder:
    """Stands before the calls that change a disk, and keeps what they do."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.disk = Disk()
        self.states: list[Disk] = []
        self._adopt()
        for name in ("open", "pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "symlink", "link"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        monkeypatch.setattr(os, "posix_fallocate", self._wrap("posix_fallocate", os.posix_fallocate))
        monkeypatch.setattr(shutil, "rmtree", self._rmtree(shutil.rmtree))

    def _adopt(self) -> None:
        """What is there at first is safe."""
        for path in self.root.rglob("*"):
            if path.is_symlink():
                self.disk.names[self._key(path)] = str(path.readlink())
            elif path.is_file():
                inode = path.stat().st_ino
                self.disk.names[self._key(path)] = inode
                self.disk.inodes[inode] = Inode(bytearray(path.read_bytes()))

    def _key(self, path: Any) -> str:
        return os.path.relpath(os.path.abspath(path), self.root)  # noqa: PTH100 - links are not followed

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and not self._key(path).startswith("..")

    def _rename(self, key: str, what: int | str | None) -> None:
        self.disk.pending.append((os.path.dirname(key), key, what))  # noqa: PTH120 - a key is no path

    def now(self, key: str) -> int | str | None:
        """What a name means, with all that was done."""
        found: int | str | None = self.disk.names.get(key)
        for _, path, what in self.disk.pending:
            if path == key:
                found = what
        return found

    def _keep(self) -> None:
        self.states.append(copy.deepcopy(self.disk))

    def _wrap(self, name: str, call: Any) -> Any:
        def changed(*words: Any, **options: Any) -> Any:
            self._before(name, words)
            result = call(*words, **options)
            if name == "open":
                self._opened(result, words)
            return result

        return changed

    def _opened(self, descriptor: int, words: Any) -> None:
        if len(words) < 2 or not words[1] & os.O_CREAT or not self._is_ours(words[0]):
            return
        key, inode = self._key(words[0]), os.fstat(descriptor).st_ino
        if self.now(key) != inode:
            # A number may be given again to a new file.
            self.disk.inodes[inode] = Inode()
            self._rename(key, inode)
        elif words[1] & os.O_TRUNC:
            self.disk.inodes[inode] = Inode()
        self._keep()

    def _before(self, name: str, words: Any) -> None:  # noqa: C901 - one branch a call
        if name == "open":
            return
        if name in {"pwrite", "fsync", "fdatasync", "posix_fallocate"}:
            status = os.fstat(words[0])
            # A new directory may have the number of a file that was removed.
            inode = None if stat.S_ISDIR(status.st_mode) else self.disk.inodes.get(status.st_ino)
            if name == "pwrite" and inode is not None:
                data, offset = bytes(words[1]), words[2]
                for start in range(0, len(data), PAGE):
                    inode.pending.append((offset + start, data[start : start + PAGE]))
            elif name == "posix_fallocate" and inode is not None:
                inode.pending.append((words[1] + words[2], b""))
            elif inode is not None:
                self._settle(inode, inode.pending)
                inode.pending = []
            elif name == "fsync":
                self._sync_directory(str(Path(f"/proc/self/fd/{words[0]}").readlink()))
        elif name in {"replace", "rename"}:
            one, two = (self._key(word) for word in words[:2])
            if self._is_ours(words[0]):
                self._rename(two, self.now(one))
                self._rename(one, None)
        elif name == "unlink" and self._is_ours(words[0]):
            self._rename(self._key(words[0]), None)
        elif name == "symlink" and self._is_ours(words[1]):
            self._rename(self._key(words[1]), str(words[0]))
        elif name == "link" and self._is_ours(words[1]):
            self._rename(self._key(words[1]), self.now(self._key(words[0])))
        self._keep()

    def _rmtree(self, call: Any) -> Any:
        def removed(path: Any, *words: Any, **options: Any) -> None:
            below = self._key(path) + "/"
            for key in list(self.disk.names) + [entry[1] for entry in self.disk.pending]:
                if key.startswith(below) and self.now(key) is not None:
                    self._rename(key, None)
            self._keep()
            call(path, *words, **options)

        return removed

    @staticmethod
    def _settle(inode: Inode, writes: list[tuple[int, bytes]]) -> None:
        for offset, data in writes:
            end = offset + len(data)
            if len(inode.data) < end:
                inode.data.extend(bytes(end - len(inode.data)))
            inode.data[offset:end] = data

    def _sync_directory(self, path: str) -> None:
        key = self._key(path)
        key = "" if key == "." else key
        kept = []
        for entry in self.disk.pending:
            if entry[0] == key:
                self._apply(self.disk, entry)
            else:
                kept.append(entry)
        self.disk.pending = kept

    @staticmethod
    def _apply(disk: Disk, entry: tuple[str, str, Any]) -> None:
        if entry[2] is None:
            disk.names.pop(entry[1], None)
        else:
            disk.names[entry[1]] = entry[2]

    def lose(self, state: Disk, draw: random.Random, root: Path, *, weights_only: bool = False) -> None:
        """Make the disk as it may be after power was lost at a state; ``weights_only``: all but weights is there."""
        disk = copy.deepcopy(state)
        share = draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        weights: set[int] = set()
        if weights_only:
            share = draw.choice([0.5, 0.9, 0.97, 0.99])
            for entry in disk.pending:
                self._apply(disk, entry)
            disk.pending = []
            weights = {what for key, what in disk.names.items() if key.endswith(".safetensors") and what in disk.inodes}
        # A rename is one change of two names: the journal of any file system has both or none.
        pairs = self._renames(disk.pending)
        for entries in pairs:
            if draw.random() < share:
                for entry in entries:
                    self._apply(disk, entry)
        for number, inode in disk.inodes.items():
            whole = weights_only and number not in weights
            kept = [write for write in inode.pending if whole or draw.random() < share]
            draw.shuffle(kept)
            self._settle(inode, kept)
        for key, what in disk.names.items():
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(what, str):
                path.symlink_to(what)
            else:
                path.write_bytes(disk.inodes[what].data)

    @staticmethod
    def _renames(pending: list[tuple[str, str, Any]]) -> Iterator[list[tuple[str, str, Any]]]:
        entries = list(pending)
        while entries:
            first = entries.pop(0)
            if first[2] is not None and entries and entries[0][2] is None and entries[0][0] == first[0]:
                yield [first, entries.pop(0)]
            else:
                yield [first]


def snapshots() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [{f"t{number}": torch.randint(0, 255, (40_000,), generator=generator).byte() for number in range(3)}]
    for _ in range(2):
        after = {name: data.clone() for name, data in made[-1].items()}
        for data in after.values():
            data[torch.randint(0, len(data), (300,), generator=generator)] += 1
        made.append(after)
    return made


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    root, contents = tmp_path_factory.mktemp("power"), snapshots()
    (root / "base").mkdir()
    save_file(contents[0], root / "base" / "model.safetensors")
    (root / "base" / "config.json").write_text("{}")
    with Writer(root / "store", base=root / "base") as writer:
        for snapshot in contents[1:]:
            writer.publish(snapshot).result()
    return root, contents


def record(store: Store, root: Path, *, durable: bool, first: bool) -> Recorder:
    """Record a patch to version 2: from version 1, or from nothing."""
    slots = Slots(root / "model", durable=durable)
    if not first:
        Patcher(store, slots, workers=1).move_to(store.manifest(0))
        Patcher(store, slots, workers=1).adopt()
        patcher = Patcher(store, slots, workers=1)
        patcher.adopt()
        patcher.move_to(store.manifest(1))
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        patcher = Patcher(store, slots, workers=1)
        patcher.adopt()
        patcher.move_to(store.manifest(2))
    assert len(recorder.states) > 15
    return recorder


def is_recorded(link: Path) -> bool:
    """Tell whether it is known what the live slot should hold, if there is one."""
    try:
        Slots(link).live()
    except SlotError:
        return False
    return True


def come_back(store: Store, root: Path, contents: list[dict[str, torch.Tensor]], *, durable: bool) -> str:
    """Start a receiver on what the disk has now; returns what it took to get to version 2."""
    slots = Slots(root / "model", durable=durable)
    slots.lock()
    how = "went on"
    try:
        try:
            Patcher(store, slots, workers=1).adopt()
        except (CorruptObject, SlotError):
            try:
                lost = damage(root / "model", contents)
                repaired = repair(store, slots, workers=1)
                assert lost is None or repaired.damaged == lost[repaired.version]
                assert repaired.damaged == repaired.from_other + repaired.from_store
                how = "mended"
            except DeltastoreError:
                slots.link.unlink()  # as the error says
                how = "built anew"
        patcher = Patcher(store, slots, workers=1)
        patcher.adopt()
        patcher.move_to(store.manifest(2))
    finally:
        slots.unlock()
    return how


def damage(link: Path, contents: list[dict[str, torch.Tensor]]) -> list[int] | None:
    """Return how many chunks are not those of each version; ``None`` where there is no telling. A tensor is a chunk."""
    try:
        found = training.load(link)
    except Exception:  # noqa: BLE001 - whatever a reader says of a torn file
        return None
    return [len(training.differences(found, snapshot)) for snapshot in contents]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["version", "none"])
@pytest.mark.parametrize("first", [False, True])
def test_power_lost_at_any_instant(
    durability: str, first: bool, stream: Any, tmp_path: Path, rounds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, contents = open_store(stream[0] / "store"), stream[1]
    durable = durability == "version"
    recorder = record(store, tmp_path / "recorded", durable=durable, first=first)
    draw, seen = random.Random(f"{durability} {first}"), set()
    for number in range(rounds(50, 1500)):
        root = tmp_path / f"after{number}"
        root.mkdir()
        recorder.lose(draw.choice(recorder.states), draw, root)
        monkeypatch.setattr(receiver.slots, "_boot_id", lambda number=number: f"boot {number}")
        link = root / "model"
        if durable and link.is_symlink():
            found = training.load(link)
            assert any(training.differences(found, contents[version]) == [] for version in (1, 2))
            assert (link / "config.json").read_text() == "{}"
        elif durable:
            assert first
        recorded = is_recorded(link)
        assert recorded or not durable
        how = come_back(store, root, contents, durable=durable)
        assert how == "went on" or not durable
        seen.add(how)
        training.assert_holds(link, contents[2], others=False)
        if recorded:  # nothing else tells what the other files were
            assert (link / "config.json").read_text() == "{}"
        shutil.rmtree(root)
    assert durable or len(seen) > 1


@pytest.mark.timeout(600)
def test_pages_lost_from_a_live_slot_are_found_and_mended_chunk_by_chunk(
    stream: Any, tmp_path: Path, rounds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody waited for is gone from the weights: only the chunks that it was in are had again."""
    store, contents = open_store(stream[0] / "store"), stream[1]
    recorder = record(store, tmp_path / "recorded", durable=False, first=False)
    draw, mended = random.Random(9), Counter[int]()
    for number in range(rounds(50, 300)):
        root = tmp_path / f"after{number}"
        root.mkdir()
        recorder.lose(recorder.states[-1], draw, root, weights_only=True)
        monkeypatch.setattr(receiver.slots, "_boot_id", lambda number=number: f"boot {number}")
        slots = Slots(root / "model", durable=False)
        lost = damage(slots.link, contents)
        slots.lock()
        try:
            try:
                Patcher(store, slots, workers=1).adopt()
                assert lost is not None
                assert lost[2] == 0
            except (CorruptObject, SlotError):
                assert lost is None or lost[2] > 0
                repaired = repair(store, slots, workers=1)
                assert lost is None or repaired.damaged == lost[2]
                assert repaired.damaged == repaired.from_other + repaired.from_store
                mended[repaired.damaged] += 1
            Patcher(store, slots, workers=1).adopt()
        finally:
            slots.unlock()
        training.assert_holds(slots.link, contents[2], others=False)
        shutil.rmtree(root)
    assert mended[1] >= rounds(2, 20)
    assert mended[2] >= rounds(2, 10)


def test_a_receiver_that_did_not_wait_for_the_disk_is_found_out(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness itself: without syncs the link leads to a version that is not whole, sooner or later."""
    store, contents = open_store(stream[0] / "store"), stream[1]
    recorder = record(store, tmp_path / "recorded", durable=False, first=False)
    draw, broken = random.Random(0), 0
    for number in range(40):
        root = tmp_path / f"after{number}"
        root.mkdir()
        recorder.lose(recorder.states[-1], draw, root)
        try:
            found = training.load(root / "model")
            broken += all(training.differences(found, contents[version]) for version in (1, 2))
        except Exception:  # noqa: BLE001 - whatever a reader says of a torn file
            broken += 1
    assert broken
