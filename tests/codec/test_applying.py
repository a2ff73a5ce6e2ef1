"""Applying many chunks at once: what one at a time gives, proven, and whatever is wrong is told with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltastore.codec import Encoding, applying
from deltastore.codec.applying import ChunkDecoder, Chunks, Steps
from deltastore.codec.chunk import ChunkEncoder
from deltastore.codec.problems import PROBLEMS
from deltastore.digest import hasher
from deltastore.memory import address_of

if TYPE_CHECKING:
    from deltastore.digest import Hasher

GUARD = 0xA5
HASHES = {"xxh3-128": hasher("xxh3-128"), "blake3": hasher("blake3")}
#: How many elements change from one version of a chunk to the next, and so how that is encoded.
SHARES = {"none": 0.0, "sparse": 0.02, "contextual": 0.2, "dense": 0.9, "full": 2.0}


@dataclass
class Case:
    """Chunks in one buffer, ``GUARD`` around each: their old and new bytes, and the steps between."""

    chunks: Chunks
    steps: Steps
    payloads: list[np.ndarray]
    old: np.ndarray
    new: np.ndarray
    digests: np.ndarray

    def build(self, decoder: ChunkDecoder, **changed: Any) -> tuple[np.ndarray, Any, np.ndarray]:
        out, spent = self.old.copy(), np.zeros(4, np.int64)
        given_words = {"chunks": self.chunks, "steps": self.steps, "digests": self.digests} | changed
        return out, decoder.build(out, *given_words.values(), spent), spent


def change(old: np.ndarray, kind: str, width: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "full":
        return rng.integers(0, 256, old.size, np.uint8)
    new = old.copy()
    values = new.view(f"<u{width}")
    values[rng.random(values.size) < SHARES[kind]] += 1
    return new


def make(
    sizes: list[tuple[int, int]], kinds: list[str], hash_function: Hasher, *, seed: int = 0, level: str = "max"
) -> Case:
    """Make a case of chunks of so many elements of a width each, and a step of each kind for each."""
    rng = np.random.default_rng(seed)
    encoder = ChunkEncoder(level)
    starts, stops, end = [], [], 64
    for elements, width in sizes:
        starts.append(end)
        stops.append(end + elements * width)
        end = -(-(stops[-1] + 16) // 8) * 8
    old = np.full(end + 64, GUARD, np.uint8)
    new = old.copy()
    numbers = np.cumsum(rng.integers(1, 4, len(sizes))) + 5
    rows, payloads = [], []
    for number, start, stop, (_, width) in zip(numbers.tolist(), starts, stops, sizes, strict=True):
        # The high halves of a few values only, as weights have them: contexts pay then.
        state = np.resize(rng.integers(0, 256, 64, np.uint8), stop - start)
        old[start:stop] = state
        for place, kind in enumerate(kinds):
            after = change(state, kind, width, rng)
            inverse = kind != "full" and place % 2 == 1
            encoded = encoder.change(*((after, state) if inverse else (state, after)), width=width)
            if encoded is None or (inverse and encoded.encoding == Encoding.FULL):
                continue
            rows.append((number, len(payloads), encoded.encoding, encoded.changed, inverse))
            payloads.append(np.frombuffer(b"before" + encoded.payload + b"behind", np.uint8))
            state = after
        new[start:stop] = state
    count = len(rows)
    table = np.array(rows, np.int64).reshape(count, 5)
    steps = Steps(
        table[:, 0].copy(),
        table[:, 1:4].astype(np.uint32),
        np.full(count, 6),
        np.array([payload.size - 6 for payload in payloads], np.int64),
        np.array(
            [(address_of(payload), payload.size, row[4]) for payload, row in zip(payloads, rows, strict=True)], np.int64
        ).reshape(count, 3),
    )
    digests = np.zeros((int(numbers[-1]) + 1, hash_function.size), np.uint8)
    for number, start, stop in zip(numbers.tolist(), starts, stops, strict=True):
        digests[number] = np.frombuffer(hash_function.digest(new[start:stop].data), np.uint8)
    widths = np.array([width for _, width in sizes])
    return Case(Chunks(numbers, np.array(starts), np.array(stops), widths), steps, payloads, old, new, digests)


SIZES = st.lists(
    st.tuples(st.one_of(st.integers(1, 40), st.sampled_from([255, 1024, 5000])), st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=5,
)
KINDS = st.lists(st.sampled_from(list(SHARES)), max_size=4)


@given(SIZES, KINDS, st.sampled_from(list(HASHES)), st.integers(0, 2**32 - 1))
@example([(5000, 2), (3, 1), (5000, 2), (7, 8)], ["contextual", "sparse", "contextual", "dense"], "xxh3-128", 1)
@example([(5000, 2), (5000, 2)], ["contextual", "contextual"], "blake3", 2)
@example([(1, 1), (3, 1), (1, 8)], [], "xxh3-128", 3)
def test_all_chunks_are_built_and_nothing_else_is_written(
    sizes: list[tuple[int, int]], kinds: list[str], hash_name: str, seed: int
) -> None:
    case = make(sizes, kinds, HASHES[hash_name], seed=seed)
    out, wrong, spent = case.build(ChunkDecoder(HASHES[hash_name]))
    assert wrong is None
    assert (out == case.new).all()
    assert spent[1] == (case.steps.stops - case.steps.starts).sum()
    assert spent[3] == (case.chunks.stops - case.chunks.starts).sum()
    assert (spent >= 0).all()


def test_there_is_a_case_of_every_encoding_both_ways() -> None:
    case = make(
        [(5000, 2)] * 3, ["sparse", "sparse", "contextual", "contextual", "dense", "dense", "full"], HASHES["blake3"]
    )
    found = {(int(words[1]), int(case.steps.payloads[words[0], 2])) for words in case.steps.words}
    assert found >= {(Encoding.CONTEXTUAL, 0), (Encoding.CONTEXTUAL, 1), (Encoding.DENSE, 0), (Encoding.DENSE, 1)}
    plain = make([(5000, 4)], ["sparse", "sparse", "full"], HASHES["blake3"])
    assert {(int(words[1]), int(plain.steps.payloads[words[0], 2])) for words in plain.steps.words} == {
        (Encoding.SPARSE, 0),
        (Encoding.SPARSE, 1),
        (Encoding.FULL, 0),
    }


@pytest.mark.parametrize("in_kernels", [True, False])
@pytest.mark.parametrize("chunk", range(4))
def test_a_wrong_digest_is_told_with_its_chunk(chunk: int, in_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_kernels:  # as where the address of the function is not known
        monkeypatch.setattr(applying, "hash_address", lambda _name: 0)
    case = make([(5000, 2), (30, 2), (5000, 2), (400, 2)], ["contextual", "dense"], HASHES["xxh3-128"])
    decoder = ChunkDecoder()
    assert case.build(decoder)[1] is None
    for byte in (0, 15):
        other = case.digests.copy()
        other[case.chunks.numbers[chunk], byte] ^= 1
        _, wrong, _ = case.build(decoder, digests=other)
        assert wrong == (chunk, None, "it has another digest")


@pytest.mark.parametrize("kinds", [["sparse"], ["contextual", "sparse"], ["sparse", "contextual"], ["dense", "full"]])
def test_a_damaged_step_is_told_with_its_place(kinds: list[str]) -> None:
    case = make([(5000, 2), (3, 1), (5000, 2)], kinds, HASHES["xxh3-128"])
    decoder = ChunkDecoder()
    for step, number in enumerate(case.steps.numbers.tolist()):
        stops = case.steps.stops.copy()
        stops[step] -= 1
        _, wrong, _ = case.build(decoder, steps=case.steps._replace(stops=stops))
        assert wrong is not None
        chunk = case.chunks.numbers.tolist().index(number)
        assert (wrong.chunk, wrong.step) == (chunk, step)
        assert wrong.problem in PROBLEMS.values()
    assert case.build(decoder)[1] is None


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        (2, 0, "more changes than it has elements"),
        (2, 31, "more changes than it has elements"),
        (1, 0, "an encoding that does not exist"),
        (1, 5, "an encoding that does not exist"),
        (1, Encoding.CONTEXTUAL, "do not have 16 bits"),
    ],
)
def test_numbers_that_no_chunk_has_are_refused(column: int, value: int, sentence: str) -> None:
    case = make([(30, 4)], ["dense"], HASHES["xxh3-128"])
    words = case.steps.words.copy()
    words[0, column] = value
    _, wrong, _ = case.build(ChunkDecoder(), steps=case.steps._replace(words=words))
    assert wrong is not None
    assert sentence in wrong.problem


def test_a_full_chunk_does_not_lead_backwards() -> None:
    case = make([(30, 4)], ["full"], HASHES["xxh3-128"])
    payloads = case.steps.payloads.copy()
    payloads[:, 2] = 1
    _, wrong, _ = case.build(ChunkDecoder(), steps=case.steps._replace(payloads=payloads))
    assert wrong is not None
    assert "does not lead backwards" in wrong.problem
