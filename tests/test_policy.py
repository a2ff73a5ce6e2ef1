"""What a policy keeps: the right versions, a whole way to each, and no more bytes than need be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import CorruptObject, UsageError
from deltastore.policy import PlannedAnchor, Policy, choose
from deltastore.retention import Retention, Standing, holds, numbers


def anchor(version, size, number=0):
    return PlannedAnchor(version, size, f"{version:016x}{number:016x}", retention=0)


def skip(start, version, size):
    return PlannedAnchor(version, size, f"{start:016x}{version:016x}", kind="skip", start=start, retention=0)


def reachable(choice, routes, *, base_stored):
    """Return the versions that lead from nothing, over what stays."""
    staying = [route for route in routes if route.attempt_id in choice.routes]
    reached = set() if base_stored else {0}
    while True:
        before = len(reached)
        reached |= {0} if holds(choice.deltas, 0) else set()
        reached |= {version for version in numbers(choice.deltas) if version - 1 in reached}
        reached |= {route.version for route in staying if route.start is None or route.start in reached}
        if len(reached) == before:
            return reached


@st.composite
def situations(draw):
    newest = draw(st.integers(0, 12))
    part_bytes = {version: draw(st.integers(0, 9)) for version in range(newest + 1)} | {0: draw(st.integers(10, 50))}
    routes = [anchor(version, draw(st.integers(5, 60))) for version in draw(st.sets(st.integers(0, 13), max_size=4))]
    if newest > 2:
        starts = draw(st.sets(st.integers(0, newest - 2), max_size=3))
        routes += [skip(start, min(start + 3, newest), draw(st.integers(0, 20))) for start in sorted(starts)]
    policy = draw(st.builds(Policy, keep_last=st.integers(1, 6), keep_tagged=st.booleans(),
                            keep_every=st.sampled_from([None, 1, 3, 5])))  # fmt: skip
    tagged, advised = (draw(st.frozensets(st.integers(0, 14), max_size=3)) for _ in range(2))
    return newest, policy, {"part_bytes": part_bytes, "routes": routes, "tagged": tagged, "advised": advised}


@given(situations(), st.booleans(), st.builds(Policy, keep_last=st.integers(1, 6)))
def test_every_kept_version_can_be_reached_and_choosing_again_changes_nothing(situation, base_stored, later):
    newest, policy, given_ = situation
    choice = choose(None, newest, policy, base_stored=base_stored, **given_)
    wanted = policy.wanted(newest, tagged=given_["tagged"], advised=given_["advised"])
    assert set(numbers(choice.kept)) == wanted
    assert newest in wanted
    assert wanted <= reachable(choice, given_["routes"], base_stored=base_stored)
    record = Retention(1, "1" * 32, "2026-01-01T00:00:00Z", 1, newest, choice.kept, choice.deltas, choice.routes)
    again = choose(record, newest, policy, base_stored=base_stored, **given_)
    assert set(numbers(again.kept)) == wanted
    assert again.stored_bytes <= choice.stored_bytes
    narrower = choose(record, newest, later, base_stored=base_stored, **given_)
    assert set(numbers(narrower.kept)) <= wanted
    assert set(numbers(narrower.deltas)) <= set(numbers(choice.deltas))
    assert set(narrower.routes) <= set(choice.routes)
    assert all(Standing(record).keeps(version) for version in numbers(narrower.kept))


@given(st.integers(0, 7), st.sets(st.integers(1, 7), max_size=3), st.lists(st.integers(1, 9), min_size=8, max_size=8),
       st.sets(st.integers(0, 7), max_size=2))  # fmt: skip
def test_without_skips_nothing_smaller_is_possible(newest, anchored, sizes, advised):
    part_bytes = dict(enumerate(sizes)) | {0: 12}
    routes = [anchor(version, 8) for version in anchored if version < newest]
    policy = Policy(keep_last=1)
    options = {"part_bytes": part_bytes, "base_stored": True, "routes": routes, "advised": advised}
    choice = choose(None, newest, policy, **options)
    wanted = policy.wanted(newest, tagged=set(), advised=advised)
    least = min(
        sum(part_bytes[version] for version in deltas) + 8 * len(chosen)
        for deltas in _subsets(range(newest + 1))
        for chosen in _subsets(routes)
        if wanted <= _reached(deltas, chosen)
    )
    assert choice.stored_bytes == least


def _subsets(items):
    items = list(items)
    return itertools.chain.from_iterable(itertools.combinations(items, count) for count in range(len(items) + 1))


def _reached(deltas, routes):
    reached = {route.version for route in routes} | ({0} & set(deltas))
    for version in sorted(deltas):
        if version - 1 in reached:
            reached.add(version)
    return reached


def test_routes_of_the_newest_versions_stay_for_those_that_move_there():
    routes = [anchor(5, 100), anchor(18, 100), skip(16, 20, 50), skip(2, 18, 50)]
    options = {"part_bytes": dict.fromkeys(range(21), 1), "base_stored": True}
    choice = choose(None, 20, Policy(keep_last=5), routes=routes, **options)
    assert set(choice.routes) == {routes[1].attempt_id, routes[2].attempt_id}
    assert choose(None, 20, Policy(keep_last=1), routes=routes, **options).routes == ()


def test_what_nothing_leads_to_is_damage():
    record = Retention(1, "1" * 32, "2026-01-01T00:00:00Z", 1, 5, ((5, 5),), ((5, 5),), ())
    with pytest.raises(CorruptObject):
        choose(record, 5, Policy(keep_last=1), part_bytes=dict.fromkeys(range(6), 1), base_stored=True, routes=[])


@pytest.mark.parametrize("values", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}])
def test_a_policy_keeps_something(values):
    with pytest.raises(UsageError):
        Policy(**values)
