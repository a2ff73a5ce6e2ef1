from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deltastore.shares import Shares, encoding_bytes
from deltastore.snapshot import CHUNK_BYTES

LEAST = 2 * CHUNK_BYTES


@given(st.integers(0, 1 << 36), st.integers(1, 64), st.integers(0, 64 << 20))
def test_shares_are_small_at_both_ends_and_never_pass_the_limit(nbytes: int, workers: int, most: int) -> None:
    shares = Shares(nbytes, workers=workers, most=most)
    sizes, left = [], nbytes
    while left > 0 and len(sizes) < 3000:
        sizes.append(shares.size)
        shares.take(sizes[-1])
        left -= sizes[-1]
    assert all(LEAST <= size <= max(most, LEAST) for size in sizes)
    if sizes:
        top = sizes.index(max(sizes))
        assert sizes[0] == LEAST
        assert all(size <= following for size, following in pairwise(sizes[: top + 1]))
        assert all(following <= size for size, following in pairwise(sizes[top:]))
    if workers > 1 and left <= 0 and len(sizes) > 1:
        # Whoever takes the last share keeps the others waiting no longer than for two chunks.
        assert sizes[-1] == LEAST


def test_more_than_was_announced_is_cut_into_the_least_shares() -> None:
    shares = Shares(CHUNK_BYTES, workers=2)
    for _ in range(5):
        shares.take(CHUNK_BYTES)
        assert shares.size == LEAST


@given(st.integers(1, 64), st.floats(0, 1.1))
def test_what_waits_is_bounded_whatever_it_comes_to(workers: int, come_to: float) -> None:
    most = encoding_bytes(come_to, workers=workers)
    assert 4 << 20 <= most <= 32 << 20
    if most > 4 << 20:
        assert (workers + 1) * most * come_to <= 32 << 20
        assert (workers + 1) * most <= 256 << 20
