from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import reference
from reference import DENSE, FULL, SPARSE

import deltastore.patch
from deltastore.codec import EncodedChunk, Encoding
from deltastore.container import build_header, parse_header
from deltastore.digest import hasher
from deltastore.errors import BaseMismatch, CorruptObject
from deltastore.memory import ALIGNMENT
from deltastore.part import ChunkRow, Part, PartIdentity, build_part, parse_part
from deltastore.patch import Patch, _Work, build, default_workers, read_each, run_in_order, write_each
from deltastore.places import Places
from deltastore.shares import Shares
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.snapshot import ChunkSpan

XXH3 = hasher("xxh3-128")
SHAPES = {
    "big": ("BF16", (CHUNK_BYTES // 2 + 40,)),
    "bytes": ("I32", (25,)),
    "double": ("F64", (9,)),
    "empty": ("F32", (0,)),
    "single": ("F32", (33,)),
}
SCHEMA = Schema(TensorSpec(name, dtype, shape) for name, (dtype, shape) in SHAPES.items())
BIG = SCHEMA.position("big")

Snapshot = dict[str, bytes]

encode = functools.lru_cache(maxsize=None)(reference.encode)


def first_snapshot() -> Snapshot:
    rng = np.random.default_rng(21)
    return {spec.name: rng.bytes(spec.nbytes) for spec in SCHEMA}


def changed(snapshot: Snapshot, seed: int, names: Sequence[str] = ("bytes", "double", "single")) -> Snapshot:
    """Change a few elements of some tensors."""
    rng = np.random.default_rng(seed)
    after = dict(snapshot)
    for name in names:
        spec = SCHEMA[name]
        numbers = np.frombuffer(after[name], f"<u{spec.width}").copy()
        chosen = rng.permutation(numbers.size)[: max(1, numbers.size // 20)]
        numbers[chosen] += rng.integers(1, 9, chosen.size).astype(numbers.dtype)
        after[name] = numbers.tobytes()
    return after


def chunks_of(snapshot: Snapshot) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (tensor, chunk, width, bytes) in schema order."""
    for position, spec in enumerate(SCHEMA):
        data = snapshot[spec.name]
        for chunk, start in enumerate(range(0, len(data), CHUNK_BYTES)):
            yield position, chunk, spec.width, data[start : start + CHUNK_BYTES]


def digests_of(snapshot: Snapshot) -> np.ndarray:
    leaves = [leaf for name in sorted(snapshot) for leaf in reference.leaves(snapshot[name])]
    return np.frombuffer(b"".join(leaves), np.uint8).reshape(len(leaves), 16)


def id_of(snapshot: Snapshot) -> str:
    return reference.snapshot_id({name: (*SHAPES[name], data) for name, data in snapshot.items()})


def rows_between(
    before: Snapshot | None, after: Snapshot, encoding: int = SPARSE, method: int | None = None
) -> list[ChunkRow]:
    """Encode a change with the reference: from nothing as an anchor."""
    rows = []
    olds = chunks_of(before or {name: bytes(len(data)) for name, data in after.items()})
    for (tensor, chunk, width, old), (*_, new) in zip(olds, chunks_of(after), strict=True):
        if before is None:
            _, payload = encode(old, new, width, FULL, method)
            count, old_digest = len(new) // width, b""
        elif old == new:
            continue
        else:
            count, payload = encode(old, new, width, encoding, method)
            old_digest = XXH3.digest(old)
        kind = Encoding(FULL if before is None else encoding)
        rows.append(ChunkRow(tensor, chunk, EncodedChunk(kind, count, payload), old_digest, XXH3.digest(new)))
    return rows


def part_of(rows: list[ChunkRow], version: int = 1, number: int = 0) -> Part:
    identity = PartIdentity("1" * 32, version, "2" * 32, "model")
    data = build_part(rows, identity, digest_size=16)
    return parse_part(data, identity, SCHEMA, XXH3, key=f"parts/{version:010d}/x/model-{number:05d}.safetensors")


class Target:
    """A snapshot that is read from, and the chunks that were handed on."""

    def __init__(self, source: Snapshot | None) -> None:
        self.source = source
        self.written: dict[tuple[str, int], bytes] = {}
        self.reads = 0
        self._lock = threading.Lock()

    def read(self, spec: TensorSpec, chunk: int) -> np.ndarray:
        assert self.source is not None, "An anchor needs nothing local."
        with self._lock:
            self.reads += 1
        start, end = spec.chunk_range(chunk)
        return np.frombuffer(self.source[spec.name][start:end], np.uint8)

    def write(self, spec: TensorSpec, chunk: int, data: np.ndarray) -> None:
        with self._lock:
            assert (spec.name, chunk) not in self.written
            self.written[spec.name, chunk] = data.tobytes()

    def result(self) -> Snapshot:
        found = dict(self.source or {name: bytes(SCHEMA[name].nbytes) for name in SHAPES})
        for (name, chunk), data in self.written.items():
            start, end = SCHEMA[name].chunk_range(chunk)
            found[name] = found[name][:start] + data + found[name][end:]
        return found

    def run(self, patch: Patch, *, everything: bool = False, workers: int = 2) -> Snapshot:
        patch.run(read_each(self.read), write_each(self.write), everything=everything, workers=workers)
        return self.result()


def patch_from(snapshot: Snapshot | None) -> Patch:
    return Patch(SCHEMA, XXH3, before=None if snapshot is None else digests_of(snapshot))


ZERO = first_snapshot()
ONE = changed(ZERO, 1)
TWO = changed(ONE, 2, ["big", "single"])


@pytest.mark.parametrize("encoding", [SPARSE, DENSE, FULL])
def test_a_delta_leads_forward(encoding: int) -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE, encoding))])
    patch.seal(id_of(ONE))
    target = Target(ZERO)
    assert target.run(patch) == ONE
    assert set(target.written) == {("bytes", 0), ("double", 0), ("single", 0)}


@pytest.mark.parametrize("encoding", [SPARSE, DENSE])
def test_a_delta_leads_back(encoding: int) -> None:
    patch = patch_from(ONE)
    patch.add_delta([part_of(rows_between(ZERO, ONE, encoding))], inverse=True)
    patch.seal(id_of(ZERO))
    assert Target(ONE).run(patch) == ZERO


def test_a_full_chunk_does_not_lead_back_and_nothing_of_it_is_handed_on() -> None:
    target = Target(ONE)

    def go_back() -> None:
        patch = patch_from(ONE)
        patch.add_delta([part_of(rows_between(ZERO, ONE, FULL))], inverse=True)
        patch.seal(id_of(ZERO))
        target.run(patch)

    with pytest.raises(CorruptObject) as caught:
        go_back()
    assert target.written == {}
    assert caught.value.key == "parts/0000000001/x/model-00000.safetensors"


def test_an_anchor_leads_from_nothing_and_deltas_go_on_from_it() -> None:
    patch = patch_from(None)
    patch.add_anchor([part_of(rows_between(None, ZERO), 0)])
    patch.add_delta([part_of(rows_between(ZERO, ONE), 1)])
    patch.add_delta([part_of(rows_between(ONE, TWO, DENSE), 2)])
    patch.seal(id_of(TWO))
    target = Target(None)
    assert target.run(patch) == TWO
    assert target.reads == 0
    assert len(target.written) == SCHEMA.chunks


def test_there_and_back_again_in_one_pass() -> None:
    patch = patch_from(ONE)
    there, back = part_of(rows_between(ONE, TWO), 2), part_of(rows_between(ZERO, ONE, DENSE), 1)
    patch.add_delta([there])
    patch.add_delta([there], inverse=True)
    patch.add_delta([back], inverse=True)
    patch.seal(id_of(ZERO))
    assert Target(ONE).run(patch) == ZERO


def test_a_version_in_several_parts_is_one_version() -> None:
    rows = rows_between(ZERO, TWO)
    parts = [part_of([row], number=number) for number, row in enumerate(rows)]
    for ordered in (parts, parts[::-1]):
        patch = patch_from(ZERO)
        patch.add_delta(ordered)
        patch.seal(id_of(TWO))
        assert Target(ZERO).run(patch) == TWO


def test_no_parts_at_all_is_the_snapshot_one_has() -> None:
    patch = patch_from(ZERO)
    patch.add_delta([])
    patch.seal(id_of(ZERO))
    target = Target(ZERO)
    assert target.run(patch) == ZERO
    assert target.written == {}
    assert len(Target(ZERO).written) == 0
    target.run(patch, everything=True)
    assert len(target.written) == SCHEMA.chunks
    assert target.result() == ZERO


def test_thirty_versions_in_one_pass_equal_thirty_steps() -> None:
    rng = np.random.default_rng(30)
    names = [name for name in SHAPES if name not in ("empty", "big")]
    snapshots = [ZERO]
    parts = []
    for version in range(1, 31):
        some = [name for name in names if rng.random() < 0.6] or ["single"]
        some += ["big"] * (version % 10 == 0)
        snapshots.append(changed(snapshots[-1], 100 + version, some))
        encoding = (SPARSE, DENSE, FULL)[version % 3] if version % 10 else SPARSE
        parts.append(part_of(rows_between(*snapshots[-2:], encoding), version))
    step_by_step = ZERO
    for version in range(1, 31):
        patch = patch_from(step_by_step)
        patch.add_delta([parts[version - 1]])
        patch.seal(id_of(snapshots[version]))
        step_by_step = Target(step_by_step).run(patch)
        assert step_by_step == snapshots[version]
    at_once = patch_from(ZERO)
    for part in parts:
        at_once.add_delta([part])
    at_once.seal(id_of(snapshots[30]))
    assert (at_once.after == digests_of(snapshots[30])).all()
    target = Target(ZERO)
    assert target.run(at_once) == snapshots[30]
    assert target.reads == len(target.written)  # each touched chunk once, whatever the number of versions


def test_thirty_versions_back_in_one_pass_equal_the_first() -> None:
    snapshots = [ZERO]
    for version in range(1, 31):
        snapshots.append(changed(snapshots[-1], 200 + version, ["bytes", "single"][: 1 + version % 2]))
    patch = patch_from(snapshots[30])
    for version in range(30, 0, -1):
        rows = rows_between(snapshots[version - 1], snapshots[version], (SPARSE, DENSE)[version % 2])
        patch.add_delta([part_of(rows, version)], inverse=True)
    patch.seal(id_of(ZERO))
    assert Target(snapshots[30]).run(patch) == ZERO


@pytest.mark.parametrize("together", [1, 2])  # which of them depends on the machine's caches
def test_a_tensor_of_many_chunks_is_built_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(deltastore.patch, "_SPAN_BYTES", together * CHUNK_BYTES)
    schema = Schema([TensorSpec("a", "U8", (3,)), TensorSpec("m", "U8", (36 * CHUNK_BYTES + 9,))])
    old = np.arange(schema["m"].nbytes // 8 + 1, dtype="<u8").view(np.uint8)[: schema["m"].nbytes]
    new = old.copy()
    new[5 * CHUNK_BYTES + 1] ^= 1
    new[17 * CHUNK_BYTES] ^= 2
    new[36 * CHUNK_BYTES + 8] ^= 4
    rows = []
    for chunk in (5, 17, 36):
        start, end = schema["m"].chunk_range(chunk)
        before, after = old[start:end].tobytes(), new[start:end].tobytes()
        count, payload = encode(before, after, 1, SPARSE)
        encoded = EncodedChunk(Encoding.SPARSE, count, payload)
        rows.append(ChunkRow(1, chunk, encoded, XXH3.digest(before), XXH3.digest(after)))
    identity = PartIdentity("1" * 32, 1, "2" * 32, "model")
    part = parse_part(build_part(rows, identity, digest_size=16), identity, schema, XXH3, key="part")
    leaves = [XXH3.digest(b"abc"), *reference.leaves(old.tobytes())]
    patch = Patch(schema, XXH3, before=np.frombuffer(b"".join(leaves), np.uint8).reshape(-1, 16))
    patch.add_delta([part])
    after_all = {"a": ("U8", (3,), b"abc"), "m": ("U8", (len(new),), new.tobytes())}
    patch.seal(reference.snapshot_id(after_all))
    for everything in (False, True):
        target = Target({"a": b"abc", "m": old.tobytes()})
        patch.run(read_each(target.read), write_each(target.write), everything=everything, workers=2)
        assert target.written["m", 5] == new[5 << 21 : 6 << 21].tobytes()
        assert target.written["m", 17] == new[17 << 21 : 18 << 21].tobytes()
        assert target.written["m", 36] == new[36 << 21 :].tobytes()
        assert len(target.written) == (schema.chunks if everything else 3)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("everything", [False, True])
def test_workers_and_everything_change_nothing_in_the_result(workers: int, everything: bool) -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, TWO))])
    patch.seal(id_of(TWO))
    done: list[int] = []
    target = Target(ZERO)
    patch.run(
        read_each(target.read), write_each(target.write), everything=everything, workers=workers, progress=done.append
    )
    assert target.result() == TWO
    assert sum(done) == (SCHEMA.nbytes if everything else sum(map(len, target.written.values())))


# What must be found before a byte is handed on.


def test_a_part_of_another_base_is_found_before_anything_runs() -> None:
    other = changed(ZERO, 9, ["double"])
    patch = patch_from(other)
    with pytest.raises(CorruptObject, match="double") as caught:
        patch.add_delta([part_of(rows_between(ZERO, ONE))])
    assert caught.value.key == "parts/0000000001/x/model-00000.safetensors"


def test_a_skipped_version_is_found_before_anything_runs() -> None:
    patch = patch_from(ZERO)
    with pytest.raises(CorruptObject, match="does not continue"):
        patch.add_delta([part_of(rows_between(ONE, TWO))])
    again = patch_from(ZERO)
    again.add_delta([part_of(rows_between(ZERO, ONE))])
    with pytest.raises(CorruptObject, match="does not continue"):
        again.add_delta([part_of(rows_between(ZERO, ONE))])


def test_the_wrong_way_round_is_found_before_anything_runs() -> None:
    part = part_of(rows_between(ZERO, ONE))
    with pytest.raises(CorruptObject):
        patch_from(ZERO).add_delta([part], inverse=True)
    with pytest.raises(CorruptObject):
        patch_from(ONE).add_delta([part])


def test_a_part_that_is_missing_is_found_when_it_is_sealed() -> None:
    rows = rows_between(ZERO, ONE)
    for left_out in range(len(rows)):
        patch = patch_from(ZERO)
        patch.add_delta([part_of(rows[:left_out] + rows[left_out + 1 :])])
        with pytest.raises(CorruptObject, match="promises"):
            patch.seal(id_of(ONE))
    with pytest.raises(CorruptObject, match="promises"):
        patch_from(ZERO).seal(id_of(ONE))


def test_a_chunk_in_two_parts_of_one_version_is_refused() -> None:
    rows = rows_between(ZERO, ONE)
    patch = patch_from(ZERO)
    with pytest.raises(CorruptObject, match="another part") as caught:
        patch.add_delta([part_of(rows, number=0), part_of(rows[1:2], number=1)])
    assert caught.value.key == "parts/0000000001/x/model-00001.safetensors"


def test_a_chunk_in_two_parts_of_an_anchor_is_refused() -> None:
    rows = rows_between(None, ZERO)
    with pytest.raises(CorruptObject) as caught:
        patch_from(None).add_anchor([part_of(rows, 0, 0), part_of(rows[1:2], 0, 1)])
    assert caught.value.key == "parts/0000000000/x/model-00001.safetensors"


def test_an_anchor_with_a_hole_or_with_differences_is_refused() -> None:
    rows = rows_between(None, ZERO)
    for left_out in range(len(rows)):
        with pytest.raises(CorruptObject, match="lacks 1 chunk"):
            patch_from(None).add_anchor([part_of(rows[:left_out] + rows[left_out + 1 :], 0)])
    with pytest.raises(CorruptObject, match="lacks"):
        patch_from(None).add_anchor([])
    one = rows[0]._replace(encoded=rows[0].encoded._replace(encoding=Encoding.DENSE))
    with pytest.raises(CorruptObject, match="differences"):
        patch_from(None).add_anchor([part_of([one, *rows[1:]], 0)])


def test_an_anchor_without_a_single_chunk_is_one() -> None:
    schema = Schema([TensorSpec("e", "F32", (0,))])
    patch = Patch(schema, XXH3, before=None)
    patch.add_anchor([])
    patch.seal(reference.snapshot_id({"e": ("F32", (0,), b"")}))
    patch.run(read_each(Target(None).read), write_each(Target(None).write), everything=True, workers=1)


# What is found at the chunk, before that chunk is handed on.


def with_payload(rows: list[ChunkRow], place: int, payload: bytes) -> list[ChunkRow]:
    encoded = rows[place].encoded._replace(payload=payload)
    return [*rows[:place], rows[place]._replace(encoded=encoded), *rows[place + 1 :]]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_chunk_is_never_handed_on_and_the_part_is_named(place: int) -> None:
    rows = rows_between(ZERO, ONE)
    name = SCHEMA.tensors[rows[place].tensor].name
    payload = rows[place].encoded.payload
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        patch = patch_from(ZERO)
        patch.add_delta([part_of(with_payload(rows, place, bytes(damaged)))])
        patch.seal(id_of(ONE))
        target = Target(ZERO)
        try:
            target.run(patch, workers=1)
        except CorruptObject as error:
            assert error.key == "parts/0000000001/x/model-00000.safetensors"  # noqa: PT017 - some flips change nothing
            assert name in str(error)  # noqa: PT017 - as above
            assert (name, 0) not in target.written
            continue
        assert target.result() == ONE  # an unused sign bit


@pytest.mark.parametrize("everything", [False, True])
def test_a_wrong_local_byte_in_a_touched_chunk_is_a_base_mismatch_that_names_the_tensor(everything: bool) -> None:
    for encoding in (SPARSE, DENSE):
        patch = patch_from(ZERO)
        patch.add_delta([part_of(rows_between(ZERO, ONE, encoding))])
        patch.seal(id_of(ONE))
        wrong = dict(ZERO)
        wrong["double"] = wrong["double"][:-1] + bytes([wrong["double"][-1] ^ 1])
        target = Target(wrong)
        with pytest.raises(BaseMismatch, match="double") as caught:
            target.run(patch, everything=everything)
        assert caught.value.tensors == ("double",)
        assert caught.value.hint
        assert ("double", 0) not in target.written


def test_a_wrong_local_byte_in_an_untouched_chunk_is_found_when_everything_is_copied() -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE))])
    patch.seal(id_of(ONE))
    big = bytearray(ZERO["big"])
    big[CHUNK_BYTES + 3] ^= 0x10
    target = Target({**ZERO, "big": bytes(big)})
    with pytest.raises(BaseMismatch, match="Chunk 1 of 'big'"):
        target.run(patch, everything=True)
    assert ("big", 1) not in target.written


def test_a_wrong_local_chunk_that_no_longer_fits_its_step_is_a_base_mismatch_too() -> None:
    start, size = CHUNK_BYTES, SCHEMA["big"].nbytes
    old = ZERO["big"][start:]
    new = (np.frombuffer(old, "<u2") + np.arange(40, dtype="<u2") % 2).tobytes()
    count, payload = reference.encode_contextual(old, new, set(), 3)
    encoded = EncodedChunk(Encoding.CONTEXTUAL, count, payload)
    rows = [ChunkRow(BIG, 1, encoded, XXH3.digest(old), XXH3.digest(new))]
    after = {**ZERO, "big": ZERO["big"][:start] + new}
    for wrong, error in ((0, None), (0x7F, BaseMismatch)):
        patch = patch_from(ZERO)
        patch.add_delta([part_of(rows)])
        patch.seal(id_of(after))
        local = bytes(byte ^ wrong if place % 2 else byte for place, byte in enumerate(ZERO["big"][start:size]))
        target = Target({**ZERO, "big": ZERO["big"][:start] + local})
        if error is None:
            assert target.run(patch) == after
            continue
        with pytest.raises(error, match="Chunk 1 of 'big'"):
            target.run(patch)
        assert target.written == {}


def test_a_full_chunk_mends_a_wrong_local_chunk() -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE, FULL))])
    patch.seal(id_of(ONE))
    wrong = {**ZERO, "double": bytes(len(ZERO["double"]))}
    assert Target(wrong).run(patch) == ONE


def test_a_failing_reader_or_writer_stops_the_run_with_its_own_error() -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE))])
    patch.seal(id_of(ONE))

    def fail(*_: object) -> np.ndarray:
        raise OSError("unplugged")

    target = Target(ZERO)
    with pytest.raises(OSError, match="unplugged"):
        patch.run(fail, write_each(target.write), everything=True, workers=2)
    assert target.written == {}
    with pytest.raises(OSError, match="unplugged"):
        patch.run(read_each(target.read), fail, everything=True, workers=2)


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_buffers_lie_in_memory_as_chunks_do_in_their_file(padding: int) -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE))])
    names = ("single", "big", "bytes", "double", "empty")  # some begin between two multiples of 8
    header = build_header([(name, *SHAPES[name]) for name in names], {"padding": padding * "-"})
    places = Places([parse_header(header, key="file")], SCHEMA)
    source, target = Target(ZERO), Target(ZERO)
    phases: list[tuple[int, int]] = []

    def write(span: ChunkSpan, data: np.ndarray) -> None:
        offset = next(iter(places.stretches(span))).offset
        phases.append((data.ctypes.data % ALIGNMENT, offset % ALIGNMENT))
        write_each(target.write)(span, data)

    shares = Shares(SCHEMA.nbytes, workers=2)
    build(patch.batches(shares, everything=True), read_each(source.read), write, workers=2, places=places)
    assert target.result() == ONE
    assert phases
    assert all(memory <= file < memory + 8 for memory, file in phases)


def test_the_digests_given_are_not_written_to() -> None:
    before = digests_of(ZERO).copy()
    patch = Patch(SCHEMA, XXH3, before=before)
    patch.add_delta([part_of(rows_between(ZERO, ONE))])
    assert (before == digests_of(ZERO)).all()
    assert (patch.after == digests_of(ONE)).all()


def test_rows_of_a_patch_are_kept_in_arrays() -> None:
    patch = patch_from(ZERO)
    patch.add_delta([part_of(rows_between(ZERO, ONE))])
    patch.add_delta([part_of(rows_between(ONE, TWO))])
    patch.seal(id_of(TWO))
    work = _Work(patch._parts)
    count = len(rows_between(ZERO, ONE)) + len(rows_between(ONE, TWO))
    rows = work.steps[:-1]
    assert all(isinstance(value, np.ndarray) and len(value) == count for value in rows)
    assert sum(value.nbytes for value in rows) <= 40 * count
    assert len(work._parts) == 2


# The pool.


def test_results_come_in_order_and_items_are_taken_only_a_few_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = run_in_order(lambda number: number * number, items(), workers=3, name="test")
    for number in range(100):
        assert next(results) == number * number
        assert len(taken) <= number + 2 * 3 + 2
    assert list(results) == []


def test_an_error_in_a_worker_reaches_the_consumer_and_stops_the_rest() -> None:
    def work(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        return number

    taken: list[int] = []
    found: list[int] = []
    with pytest.raises(ValueError, match="five"):
        found.extend(run_in_order(work, (taken.append(i) or i for i in range(1000)), workers=2, name="test"))
    assert len(taken) < 20


def test_there_is_a_worker_for_each_core_within_reason() -> None:
    assert 1 <= default_workers() <= 32
