"""Making a stream: all or nothing, and only where exclusive creation is kept."""

from __future__ import annotations

import msgspec
import pytest
import training

from deltastore import open_checkpoint, open_store
from deltastore.errors import CommitInDoubt, StorageError, StreamExists
from deltastore.fsck import check
from deltastore.init import create_stream
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend


@pytest.fixture
def base(tmp_path):
    return open_checkpoint(training.save(tmp_path / "base", training.small_snapshot(0)))


@pytest.fixture
def backend(tmp_path):
    return FaultyBackend(LocalBackend(tmp_path / "store"))


def usable(tmp_path):
    store = open_store(tmp_path / "store")
    store.restore(0, tmp_path / "restored")
    training.assert_holds(tmp_path / "restored", training.small_snapshot(0))
    assert check(store.backend, read_data=True).ok


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_while_the_manifest_is_sent_leaves_a_whole_stream_or_none(moment, base, backend, tmp_path):
    effect = Effect.BEFORE if moment == "before" else Effect.AFTER
    backend.add(Fault(operation="create", key_prefix="manifests/", effect=effect, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        create_stream(backend, base)
    if moment == "before":
        create_stream(backend, base)
    usable(tmp_path)


def test_a_manifest_that_lands_late_finds_its_parts(base, backend, tmp_path):
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    backend.add(Fault(operation="create", key_prefix="manifests/", effect=Effect.LATE, error=error))
    with pytest.raises(CommitInDoubt):
        create_stream(backend, base)
    backend.land()
    usable(tmp_path)
    with pytest.raises(StreamExists):
        create_stream(backend, base)


def test_a_failed_upload_leaves_nothing(base, backend, tmp_path):
    for number in range(6):
        backend.add(Fault(operation="write", key_prefix="parts/"))
        if number:
            backend.add()
        with pytest.raises(StorageError):
            create_stream(backend, base)
        assert [info.key for info in backend.inner.list("")] == []
    create_stream(backend, base)
    usable(tmp_path)


def test_a_place_that_overwrites_on_creation_is_refused(base, tmp_path):
    class Careless(LocalBackend):
        __slots__ = ()

        def create(self, key, data):
            self.write(key, data)

    backend = Careless(tmp_path / "store")
    with pytest.raises(StorageError, match="exclusively"):
        create_stream(backend, base)
    assert [info.key for info in backend.list("")] == []


def test_a_place_that_is_taken_is_left_as_it_is(base, backend):
    create_stream(backend, base)
    before = {info.key: info.size for info in backend.inner.list("")}
    with pytest.raises(StreamExists):
        create_stream(backend, base)
    assert {info.key: info.size for info in backend.inner.list("")} == before


@pytest.mark.parametrize("hash_name", ["xxh3-128", "blake3"])
@pytest.mark.parametrize("upload_base", [True, False])
def test_the_stream_is_what_was_asked_for(hash_name, upload_base, base, backend):
    told = []
    store = create_stream(
        backend, base, hash_name=hash_name, upload_base=upload_base, progress=lambda *call: told.append(call)
    )
    again = store_at(backend)
    assert again.base == store.base
    assert again.hash.name == hash_name
    assert again.base.anchored == upload_base
    assert set(again.base.components) == ({"model", "files", "headers"} if upload_base else {"model"})
    assert told[-1] == ("base", base.schema.nbytes, base.schema.nbytes)


def test_weights_of_any_name_that_an_index_gives_are_no_other_files(tmp_path):
    directory = training.save(tmp_path / "base", training.small_snapshot(0))
    (directory / "model.safetensors").rename(directory / "weights.dat")
    index = {"weight_map": dict.fromkeys(training.small_snapshot(0), "weights.dat")}
    (directory / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    opened = open_checkpoint(directory)
    assert "weights.dat" not in opened.other_files
    create_stream(LocalBackend(tmp_path / "store"), opened)
    store = open_store(tmp_path / "store")
    for base in (None, directory):
        store.restore(0, tmp_path / f"restored-{base is None}", base=base)
        restored = tmp_path / f"restored-{base is None}" / "weights.dat"
        assert restored.read_bytes() == (directory / "weights.dat").read_bytes()


def test_the_longest_names_are_restored(tmp_path):
    directory = training.save(tmp_path / "base", training.small_snapshot(0))
    name = "k" * 255
    (directory / name).write_text("kept")
    create_stream(LocalBackend(tmp_path / "store"), open_checkpoint(directory))
    open_store(tmp_path / "store").restore(0, tmp_path / ("r" * 255))
    assert (tmp_path / ("r" * 255) / name).read_text() == "kept"
