"""Stores that a release wrote once: every later one reads them to the same bytes. The files are never made anew.

Each store has two shards with tensors of every element width, one of them of two chunks, and five versions: sparse,
dense, full, nothing changed, mixed; from format 2 on also contextual chunks, and an anchor (``make.py``).
``expected.json`` holds the snapshot ids and the SHA-256 of every tensor.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import reference

from deltastore.checkpoint import open_checkpoint
from deltastore.digest import hasher
from deltastore.reader import Store, open_store
from deltastore.record import FORMATS
from deltastore.snapshot import snapshot_id

STORES = sorted(Path(__file__).parent.glob("[0-9]*/*/expected.json"))
VERSIONS = range(6)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=STORES, ids=lambda path: f"format {path.parent.parent.name} {path.parent.name}")
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a copy of a golden store and what is expected of it."""
    shutil.copytree(request.param.parent / "store", tmp_path / "store")
    return tmp_path / "store", json.loads(request.param.read_bytes())


def assert_is_version(directory: Path, expected: dict[str, Any], version: int) -> None:
    record = expected["versions"][version]
    checkpoint = open_checkpoint(directory)
    found = {spec.name: sha256(checkpoint.tensor(spec.name).tobytes()) for spec in checkpoint.schema}
    assert found == record["sha256"]
    function = hasher(expected["hash"])
    assert snapshot_id(checkpoint.schema, checkpoint.digests(function), function) == record["snapshot_id"]
    assert {name: sha256(checkpoint.read_other_file(name)) for name in checkpoint.other_files} == expected["files"]
    assert [file.name for file in checkpoint.layout.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def restored(store: Store, version: int, directory: Path, base: Path | None = None) -> Path:
    store.restore(version, directory, base=base)
    return directory


@pytest.mark.parametrize("number", sorted(FORMATS))
def test_there_is_a_golden_store_for_each_hash_of_each_format(number: int) -> None:
    found = [path for path in STORES if path.parent.parent.name == str(number)]
    assert [path.parent.name for path in found] == ["blake3", "xxh3-128"]
    for path in found:
        manifests = [open_store(path.parent / "store").manifest(version) for version in VERSIONS]
        assert {manifest.format for manifest in manifests} == {number}


def test_the_anchor_of_a_golden_store_is_read(tmp_path: Path) -> None:
    for path in (path for path in STORES if path.parent.parent.name != "1"):
        store = open_store(path.parent / "store")
        assert [step.kind for step in store.plan(None, 3).steps] == ["anchor"]
        directory = restored(store, 3, tmp_path / path.parent.name)
        assert_is_version(directory, json.loads(path.read_bytes()), 3)


def test_the_history_of_a_golden_store_is_read(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    history = open_store(path).log()
    assert [manifest.snapshot_id for manifest in history] == [record["snapshot_id"] for record in expected["versions"]]
    assert [manifest.step for manifest in history] == [None, 10, 20, 30, 40, 50]
    assert history[2].metadata == {"loss": 0.5}
    assert [manifest.model.invertible for manifest in history[1:]] == [True, True, False, True, False]


def test_every_version_of_a_golden_store_is_restored_from_its_anchor(
    golden: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, expected = golden
    store = open_store(path)
    for version in VERSIONS:
        directory = restored(store, version, tmp_path / f"v{version}")
        assert_is_version(directory, expected, version)


def test_a_golden_store_leads_from_version_to_version_forward_and_back(
    golden: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, expected = golden
    store = open_store(path)
    held = restored(store, 0, tmp_path / "first")
    for number, version in enumerate([1, 2, 1, 0, 5, 4, 3]):
        held = restored(store, version, tmp_path / f"next{number}", held)
        assert_is_version(held, expected, version)


# The same stores, read with nothing of the package.


def read_safetensors(data: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    body = data[8 + size :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}, metadata


def checked(path: Path, record: dict[str, Any]) -> bytes:
    data = (path / record["key"]).read_bytes()
    name, _, digest = record["digest"].partition(":")
    assert len(data) == record["size"]
    assert reference.HASHES[name](data).hex() == digest
    return data


def test_the_reference_reads_a_golden_store_to_the_expected_bytes(golden: tuple[Path, dict[str, Any]]) -> None:
    path, expected = golden
    hash_name = expected["hash"]
    digest = reference.HASHES[hash_name]
    size = len(digest(b""))
    tensors: list[list[Any]] = []
    content: dict[str, bytearray] = {}
    for version in VERSIONS:
        line, seal, rest = (path / f"manifests/{version:010d}.json").read_bytes().split(b"\n")
        assert seal.decode() == f"{hash_name}:{digest(line).hex()}"
        assert rest == b""
        manifest = json.loads(line)
        assert line.decode() == json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if version == 0:
            schema = json.loads(checked(path, manifest["stream"]["schemas"]["model"]))
            tensors = schema["tensors"]
            sizes = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I32": 32, "F8_E4M3": 8, "F4": 4}
            for name, dtype, shape, _ in tensors:
                bits = sizes[dtype]
                for dimension in shape:
                    bits *= dimension
                content[name] = bytearray(bits // 8)
        for record in manifest["components"]["model"]["parts"]:
            columns, metadata = read_safetensors(checked(path, record))
            assert metadata == {
                "format": "deltastore.part/1",
                "stream_id": manifest["stream_id"],
                "version": str(version),
                "attempt_id": manifest["attempt_id"],
                "component": "model",
            }
            apply(columns, tensors, content, hash_name, anchor=version == 0)
            assert len(columns["old_digest"]) == len(columns["new_digest"]) == size * record["chunks"]
        record = expected["versions"][version]
        assert {name: sha256(bytes(data)) for name, data in content.items()} == record["sha256"]
        snapshot = {name: (dtype, tuple(shape), bytes(content[name])) for name, dtype, shape, _ in tensors}
        assert reference.snapshot_id(snapshot, hash_name) == record["snapshot_id"]
        assert manifest["components"]["model"]["snapshot_id"] == record["snapshot_id"]


def apply(
    columns: dict[str, bytes],
    tensors: list[list[Any]],
    content: dict[str, bytearray],
    hash_name: str,
    *,
    anchor: bool,
) -> None:
    """Apply a part's rows to the tensors' bytes, checking both digests of each chunk."""
    digest = reference.HASHES[hash_name]
    size = len(digest(b""))
    count = len(columns["encoding"])
    tensor, chunk, changed, length = (
        struct.unpack(f"<{count}I", columns[name]) for name in ("tensor", "chunk", "changed", "length")
    )
    position = 0
    for row in range(count):
        name, _, _, width = tensors[tensor[row]]
        start = chunk[row] * reference.CHUNK
        old = bytes(content[name][start : start + reference.CHUNK])
        payload = columns["payload"][position : position + length[row]]
        position += length[row]
        new = reference.decode(old, columns["encoding"][row], changed[row], payload, width)
        old_digest, new_digest = (
            columns[column][row * size : (row + 1) * size] for column in ("old_digest", "new_digest")
        )
        assert old_digest == (bytes(size) if anchor else digest(old))
        assert new_digest == digest(new)
        content[name][start : start + reference.CHUNK] = new
    assert position == len(columns["payload"])
