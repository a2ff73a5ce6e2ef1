"""Planning in a store: what is listed, what is read, and what is left out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest
import training

from deltastore import Writer, open_store
from deltastore.compact import compact
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, VersionNotFound
from deltastore.manifest import encode_manifest, manifest_key
from deltastore.planner import Planner, read_route
from deltastore.retention import Standing, retention_key
from deltastore.route import Route, encode_route, route_key
from deltastore.storage.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.reader import Store

XXH3 = hasher("xxh3-128")
VERSIONS = 1300


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 1,300 versions of which all but the first few change nothing, compacted."""
    root = tmp_path_factory.mktemp("planner")
    with Writer(
        root / "store", base=training.save(root / "base", training.small_snapshot(0)), anchor_every=1000
    ) as writer:
        for seed in (1, 2, 3):
            writer.publish(training.small_snapshot(seed)).result()
        parent = writer.head
    for version in range(4, VERSIONS + 1):
        name = f"{version:032x}"
        parent = msgspec.structs.replace(
            parent,
            version=version,
            commit_id=name,
            attempt_id=name,
            parent_version=parent.version,
            parent_commit_id=parent.commit_id,
            parent_snapshot_id=parent.snapshot_id,
            components={"model": msgspec.structs.replace(parent.model, parts=(), invertible=True)},
        )
        (root / "store" / manifest_key(version)).write_bytes(encode_manifest(parent, hash_function=XXH3))
    added = compact(open_store(root / "store"))
    assert len(added.routes) == VERSIONS // 16 + VERSIONS // 256 + 1
    assert added.segments == (0,)
    return root / "store"


class Watched:
    """A backend that notes what it is asked for."""

    def __init__(self, path: Path) -> None:
        self._inner = LocalBackend(path)
        self.read_keys: list[str] = []
        self.listed: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read(self, key: str, *, limit: int) -> bytes:
        self.read_keys.append(key)
        return self._inner.read(key, limit=limit)

    def list(self, prefix: str) -> object:
        self.listed.append(prefix)
        return self._inner.list(prefix)


def watched(path: Path) -> tuple[Store, Watched]:
    store = open_store(path)
    backend = Watched(path)
    store.backend = backend  # type: ignore[assignment]
    return store, backend


def steps(store: Store, start: int | None, end: int) -> list[tuple[str, int | None, int]]:
    return [(step.kind, step.start, step.end) for step in store.plan(start, end).steps]


def test_the_next_version_takes_its_manifest_and_no_listing(template) -> None:
    store, backend = watched(template)
    store.manifest(700)
    backend.read_keys.clear()
    assert steps(store, 700, 701) == [("delta", 700, 701)]
    assert steps(store, 701, 701) == []
    assert backend.read_keys == [manifest_key(701), retention_key(1), retention_key(1)]
    assert backend.listed == []


def test_a_thousand_versions_are_planned_with_few_reads_and_one_listing(template, tmp_path) -> None:
    # Routes without parts have to be read to be known: give them names, as routes that store something have.
    shutil.copytree(template, tmp_path / "store")
    with_parts(tmp_path / "store")
    store, backend = watched(tmp_path / "store")
    found = steps(store, 250, 1250)
    assert len(found) < 40
    assert ("skip", 256, 512) in found
    assert sum(kind == "delta" for kind, _, _ in found) <= 30
    assert backend.listed == ["routes/"]
    assert len(backend.read_keys) < 150
    assert manifest_key(1250) in backend.read_keys
    assert not [key for key in backend.read_keys if "/0000000600" in key]


def records(store: Store) -> list[Route]:
    return [read_route(store, route.version, route.attempt_id) for route in Planner(store).routes().values()]


def with_parts(path: Path) -> None:
    """Give each route one part, of which only the listing is ever asked."""
    from deltastore.manifest import PartRef  # noqa: PLC0415 - only here
    from deltastore.route import route_part_key  # noqa: PLC0415

    store = open_store(path)
    for route in records(store):
        key = route_part_key(route.start)(route.version, route.attempt_id, "model-00000.safetensors")
        content = bytes(10 if route.kind == "skip" else 100_000)
        (path / key).write_bytes(content)
        part = PartRef(key, len(content), XXH3.of(content), 1, 0, 0)
        data = encode_route(msgspec.structs.replace(route, parts=(part,)), hash_function=XXH3)
        (path / route_key(route.version, route.attempt_id)).write_bytes(data)


def test_versions_without_routes_between_are_read_by_the_segment(template, tmp_path) -> None:
    shutil.copytree(template, tmp_path / "store")
    shutil.rmtree(tmp_path / "store/routes")
    store, backend = watched(tmp_path / "store")
    assert len(steps(store, 0, 999)) == 999
    assert len(backend.read_keys) < 10
    assert "segments/0000000000.zst" in backend.read_keys


def test_a_plan_from_nothing_starts_at_the_newest_anchor(template) -> None:
    store = open_store(template)
    assert steps(store, None, 1001)[0] == ("anchor", None, 1000)
    assert steps(store, None, 999) == [("anchor", None, 1000), ("inverse", 1000, 999)]
    assert store.anchored(range(VERSIONS)) == {1000}


def test_going_far_back_goes_over_skips(template) -> None:
    store = open_store(template)
    found = steps(store, 1025, 512)
    assert [kind for kind, _, _ in found] == ["inverse"] * len(found)
    assert len(found) == 3


def changed(path: Path, **changes: object) -> None:
    """Rewrite every route's record with other fields."""
    if changes.get("kind") == "abandoned":
        changes["parts"] = ()
    store = open_store(path)
    for route in records(store):
        data = encode_route(msgspec.structs.replace(route, **changes), hash_function=XXH3)
        (path / route_key(route.version, route.attempt_id)).write_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"commit_id": "9" * 32},
        {"snapshot_id": f"xxh3-128:{'9' * 32}"},
        {"stream_id": "9" * 32},
        {"kind": "abandoned"},
        {"format": 3},
        {"kind": "bridge"},
    ],
)
def test_routes_of_another_history_or_kind_are_left_out(changes, template, tmp_path) -> None:
    shutil.copytree(template, tmp_path / "store")
    changed(tmp_path / "store", **changes)
    store = open_store(tmp_path / "store")
    assert steps(store, 0, 20) == [("delta", version - 1, version) for version in range(1, 21)]
    assert store.anchored(range(VERSIONS)) == frozenset()


def test_skips_from_another_commit_are_left_out(template, tmp_path) -> None:
    shutil.copytree(template, tmp_path / "store")
    store = open_store(tmp_path / "store")
    for route in records(store):
        if route.kind == "skip":
            data = encode_route(msgspec.structs.replace(route, start_commit_id="9" * 32), hash_function=XXH3)
            (tmp_path / "store" / route_key(route.version, route.attempt_id)).write_bytes(data)
    assert "skip" not in {kind for kind, _, _ in steps(open_store(tmp_path / "store"), 0, 40)}


def test_dropped_routes_are_left_out(template, monkeypatch) -> None:
    monkeypatch.setattr(Standing, "keeps_route", lambda self, route: route.version == 32)
    found = steps(open_store(template), 0, 32)
    assert found == [*(("delta", version - 1, version) for version in range(1, 17)), ("skip", 16, 32)]
    monkeypatch.setattr(Standing, "keeps_route", lambda self, route: False)
    assert open_store(template).anchored(range(VERSIONS)) == frozenset()


def test_versions_whose_own_parts_are_gone_are_reached_over_routes(template, monkeypatch) -> None:
    monkeypatch.setattr(Standing, "keeps_parts", lambda self, version: version > 16)
    assert steps(open_store(template), 0, 17) == [("skip", 0, 16), ("delta", 16, 17)]
    assert steps(open_store(template), None, 17)[0][0] == "anchor"
    with pytest.raises(VersionNotFound):
        open_store(template).plan(0, 1)
    monkeypatch.setattr(Standing, "keeps_parts", lambda self, version: version != 16)
    assert ("skip", 0, 16) in steps(open_store(template), 0, 16)
    assert steps(open_store(template), 15, 16) != [("delta", 15, 16)]


def test_a_record_says_which_attempt_is_damaged(template, tmp_path) -> None:
    shutil.copytree(template, tmp_path / "store")
    store = open_store(tmp_path / "store")
    attempt_id = next(iter(Planner(store).routes()))
    version = Planner(store).routes()[attempt_id].version
    path = tmp_path / "store" / route_key(version, attempt_id)
    path.write_bytes(path.read_bytes()[1:])
    with pytest.raises(CorruptObject) as caught:
        read_route(store, version, attempt_id)
    assert caught.value.key == route_key(version, attempt_id)
