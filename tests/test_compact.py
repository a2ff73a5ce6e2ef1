"""Routes made from chains of every dtype and encoding lead to the exact bytes, whatever happens on the way."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
import training

import deltastore.attempt
import deltastore.codec
import deltastore.compact
from deltastore import Writer, open_store
from deltastore.codec import Encoding
from deltastore.compact import Wanted, anchor, compact, missing_skips
from deltastore.errors import CorruptObject, StorageError, StreamMismatch, VersionNotFound
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.manifest import MAX_PART_BYTES
from deltastore.part import parse_part
from deltastore.planner import Planner, read_route
from deltastore.policy import Policy
from deltastore.reader import store_at
from deltastore.retention import Standing
from deltastore.route import begun_key
from deltastore.spool import read_object
from deltastore.stats import stats
from deltastore.storage.faults import Effect, Fault, FaultyBackend
from deltastore.storage.local import LocalBackend
from deltastore.tags import read_standing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.reader import Store
    from deltastore.route import Route

VERSIONS = 21


def small(snapshots: list[training.Snapshot]) -> list[training.Snapshot]:
    """Leave out the largest tensors: what is left has every dtype."""
    return [{name: tensor for name, tensor in snapshot.items() if tensor.numel() < 100_000} for snapshot in snapshots]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltastore.compact, "SPANS", (2, 8, 16))


@pytest.fixture(scope="module")
def snapshots() -> list[training.Snapshot]:
    """Versions with sparse, dense, full and no changes."""
    versions = small(training.chain(VERSIONS, seed=4))
    for number, version in enumerate(versions):
        # Now and then beyond what a difference says well: full chunks, which do not lead back.
        noise = np.random.default_rng((number + 2) // 6).integers(0, 256, version["model.ids"].nbytes, np.uint8)
        training.flat(version["model.ids"])[:] = training.torch.from_numpy(noise)
    return versions


@pytest.fixture(scope="module")
def template(snapshots: list[training.Snapshot], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes a store of all versions, written at one level, once."""
    made: dict[str, Path] = {}

    def make(level: str) -> Path:
        if level not in made:
            root = made[level] = tmp_path_factory.mktemp(level)
            base = training.save(root / "base", snapshots[0])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(deltastore.attempt, "_PART_BYTES", 30_000)
                with Writer(root / "store", base=base, level=level, anchor_every=10) as writer:
                    for snapshot in snapshots[1:]:
                        writer.publish(snapshot).result()
        return made[level]

    return make


@pytest.fixture
def place(request: pytest.FixtureRequest, template: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(template(getattr(request, "param", "fast")), tmp_path / "it")
    return tmp_path / "it"


def spans(routes: tuple[Route, ...] | list[Route]) -> list[tuple[int | None, int]]:
    return sorted(
        ((route.start, route.version) for route in routes),
        key=lambda span: (span[1], 1 if span[0] is None else -span[0]),
    )


def routes_in(store: Store) -> list[Route]:
    return [read_route(store, route.version, route.attempt_id) for route in Planner(store).routes().values()]


def assert_leads(store: Store, start: int | None, end: int, snapshots: list[training.Snapshot], tmp_path: Path) -> None:
    source = tmp_path / f"source{start}"
    if start is not None and not source.exists():
        training.save(source, snapshots[start])
    target = tmp_path / f"{start}to{end}"
    store.restore(end, target, base=None if start is None else source)
    training.assert_holds(target, snapshots[end])


def expected_spans() -> list[tuple[int | None, int]]:
    return spans_of(VERSIONS - 1)


def spans_of(newest: int) -> list[tuple[int | None, int]]:
    skips = [(wanted.start, wanted.version) for wanted in missing_skips(newest, ())]
    return sorted([*skips, (None, 10), (None, 20)], key=lambda span: (span[1], 1 if span[0] is None else -span[0]))


@pytest.mark.parametrize(("place", "level"), [("fast", "max"), ("max", "fast")], indirect=["place"])
def test_every_route_leads_where_it_says(level, place, snapshots, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(deltastore.compact, "_WINDOW_BYTES", 50_000)
    monkeypatch.setattr(deltastore.compact, "_ROUTES_AT_ONCE", 5)
    monkeypatch.setattr(deltastore.attempt, "_PART_BYTES", 30_000)
    store = open_store(place / "store")
    added = compact(store, level=level)
    assert spans(added.routes) == expected_spans()
    assert any(len(route.parts) > 2 for route in added.routes)
    assert {route.invertible for route in added.routes if route.kind == "skip"} == {True, False}
    report = check(store.backend, read_data=True)
    assert report.ok, report.problems
    held = [encoding for route in added.routes if route.kind == "skip" for encoding in encodings(store, route)]
    assert set(held) >= {Encoding.SPARSE, Encoding.DENSE, Encoding.FULL}
    assert (Encoding.CONTEXTUAL in held) == (level == "max")
    again = open_store(place / "store")
    for start, end in [(0, 16), (0, 20), (3, 18), (8, 16), (2, 4), (None, 20), (None, 9), (16, 0), (20, 3), (18, 16)]:
        assert_leads(again, start, end, snapshots, tmp_path)
    assert compact(again) == deltastore.compact.Compacted((), ())


def encodings(store: Store, route: Route) -> list[int]:
    from deltastore.plan import Step  # noqa: PLC0415 - only here

    identity = Step("skip", route).identity
    return [
        int(encoding)
        for part in route.parts
        for encoding in parse_part(
            read_object(store.backend, part, limit=MAX_PART_BYTES), identity, store.schema(), store.hash, key=part.key
        ).encoding
    ]


def test_a_plan_goes_over_the_skips_and_back_over_those_that_invert(place, snapshots, tmp_path) -> None:
    store = open_store(place / "store")
    added = compact(store)
    found = [(step.kind, step.start, step.end) for step in open_store(place / "store").plan(1, 4).steps]
    assert found == [("delta", 1, 2), ("skip", 2, 4)]
    back = next(route for route in added.routes if route.kind == "skip" and route.invertible)
    assert back.start is not None
    plan = open_store(place / "store").plan(back.version, back.start)
    assert [(step.kind, step.start, step.end) for step in plan.steps] == [("inverse", back.version, back.start)]
    assert_leads(open_store(place / "store"), back.version, back.start, snapshots, tmp_path)


def test_what_was_added_helps_the_next_compaction_and_is_not_made_again(place, monkeypatch) -> None:
    monkeypatch.setattr(deltastore.compact, "SPANS", (2,))
    first = compact(open_store(place / "store"))
    monkeypatch.setattr(deltastore.compact, "SPANS", (2, 8))
    store = open_store(place / "store")
    read: list[str] = []
    backend_read = LocalBackend.read
    monkeypatch.setattr(
        LocalBackend, "read", lambda self, key, *, limit: read.append(key) or backend_read(self, key, limit=limit)
    )
    second = compact(store)
    assert spans(second.routes) == [(0, 8), (8, 16)]
    assert {(route.start, route.version) for route in first.routes}.isdisjoint(spans(second.routes))
    # Over the skips of two: no delta's parts, but those to the anchor at hand.
    assert not [key for key in read if key.startswith("parts/") and key[6:16] != "0000000000"]
    assert check(store.backend, read_data=True).ok


def test_a_base_that_is_not_stored_has_to_be_given(snapshots, tmp_path) -> None:
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "store", base=base, upload_base=False) as writer:
        for snapshot in snapshots[1:5]:
            writer.publish(snapshot).result()
    store = open_store(tmp_path / "store")
    for make in (lambda: compact(store), lambda: anchor(store, 3)):
        with pytest.raises(VersionNotFound) as caught:
            make()
        assert "--base" in (caught.value.hint or "")
    assert list(store.backend.list("routes/")) == []
    assert spans(compact(store, base=base).routes) == [(0, 2), (2, 4)]
    made = anchor(store, 3, base=base)
    assert made is not None
    assert made.version == 3
    assert anchor(store, 3) is None
    assert anchor(store, 4) is not None  # from the anchor of 3
    with Writer(tmp_path / "store") as writer:  # and a writer needs the base no more
        assert writer.version == 4
        writer.publish(snapshots[5]).result()
    assert check(store.backend, read_data=True).ok


def test_an_anchor_by_hand_serves_those_who_have_nothing(place, snapshots, tmp_path) -> None:
    store = open_store(place / "store")
    assert anchor(store, 0) is None
    route = anchor(store, 7)
    assert route is not None
    assert anchor(open_store(place / "store"), 7) is None
    again = open_store(place / "store")
    assert [(step.kind, step.end) for step in again.plan(None, 7).steps] == [("anchor", 7)]
    assert again.anchored(range(21)) == {7}
    assert again.anchored(range(7)) == frozenset()
    assert_leads(again, None, 8, snapshots, tmp_path)
    with pytest.raises(VersionNotFound):
        anchor(store, VERSIONS)


def test_an_anchor_is_due_when_the_newest_version_costs_too_much(snapshots, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(deltastore.compact, "SPANS", ())
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(tmp_path / "store", base=base, anchor_when=1.0) as writer:
        for snapshot in snapshots[1:13]:
            writer.publish(snapshot).result()
    store = open_store(tmp_path / "store")
    assert store.plan(None, 12).stored_bytes > store.base.model.snapshot_bytes
    added = compact(store)
    assert [route.version for route in added.routes if route.kind == "anchor"] == [12]
    assert compact(open_store(tmp_path / "store")).routes == ()


def damaged(kind: str, path: Path) -> None:
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["gone", "cut", "flipped"])
def test_a_route_whose_parts_are_damaged_is_no_obstacle(kind, place, snapshots, tmp_path) -> None:
    store = open_store(place / "store")
    routes = compact(store).routes
    for route in routes:
        for part in route.parts:
            damaged(kind, place / "store" / part.key)
    again = open_store(place / "store")
    for start, end in [(0, 16), (1, 20), (None, 20), (20, 0)]:
        assert_leads(again, start, end, snapshots, tmp_path)
    found = {(problem.kind, problem.key) for problem in check(store.backend, read_data=True).problems}
    assert {key for _, key in found} == {part.key for route in routes for part in route.parts}
    with Writer(place / "store") as writer:
        writer.publish(snapshots[0]).result()
        assert writer.version == VERSIONS


@pytest.mark.parametrize("kind", ["gone", "flipped"])
def test_a_route_whose_record_is_damaged_is_no_obstacle(kind, place, snapshots, tmp_path) -> None:
    store = open_store(place / "store")
    for route in compact(store).routes:
        damaged(kind, place / "store" / f"routes/{route.version:010d}/{route.attempt_id}/route.json")
    assert_leads(open_store(place / "store"), 0, 17, snapshots, tmp_path)
    assert check(store.backend, read_data=True).ok == (kind == "gone")


def test_a_compaction_takes_another_way_round_a_damaged_route(place, snapshots, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(deltastore.compact, "SPANS", (2,))
    broken = compact(open_store(place / "store")).routes
    for route in broken:
        for part in route.parts:
            damaged("flipped", place / "store" / part.key)
    monkeypatch.setattr(deltastore.compact, "SPANS", (8,))
    store = open_store(place / "store")
    assert spans(compact(store).routes) == [(0, 8), (8, 16)]
    assert_leads(open_store(place / "store"), 0, 16, snapshots, tmp_path)
    keys = {part.key for route in broken for part in route.parts}
    assert {problem.key for problem in check(store.backend, read_data=True).problems} == keys


def test_a_route_that_lies_in_its_tables_is_left_and_the_bytes_are_exact(
    place, snapshots, tmp_path, monkeypatch
) -> None:
    """A skip that says it leads to 16, and leads to 14 instead, with digests that agree with themselves."""
    import msgspec  # noqa: PLC0415 - only here

    from deltastore.commit import commit  # noqa: PLC0415
    from deltastore.part import ChunkRow, PartIdentity, build_part  # noqa: PLC0415
    from deltastore.route import encode_route, route_key, route_part_key  # noqa: PLC0415

    store = open_store(place / "store")
    monkeypatch.setattr(deltastore.compact, "SPANS", (14,))
    (honest,) = compact(store).routes[:1]
    assert (honest.start, honest.version) == (0, 14)
    attempt = "ab" * 16
    parts = []
    for reference in honest.parts:
        identity = PartIdentity(store.stream_id, 14, honest.attempt_id, "model")
        data = read_object(store.backend, reference, limit=MAX_PART_BYTES)
        part = parse_part(data, identity, store.schema(), store.hash, key=reference.key)
        rows = [
            ChunkRow(
                int(part.tensor[row]),
                int(part.chunk[row]),
                deltastore.codec.EncodedChunk(
                    Encoding(part.encoding[row]), int(part.changed[row]), bytes(part.chunk_payload(row))
                ),
                part.old_digests[row].tobytes(),
                part.new_digests[row].tobytes(),
            )
            for row in range(len(part))
        ]
        forged = build_part(rows, PartIdentity(store.stream_id, 16, attempt, "model"), digest_size=16)
        key = route_part_key(0)(16, attempt, reference.key.rsplit("/", 1)[1].removeprefix("0000000000-"))
        store.backend.write(key, forged)
        parts.append(msgspec.structs.replace(reference, key=key, size=len(forged), digest=store.hash.of(forged)))
    end = store.manifest(16)
    lie = msgspec.structs.replace(
        honest, attempt_id=attempt, version=16, commit_id=end.commit_id, snapshot_id=end.snapshot_id, parts=tuple(parts)
    )
    commit(store.backend, route_key(16, attempt), encode_route(lie, hash_function=store.hash), limit=1 << 20)
    again = open_store(place / "store")
    assert ("skip", 0, 16) in [(step.kind, step.start, step.end) for step in again.plan(0, 16).steps]
    for end_version in (16, 17, 18):  # where the lie is found at the end, and where at the next part
        assert_leads(again, 0, end_version, snapshots, tmp_path)
    problems = check(store.backend, read_data=True).problems
    assert [problem.key for problem in problems] == [route_key(16, attempt)]


def test_damaged_deltas_are_damage_with_routes_or_without(place, tmp_path) -> None:
    store = open_store(place / "store")
    compact(store)
    for version in range(1, VERSIONS):
        for part in store.manifest(version).model.parts:
            damaged("flipped", place / "store" / part.key)
    store = open_store(place / "store")
    store.restore(16, tmp_path / "sixteen")  # over skips alone
    with pytest.raises(CorruptObject) as caught:
        store.restore(17, tmp_path / "seventeen")
    assert caught.value.key is not None
    assert caught.value.key.startswith("parts/")
    assert not (tmp_path / "seventeen").exists()


@pytest.mark.parametrize("operation", ["read", "write", "create", "list"])
@pytest.mark.parametrize(("effect", "skipped"), [(Effect.BEFORE, 0), (Effect.BEFORE, 3), (Effect.AFTER, 2)])
def test_a_store_that_fails_once_leaves_nothing_half_made(
    operation, effect, skipped, place, snapshots, tmp_path
) -> None:
    passed = Fault(operation=operation, effect=Effect.NONE, key_prefix="routes/")
    script = [passed] * skipped + [Fault(operation=operation, effect=effect, key_prefix="routes/")]
    faulty = FaultyBackend(LocalBackend(place / "store"), script)
    with suppress(StorageError):  # a lost answer to a creation is no failure, and the others are
        compact(store_at(faulty))
    assert check(LocalBackend(place / "store"), read_data=True).ok
    compact(open_store(place / "store"))
    store = open_store(place / "store")
    assert sorted(set(spans(routes_in(store))), key=str) == sorted(expected_spans(), key=str)
    assert_leads(store, 0, 17, snapshots, tmp_path)


def test_compactors_at_once_do_no_harm(place, snapshots, tmp_path) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(2)

    def run() -> None:
        try:
            store = open_store(place / "store")
            gate.wait()
            compact(store, workers=1)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store = open_store(place / "store")
    assert sorted(set(spans(routes_in(store))), key=str) == sorted(expected_spans(), key=str)
    assert check(store.backend, read_data=True).ok
    assert_leads(store, 0, 20, snapshots, tmp_path)


def test_a_version_that_is_no_longer_the_same_gets_no_route(place, monkeypatch) -> None:
    store = open_store(place / "store")

    def changed(manifest: object) -> None:
        raise StreamMismatch("replaced")

    monkeypatch.setattr(store, "recheck", changed)
    with pytest.raises(StreamMismatch):
        compact(store)
    assert list(store.backend.list("routes/")) == []


def test_no_route_is_made_to_or_from_a_version_that_is_not_kept(place, monkeypatch) -> None:
    store = open_store(place / "store")
    monkeypatch.setattr(Standing, "keeps", lambda self, version: version >= 10)
    assert spans(compact(store).routes) == [(None, 10), (10, 12), (12, 14), (14, 16), (16, 18), (18, 20), (None, 20)]
    assert check(store.backend, read_data=True).ok


def test_a_route_says_when_it_was_begun_before_its_first_part(place) -> None:
    store = open_store(place / "store")
    backend = FaultyBackend(store.backend)
    backend.add(Fault(operation="write", effect=Effect.AFTER, key_prefix="routes/"))
    with pytest.raises(StorageError):
        anchor(store_at(backend), 7)
    (begun,) = [info.key for info in store.backend.list("routes/")]
    assert begun.endswith("/begun.json")
    assert collect(store).young == 1
    assert collect(store, grace=0).by_reason().keys() == {"abandoned"}
    made = anchor(store, 7)
    assert made is not None
    assert begun_key(7, made.attempt_id) in {info.key for info in store.backend.list("routes/")}
    assert stats(store).orphan_bytes == sum(
        info.size for info in store.backend.list("routes/") if made.attempt_id not in info.key
    )


def test_a_collector_takes_the_way_from_under_a_compaction(place) -> None:
    """What vanished was let go: the compaction goes on from the anchor that the record keeps."""
    store = open_store(place / "store")
    backend = FaultyBackend(store.backend)

    def meanwhile() -> None:
        assert anchor(store, 19) is not None
        forget(store, Policy(keep_last=2))
        collect(store)

    backend.add(Fault(operation="read", effect=Effect.NONE, key_prefix="parts/0000000005", hook=meanwhile))
    made = anchor(store_at(backend), 20, workers=1)
    assert made is not None
    assert backend.remaining == 0
    assert check(store.backend, read_data=True).ok


def test_what_was_dropped_is_made_again_where_both_ends_are_kept(place) -> None:
    store = open_store(place / "store")
    first = compact(store).routes
    assert spans(compact(store).routes) == []
    forget(store, Policy(keep_last=1, keep_every=4))
    standing, _ = read_standing(store)
    gone = [route for route in first if not standing.keeps_route(route)]
    kept = [route for route in first if standing.keeps_route(route)]
    assert gone
    assert kept
    made = compact(store).routes
    there = {(route.start, route.version) for route in kept}
    assert not there & set(spans(made))
    assert all(version % 4 == 0 for span in spans(made) for version in span if version is not None)
    collect(store, grace=0)
    assert check(store.backend, read_data=True).ok
    assert compact(store).routes == ()


@pytest.mark.s3
def test_a_real_s3_server_is_compacted_and_read(s3, snapshots, tmp_path) -> None:
    url, options = f"{s3.url}/compact", dict(s3.storage_options)
    base = training.save(tmp_path / "base", snapshots[0])
    with Writer(url, base=base, storage_options=options, anchor_every=4) as writer:
        for snapshot in snapshots[1:6]:
            writer.publish(snapshot).result()
    made = compact(open_store(url, storage_options=options))
    assert spans(made.routes) == [(0, 2), (2, 4), (None, 4)]
    store = open_store(url, storage_options=options)
    for start, end in [(0, 5), (None, 5), (4, 0)]:
        assert_leads(store, start, end, snapshots, tmp_path)
    assert compact(store).routes == ()
    assert check(store.backend, read_data=True).ok


def test_missing_skips_are_the_aligned_spans_that_are_not_there(monkeypatch) -> None:
    monkeypatch.setattr(deltastore.compact, "SPANS", (16, 256))
    assert missing_skips(15, ()) == []
    assert missing_skips(40, ()) == [Wanted(16, 0), Wanted(32, 16)]
    assert missing_skips(40, {Wanted(16, 0)}) == [Wanted(32, 16)]
    assert missing_skips(40, {Wanted(16, None), Wanted(32, 0)}) == [Wanted(16, 0), Wanted(32, 16)]
    assert len(missing_skips(256, ())) == 17


def test_a_stream_of_no_bytes_is_compacted_too(tmp_path) -> None:
    import torch  # noqa: PLC0415 - only here

    empty = {"nothing": torch.empty(0, 4)}
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", empty), anchor_every=2) as writer:
        for _ in range(4):
            writer.publish(empty).result()
    added = compact(open_store(tmp_path / "store"))
    assert spans(added.routes) == [(0, 2), (None, 2), (2, 4), (None, 4)]
    store = open_store(tmp_path / "store")
    assert store.plan(0, 4).stored_bytes == 0
    store.restore(4, tmp_path / "out")
    training.assert_holds(tmp_path / "out", empty)
