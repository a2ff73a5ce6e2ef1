from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import reference

from deltastore.digest import hasher
from deltastore.errors import CorruptObject
from deltastore.manifest import encode_manifest, manifest_key
from deltastore.reader import Store, open_store

GOLDEN = Path(__file__).parent / "golden" / "1" / "xxh3-128"
XXH3 = hasher("xxh3-128")
METADATA = {"format": "deltastore.digests/1", "component": "model"}


def store_with_table(tmp_path: Path, data: bytes) -> Store:
    """Return a store whose base names ``data`` as its digest table, with the right size and digest."""
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    base = open_store(tmp_path / "store").base
    table = base.model.digests
    assert table is not None
    (tmp_path / "store" / table.key).write_bytes(data)
    table = msgspec.structs.replace(table, size=len(data), digest=XXH3.of(data))
    components = {**base.components, "model": msgspec.structs.replace(base.model, digests=table)}
    changed = msgspec.structs.replace(base, components=components)
    (tmp_path / "store" / manifest_key(0)).write_bytes(encode_manifest(changed, hash_function=XXH3))
    return open_store(tmp_path / "store")


def golden_leaves() -> bytes:
    (path,) = (GOLDEN / "store").glob("parts/0000000000/*/model-digests.safetensors")
    return path.read_bytes()[-16 * 10 :]


def table_file(metadata: Any = METADATA, **tensors: Any) -> bytes:
    leaves = golden_leaves()
    return reference.safetensors_file(tensors or {"digests": ("U8", (10, 16), leaves)}, metadata)


def test_the_digest_table_of_the_format_is_read(tmp_path: Path) -> None:
    (path,) = (GOLDEN / "store").glob("parts/0000000000/*/model-digests.safetensors")
    assert path.read_bytes() == table_file()
    table = store_with_table(tmp_path, table_file()).base_digests()
    assert table.shape == (10, 16)
    assert table.tobytes() == golden_leaves()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(table_file()[:-1], id="a byte short"),
        pytest.param(table_file() + b"\0", id="a byte long"),
        pytest.param(table_file(digests=("U8", (9, 16), golden_leaves()[16:])), id="a row short"),
        pytest.param(table_file(digests=("U8", (5, 32), golden_leaves())), id="another shape"),
        pytest.param(table_file(digests=("I8", (10, 16), golden_leaves())), id="another dtype"),
        pytest.param(table_file(digests=("U16", (10, 16), golden_leaves() * 2)), id="a wider dtype"),
        pytest.param(table_file(digest=("U8", (10, 16), golden_leaves())), id="another name"),
        pytest.param(table_file(None), id="no metadata"),
        pytest.param(table_file({**METADATA, "component": "files"}), id="another component"),
        pytest.param(table_file({**METADATA, "format": "deltastore.digests/2"}), id="another format"),
        pytest.param(table_file(digests=("U8", (10, 16), golden_leaves()[::-1])), id="other digests"),
    ],
)
def test_a_table_that_is_not_that_of_the_base_is_refused_with_its_key(tmp_path: Path, data: bytes) -> None:
    store = store_with_table(tmp_path, data)
    table = store.base.model.digests
    assert table is not None
    with pytest.raises(CorruptObject) as caught:
        store.base_digests()
    assert caught.value.key == table.key


def test_each_flipped_bit_of_the_digests_is_refused(tmp_path: Path) -> None:
    leaves = golden_leaves()
    for bit in np.random.default_rng(8).permutation(8 * len(leaves))[:20].tolist():
        damaged = bytearray(leaves)
        damaged[bit // 8] ^= 1 << (bit % 8)
        store = store_with_table(tmp_path / str(bit), table_file(digests=("U8", (10, 16), bytes(damaged))))
        with pytest.raises(CorruptObject, match="does not hold"):
            store.base_digests()
