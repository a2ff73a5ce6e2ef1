from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import CorruptObject, StreamMismatch, UnsupportedFormat, VersionNotFound
from deltastore.manifest import Component, Manifest, ObjectRef, PartRef, StreamRecord, part_key
from deltastore.plan import Plan, Step, cheapest, check_components, check_link, make_plan
from deltastore.route import Route, route_part_key

if TYPE_CHECKING:
    from collections.abc import Sequence

STREAM, ATTEMPT = "1" * 32, "2" * 32
DIGEST = f"xxh3-128:{'7' * 32}"


def commit_of(version: int) -> str:
    return f"{version:032x}"


def snapshot_of(version: int) -> str:
    return f"xxh3-128:{version + 0xABC:032x}"


def manifest(version: int, size: int = 10, *, invertible: bool = True, epoch: int = 1) -> Manifest:
    """Return the manifest of a version whose parts take ``size`` bytes; 0: no part."""
    part = PartRef(part_key(version, ATTEMPT, "model-00000.safetensors"), max(size, 1), DIGEST, 1, 0, 0)
    parts = (part,) if size else ()
    table = ObjectRef(part_key(0, ATTEMPT, "model-digests.safetensors"), 10, DIGEST) if not version else None
    is_base = version == 0
    return Manifest(
        format=1,
        stream_id=STREAM,
        version=version,
        kind="base" if is_base else "delta",
        commit_id=commit_of(version),
        attempt_id=ATTEMPT,
        writer_epoch=epoch,
        created_at="2026-01-02T03:04:05Z",
        components={"model": Component(snapshot_of(version), 100, 100, 1, parts, invertible, table)},
        parent_version=None if is_base else version - 1,
        parent_commit_id=None if is_base else commit_of(version - 1),
        parent_snapshot_id=None if is_base else snapshot_of(version - 1),
        stream=StreamRecord("xxh3-128", 1 << 21, {}) if is_base else None,
    )


def history(sizes: list[int], anchor: int = 1000, back: list[bool] | None = None) -> dict[int, Manifest]:
    ways = back or [True] * len(sizes)
    found = {0: manifest(0, anchor, invertible=False)}
    for version, (size, way) in enumerate(zip(sizes, ways, strict=True), 1):
        found[version] = manifest(version, size, invertible=way)
    return found


def route(plan: Plan) -> list[tuple[str, int]]:
    return [(step.kind, step.record.version) for step in plan.steps]


def between(start: int | None, version: int, size: int = 10, *, invertible: bool = True) -> Route:
    """Return a route whose parts take ``size`` bytes; 0: no part."""
    attempt = f"{version:016x}{0 if start is None else start + 1:016x}"
    key = route_part_key(start)(version, attempt, "model-00000.safetensors")
    return Route(
        format=1,
        stream_id=STREAM,
        attempt_id=attempt,
        kind="anchor" if start is None else "skip",
        version=version,
        created_at="2026-01-02T03:04:05Z",
        commit_id=commit_of(version),
        snapshot_id=snapshot_of(version),
        start=start,
        start_commit_id=None if start is None else commit_of(start),
        parts=(PartRef(key, size, DIGEST, 1, 0, 0),) if size else (),
        invertible=invertible and start is not None,
    )


def plan(start: int | None, end: int, manifests: dict[int, Manifest], routes: Sequence[Route] = ()) -> Plan:
    found = make_plan(start, end, manifests, routes)
    assert (found.start, found.end, found.snapshot_id) == (start, end, snapshot_of(end))
    assert found.stored_bytes == sum(step.stored_bytes for step in found.steps)
    assert_continuous(found)
    return found


def assert_continuous(found: Plan) -> None:
    standing = found.start
    for step in found.steps:
        assert step.start is None or step.start == standing
        standing = step.end
    assert standing == found.end


def test_forward_goes_through_every_delta() -> None:
    found = plan(2, 5, history([10] * 6))
    assert route(found) == [("delta", 3), ("delta", 4), ("delta", 5)]
    assert found.stored_bytes == 30
    assert not found.from_anchor


def test_nowhere_to_go_takes_no_step() -> None:
    for version in (0, 3):
        found = plan(version, version, history([10] * 3))
        assert found.steps == ()
        assert found.stored_bytes == 0
        assert not found.from_anchor


def test_from_nothing_starts_with_the_anchor() -> None:
    found = plan(None, 2, history([10] * 3))
    assert route(found) == [("anchor", 0), ("delta", 1), ("delta", 2)]
    assert found.stored_bytes == 1020
    assert found.from_anchor
    assert route(plan(None, 0, history([]))) == [("anchor", 0)]


def test_back_goes_through_the_same_deltas_inverted_when_that_is_cheaper() -> None:
    found = plan(3, 1, history([10] * 3))
    assert route(found) == [("inverse", 3), ("inverse", 2)]
    assert [(step.start, step.end) for step in found.steps] == [(3, 2), (2, 1)]
    assert not found.from_anchor


def test_back_goes_over_the_anchor_when_that_is_cheaper() -> None:
    found = plan(3, 1, history([10, 900, 900], anchor=1000))
    assert route(found) == [("anchor", 0), ("delta", 1)]
    assert found.from_anchor


def test_back_goes_over_the_anchor_when_one_delta_does_not_lead_back() -> None:
    for broken in (2, 3):
        ways = [version != broken for version in (1, 2, 3)]
        assert route(plan(3, 1, history([10] * 3, back=ways))) == [("anchor", 0), ("delta", 1)]
    assert route(plan(3, 1, history([10] * 3, back=[False, True, True]))) == [("inverse", 3), ("inverse", 2)]


def test_without_an_anchor_there_is_no_way_from_nothing() -> None:
    with pytest.raises(VersionNotFound) as caught:
        plan(None, 2, history([10] * 3, anchor=0))
    assert caught.value.hint


def test_without_an_anchor_there_is_no_way_back_over_a_delta_that_does_not_lead_back() -> None:
    with pytest.raises(VersionNotFound):
        plan(3, 1, history([10] * 3, anchor=0, back=[True, False, True]))
    assert route(plan(3, 1, history([10] * 3, anchor=0))) == [("inverse", 3), ("inverse", 2)]


def test_versions_where_nothing_changed_cost_nothing_and_are_walked_through() -> None:
    found = plan(1, 3, history([10, 0, 10]))
    assert route(found) == [("delta", 2), ("delta", 3)]
    assert found.stored_bytes == 10
    assert found.steps[0].parts == ()


def test_skips_are_taken_where_they_are_cheaper_and_deltas_where_they_are_not() -> None:
    manifests = history([10] * 9)
    skips = [between(0, 4, 12), between(4, 8, 12), between(0, 8, 90)]
    found = plan(0, 9, manifests, skips)
    assert route(found) == [("skip", 4), ("skip", 8), ("delta", 9)]
    assert [(step.start, step.end, step.stored_bytes) for step in found.steps] == [(0, 4, 12), (4, 8, 12), (8, 9, 10)]
    assert route(plan(0, 8, manifests, [between(0, 8, 500)])) == [("delta", version) for version in range(1, 9)]
    assert route(plan(3, 9, manifests, skips)) == [("delta", 4), ("skip", 8), ("delta", 9)]


def test_a_version_overshot_is_reached_backwards() -> None:
    assert route(plan(0, 7, history([10] * 8), [between(0, 8, 12)])) == [("skip", 8), ("inverse", 8)]
    assert route(plan(8, 0, history([10] * 8), [between(0, 8, 12)])) == [("inverse", 8)]
    found = plan(9, 1, history([10] * 9), [between(0, 8, 12)])
    assert [(step.kind, step.start, step.end) for step in found.steps] == [
        ("inverse", 9, 8),
        ("inverse", 8, 0),
        ("delta", 0, 1),
    ]


def test_a_skip_that_does_not_lead_back_is_no_way_back() -> None:
    found = plan(8, 0, history([10] * 8), [between(0, 8, 12, invertible=False)])
    assert route(found) == [("inverse", version) for version in range(8, 0, -1)]


def test_a_later_anchor_is_taken_by_those_who_have_nothing_or_are_far_behind() -> None:
    manifests = history([400] * 8)
    anchors = [between(None, 6, 1000)]
    assert route(plan(None, 7, manifests, anchors)) == [("anchor", 6), ("delta", 7)]
    assert route(plan(0, 7, manifests, anchors)) == [("anchor", 6), ("delta", 7)]
    assert plan(0, 7, manifests, anchors).from_anchor
    assert route(plan(5, 7, manifests, anchors)) == [("delta", 6), ("delta", 7)]
    assert route(plan(None, 5, manifests, anchors)) == [("anchor", 6), ("inverse", 6)]


def work(manifests: dict[int, Manifest]) -> int:
    return manifests[0].model.snapshot_bytes // 64 + 1


@given(st.data())
def test_every_plan_is_continuous_and_no_dearer_than_any_other_way(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    ways = [data.draw(st.booleans()) for _ in sizes]
    manifests = history(sizes, data.draw(st.integers(0, 150)), ways)
    spans = st.tuples(st.integers(0, len(sizes)), st.integers(0, len(sizes))).filter(lambda span: span[0] < span[1])
    skips = data.draw(st.lists(spans, unique=True, max_size=4))
    anchors = data.draw(st.lists(st.integers(0, len(sizes)), unique=True, max_size=2))
    routes = [
        between(start, end, data.draw(st.integers(0, 150)), invertible=data.draw(st.booleans())) for start, end in skips
    ]
    routes += [between(None, version, data.draw(st.integers(0, 150))) for version in anchors]
    start = data.draw(st.one_of(st.none(), st.integers(0, len(sizes))))
    end = data.draw(st.integers(0, len(sizes)))
    best = cheapest_by_force(start, end, manifests, routes)
    if best is None:
        with pytest.raises(VersionNotFound):
            plan(start, end, manifests, routes)
        return
    found = plan(start, end, manifests, routes)
    assert found.stored_bytes + len(found.steps) * work(manifests) == best


def cheapest_by_force(
    start: int | None, end: int, manifests: dict[int, Manifest], routes: Sequence[Route]
) -> int | None:
    """Relax every hop as often as there are versions; ``None`` when nothing leads there."""
    hops: list[tuple[int | None, int, int]] = []
    for version, entry in manifests.items():
        size = sum(part.size for part in entry.model.parts)
        if version:
            hops.append((version - 1, version, size))
            hops += [(version, version - 1, size)] if entry.model.invertible else []
        elif size:
            hops.append((None, 0, size))
    for entry in routes:
        hops.append((entry.start, entry.version, entry.stored_bytes))
        hops += (
            [(entry.version, entry.start, entry.stored_bytes)] if entry.invertible and entry.start is not None else []
        )
    # Whoever has a version has nothing too: an anchor may be taken from anywhere.
    costs: dict[int | None, int] = {None: 0, start: 0}
    for _ in range(len(manifests) + 1):
        for origin, place, size in hops:
            if origin in costs:
                costs[place] = min(costs.get(place, 10**9), costs[origin] + size + work(manifests))
    return costs.get(end)


@given(st.data())
def test_what_was_not_read_is_taken_as_guessed(data: st.DataObject) -> None:
    """With a guess instead of unread deltas a plan is the one that it would be if they were of that size."""
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    read = data.draw(st.sets(st.integers(1, len(sizes))))
    guess = data.draw(st.integers(1, 50))
    full = history([size if version in read else guess for version, size in enumerate(sizes, 1)])
    known = {version: full[version] for version in full if version in read or version in {0, len(sizes)}}
    hops = cheapest(0, len(sizes), known, guess=guess)
    assert hops is not None
    assert sum(hop.stored_bytes for hop in hops) == make_plan(0, len(sizes), full).stored_bytes
    assert [hop.record is None for hop in hops] == [hop.end not in known for hop in hops]
    last = {len(sizes): full[len(sizes)]}
    assert (cheapest(0, len(sizes), last) is None) == (len(sizes) > 1)


def test_a_step_knows_where_it_leads() -> None:
    third = manifest(3)
    assert [(Step(kind, third).start, Step(kind, third).end) for kind in ("delta", "inverse")] == [(2, 3), (3, 2)]
    anchor = Step("anchor", manifest(0))
    assert (anchor.start, anchor.end) == (None, 0)


def test_a_link_in_one_history_is_accepted_whether_the_writer_stays_or_changes() -> None:
    check_link(manifest(0), manifest(1))
    check_link(manifest(4), manifest(5))
    check_link(manifest(4, epoch=2), manifest(5, epoch=2))
    check_link(manifest(4, epoch=2), manifest(5, epoch=9))


def test_a_link_to_another_stream_is_refused() -> None:
    child = msgspec.structs.replace(manifest(5), stream_id="9" * 32)
    with pytest.raises(StreamMismatch) as caught:
        check_link(manifest(4), child)
    assert caught.value.key == "manifests/0000000005.json"


@pytest.mark.parametrize("name", ["draft", "adapter", "files"])
def test_a_version_with_more_than_the_model_is_refused_by_its_name(name: str) -> None:
    child = msgspec.structs.replace(manifest(5), components={**manifest(5).components, name: manifest(5).model})
    for check in (lambda: check_components(child), lambda: check_link(manifest(4), child)):
        with pytest.raises(UnsupportedFormat, match=f"Version 5 carries {name} beside the model") as caught:
            check()
        assert caught.value.key == "manifests/0000000005.json"
        assert caught.value.hint
    check_components(msgspec.structs.replace(manifest(0), components={"model": manifest(5).model}))


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_commit_id": "9" * 32},
        {"parent_commit_id": commit_of(5)},
        {"parent_snapshot_id": snapshot_of(3)},
        {"parent_snapshot_id": snapshot_of(5)},
        {"writer_epoch": 4},
        {"components": {}},
        {"parent_version": 3},
        {"version": 6, "parent_version": 5},
    ],
)
def test_a_broken_link_is_refused_with_the_childs_key(changes: dict[str, object]) -> None:
    child = msgspec.structs.replace(manifest(5, epoch=5), **changes)
    with pytest.raises(CorruptObject) as caught:
        check_link(manifest(4, epoch=5), child)
    assert caught.value.key == f"manifests/{child.version:010d}.json"
