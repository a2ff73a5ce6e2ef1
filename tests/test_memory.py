from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from deltastore.memory import ALIGNMENT, aligned_memory, last_cache_bytes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4096, (2 << 20) + 1])
def test_memory_begins_where_a_cache_line_does(nbytes: int) -> None:
    kept = [aligned_memory(nbytes) for _ in range(5)]
    assert all(memory.ctypes.data % ALIGNMENT == 0 for memory in kept)
    assert all(memory.shape == (nbytes,) and memory.dtype == np.uint8 and memory.flags.writeable for memory in kept)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({}, None),
        ({"index0": "32K", "index2": "512K", "index3": "8192K"}, 8 << 20),
        ({"index0": "32K", "index3": ""}, 32 << 10),
        ({"index0": "what?"}, None),
    ],
)
def test_the_last_cache_is_as_large_as_the_system_tells(
    tmp_path: Path, sizes: dict[str, str], found: int | None
) -> None:
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == found


def test_caches_that_nobody_tells_of_are_not_known(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path / "none") is None
    (tmp_path / "index0").mkdir()
    assert last_cache_bytes(tmp_path) is None
