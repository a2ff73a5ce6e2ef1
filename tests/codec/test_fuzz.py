"""The quick, seeded run of ``fuzzing`` (``make fuzz`` is the long one)."""

from __future__ import annotations

import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from fuzzing.run import DECODERS, fuzz, peak_memory

if TYPE_CHECKING:
    from fuzzing.decoder import Decoder

#: For each of the eighteen decoders: about two million in all.
BYTES = int(os.environ.get("DELTASTORE_FUZZ_BYTES", "120000"))


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_any_bytes_are_an_error_of_ours_or_a_correct_result(decoder: Decoder) -> None:
    fuzz(decoder, 5000, seed=1)  # what is loaded once is not counted
    before = peak_memory()
    tracemalloc.start()
    try:
        outcome = fuzz(decoder, BYTES, seed=2)
    finally:
        tracemalloc.stop()
    assert peak_memory() - before < 64 << 20
    assert outcome.fed >= BYTES
    assert 0 < outcome.accepted < outcome.cases  # both ends are reached
