from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import reference
from descriptors import open_under
from hypothesis import given
from hypothesis import strategies as st
from reference import safetensors_file

from deltastore.checkpoint import is_safe_path, open_checkpoint
from deltastore.digest import hasher
from deltastore.errors import BaseMismatch, CheckpointError
from deltastore.snapshot import DTYPES, chunk_spans, snapshot_id

XXH3 = hasher("xxh3-128")
INDEX = "model.safetensors.index.json"

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def some_tensors() -> Tensors:
    """One tensor of every dtype, a scalar, an empty one, and one of more than two chunks."""
    rng = np.random.default_rng(11)
    tensors: Tensors = {f"of.{name.lower()}": (name, (2, 4), rng.bytes(dtype.bits)) for name, dtype in DTYPES.items()}
    tensors["scalar"] = ("F32", (), rng.bytes(4))
    tensors["empty"] = ("BF16", (0, 7), b"")
    tensors["large"] = ("BF16", ((1 << 21) + 50,), rng.bytes((4 << 20) + 100))
    return tensors


def save_whole(root: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(safetensors_file(tensors, {"format": "pt"}))


def save_shards(root: Path, tensors: Tensors, count: int, metadata: object = None) -> list[str]:
    root.mkdir(parents=True, exist_ok=True)
    shards: list[Tensors] = [{} for _ in range(count)]
    for i, (name, tensor) in enumerate(reversed(tensors.items())):
        shards[i % count][name] = tensor
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        save_whole(root, shard, name)
        weight_map.update(dict.fromkeys(shard, name))
    write_index(root, weight_map, metadata)
    return names


def write_index(root: Path, weight_map: object, metadata: object = None) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / INDEX).write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}))


SMALL: Tensors = {"a": ("U8", (4,), b"abcd"), "b": ("BF16", (2,), b"wxyz")}


def refused(root: Path, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root)
    assert caught.value.key
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def test_a_single_file_is_opened_with_every_dtype_and_every_byte(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_whole(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert [spec.name for spec in checkpoint.schema] == sorted(tensors)
    for name, (dtype, shape, data) in tensors.items():
        spec = checkpoint.schema[name]
        assert (spec.dtype, spec.shape) == (dtype, shape)
        found = checkpoint.tensor(name)
        assert found.tobytes() == data
        assert not found.flags.writeable
        chunks = b"".join(checkpoint.chunk(spec, chunk).tobytes() for chunk in range(spec.chunks))
        assert chunks == data


def test_one_file_of_any_name_is_a_checkpoint_and_the_usual_name_wins(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "weights.safetensors")
    assert len(open_checkpoint(tmp_path).schema) == 2
    save_whole(tmp_path, {"c": ("U8", (1,), b"c")})
    assert [spec.name for spec in open_checkpoint(str(tmp_path)).schema] == ["c"]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("hash_name", ["xxh3-128", "blake3"])
def test_digests_are_those_of_the_format_however_files_are_split(tmp_path: Path, hash_name: str, workers: int) -> None:
    tensors = some_tensors()
    save_whole(tmp_path / "whole", tensors)
    save_shards(tmp_path / "three", tensors, 3, {"total_size": 1})
    save_shards(tmp_path / "five", dict(sorted(tensors.items())), 5)
    function = hasher(hash_name)
    leaves = [leaf for name in sorted(tensors) for leaf in reference.leaves(tensors[name][2], hash_name)]
    for name in ("whole", "three", "five"):
        checkpoint = open_checkpoint(tmp_path / name)
        done: list[int] = []
        table = checkpoint.digests(function, workers=workers, progress=done.append)
        assert [row.tobytes() for row in table] == leaves
        assert sum(done) == checkpoint.schema.nbytes
        found = snapshot_id(checkpoint.schema, table, function)
        assert found == reference.snapshot_id(tensors, hash_name)


@pytest.mark.parametrize("workers", [1, 4])
def test_digests_of_a_tensor_of_many_chunks_stand_in_order(tmp_path: Path, workers: int) -> None:
    data = np.arange(37 * (1 << 20) // 8 + 3, dtype="<u8").tobytes()
    save_whole(tmp_path, {"a": ("U8", (3,), b"abc"), "m": ("U64", (len(data) // 8,), data), "z": ("U8", (1,), b"z")})
    checkpoint = open_checkpoint(tmp_path)
    table = checkpoint.digests(XXH3, workers=workers)
    expected = [reference.leaves(content) for content in (b"abc", data, b"z")]
    assert [row.tobytes() for row in table] == [leaf for leaves in expected for leaf in leaves]


def test_shards_hold_tensors_that_the_index_does_not_need_to_name(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors"})
    assert len(open_checkpoint(tmp_path).schema) == 2


def test_other_files_are_those_that_are_neither_weights_nor_hidden(tmp_path: Path) -> None:
    save_shards(tmp_path, SMALL, 2)
    kept = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "README",
        "assets/vocab.txt",
        "assets/deep/er/notes.md",
        INDEX,
    ]
    left = [
        "pytorch_model.bin",
        "model.pt",
        "optimizer.pth",
        "x.ckpt",
        "model.GGUF",
        "old.safetensors",
        "original/consolidated.safetensors",
        "onnx/model.onnx",
        ".gitattributes",
        ".cache/huggingface/x.json",
        "assets/.hidden/y.json",
        "half.tmp",
    ]
    for name in (*kept[:-1], *left):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.other_files) == sorted(kept)
    assert checkpoint.read_other_file("assets/vocab.txt") == b"assets/vocab.txt"
    (tmp_path / "assets/vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"vocab\.txt"):
        checkpoint.read_other_file("assets/vocab.txt")


def test_hidden_weight_files_are_not_weights(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, ".hidden.safetensors")
    refused(tmp_path, "no safetensors file")
    save_whole(tmp_path, SMALL)
    assert len(open_checkpoint(tmp_path).schema) == 2


def test_links_to_files_are_followed_as_hubs_lay_them_out(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    save_whole(blobs, SMALL, "0f3a")
    (blobs / "77aa").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0f3a")
    (snapshot / "config.json").symlink_to("../../blobs/77aa")
    (tmp_path / "link").symlink_to(snapshot)
    for root in (snapshot, tmp_path / "link"):
        checkpoint = open_checkpoint(root)
        assert checkpoint.tensor("a").tobytes() == b"abcd"
        assert checkpoint.other_files == ("config.json",)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize("missing", [1, 3, 7, 8, 9, 100])
def test_a_half_written_file_is_refused_with_its_path(tmp_path: Path, missing: int) -> None:
    data = safetensors_file(SMALL)
    for end in {len(data) - missing, missing}:
        (tmp_path / "model.safetensors").write_bytes(data[:end])
        error = refused(tmp_path, "model.safetensors")
        assert error.key == str(tmp_path / "model.safetensors")


def test_a_file_with_bytes_after_its_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(SMALL) + b"\0")
    refused(tmp_path, "model.safetensors")


def test_a_half_written_or_missing_or_empty_shard_is_refused_with_its_path(tmp_path: Path) -> None:
    first, second = save_shards(tmp_path, SMALL, 2)
    whole = (tmp_path / second).read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], b""):
        (tmp_path / second).write_bytes(data)
        assert refused(tmp_path, second).key == str(tmp_path / second)
    (tmp_path / second).unlink()
    assert refused(tmp_path, second).key == str(tmp_path / second)
    assert (tmp_path / first).exists()


def test_a_damaged_header_is_refused_with_its_path(tmp_path: Path) -> None:
    data = bytearray(safetensors_file(SMALL))
    data[data.index(b"BF16") : data.index(b"BF16") + 4] = b"XX16"
    (tmp_path / "model.safetensors").write_bytes(data)
    error = refused(tmp_path, "model.safetensors", "XX16")
    assert error.hint


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "sub/x.safetensors",
        "/etc/x.safetensors",
        "./x.safetensors",
        ".hidden.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        "C:x.safetensors",
        "x\n.safetensors",
        "x\0.safetensors",
        "x" * 300,
    ],
)
def test_an_index_that_leads_out_of_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "model"
    save_whole(tmp_path, SMALL, "x.safetensors")
    save_whole(root / "sub", SMALL, "x.safetensors")
    write_index(root, {"a": name})
    assert refused(root, "no file beside it").key == str(root / INDEX)


def test_an_index_that_is_wrong_about_a_tensor_is_refused(tmp_path: Path) -> None:
    first, second = save_shards(tmp_path, SMALL, 2)
    write_index(tmp_path, {"a": first, "b": first})
    refused(tmp_path, INDEX)
    write_index(tmp_path, {"a": first, "b": second, "c": second})
    refused(tmp_path, INDEX)
    write_index(tmp_path, {"a": second, "b": second})
    refused(tmp_path, INDEX)
    held = {"b": first, "a": second}  # the last tensor stands in the first shard
    write_index(tmp_path, held)
    assert len(open_checkpoint(tmp_path).schema) == 2
    write_index(tmp_path, {"a": first, "b": second})
    refused(tmp_path, INDEX)


def test_a_tensor_in_two_shards_is_refused_whichever_the_index_names(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "one.safetensors")
    save_whole(tmp_path, {"b": SMALL["b"], "c": ("U8", (1,), b"c")}, "two.safetensors")
    for owner in ("one.safetensors", "two.safetensors"):
        write_index(tmp_path, {"a": "one.safetensors", "b": owner, "c": "two.safetensors"})
        refused(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "one.safetensors")
    save_whole(tmp_path, {"c": ("U8", (1,), b"c")}, "two.safetensors")
    assert refused(tmp_path, "no index", "one.safetensors").hint


def test_one_of_several_shards_without_an_index_is_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "model-00001-of-00002.safetensors")
    assert refused(tmp_path, "one of 2 shards", "no index").hint


def test_the_only_shard_needs_no_index(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL, "model-00001-of-00001.safetensors")
    assert len(open_checkpoint(tmp_path).schema) == 2


def test_several_indexes_are_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, SMALL, 2)
    (tmp_path / "other.safetensors.index.json").write_text('{"weight_map":{}}')
    refused(tmp_path, "several indexes")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"weight_map":[]}',
        '{"weight_map":{"a":1}}',
        '{"weight_map":{"a":null}}',
        '{"weight_map":',
        '{"weight_map":' * 50_000,
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    save_whole(tmp_path, SMALL)
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, INDEX)


def test_an_index_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map":{"a\xff":"b"}}')
    refused(tmp_path, INDEX)


def test_an_empty_directory_a_missing_one_and_a_file_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "no safetensors file").hint
    assert refused(tmp_path / "missing", "missing").hint
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file", "file").hint


def test_a_directory_in_the_place_of_a_weight_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL)
    (tmp_path / "model.safetensors").chmod(0)
    if os.access(tmp_path / "model.safetensors", os.R_OK):
        pytest.skip("This user reads everything.")
    refused(tmp_path, "cannot be read")


def test_a_checkpoint_without_bytes_is_one(tmp_path: Path) -> None:
    save_whole(tmp_path, {"e": ("F32", (0,), b"")})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.digests(XXH3).shape == (0, 16)
    assert checkpoint.tensor("e").size == 0


@pytest.mark.parametrize(
    "name", ["config.json", "a/b/c.txt", "a b.txt", "é.txt", "中/文", "a..b", "x.", "a" * 255, "~", "-rf"]
)
def test_ordinary_relative_names_are_safe(name: str) -> None:
    assert is_safe_path(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "/a",
        "//a",
        "a/",
        "a//b",
        "a/./b",
        "./a",
        "../a",
        "a/..",
        "a/../b",
        ".a",
        "a/.b",
        "a\\b",
        "a:b",
        "a*",
        'a"',
        "a<b",
        "a>b",
        "a|b",
        "a?",
        "a\0",
        "a\nb",
        "a\x1f",
        "a\x7f",
        "a" * 256,
        "é" * 128,
        "/".join(["a" * 200] * 6),
        "\udcff",
        "a/\ud800.txt",
    ],
)
def test_names_that_could_lead_elsewhere_are_not_safe(name: str) -> None:
    assert not is_safe_path(name)


@given(st.text(max_size=30))
def test_a_safe_name_stays_below_its_directory(name: str) -> None:
    if not is_safe_path(name):
        return
    path = Path(os.path.normpath(Path("/root/x") / name))
    assert path.is_relative_to("/root/x")
    assert path != Path("/root/x")
    assert path.relative_to("/root/x").as_posix() == name


def test_a_file_whose_name_is_not_unicode_is_left_behind(tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL)
    try:
        (tmp_path / os.fsdecode(b"\xe9t\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("This file system takes Unicode names only.")
    assert open_checkpoint(tmp_path).other_files == ()


@pytest.mark.parametrize("more", [0, 1])
def test_a_large_file_of_whatever_name_is_left_behind(more: int, tmp_path: Path) -> None:
    save_whole(tmp_path, SMALL)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with (tmp_path / "model.onnx_data").open("wb") as stream:
        stream.truncate((128 << 20) + more)
    opened = open_checkpoint(tmp_path)
    large = ("model.onnx_data",)
    assert opened.other_files == (("tokenizer.json",) if more else (*large, "tokenizer.json"))
    assert opened.left_behind() == (large if more else ())


def test_a_link_that_is_swapped_later_leads_to_one_checkpoint_to_the_end(tmp_path: Path) -> None:
    for name in ("old", "new"):
        save_shards(tmp_path / name, SMALL, 2)
        (tmp_path / name / "config.json").write_text(name)
    (tmp_path / "link").symlink_to("old")
    opened = open_checkpoint(tmp_path / "link")
    (tmp_path / "draft").symlink_to("new")
    (tmp_path / "draft").replace(tmp_path / "link")
    assert opened.read_other_file("config.json") == b"old"


def test_a_file_that_was_cut_after_it_was_opened_is_an_error_and_no_signal(tmp_path: Path) -> None:
    save_whole(tmp_path, some_tensors())
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 4096)
    *_, last = chunk_spans(checkpoint.schema, np.arange(checkpoint.schema.chunks))
    with pytest.raises(BaseMismatch, match="it was cut") as caught:
        checkpoint.read(last, np.empty(last.nbytes, np.uint8))
    assert caught.value.tensors
    with pytest.raises(BaseMismatch, match="it was cut"):
        checkpoint.digests(XXH3, workers=2)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_of_several_tensors_read_at_once_the_one_that_is_missing_is_named(
    tmp_path: Path, name: str, shards: int
) -> None:
    tensors: Tensors = {each: ("U8", (1000,), bytes(1000)) for each in "abc"}
    if shards == 1:  # one stretch, of which the first bytes are there
        save_whole(tmp_path, tensors)
    else:
        save_shards(tmp_path, tensors, shards)
    checkpoint = open_checkpoint(tmp_path)
    file, start = checkpoint.places.tensor(checkpoint.schema.position(name))
    os.truncate(tmp_path / checkpoint.layout.files[file].name, start + 500)
    (span,) = chunk_spans(checkpoint.schema, np.arange(checkpoint.schema.chunks))
    with pytest.raises(BaseMismatch, match="it was cut") as caught:
        checkpoint.read(span, np.empty(span.nbytes, np.uint8))
    assert caught.value.tensors == (name,)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_whole(tmp_path, SMALL)
    checkpoint = open_checkpoint(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(BaseMismatch, match="Input/output error"):
        checkpoint.digests(XXH3)


def test_files_are_closed_with_the_checkpoint_and_views_outlive_it(tmp_path: Path) -> None:
    save_shards(tmp_path, SMALL, 2)
    checkpoint = open_checkpoint(tmp_path)
    assert len(open_under(tmp_path)) == 2
    tensor = checkpoint.tensor("a")
    del checkpoint
    gc.collect()
    assert not open_under(tmp_path)
    assert tensor.tobytes() == b"abcd"
    assert not tensor.flags.writeable
