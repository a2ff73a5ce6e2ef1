"""The quick, seeded run of ``fuzzing`` (``make fuzz`` is the long one)."""

from __future__ import annotations

import os
import tracemalloc

import fuzzing
import pytest

#: For each of the twelve decoders: about a million and a half in all.
BYTES = int(os.environ.get("DELTASTORE_FUZZ_BYTES", "120000"))


@pytest.mark.parametrize("decoder", fuzzing.DECODERS, ids=lambda decoder: decoder.name)
def test_any_bytes_are_an_error_of_ours_or_a_correct_result(decoder: fuzzing.Decoder) -> None:
    fuzzing.fuzz(decoder, 5000, seed=1)  # what is loaded once is not counted
    before = fuzzing.peak_memory()
    tracemalloc.start()
    try:
        outcome = fuzzing.fuzz(decoder, BYTES, seed=2)
    finally:
        tracemalloc.stop()
    assert fuzzing.peak_memory() - before < 64 << 20
    assert outcome.fed >= BYTES
    assert 0 < outcome.accepted < outcome.cases  # both ends are reached
