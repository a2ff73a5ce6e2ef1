"""Publishing tensors that are not in the CPU's memory: on the CPU itself always, on a CUDA device if there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import training
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import deltastore.writer
from deltastore import Writer, device, open_store, tensors
from deltastore.codec import LEVELS
from deltastore.codec.chunk import ChunkEncoder
from deltastore.device import Bus, DeviceShadow, changed_elements
from deltastore.digest import hasher
from deltastore.errors import CommitInDoubt, PublishError, StorageError
from deltastore.shadow import Shadow
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec
from deltastore.storage.local import LocalBackend
from deltastore.tensors import DeviceBytes, TensorInput, named_tensors
from deltastore.testing import Effect, Fault, FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
XXH3 = hasher("xxh3-128")
WIDTHS = (1, 2, 4, 8)
ELEMENT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


@pytest.fixture(autouse=True)
def all_tensors_are_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_on_host", lambda _flat: False)


def on(place: str, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy()).to(place)


@st.composite
def chunk_pairs(draw: st.DrawFn, most: int = 900) -> tuple[int, np.ndarray, np.ndarray]:
    """Draw (width, old, new), uint8, from nothing changed to everything changed, near or far."""
    width = draw(st.sampled_from(WIDTHS))
    size = draw(st.integers(1, most))
    share = draw(st.sampled_from([0, 0.001, 0.02, 0.2, 0.25, 0.3, 0.45, 0.6, 1]))
    near = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 256, size * width, np.uint8)
    new = old.copy()
    chosen = rng.random(size) < share
    steps = rng.integers(1, 4, size) if near else rng.integers(0, 1 << 63, size)
    elements = new.view(f"<u{width}")
    elements[chosen] += steps.astype(elements.dtype)[chosen]
    return width, old, new


@given(chunk_pairs(4000), st.sampled_from(sorted(LEVELS)))
def test_known_positions_make_the_same_bytes_as_looking_for_them(
    pair: tuple[int, np.ndarray, np.ndarray], level: str
) -> None:
    width, old, new = pair
    positions = np.flatnonzero(old.view(f"<u{width}") != new.view(f"<u{width}")).astype(np.int32)
    encoder = ChunkEncoder(level)
    expected = encoder.change(old, new, width=width)
    assert encoder.change_at(old, new, positions, width=width) == expected
    # Whoever found the positions may have seen an element on its way there and back.
    unchanged = np.flatnonzero(old.view(f"<u{width}") == new.view(f"<u{width}"))[:1]
    more = np.sort(np.concatenate([positions, unchanged])).astype(np.int32)
    assert encoder.change_at(old, new, more, width=width) == expected


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 764, 765])
def test_known_positions_round_every_escape_boundary_make_the_same_bytes(width: int, gap: int) -> None:
    old = np.zeros((gap + 12) * width, np.uint8)
    new = old.copy()
    new.view(f"<u{width}")[[gap, gap + 11]] = 3
    encoder = ChunkEncoder()
    positions = np.array([gap, gap + 11], np.int32)
    assert encoder.change_at(old, new, positions, width=width) == encoder.change(old, new, width=width)


@pytest.mark.parametrize("place", DEVICES)
@given(pair=chunk_pairs())
def test_changed_elements_are_where_and_what_numpy_finds(place: str, pair: tuple[int, np.ndarray, np.ndarray]) -> None:
    width, old, new = pair
    before, after = (on(place, data).view(ELEMENT[width]) for data in (old, new))
    expected = np.flatnonzero(old.view(f"<u{width}") != new.view(f"<u{width}"))
    found = changed_elements(before, after, limit=expected.size)
    assert found is not None
    positions, values = found
    assert positions.dtype == torch.int32
    assert positions.cpu().numpy().tolist() == expected.tolist()
    assert values.cpu().numpy().tobytes() == new.view(f"<u{width}")[expected].tobytes()
    if expected.size:
        assert changed_elements(before, after, limit=expected.size - 1) is None


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7])
def test_chunks_come_over_in_order_and_whole(place: str, count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count * 1000 + 17, np.uint8)
    content = device_bytes(on(place, data))
    ranges = [(start * 1000, min(start * 1000 + 1000, data.size)) for start in range(count)]
    bus = Bus(content.flat.device)
    for _ in range(2):
        for (start, end), found in zip(ranges, bus.chunks(content, ranges), strict=True):
            assert found.tobytes() == data[start:end].tobytes()


def device_bytes(value: torch.Tensor) -> DeviceBytes:
    (found,) = named_tensors({"w": value}, Schema([]))
    assert isinstance(found.bytes, DeviceBytes)
    return found.bytes


# A whole shadow.

SPECS = [
    TensorSpec("big", "BF16", (CHUNK_BYTES + 700,)),
    TensorSpec("bool", "BOOL", (40,)),
    TensorSpec("bytes", "U8", (5 * CHUNK_BYTES + 3,)),
    TensorSpec("double", "F64", (3, 5)),
    TensorSpec("empty", "F32", (0, 3)),
    TensorSpec("float8", "F8_E4M3", (64, 3)),
    TensorSpec("packed", "U8", (256,), 4),
    TensorSpec("scalar", "F32", ()),
    TensorSpec("single", "F32", (CHUNK_BYTES // 4 + 5,)),
]
TORCH = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F64": torch.float64,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}


def first_bytes(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    return rng.integers(0, 2 if spec.dtype == "BOOL" else 256, spec.nbytes, np.uint8)


def next_bytes(rng: np.random.Generator, spec: TensorSpec, data: np.ndarray, share: float) -> np.ndarray:
    new = data.copy()
    if spec.dtype == "BOOL":
        new ^= (rng.random(new.size) < share).astype(np.uint8)
    else:
        elements = new.view(f"<u{spec.width}")
        chosen = rng.random(elements.size) < share
        elements[chosen] += rng.integers(1, 3, int(chosen.sum())).astype(elements.dtype)
    return new


def as_tensor(spec: TensorSpec, data: np.ndarray, place: str = "cpu") -> torch.Tensor:
    return (
        torch.empty(0).new_empty(spec.shape, dtype=TORCH[spec.dtype]).to(place)
        if not data.size
        else (on(place, data).view(TORCH[spec.dtype]).reshape(spec.shape))
    )


def shadow_of(schema: Schema, contents: Mapping[str, np.ndarray], level: str) -> Shadow:
    shadow = Shadow(schema, XXH3, level=level)
    for spec in schema:
        shadow._tensors[schema.position(spec.name)][:] = contents[spec.name]
    return shadow


def runs_of(schema: Schema, inputs: Mapping[str, TensorInput], longest: int) -> list[Any]:
    return [
        (schema.position(spec.name), inputs[spec.name].bytes, first, min(first + longest, spec.chunks))
        for spec in schema
        for first in range(0, spec.chunks, longest)
    ]


def compare(place: str, level: str, share: float, longest: int, memory: float) -> None:
    rng = np.random.default_rng(int(1000 * share) + longest)
    schema = Schema(SPECS)
    old = {spec.name: first_bytes(rng, spec) for spec in schema}
    new = {spec.name: next_bytes(rng, spec, old[spec.name], share) for spec in schema}
    values = {spec.name: as_tensor(spec, new[spec.name], place) for spec in schema}
    on_device = {found.spec.name: found for found in named_tensors(values, schema)}
    on_host = {spec.name: TensorInput(spec, tensors._view(new[spec.name])) for spec in schema}
    expected = shadow_of(schema, old, level).encode(runs_of(schema, on_host, longest))
    shadow = shadow_of(schema, old, level)
    shadow._device = DeviceShadow(schema, shadow._tensors, share=memory)
    if place == "cpu" and 0 < memory < 1:
        shadow._device._left[torch.device("cpu")] = 4 * CHUNK_BYTES  # "bytes" does not fit
    found = shadow.encode(runs_of(schema, on_device, longest))
    assert found == expected
    assert (len(shadow._device._held) > 0) == (memory > 0)


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("share", [0, 0.0001, 0.02, 0.26, 1])
def test_rows_are_those_of_the_cpu_path(place: str, level: str, share: float) -> None:
    compare(place, level, share, longest=4, memory=1)


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("longest", [1, 2])
@pytest.mark.parametrize("memory", [0, 0.5])
def test_rows_are_those_of_the_cpu_path_where_the_copy_fits_in_part_or_not_at_all(
    place: str, longest: int, memory: float
) -> None:
    compare(place, "fast", 0.02, longest, memory)


def test_a_run_with_one_dense_chunk_among_sparse_ones_is_the_same() -> None:
    spec = TensorSpec("w", "BF16", (4 * CHUNK_BYTES // 2,))
    schema = Schema([spec])
    rng = np.random.default_rng(1)
    old = first_bytes(rng, spec)
    new = next_bytes(rng, spec, old, 0.01)
    new[CHUNK_BYTES : CHUNK_BYTES + CHUNK_BYTES // 2] += 1
    new[2 * CHUNK_BYTES : 3 * CHUNK_BYTES] = old[2 * CHUNK_BYTES : 3 * CHUNK_BYTES]
    expected = shadow_of(schema, {"w": old}, "fast").encode([(0, tensors._view(new), 0, 4)])
    shadow = shadow_of(schema, {"w": old}, "fast")
    assert [row.chunk for row in expected] == [0, 1, 3]
    assert [row.encoded.encoding for row in expected] == [1, 2, 1]
    assert shadow.encode([(0, device_bytes(torch.from_numpy(new)), 0, 4)]) == expected


def test_only_changed_elements_come_over(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = []
    fetch = Bus.fetch

    def counted(self: Bus, *given: torch.Tensor) -> list[np.ndarray]:
        found = fetch(self, *given)
        crossed.append(sum(data.size for data in found))
        return found

    monkeypatch.setattr(Bus, "fetch", counted)
    monkeypatch.setattr(Bus, "chunks", None)
    spec = TensorSpec("w", "BF16", (CHUNK_BYTES,))
    rng = np.random.default_rng(2)
    old = first_bytes(rng, spec)
    new = next_bytes(rng, spec, old, 0.02)
    shadow = shadow_of(Schema([spec]), {"w": old}, "fast")
    rows = shadow.encode([(0, device_bytes(torch.from_numpy(new)), 0, 2)])
    assert sum(crossed) == 6 * sum(row.encoded.changed for row in rows)


@pytest.mark.parametrize("place", DEVICES)
def test_tensors_at_odd_places_of_their_storage_are_compared(place: str) -> None:
    spec = TensorSpec("w", "U8", (4096,), 4)
    rng = np.random.default_rng(3)
    old = first_bytes(rng, spec)
    new = next_bytes(rng, spec, old, 0.02)
    expected = shadow_of(Schema([spec]), {"w": old}, "fast").encode([(0, tensors._view(new), 0, 1)])
    shadow = shadow_of(Schema([spec]), {"w": old}, "fast")
    for shift in (1, 2, 3):
        storage = torch.zeros(4096 + shift, dtype=torch.uint8, device=place)
        storage[shift:] = torch.from_numpy(new)
        assert shadow.encode([(0, device_bytes(storage[shift:]), 0, 1)]) == expected


def test_a_copy_that_the_device_fails_to_change_is_given_up_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("w", "F32", (1000,))
    host = [np.zeros(4000, np.uint8)]
    shadow = DeviceShadow(Schema([spec]), host)
    place = torch.device("cpu")
    held = shadow._copy(0, place)
    assert held is not None
    left = shadow._left[place]

    def fail(*_: object) -> None:
        held.fill_(77)
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(shadow, "_write", fail)
        shadow.follow(0, 0, np.full(4000, 1, np.uint8))
    assert shadow._held == {}
    assert shadow._left[place] == left + 4000
    host[0][:] = 1
    again = shadow._copy(0, place)
    assert again is not None
    assert again.numpy().tobytes() == host[0].tobytes()
    assert shadow._left[place] == left


def test_a_device_without_memory_left_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("w", "F32", (1000,))
    shadow = DeviceShadow(Schema([spec]), [np.zeros(4000, np.uint8)])
    asked = []

    def full(*_: object, **__: object) -> torch.Tensor:
        asked.append(1)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(device.torch, "empty", full)
    bus = object.__new__(Bus)
    bus._slots = ()
    monkeypatch.setattr(bus, "computing", device.nullcontext, raising=False)
    monkeypatch.setattr(shadow, "_bus", lambda _device: bus)
    assert shadow._copy(0, torch.device("cpu")) is None
    assert shadow._copy(0, torch.device("cpu")) is None
    assert asked == [1]


@given(st.data())
def test_copies_follow_chunk_by_chunk_at_every_density(data: st.DataObject) -> None:
    width, old, new = data.draw(chunk_pairs())
    spec = TensorSpec("w", "U8", (old.size,), width)
    host = [old.copy()]
    shadow = DeviceShadow(Schema([spec]), host)
    held = shadow._copy(0, torch.device("cpu"))
    assert held is not None
    shadow.follow(0, 0, new)
    assert held.numpy().tobytes() == new.tobytes()
    assert host[0].tobytes() == old.tobytes()


# A whole writer.


@pytest.fixture(scope="module")
def snapshots() -> list[training.Snapshot]:
    return training.chain(7)


@pytest.fixture
def stores(tmp_path: Path, snapshots: list[training.Snapshot]) -> list[Path]:
    """One stream, twice: the same ids."""
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "one", base=base):
        pass
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    return [tmp_path / "one", tmp_path / "other"]


def chunks_of(store: Path) -> dict[tuple[str, int, int], tuple[object, ...]]:
    """Return every encoded chunk by version, tensor and number; in which part it came to lie is a matter of timing."""
    found: dict[tuple[str, int, int], tuple[object, ...]] = {}
    for path in sorted(store.glob("parts/*/*/model-0*.safetensors")):
        columns = load_file(path)
        payload, start = columns["payload"].tobytes(), 0
        for row, length in enumerate(columns["length"].tolist()):
            key = (path.parent.parent.name, int(columns["tensor"][row]), int(columns["chunk"][row]))
            assert key not in found
            names = ("encoding", "changed", "old_digest", "new_digest")
            found[key] = (*(columns[name][row].tolist() for name in names), payload[start : start + length])
            start += length
    return found


def assert_copies_are_the_shadow(writer: Writer) -> None:
    shadow = writer._shadow
    assert shadow._device is not None
    assert shadow._device._held
    for tensor, held in shadow._device._held.items():
        assert held.cpu().numpy().tobytes() == shadow._tensors[tensor].tobytes()


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize(("level", "kind"), [("fast", "mapping"), ("max", "pairs")])
def test_a_writer_stores_the_same_parts_as_from_the_cpu(
    stores: list[Path],
    snapshots: list[training.Snapshot],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    level: str,
    kind: str,
) -> None:
    with Writer(stores[0], level=level) as writer:
        for snapshot in snapshots[1:]:
            given = {name: scattered(value.to(place)) for name, value in snapshot.items()}
            writer.publish(given if kind == "mapping" else given.items()).result()
            assert_copies_are_the_shadow(writer)
            assert len(writer._shadow._device._held) == len([v for v in snapshot.values() if v.numel()])
    monkeypatch.undo()
    with Writer(stores[1], level=level) as writer:
        for snapshot in snapshots[1:]:
            writer.publish(snapshot).result()
        assert writer._shadow._device is None
    found, expected = (chunks_of(store) for store in stores)
    assert len({version for version, *_ in found}) == len(snapshots) - 1  # one version changes nothing
    assert found == expected


def scattered(value: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that is not contiguous, where a matrix allows it."""
    return value.t().contiguous().t() if value.ndim == 2 else value


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("what", ["part lost", "in doubt", "late", "a tensor missing"])
def test_a_failed_publish_leaves_the_copies_at_the_last_committed_version(
    stores: list[Path],
    snapshots: list[training.Snapshot],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
    what: str,
) -> None:
    backend = FaultyBackend(LocalBackend(stores[0]))
    monkeypatch.setattr(deltastore.writer, "open_backend", lambda *_, **__: backend)
    versions = [{name: value.to(place) for name, value in snapshot.items()} for snapshot in snapshots]
    with Writer("any") as writer:
        writer.publish(versions[1]).result()
        before = [held.clone() for held in writer._shadow._device._held.values()]
        if what == "a tensor missing":
            with pytest.raises(PublishError):
                writer.publish(list(versions[2].items())[:-1])
        else:
            if what == "part lost":
                backend.add(Fault(operation="write", key_prefix="parts/"))
            else:
                effect = Effect.LATE if what == "late" else Effect.AFTER
                backend.add(*[Fault(operation="create", key_prefix="manifests/", effect=effect)])
                backend.add(*[Fault(operation="read", key_prefix="manifests/")] * 9)
            with pytest.raises((StorageError, CommitInDoubt)):
                writer.publish(versions[2]).result()
            backend._left.clear()
            backend.land()
        after = list(writer._shadow._device._held.values())
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert_copies_are_the_shadow(writer)
        last = writer.publish(versions[4]).result().version
        assert_copies_are_the_shadow(writer)
    assert last == (3 if what in {"in doubt", "late"} else 2)
    open_store(stores[0]).restore(last, tmp_path / "restored")
    training.assert_holds(tmp_path / "restored", snapshots[4])


def test_nothing_of_this_is_imported_for_tensors_on_the_cpu(stores: list[Path], tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "import deltastore, deltastore.shadow, deltastore.tensors, deltastore.intake, deltastore.writer\n"
        "assert 'torch' not in sys.modules\n"
        "with deltastore.Writer(sys.argv[1]) as writer:\n"
        "    writer.publish(deltastore.open_checkpoint(sys.argv[2])).result()\n"
        "assert 'torch' not in sys.modules and 'deltastore.device' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(stores[0]), str(tmp_path / "base")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


# What CUDA is asked for, where there is none: streams and events that write down what happens.


class _Recorded:
    """Stands in for a stream; ``log`` is shared."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.log.append(f"{self.name} done")

    def __enter__(self) -> None:
        self.log.append(f"in {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    names = iter("abcdefgh")
    plain = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: _Recorded(next(names), written))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return plain(*sizes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    return written


def test_a_chunk_is_handed_on_only_after_its_stream_and_while_the_next_is_on_its_way(log: list[str]) -> None:
    content = DeviceBytes(torch.arange(90, dtype=torch.uint8), "event")
    bus = Bus(torch.device("cuda", 0))
    found = []
    for chunk in bus.chunks(content, [(0, 30), (30, 60), (60, 90)]):
        log.append("used")
        found.append(chunk.tobytes())
    assert b"".join(found) == bytes(range(90))
    begin = ["{0} waits for event", "in {0}", "in {0}"]
    a, b = ([line.format(name) for line in begin] for name in "ab")
    assert log == [*a, *b, "a done", "used", *a, "b done", "used", "a done", "used"]


def test_changed_elements_are_read_only_after_the_stream_that_found_them(log: list[str]) -> None:
    bus = Bus(torch.device("cuda", 0))
    with bus.computing(["one", None, "two"]):
        positions, values = bus.fetch(torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int16))
    assert positions.view(np.int32).tolist() == values.view(np.int16).tolist() == [0, 1, 2]
    assert log == ["a waits for one", "a waits for two", "in a", "in a", "in a", "a done"]


def test_bytes_of_a_device_wait_for_the_stream_that_made_them(log: list[str]) -> None:
    content = DeviceBytes(torch.arange(9, dtype=torch.uint8), _Recorded("the trainer", log))
    assert content(2, 5).tolist() == [2, 3, 4]
    assert log == ["the trainer done"]
