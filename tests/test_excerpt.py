"""What is read of parts by ranges, and how it is counted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from deltastore.digest import hasher
from deltastore.excerpt import Excerpts


class SlowlyCounted(Excerpts):
    """Others have their turn between a look at the count and a new one."""

    _count = 0

    @property
    def fetched_bytes(self):
        seen = self._count
        time.sleep(0.001)
        return seen

    @fetched_bytes.setter
    def fetched_bytes(self, count):
        self._count = count


def test_what_several_threads_fetch_is_all_counted():
    backend = SimpleNamespace(read_range=lambda _key, start, end: bytes(end - start))
    excerpts = SlowlyCounted(SimpleNamespace(backend=backend, hash=hasher("xxh3-128")), plan=None)
    part = SimpleNamespace(key="part", size=1000)
    sizes = [number % 17 + 1 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        fetched = list(pool.map(lambda size: excerpts._range(part, 0, size), sizes))
    assert [len(data) for data in fetched] == sizes
    assert excerpts.fetched_bytes == sum(sizes)
