"""Retention records: strict parsing, what they keep, and that none takes back what an earlier one let go."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, VersionForgotten
from deltastore.policy import PlannedAnchor
from deltastore.retention import (
    Retention,
    Standing,
    check_successor,
    encode_retention,
    holds,
    numbers,
    parse_retention,
    ranges,
    ranges_problem,
)

STREAM = "1" * 32
HASH = hasher("xxh3-128")
versions = st.sets(st.integers(0, 40))


def record(number=1, until=10, kept=((3, 3), (9, 10)), deltas=((3, 10),), routes=()):
    return Retention(1, STREAM, "2026-01-01T00:00:00Z", number, until, kept, deltas, routes)


def parse(data, number=1):
    return parse_retention(data, number=number, stream_id=STREAM, hash_name="xxh3-128")


@given(versions)
def test_ranges_hold_what_they_were_made_of(some):
    runs = ranges(some)
    assert set(numbers(runs)) == some
    assert ranges_problem(runs) is None
    assert [holds(runs, version) for version in range(42)] == [version in some for version in range(42)]
    assert all(before[1] + 1 < after[0] for before, after in pairwise(runs))


@given(versions, versions, st.integers(1, 40))
def test_a_record_comes_back_as_it_was(kept, deltas, until):
    one = record(
        until=until,
        kept=ranges({version for version in kept if version < until} | {until}),
        deltas=ranges(version for version in deltas if version <= until),
        routes=("a" * 32, "b" * 32),
    )
    assert parse(encode_retention(one, hash_function=HASH)) == one


def test_every_flipped_bit_and_every_truncation_is_found():
    data = encode_retention(record(), hash_function=HASH)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObject):
            parse(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(CorruptObject):
            parse(data[:size])


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 2},
        {"stream_id": "2" * 32},
        {"kept": ()},
        {"kept": ((3, 9),)},
        {"kept": ((3, 11),)},
        {"kept": ((10, 9), (10, 10))},
        {"kept": ((9, 10), (3, 3))},
        {"kept": ((3, 9), (9, 10))},
        {"deltas": ((3, 11),)},
        {"deltas": ((5, 4),)},
        {"routes": ("b" * 32, "a" * 32)},
        {"routes": ("a" * 32, "a" * 32)},
        {"routes": ("A" * 32,)},
        {"until": -1},
        {"created_at": "yesterday"},
    ],
)
def test_each_rule_broken_by_itself_is_damage(changes):
    data = encode_retention(msgspec.structs.replace(record(), **changes), hash_function=HASH)
    with pytest.raises(CorruptObject) as caught:
        parse(data)
    assert caught.value.key == "retention/0000000001.json"


def test_a_record_of_another_hash_is_damage():
    with pytest.raises(CorruptObject):
        parse(encode_retention(record(), hash_function=hasher("blake3")))


def subset(data, runs):
    return {version for version in numbers(runs) if data.draw(st.booleans())}


@given(versions, versions, st.integers(0, 40), st.integers(0, 5), st.data())
def test_a_record_may_let_go_and_never_takes_back(kept, deltas, until, more, data):
    before = record(
        until=until,
        kept=ranges({version for version in kept if version < until} | {until}),
        deltas=ranges(version for version in deltas if version <= until),
    )
    newer = set(range(until + 1, until + more + 1))
    after = record(
        number=2,
        until=until + more,
        kept=ranges(subset(data, before.kept) | newer | {until + more}),
        deltas=ranges(subset(data, before.deltas) | newer),
    )
    check_successor(before, after)
    for field in ("kept", "deltas"):
        runs = getattr(before, field)
        gone = [version for version in range(until) if not holds(runs, version)]
        if gone:
            back = data.draw(st.sampled_from(gone))
            changed = msgspec.structs.replace(after, **{field: ranges({*numbers(getattr(after, field)), back})})
            with pytest.raises(CorruptObject):
                check_successor(before, changed)


@pytest.mark.parametrize("changes", [{"number": 3}, {"until": 9, "kept": ((9, 9),), "deltas": ()}])
def test_a_record_follows_the_one_before(changes):
    with pytest.raises(CorruptObject):
        check_successor(record(), msgspec.structs.replace(record(number=2), **changes))


def test_ranges_written_apart_are_the_same_versions():
    check_successor(record(kept=((3, 5), (6, 10))), record(number=2, kept=((4, 10),)))
    check_successor(record(kept=((3, 10),)), record(number=2, kept=((4, 6), (7, 10))))


def test_routes_are_kept_when_listed_or_newer_or_further():
    one, other = PlannedAnchor(5, 1, "a" * 32, retention=0), PlannedAnchor(5, 1, "b" * 32, retention=1)
    further = PlannedAnchor(11, 1, "c" * 32, retention=0)
    first = record(number=2, routes=())
    assert [first.keeps_route(route) for route in (one, other, further)] == [False, False, True]
    assert first.keeps_route(PlannedAnchor(5, 1, "d" * 32, retention=2))
    assert record(number=2, routes=("a" * 32,)).keeps_route(one)
    with pytest.raises(CorruptObject):
        check_successor(first, record(number=3, routes=("a" * 32,)), [one])
    check_successor(record(number=2, routes=("a" * 32,)), record(number=3, routes=("a" * 32,)), [one])


def test_what_stands_is_what_the_record_or_a_tag_keeps():
    class Tag:
        version, deltas, routes = 5, ((0, 5),), ("a" * 32,)

    route = PlannedAnchor(5, 1, "a" * 32, retention=0)
    alone, tagged = Standing(record()), Standing(record(), (Tag(),))
    assert [alone.keeps(version) for version in (3, 5, 9, 11)] == [True, False, True, True]
    assert [tagged.keeps(version) for version in (4, 5)] == [False, True]
    assert (alone.keeps_parts(2), tagged.keeps_parts(2)) == (False, True)
    assert (alone.keeps_route(route), tagged.keeps_route(route)) == (False, True)
    with pytest.raises(VersionForgotten):
        alone.require(5)
    tagged.require(5)
    assert Standing(None).keeps(0)
