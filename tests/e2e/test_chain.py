"""A chain as a training run makes it, published, restored and received in every way there is."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import training
from training import assert_holds, differences, load, save, tree

from deltastore import Writer, open_checkpoint, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSIONS = 12
LAST = VERSIONS - 1


@dataclass
class Chain:
    """A store, what it should hold, and the base's directory."""

    store: str
    snapshots: list[training.Snapshot]
    base: Path
    shards: int
    upload_base: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """What a command line needs to reach the store."""
        return [word for name, value in self.options.items() for word in ("--storage-option", f"{name}={value}")]

    def open(self):
        return open_store(self.store, storage_options=dict(self.options))


@pytest.fixture(
    scope="module",
    params=["one file", "shards and blake3", "no base in the store", pytest.param("s3", marks=pytest.mark.s3)],
)
def chain(request, tmp_path_factory, commands):
    """Publish twelve snapshots, by command line and from Python in turn."""
    kind = request.param
    root = tmp_path_factory.mktemp("chain")
    snapshots = training.chain(VERSIONS, seed=len(kind))
    shards = 3 if kind in {"shards and blake3", "s3"} else 1
    made = Chain(str(root / "store"), snapshots, save(root / "base", snapshots[0], shards=shards), shards)
    words = ["--hash", "blake3"] if kind in {"shards and blake3", "s3"} else []
    if kind == "no base in the store":
        made.upload_base = False
        words.append("--no-upload-base")
    if kind == "s3":
        server = request.getfixturevalue("s3")
        made.store, made.options = f"{server.url}/chain", dict(server.storage_options)
    commands.run("deltastore", "init", made.store, "--base", made.base, *words, *made.flags).ok()
    local_base = [] if made.upload_base else ["--base", made.base]
    for version in range(1, VERSIONS):
        if version % 4 == 3:
            with Writer(
                made.store, storage_options=dict(made.options), base=local_base[1] if local_base else None
            ) as writer:
                published = writer.publish(snapshots[version], step=version, metadata={"by": "python"}).result()
        else:
            # Split another way than the base: 1, 2, 4, … files.
            directory = save(
                root / "published", snapshots[version], shards=1 + version % 4, others=False, order=version
            )
            level = "max" if version % 5 == 0 else "fast"
            given = ["--step", version, "--meta", "by=cli", "--level", level, "--json", *made.flags, *local_base]
            published = commands.run("deltastore", "publish", made.store, directory, *given).ok().json
            published = type("Published", (), published)
            shutil.rmtree(directory)
        assert published.version == version
        assert (published.stored_bytes == 0) == (version % 6 == 3)
    return made


def test_the_log_tells_the_whole_history(chain, commands):
    record = commands.run("deltastore", "log", chain.store, "--json", *chain.flags).ok().json
    versions = record["versions"]
    assert [entry["version"] for entry in versions] == list(range(VERSIONS))
    assert [entry["step"] for entry in versions] == [None, *range(1, VERSIONS)]
    assert [entry["kind"] for entry in versions] == ["base"] + ["delta"] * LAST
    assert versions[0]["anchored"] == chain.upload_base
    for before, after in itertools.pairwise(versions):
        assert after["parent_version"] == before["version"]
        assert after["parent_snapshot_id"] == before["snapshot_id"]
    assert versions[3]["snapshot_id"] == versions[2]["snapshot_id"]
    assert len({entry["snapshot_id"] for entry in versions}) == VERSIONS - 2


def test_the_store_is_whole(chain, commands):
    report = commands.run("deltastore", "check", chain.store, "--read-data", "--json", *chain.flags).ok().json
    assert report["ok"]
    assert report["problems"] == []
    subset = commands.run("deltastore", "check", chain.store, "--read-data-subset", 50, *chain.flags).ok()
    assert "no problems" in subset.out


def test_every_version_is_restored_bit_for_bit(chain, tmp_path):
    store = chain.open()
    for version, snapshot in enumerate(chain.snapshots):
        if chain.upload_base:
            store.restore(version, tmp_path / f"bare{version}")
            assert_holds(tmp_path / f"bare{version}", snapshot)
        store.restore(version, tmp_path / f"based{version}", base=chain.base)
        assert_holds(tmp_path / f"based{version}", snapshot)
        assert open_checkpoint(tmp_path / f"based{version}").layout == open_checkpoint(chain.base).layout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_version_zero_is_the_base_file_for_file(chain, tmp_path, commands):
    given = [] if chain.upload_base else ["--base", chain.base]
    commands.run("deltastore", "restore", chain.store, 0, tmp_path / "zero", *chain.flags, *given).ok()
    assert tree(tmp_path / "zero") == tree(chain.base)


def test_a_version_leads_to_any_other_forwards_and_backwards(chain, tmp_path):
    store = chain.open()
    for number, (start, end) in enumerate([(0, 11), (5, 11), (7, 4), (11, 0), (11, 10), (2, 3), (3, 3), (6, 5)]):
        source = save(tmp_path / f"source{number}", chain.snapshots[start], shards=2, order=number)
        if (
            not chain.upload_base
            and start > end
            and any(not store.manifest(v).model.invertible for v in range(end + 1, start + 1))
        ):
            continue  # neither an anchor nor a way back
        store.restore(end, tmp_path / f"result{number}", base=source)
        assert_holds(tmp_path / f"result{number}", chain.snapshots[end])


def test_without_a_base_anywhere_there_is_no_way(chain, tmp_path, commands):
    if chain.upload_base:
        pytest.skip("this store holds its base")
    ended = commands.run("deltastore", "restore", chain.store, 4, tmp_path / "out", *chain.flags)
    assert ended.code == 10
    assert "--base" in ended.err
    assert list(tmp_path.iterdir()) == []
    once = commands.run("receiver", "once", "--store", chain.store, "--checkpoint", tmp_path / "live", *chain.flags)
    assert once.code == 10
    assert not (tmp_path / "live").exists()


def once(chain, commands, checkpoint, *more):
    words = ["receiver", "once", "--store", chain.store, "--checkpoint", checkpoint, "--json", *chain.flags]
    return commands.run(*words, *more)


def test_a_receiver_starts_from_a_copy_of_the_base(chain, tmp_path, commands):
    live = save(tmp_path / "live", chain.snapshots[0], shards=chain.shards)
    record = once(chain, commands, live).ok().json
    assert (record["version"], record["target"], record["lag"], record["serving"]) == (LAST, LAST, 0, LAST)
    assert record["last_update"]["from"] == 0
    assert live.is_symlink()
    assert_holds(live, chain.snapshots[LAST])
    again = once(chain, commands, live).ok().json
    assert again["last_update"] == {}


def test_a_receiver_starts_from_a_directory_that_holds_version_five(chain, tmp_path, commands):
    live = save(tmp_path / "live", chain.snapshots[5], shards=2, order=9)
    record = once(chain, commands, live).ok().json
    assert record["last_update"]["from"] == 5
    assert_holds(live, chain.snapshots[LAST])


def test_a_receiver_stops_in_the_middle_and_goes_on(chain, tmp_path, commands):
    live = save(tmp_path / "live", chain.snapshots[0])
    assert once(chain, commands, live, "--target", 5).ok().json["version"] == 5
    assert_holds(live, chain.snapshots[5])
    record = once(chain, commands, live).ok().json
    assert (record["last_update"]["from"], record["version"]) == (5, LAST)
    assert_holds(live, chain.snapshots[LAST])
    if chain.upload_base:
        assert once(chain, commands, live, "--target", 2).ok().json["version"] == 2
        assert_holds(live, chain.snapshots[2])
    verified = commands.run("receiver", "verify", "--checkpoint", live, "--json").ok().json
    assert verified["ok"]


def test_a_new_host_gets_everything(chain, tmp_path, commands):
    live = tmp_path / "hosts" / "live"
    given = [] if chain.upload_base else ["--base", chain.base]
    record = once(chain, commands, live, *given).ok().json
    assert record["last_update"]["from"] == (None if chain.upload_base else 0)
    assert_holds(live, chain.snapshots[LAST])
    assert {path.name for path in live.iterdir()} == {path.name for path in chain.base.iterdir()}


def test_a_base_elsewhere_is_only_read(chain, tmp_path, commands):
    before = tree(chain.base)
    assert once(chain, commands, tmp_path / "live", "--base", chain.base).ok().json["last_update"]["from"] == 0
    assert_holds(tmp_path / "live", chain.snapshots[LAST])
    assert tree(chain.base) == before
    assert not chain.base.is_symlink()


def test_one_flipped_byte_is_refused_by_name_and_left_alone(chain, tmp_path, commands):
    live = save(tmp_path / "live", chain.snapshots[0], shards=chain.shards)
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoint = open_checkpoint(live)
    file, start = checkpoint.places.tensor(checkpoint.schema.position(name))
    with (live / checkpoint.layout.files[file].name).open("r+b") as stream:
        stream.seek(start + 77_777)
        byte = stream.read(1)[0]
        stream.seek(start + 77_777)
        stream.write(bytes([byte ^ 0x10]))
    assert differences(load(live), chain.snapshots[0]) == [name]
    before = tree(live)
    for words in (
        ("receiver", "once", "--store", chain.store, "--checkpoint", live),
        ("receiver", "once", "--store", chain.store, "--checkpoint", tmp_path / "other", "--base", live),
        ("deltastore", "restore", chain.store, LAST, tmp_path / "restored", "--base", live),
    ):
        ended = commands.run(*words, *chain.flags)
        assert ended.code == 12, ended
        assert name in ended.err
        assert "Try:" in ended.err
        assert ended.out == ""
    assert tree(live) == before
    assert not live.is_symlink()
    assert not (tmp_path / "restored").exists()
    assert not (tmp_path / "other").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_wrong_base_is_refused_before_anything_is_published(chain, tmp_path, commands):
    wrong = save(tmp_path / "wrong", training.base_snapshot(seed=999))
    ended = commands.run("deltastore", "publish", chain.store, wrong, "--base", wrong, *chain.flags)
    assert ended.code == 12
    assert "model.embed_tokens.weight" in ended.err
    assert chain.open().latest().version == LAST


def test_a_link_that_somebody_else_made_is_read_and_replaced(chain, tmp_path, commands):
    cache = save(tmp_path / "cache", chain.snapshots[0], shards=chain.shards)
    live = tmp_path / "live"
    live.symlink_to(cache)
    before = tree(cache)
    assert once(chain, commands, live).ok().json["version"] == LAST
    assert_holds(live, chain.snapshots[LAST])
    assert tree(cache) == before


def test_a_directory_of_links_is_read_and_kept_as_the_original(chain, tmp_path, commands):
    cache = save(tmp_path / "cache", chain.snapshots[0], shards=chain.shards)
    live = tmp_path / "live"
    live.mkdir()
    for path in cache.rglob("*"):
        target = live / path.relative_to(cache)
        if path.is_dir():
            target.mkdir()
        else:
            target.symlink_to(path)
    before = tree(cache)
    assert once(chain, commands, live).ok().json["version"] == LAST
    assert_holds(live, chain.snapshots[LAST])
    assert tree(cache) == before
    assert_holds(tmp_path / "live.original", chain.snapshots[0])
