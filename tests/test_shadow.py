"""The shadow follows while it encodes; it becomes the committed version, or goes back to the one before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltastore.attempt
import deltastore.shadow
from deltastore.attempt import Attempt
from deltastore.codec import LEVELS, Encoding, taking
from deltastore.codec.taking import TakingEncoder
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, PublishError
from deltastore.intake import Intake
from deltastore.shadow import Shadow
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec
from deltastore.spool import TemporarySpool
from deltastore.storage.local import LocalBackend
from deltastore.tensors import HostBytes, TensorInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.part import Part

XXH3 = hasher("xxh3-128")
SCHEMA = Schema(
    [
        *(TensorSpec(f"norm.{number:02d}", "BF16", (number,)) for number in range(1, 20)),
        *(TensorSpec(f"bias.{number}", "F32", (number,)) for number in (0, 1, 700)),
        TensorSpec("bytes", "U8", (3000,)),
        TensorSpec("large", "BF16", (CHUNK_BYTES,)),
        TensorSpec("wide", "F32", (40_000,)),
    ]
)
Content = dict[str, np.ndarray]


def first(rng: np.random.Generator) -> Content:
    return {spec.name: rng.integers(0, 256, spec.nbytes, np.uint8) for spec in SCHEMA}


def following(rng: np.random.Generator, old: Content) -> Content:
    """Change each tensor in its own way: not at all, a little, much, or into something else altogether."""
    new = {}
    for spec in SCHEMA:
        elements = old[spec.name].view(f"<u{spec.width}").copy()
        share = rng.choice([0, 0.01, 0.5, 1])
        chosen = rng.random(elements.size) < share
        elements[chosen] += rng.integers(1, 3 if rng.random() < 0.7 else 1 << 63, elements.size).astype(elements.dtype)[
            chosen
        ]
        new[spec.name] = elements.view(np.uint8)
    return new


class Bench:
    """A shadow of one snapshot, and an attempt to publish another."""

    def __init__(self, directory: Path, content: Content, level: str = "fast") -> None:
        self.spool = TemporarySpool(directory)
        self.pool = ThreadPoolExecutor(2)
        self.backend = LocalBackend(directory / "store")
        self.shadow = Shadow(SCHEMA, XXH3, level=level)
        for position, spec in enumerate(SCHEMA):
            self.shadow._tensors[position][:] = content[spec.name]
            for chunk in range(spec.chunks):
                digest = XXH3.digest(content[spec.name][slice(*spec.chunk_range(chunk))])
                self.shadow.digests[SCHEMA.chunk_number(spec.name, chunk)] = np.frombuffer(digest, np.uint8)

    def begin(self) -> tuple[Attempt, Intake]:
        attempt = Attempt(self.backend, self.spool, stream_id="1" * 32, version=3, hash_function=XXH3)
        attempt.begin("model", SCHEMA)
        return attempt, Intake(SCHEMA, self.shadow, attempt, pool=self.pool, workers=2)

    def holds(self, content: Content) -> None:
        for position, spec in enumerate(SCHEMA):
            assert self.shadow._tensors[position].tobytes() == content[spec.name].tobytes(), spec.name
        assert not self.shadow._ahead.any()


def inputs(content: Content) -> Iterator[TensorInput]:
    for spec in SCHEMA:
        yield TensorInput(spec, lambda start, end, data=content[spec.name]: data[start:end])


def as_host_bytes(data: np.ndarray) -> HostBytes:
    """Return what the writer makes of a torch tensor over this memory."""
    tensor = torch.from_numpy(data)
    return HostBytes("tensor", tensor, tensor.data_ptr())


def as_function(data: np.ndarray) -> Any:
    return lambda start, end: data[start:end]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made = []

    def new_bench(content: Content, level: str = "fast") -> Bench:
        made.append(Bench(tmp_path, content, level))
        return made[-1]

    yield new_bench
    for bench in made:
        bench.spool.close()
        bench.pool.shutdown()


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("memory", [0, 64 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_it_goes_back_and_forward(
    make: Any, monkeypatch: pytest.MonkeyPatch, level: str, memory: int, seed: int
) -> None:
    monkeypatch.setattr(deltastore.attempt, "_MEMORY_BYTES", memory)
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 1 << 14)
    rng = np.random.default_rng(seed)
    old = first(rng)
    bench = make(old, level)
    encodings = set()
    for _ in range(3):
        new = following(rng, old)
        attempt, intake = bench.begin()
        intake.take(inputs(new), reusable=True)
        intake.finish()
        bench.shadow.take_back(attempt.parts(SCHEMA), workers=2)
        attempt.abandon()
        bench.holds(old)

        attempt, intake = bench.begin()
        intake.take(inputs(new), reusable=False)
        digests = intake.finish()
        attempt.end()
        encodings |= {int(code) for part in attempt.parts(SCHEMA) for code in part.encoding}
        bench.shadow.advance(lambda attempt=attempt: attempt.parts(SCHEMA), digests, workers=2)
        attempt.wait_uploaded()
        attempt.drop()
        bench.holds(new)
        for spec in SCHEMA:
            for chunk in range(spec.chunks):
                digest = XXH3.digest(new[spec.name][slice(*spec.chunk_range(chunk))])
                assert bench.shadow.digests[SCHEMA.chunk_number(spec.name, chunk)].tobytes() == digest
        old = new
    assert {Encoding.SPARSE, Encoding.DENSE, Encoding.FULL} <= encodings
    assert list(bench.spool.directory.iterdir()) == []


def test_parts_are_asked_for_only_if_something_was_not_followed(make: Any) -> None:
    rng = np.random.default_rng(0)
    old = first(rng)
    new = {name: data.copy() for name, data in old.items()}
    for data in new.values():
        data[::300] += 1
    bench = make(old)
    attempt, intake = bench.begin()
    intake.take(inputs(new), reusable=True)

    def asked() -> list[Part]:
        raise AssertionError

    bench.shadow.advance(asked, intake.finish(), workers=1)
    bench.holds(new)
    attempt.abandon()


class Broken(Exception):
    pass


@given(st.integers(0, len(SCHEMA) - 1), st.booleans(), st.integers(0, 2**32 - 1))
def test_whatever_ends_the_tensors_can_be_taken_back(
    tmp_path_factory: pytest.TempPathFactory, end: int, reusable: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = first(rng)
    bench = Bench(tmp_path_factory.mktemp("bench"), old)

    def broken() -> Iterator[TensorInput]:
        for number, tensor in enumerate(inputs(following(rng, old))):
            if number == end:
                raise Broken
            yield tensor

    attempt, intake = bench.begin()
    with pytest.raises(Broken):
        intake.take(broken(), reusable=reusable)
    intake.leave()
    bench.shadow.take_back(attempt.parts(SCHEMA), workers=2)
    attempt.abandon()
    bench.holds(old)
    bench.spool.close()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_encoder_that_fails_can_be_taken_back(make: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rng = np.random.default_rng(number)
    old, new = first(rng), first(rng)
    calls = 0

    def failing(function: Any) -> Any:
        def fail(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:
                raise MemoryError
            return function(*arguments, **options)

        return fail

    bench = make(old)
    monkeypatch.setattr(TakingEncoder, "take", failing(TakingEncoder.take))
    monkeypatch.setattr(Shadow, "_rows", failing(Shadow._rows))
    attempt, intake = bench.begin()
    with pytest.raises(MemoryError):
        intake.take(inputs(new), reusable=True)
    intake.leave()
    bench.shadow.take_back(attempt.parts(SCHEMA), workers=1)
    attempt.abandon()
    bench.holds(old)


def raises_after(function: Any = None) -> Any:
    """Do what a function does, and then run out of memory."""

    def fail(*arguments: Any, **options: Any) -> Any:
        if function is not None:
            function(*arguments, **options)
        raise MemoryError

    return fail


@pytest.mark.parametrize("where", ["kernel", "going back"])
def test_chunks_that_cannot_be_led_back_let_nothing_be_published_upon_them(
    make: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rng = np.random.default_rng(9)
    old = first(rng)
    new = {name: data + np.uint8(1) for name, data in old.items()}
    new["wide"] = old["wide"].copy()
    new["wide"][0] += 1
    bench = make(old)
    if where == "kernel":
        monkeypatch.setattr(taking, "_take_spans", raises_after(taking._take_spans))
    else:
        monkeypatch.setattr(Shadow, "_rows", raises_after())
        monkeypatch.setattr(deltastore.shadow, "give_back", raises_after())
    attempt, intake = bench.begin()
    with pytest.raises(MemoryError):
        intake.take(inputs(new), reusable=True)
    intake.leave()
    with pytest.raises(CorruptObject, match="not known"):
        bench.shadow.take_back(attempt.parts(SCHEMA), workers=1)
    attempt.abandon()


@pytest.mark.parametrize("content", [as_host_bytes, as_function])
@pytest.mark.parametrize("offset", range(9))
def test_bytes_may_begin_anywhere(make: Any, content: Any, offset: int) -> None:
    old = first(np.random.default_rng(12))
    bench = make(old)
    new = {name: data.copy() for name, data in old.items()}
    for spec in SCHEMA:
        if spec.nbytes:
            new[spec.name][:: max(spec.nbytes // 20, 1)] ^= 5
    memory = {}
    for spec in SCHEMA:
        memory[spec.name] = np.zeros(spec.nbytes + 16, np.uint8)[offset : offset + spec.nbytes]
        memory[spec.name][:] = new[spec.name]
    attempt, intake = bench.begin()
    intake.take([TensorInput(spec, content(memory[spec.name])) for spec in SCHEMA], reusable=True)
    digests = intake.finish()
    attempt.end()
    bench.shadow.advance(lambda: attempt.parts(SCHEMA), digests, workers=1)
    attempt.wait_uploaded()
    attempt.drop()
    bench.holds(new)


def test_a_tensor_that_gives_less_than_it_has_is_refused(make: Any) -> None:
    old = first(np.random.default_rng(10))
    bench = make(old)
    position = SCHEMA.position("wide")
    for content in (
        lambda start, end: old["wide"][start : end - 2],
        lambda start, end: np.repeat(old["wide"][start:end], 2)[::2],
    ):
        with pytest.raises(PublishError, match="wide"):
            bench.shadow.encode([(position, content, 0, 1)])
    bench.shadow.take_back([], workers=1)
    bench.holds(old)


def test_a_chunk_of_which_no_part_tells_is_not_passed_over(make: Any) -> None:
    rng = np.random.default_rng(1)
    old = first(rng)
    new = {name: data.copy() for name, data in old.items()}
    new["wide"][0] += 1
    bench = make(old)
    attempt, intake = bench.begin()
    intake.take(inputs(new), reusable=True)
    with pytest.raises(CorruptObject):
        bench.shadow.take_back([], workers=1)
    bench.shadow._tensors[SCHEMA.position("wide")][1] ^= 1
    with pytest.raises(CorruptObject, match="wide"):
        bench.shadow.take_back(attempt.parts(SCHEMA), workers=1)
    attempt.abandon()


def test_a_tensor_that_comes_twice_is_refused_and_can_be_taken_back(make: Any) -> None:
    rng = np.random.default_rng(2)
    old, new = first(rng), first(rng)
    bench = make(old)
    attempt, intake = bench.begin()
    intake.take([*inputs(new), *inputs(old)], reusable=True)
    with pytest.raises(PublishError, match="twice"):
        intake.finish()
    bench.shadow.take_back(attempt.parts(SCHEMA), workers=2)
    attempt.abandon()
    bench.holds(old)


def test_a_model_that_memory_does_not_hold_is_refused_with_its_size() -> None:
    schema = Schema([TensorSpec("huge", "U8", (1 << 47,))])
    with pytest.raises(PublishError, match=str(1 << 47)) as caught:
        Shadow(schema, XXH3, level="fast")
    assert caught.value.hint
