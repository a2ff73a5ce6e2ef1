from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import deltastore.attempt
import deltastore.replay
from deltastore import Writer, open_checkpoint, open_store
from deltastore.errors import CorruptObject, StorageError
from deltastore.limits import Limits
from deltastore.part import PartIdentity, build_part
from deltastore.patch import write_each
from deltastore.replay import Fetch, _fronts, replay
from deltastore.restore import identify
from deltastore.spool import Spool

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.plan import Plan
    from deltastore.reader import Store
    from deltastore.replay import Replayed
    from deltastore.restore import Source
    from deltastore.snapshot import TensorSpec

TENSORS, ELEMENTS = 60, 150_000


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """A store of three versions, each delta in many parts, and what each version holds."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - only here

    root = tmp_path_factory.mktemp("replay")
    rng = np.random.default_rng(4)
    tensors = {f"t{i:02d}": rng.integers(0, 255, ELEMENTS, np.uint8) for i in range(TENSORS)}
    (root / "base").mkdir()
    save_file(tensors, root / "base" / "model.safetensors")
    snapshots = [tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltastore.attempt, "_PART_BYTES", 20_000)
        with Writer(root / "store", base=root / "base") as writer:
            for _ in range(2):
                tensors = {name: data.copy() for name, data in tensors.items()}
                for data in tensors.values():
                    data[rng.integers(0, ELEMENTS, 3_000)] += 1
                snapshots.append(tensors)
                writer.publish(tensors).result()
    return root, snapshots


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.replay, "_LEAST_WINDOW_CHUNKS", 4)


def follow(
    store: Store, plan: Plan, spool: Spool, source: Source | None, write: Any, *, workers: int, fronts: int = 1
) -> Replayed:
    with Fetch(store, plan, spool, fronts=fronts) as fetch:
        return replay(
            fetch,
            before=source.digests if source else None,
            read=source.checkpoint.read if source else nothing,
            write=write,
            workers=workers,
        )


class Result:
    """Collects the chunks that a replay hands on."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def write(self, spec: TensorSpec, chunk: int, data: np.ndarray) -> None:
        start, end = spec.chunk_range(chunk)
        self.tensors.setdefault(spec.name, np.zeros(spec.nbytes, np.uint8))[start:end] = data


def nothing(*_: object) -> np.ndarray:
    raise AssertionError("an anchor reads nothing")


@pytest.mark.parametrize("fronts", [1, 3])
@pytest.mark.parametrize("route", [(0, 2), (0, 1), (1, 0), (2, 0), (1, 1), (None, 2)])
def test_a_plan_leads_to_its_version_window_by_window(route, fronts, history, tmp_path) -> None:
    root, snapshots = history
    store = open_store(root / "store")
    start, end = route
    plan = store.plan(start, end)
    source = None
    if start is not None:
        store.restore(start, tmp_path / "source")
        source = identify(store, tmp_path / "source", workers=2)
    result = Result()
    spool = Spool(tmp_path / "parts")
    replayed = follow(store, plan, spool, source, write_each(result.write), workers=2, fronts=fronts)
    assert all((result.tensors[name] == data).all() for name, data in snapshots[end].items())
    assert replayed.fetched_bytes == plan.stored_bytes
    assert (replayed.digests == replay_digests(store, end, tmp_path)).all()


def replay_digests(store: Store, version: int, tmp_path: Path) -> np.ndarray:
    store.restore(version, tmp_path / "again")
    return open_checkpoint(tmp_path / "again").digests(store.hash)


def test_a_delta_of_many_parts_makes_several_windows(history) -> None:
    store = open_store(history[0] / "store")
    chunks = store.schema().chunks
    parts = store.manifest(1).model.parts
    assert len(parts) > 5
    assert all(later.first >= earlier.last for earlier, later in itertools.pairwise(parts))
    (windows,) = _fronts(store.plan(0, 2), chunks, most=1, rows=None)
    assert len(windows) > 1
    assert [number for window in windows for number in window] == list(range(chunks))


@pytest.mark.parametrize(("most", "expected"), [(2, 2), (7, 7), (99, 8)])
def test_fronts_share_all_chunks_out(most, expected, history) -> None:
    store = open_store(history[0] / "store")
    chunks = store.schema().chunks
    fronts = _fronts(store.plan(0, 2), chunks, most=most, rows=None)
    assert len(fronts) == expected
    assert [number for windows in fronts for window in windows for number in window] == list(range(chunks))
    sizes = [sum(map(len, windows)) for windows in fronts]
    assert max(sizes) - min(sizes) <= 1


def test_a_small_model_has_no_fronts(history, monkeypatch) -> None:
    store = open_store(history[0] / "store")
    chunks = store.schema().chunks
    monkeypatch.setattr(deltastore.replay, "_LEAST_WINDOW_CHUNKS", chunks + 1)
    assert _fronts(store.plan(0, 2), chunks, most=8, rows=None) == [[range(chunks)]]


@pytest.mark.parametrize(("steps", "expected"), [(1, 7), (2, 3), (0, 7)])
def test_the_more_steps_the_fewer_fronts(steps, expected, history, monkeypatch) -> None:
    store = open_store(history[0] / "store")
    monkeypatch.setattr(deltastore.replay, "_FRONT_STEPS", 7)
    assert len(_fronts(store.plan(0, steps), store.schema().chunks, most=8, rows=None)) == expected
    monkeypatch.setattr(deltastore.replay, "_FRONT_STEPS", 1)
    assert len(_fronts(store.plan(0, 2), store.schema().chunks, most=8, rows=None)) == 1


def test_fronts_are_built_side_by_side_and_their_parts_fetched_in_turn(history, tmp_path) -> None:
    store = open_store(history[0] / "store")
    plan, chunks = store.plan(0, 1), store.schema().chunks
    source = identify(store, history[0] / "base", workers=2)
    backend = store.backend
    recorder = store.backend = Recorder(backend)
    order = []

    def write(spec: TensorSpec, chunk: int, _data: np.ndarray) -> None:
        order.append(store.schema().chunk_number(spec.name, chunk))

    with Fetch(store, plan, Spool(tmp_path / "parts"), limits=Limits(fetchers=1), fronts=2) as fetch:
        replay(fetch, before=source.digests, read=source.checkpoint.read, write=write_each(write), workers=1)
        assert not fetch._parsed
    store.backend = backend
    assert sorted(order) == list(range(chunks))
    first, second = ([n for n in order if n in half] for half in (range(chunks // 2), range(chunks // 2, chunks)))
    assert (first, second) == (sorted(first), sorted(second))
    assert order.index(second[0]) < order.index(first[-1])
    assert order.index(first[0]) < order.index(second[-1])
    of_second = {part.key for part in plan.steps[0].parts if part.first >= chunks // 2}
    fetched = [key in of_second for key in recorder.keys]
    assert fetched != sorted(fetched), "one half's parts before the other's"


class Recorder:
    """A backend that notes the keys that are read."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read(self, key: str, *, limit: int) -> bytes:
        self.keys.append(key)
        return self._inner.read(key, limit=limit)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", [1, 20, 10**9])
def test_the_windows_of_a_time_have_no_more_rows_than_they_may(history, tmp_path, rows, count) -> None:
    store = open_store(history[0] / "store")
    chunks, plan = store.schema().chunks, store.plan(0, 2)
    fronts = _fronts(plan, chunks, most=count, rows=rows)
    assert len(fronts) == count
    windows = [window for front in fronts for window in front]
    assert [number for window in windows for number in window] == list(range(chunks))
    assert max(map(len, windows)) <= max(4, rows // count // len(plan.steps))
    source = identify(store, history[0] / "base", workers=2)
    result = Result()
    with Fetch(store, plan, Spool(tmp_path / "parts"), limits=Limits(window_rows=rows), fronts=count) as fetch:
        replay(fetch, before=source.digests, read=source.checkpoint.read, write=write_each(result.write), workers=2)
    assert all((result.tensors[name] == data).all() for name, data in history[1][2].items())


def test_it_is_told_once_that_all_parts_are_here(history, tmp_path) -> None:
    store = open_store(history[0] / "store")
    plan = store.plan(0, 2)
    told = []
    with Fetch(store, plan, Spool(tmp_path / "parts"), all_here=told.append) as fetch:
        for step in plan.steps:
            for part in step.parts:
                fetch.wait(part, step)
    assert told == [fetch]
    assert fetch.downloaded() == plan.stored_bytes


class Paused:
    """A backend that holds every range until it is told."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.opened, self.entered = threading.Event(), threading.Semaphore(0)
        self.ranges = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        self.ranges += 1
        self.entered.release()
        assert self.opened.wait(30)
        return self._inner.read_range(key, start, end)


def test_leaving_begins_no_other_request_and_what_came_is_kept(history, tmp_path) -> None:
    store = open_store(history[0] / "store")
    plan = store.plan(0, 2)
    backend = store.backend
    paused = store.backend = Paused(backend)
    spool = Spool(tmp_path / "parts")
    with Fetch(store, plan, spool, limits=Limits(largest_piece=1000, fetchers=2)) as fetch:
        for _ in range(2):
            assert paused.entered.acquire(timeout=30)
        fetch._leaving.set()
        paused.opened.set()
    assert paused.ranges == 2
    store.backend = backend
    with Fetch(store, plan, spool, limits=Limits(largest_piece=1000, fetchers=2)) as fetch:
        assert fetch.downloaded() == plan.stored_bytes - 2000
    with Fetch(store, store.plan(0, 1), Spool(tmp_path / "parts")) as fetch:
        assert fetch.downloaded() == 0


def test_an_interrupt_while_parts_are_asked_for_leaves_no_request_running(history, tmp_path, monkeypatch) -> None:
    store = open_store(history[0] / "store")
    backend = store.backend
    paused = store.backend = Paused(backend)
    submit = ThreadPoolExecutor.submit
    submitted: list[Future[int]] = []

    def interrupted(pool: ThreadPoolExecutor, *work: Any) -> Future[int]:
        submitted.append(submit(pool, *work))
        if len(submitted) == 5:
            assert paused.entered.acquire(timeout=60)
            paused.opened.set()
            raise KeyboardInterrupt
        return submitted[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Fetch(store, store.plan(0, 2), Spool(tmp_path / "parts"), limits=Limits(largest_piece=1000, fetchers=1))
    assert len(submitted) == 5
    assert all(future.done() for future in submitted)
    store.backend = backend


class Gate:
    """A backend whose last part of a version is not answered before the first window was written."""

    def __init__(self, inner, last_key: str) -> None:
        self._inner = inner
        self._last_key = last_key
        self.opened = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read(self, key: str, *, limit: int) -> bytes:
        if key == self._last_key and not self.opened.wait(30):
            raise StorageError("nothing was built while a part was on its way")
        return self._inner.read(key, limit=limit)


def test_chunks_are_built_while_later_parts_are_on_their_way(history, tmp_path) -> None:
    store = open_store(history[0] / "store")
    plan = store.plan(0, 1)
    source = identify(store, history[0] / "base", workers=2)
    gate = Gate(store.backend, plan.steps[0].parts[-1].key)
    store.backend = gate
    result = Result()

    def write(spec: TensorSpec, chunk: int, data: np.ndarray) -> None:
        result.write(spec, chunk, data)
        gate.opened.set()

    spool = Spool(tmp_path / "parts")
    follow(store, plan, spool, source, write_each(write), workers=2)
    assert all((result.tensors[name] == data).all() for name, data in history[1][1].items())


def test_a_part_that_holds_other_chunks_than_its_manifest_says_is_refused(history, tmp_path) -> None:
    import msgspec  # noqa: PLC0415 - only here

    store = open_store(history[0] / "store")
    plan = store.plan(0, 1)
    step = plan.steps[0]
    part = step.parts[0]
    for changes in ({"first": part.first + 1}, {"last": part.last + 1}, {"chunks": part.chunks - 1}):
        wrong = msgspec.structs.replace(part, **changes)
        model = msgspec.structs.replace(step.record.model, parts=(wrong, *step.parts[1:]))
        manifest = msgspec.structs.replace(step.record, components={"model": model})
        forged = type(plan)(plan.start, plan.end, plan.snapshot_id, (type(step)("delta", manifest),))
        source = identify(store, history[0] / "base", workers=2)
        with pytest.raises(CorruptObject) as caught:
            follow(store, forged, Spool(tmp_path / "parts"), source, lambda *_: None, workers=2)
        assert caught.value.key == part.key


def test_a_part_said_to_lie_beyond_the_schema_is_refused(history, tmp_path) -> None:
    import msgspec  # noqa: PLC0415 - only here

    store = open_store(history[0] / "store")
    plan = store.plan(0, 1)
    step = plan.steps[0]
    wrong = msgspec.structs.replace(step.parts[0], first=10**6, last=2 * 10**6)
    model = msgspec.structs.replace(step.record.model, parts=(wrong, *step.parts[1:]))
    manifest = msgspec.structs.replace(step.record, components={"model": model})
    forged = type(plan)(plan.start, plan.end, plan.snapshot_id, (type(step)("delta", manifest),))
    source = identify(store, history[0] / "base", workers=1)
    with pytest.raises(CorruptObject):
        follow(store, forged, Spool(tmp_path / "parts"), source, lambda *_: None, workers=1, fronts=3)
    with Fetch(store, forged, Spool(tmp_path / "parts")) as fetch, pytest.raises(CorruptObject) as caught:
        fetch.wait(wrong, forged.steps[0])
    assert caught.value.key == wrong.key


def test_a_part_without_a_row_is_refused(history, tmp_path) -> None:
    import msgspec  # noqa: PLC0415 - only here

    store = open_store(history[0] / "store")
    plan = store.plan(0, 1)
    step = plan.steps[0]
    identity = PartIdentity(store.stream_id, 1, step.record.attempt_id, "model")
    data = build_part([], identity, digest_size=store.hash.size)
    wrong = msgspec.structs.replace(step.parts[0], size=len(data), digest=store.hash.of(data))
    model = msgspec.structs.replace(step.record.model, parts=(wrong,))
    manifest = msgspec.structs.replace(step.record, components={"model": model})
    forged = type(plan)(plan.start, plan.end, plan.snapshot_id, (type(step)("delta", manifest),))
    spool = Spool(tmp_path / "parts")
    spool.put(data, wrong.digest)
    source = identify(store, history[0] / "base", workers=1)
    with pytest.raises(CorruptObject) as caught:
        follow(store, forged, spool, source, lambda *_: None, workers=1)
    assert caught.value.key == wrong.key
