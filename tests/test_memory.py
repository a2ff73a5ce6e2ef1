from __future__ import annotations

import numpy as np
import pytest

from deltastore.memory import ALIGNMENT, aligned_memory


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4096, (2 << 20) + 1])
def test_memory_begins_where_a_cache_line_does(nbytes: int) -> None:
    kept = [aligned_memory(nbytes) for _ in range(5)]
    assert all(memory.ctypes.data % ALIGNMENT == 0 for memory in kept)
    assert all(memory.shape == (nbytes,) and memory.dtype == np.uint8 and memory.flags.writeable for memory in kept)
