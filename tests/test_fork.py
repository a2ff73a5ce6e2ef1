"""Forks: a stream of its own that begins where another one was."""

from __future__ import annotations

import shutil

import pytest
import training

import deltastore.fork
from deltastore import Writer, fork_stream, open_store
from deltastore.errors import SignatureMismatch, StorageError, StreamExists, VersionNotFound
from deltastore.fsck import check
from deltastore.signing import generate_key
from deltastore.storage import open_backend
from deltastore.storage.local import LocalBackend
from deltastore.testing import Fault, FaultyBackend

HASHES = ["xxh3-128", "blake3"]


@pytest.fixture(scope="module")
def snapshots():
    chain = [{name: tensor for name, tensor in training.base_snapshot(11).items() if tensor.numel() < 5000}]
    for number in (1, 2, 4):
        chain.append(training.step(chain[-1], number))
    return chain


@pytest.fixture(scope="module", params=HASHES)
def made(request, tmp_path_factory, snapshots):
    """A store of versions 0 to 2 whose base has three files."""
    root = tmp_path_factory.mktemp("source")
    base = training.save(root / "base", snapshots[0], shards=3)
    with Writer(root / "store", base=base, hash_name=request.param) as writer:
        for number in (1, 2):
            writer.publish(snapshots[number]).result()
    return root / "store", request.param


@pytest.fixture
def source(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "source")
    return open_store(tmp_path / "source")


@pytest.mark.parametrize("hash_name", [None, *HASHES])
@pytest.mark.parametrize("version", [0, 2])
def test_a_fork_is_the_version_with_its_files_and_lives_on_its_own(
    version, hash_name, made, source, snapshots, tmp_path
):
    (tmp_path / "spool").mkdir()
    before = training.tree(tmp_path / "source")
    fork = fork_stream(tmp_path / "fork", source, version, hash_name=hash_name, spool=tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []
    assert training.tree(tmp_path / "source") == before
    assert fork.stream_id != source.stream_id
    assert fork.hash.name == (hash_name or made[1])
    assert fork.base.metadata == {
        "forked_from": source.stream_id,
        "forked_from_version": version,
        "forked_from_snapshot_id": source.manifest(version).snapshot_id,
    }
    if fork.hash.name == source.hash.name:
        assert fork.base.snapshot_id == source.manifest(version).snapshot_id
    source.restore(version, tmp_path / "of-source")
    shutil.rmtree(tmp_path / "source")
    with Writer(tmp_path / "fork", resume=True) as writer:
        writer.publish(snapshots[3]).result()
    opened = open_store(tmp_path / "fork")
    for number in (0, 1):
        opened.restore(number, tmp_path / "of-fork" / str(number))
    assert training.tree(tmp_path / "of-fork" / "0") == training.tree(tmp_path / "of-source")
    training.assert_holds(tmp_path / "of-fork" / "1", snapshots[3])
    assert check(opened.backend, read_data=True).ok


def test_both_streams_go_on_apart(source, snapshots, tmp_path):
    fork_stream(tmp_path / "fork", source, 1)
    for place, number in (("source", 0), ("fork", 3)):
        with Writer(tmp_path / place, resume=True) as writer:
            writer.publish(snapshots[number]).result()
    assert [open_store(tmp_path / place).latest().version for place in ("source", "fork")] == [3, 1]
    for place, version, number in (("source", 3, 0), ("source", 2, 2), ("fork", 1, 3), ("fork", 0, 1)):
        open_store(tmp_path / place).restore(version, tmp_path / "out" / f"{place}{version}")
        training.assert_holds(tmp_path / "out" / f"{place}{version}", snapshots[number])


def test_a_place_that_is_taken_is_told_before_anything_is_fetched(source, tmp_path):
    fork_stream(tmp_path / "fork", source, 0)
    before = training.tree(tmp_path / "fork")
    shutil.rmtree(tmp_path / "source" / "parts")
    with pytest.raises(StreamExists):
        fork_stream(tmp_path / "fork", source, 1)
    assert training.tree(tmp_path / "fork") == before


def test_a_source_without_a_stored_base_needs_it_at_hand(snapshots, tmp_path):
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "source", base=base, upload_base=False) as writer:
        writer.publish(snapshots[1]).result()
    source = open_store(tmp_path / "source")
    with pytest.raises(VersionNotFound):
        fork_stream(tmp_path / "fork", source, 1)
    fork_stream(tmp_path / "fork", source, 1, base=base)
    open_store(tmp_path / "fork").restore(0, tmp_path / "out")
    training.assert_holds(tmp_path / "out", snapshots[1])


@pytest.mark.parametrize("operation", ["write", "create"])
def test_a_fork_that_fails_leaves_no_stream_and_no_room_taken(operation, source, tmp_path, monkeypatch):
    (tmp_path / "spool").mkdir()
    backend = FaultyBackend(LocalBackend(tmp_path / "fork"))
    monkeypatch.setattr(deltastore.fork, "open_backend", lambda *_, **__: backend)
    backend.add(Fault(operation=operation, key_prefix="parts/" if operation == "write" else "probes/"))
    with pytest.raises(StorageError):
        fork_stream("here", source, 2, spool=tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []
    assert [info.key for info in backend.inner.list("")] == []


def test_a_signed_stream_is_forked_into_a_signed_one_of_another_key(snapshots, tmp_path):
    keys = [generate_key(tmp_path / name) for name in ("one", "two")]
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "source", base=base, sign_key=tmp_path / "one", hash_name="blake3") as writer:
        writer.publish(snapshots[1]).result()
    source = open_store(tmp_path / "source", trusted_keys=keys[:1])
    fork_stream(tmp_path / "fork", source, 1, sign_key=tmp_path / "two")
    assert open_store(tmp_path / "fork", trusted_keys=keys[1:]).latest().version == 0
    with pytest.raises(SignatureMismatch):
        open_store(tmp_path / "fork", trusted_keys=keys[:1])
    plain = fork_stream(tmp_path / "plain", source, 1)
    assert plain.stream.signers == ()


@pytest.mark.s3
def test_a_local_stream_is_forked_to_an_object_store_and_back(source, snapshots, s3, tmp_path):
    options = dict(s3.storage_options)
    url = f"{s3.url}/forks-{source.hash.name}"
    fork = fork_stream(url, source, 2, storage_options=options)
    assert check(open_backend(url, storage_options=options), read_data=True).ok
    with Writer(url, resume=True, storage_options=options) as writer:
        writer.publish(snapshots[3]).result()
    back = fork_stream(tmp_path / "back", open_store(url, storage_options=options), 1)
    assert back.base.metadata["forked_from"] == fork.stream_id
    back.restore(0, tmp_path / "out")
    training.assert_holds(tmp_path / "out", snapshots[3])
