"""Route records: read strictly, found by a listing, compared with the versions at both ends."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import manifest

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DeltastoreError, UnsupportedFormat
from deltastore.manifest import PartRef
from deltastore.route import (
    ListedRoute,
    Route,
    encode_route,
    fits,
    listed_routes,
    parse_route,
    route_key,
    route_part_key,
)
from deltastore.storage.base import ObjectInfo

STREAM, ATTEMPT, COMMIT, OTHER = "1" * 32, "2" * 32, "3" * 32, "4" * 32
XXH3 = hasher("xxh3-128")
DIGEST = f"xxh3-128:{'7' * 32}"


def part(version: int, start: int | None, number: int = 0, attempt: str = ATTEMPT, **changes: Any) -> PartRef:
    key = route_part_key(start)(version, attempt, f"model-{number:05d}.safetensors")
    return PartRef(**{"key": key, "size": 10, "digest": DIGEST, "chunks": 2, "first": 3, "last": 4, **changes})


def skip(start: int = 16, version: int = 32, **changes: Any) -> Route:
    fields: dict[str, Any] = {
        "format": 1,
        "stream_id": STREAM,
        "attempt_id": ATTEMPT,
        "kind": "skip",
        "version": version,
        "created_at": "2026-01-02T03:04:05Z",
        "commit_id": COMMIT,
        "snapshot_id": DIGEST,
        "start": start,
        "start_commit_id": OTHER,
        "parts": (part(version, start), part(version, start, 1)),
        "changed_elements": 5,
        "invertible": True,
        "retention": 0,
    }
    return Route(**{**fields, **changes})


def anchor(version: int = 32, **changes: Any) -> Route:
    return skip(
        version=version,
        **{
            "kind": "anchor",
            "start": None,
            "start_commit_id": None,
            "invertible": False,
            "parts": (part(version, None),),
            **changes,
        },
    )


ABANDONED = Route(1, STREAM, ATTEMPT, "abandoned", 32, "2026-01-02T03:04:05Z")


def parsed(route: Route, hash_name: str = "xxh3-128") -> Route:
    data = encode_route(route, hash_function=hasher(hash_name))
    return parse_route(data, version=32, attempt_id=ATTEMPT)


def refused(data: bytes, kind: type[DeltastoreError] = CorruptObject) -> None:
    with pytest.raises(kind) as caught:
        parse_route(data, version=32, attempt_id=ATTEMPT)
    assert caught.value.key == route_key(32, ATTEMPT)


@pytest.mark.parametrize("route", [skip(), anchor(), ABANDONED, skip(parts=()), skip(start=0)])
def test_a_route_is_read_as_it_was_written(route: Route) -> None:
    assert parsed(route) == route
    assert route.stored_bytes == 10 * len(route.parts)


def test_a_record_is_two_lines_and_unknown_fields_are_ignored() -> None:
    line, seal, rest = encode_route(skip(), hash_function=XXH3).split(b"\n")
    assert (seal.decode(), rest) == (XXH3.of(line), b"")
    fields = json.loads(line)
    assert list(fields) == sorted(fields)
    line = json.dumps({**fields, "later": {"a": 1}}).encode()
    assert parse_route(b"%b\n%b\n" % (line, XXH3.of(line).encode()), version=32, attempt_id=ATTEMPT) == skip()


@pytest.mark.parametrize("route", [skip(), anchor(), ABANDONED])
def test_every_flipped_bit_and_every_cut_is_refused(route: Route) -> None:
    data = encode_route(route, hash_function=XXH3)
    for position in range(len(data)):
        refused(data[:position])
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            refused(bytes(flipped))


@pytest.mark.parametrize(
    "route",
    [
        skip(version=33, parts=()),
        skip(attempt_id=OTHER, parts=()),
        skip(kind="anchor"),
        anchor(kind="skip"),
        skip(commit_id=None),
        skip(snapshot_id=None),
        skip(start=32, parts=()),
        skip(start=40, parts=()),
        skip(start_commit_id=None),
        anchor(start_commit_id=OTHER),
        anchor(invertible=True),
        anchor(parts=(part(32, 16),)),
        skip(parts=(part(32, None),)),
        skip(parts=(part(32, 15),)),
        skip(parts=(part(31, 16),)),
        skip(parts=(part(32, 16, attempt=OTHER),)),
        skip(parts=(part(32, 16), part(32, 16))),
        skip(parts=(part(32, 16, chunks=3),)),
        skip(parts=(part(32, 16, first=5),)),
        skip(parts=(part(32, 16, size=0),)),
        skip(parts=(part(32, 16, size=(64 << 20) + 1),)),
        skip(parts=(part(32, 16, key="routes/0000000032/" + ATTEMPT + "/route.json"),)),
        skip(parts=(part(32, 16, digest=f"blake3:{'7' * 64}"),)),
        skip(snapshot_id=f"blake3:{'7' * 64}"),
        skip(kind="bridge"),
        skip(stream_id="x"),
        skip(created_at="yesterday"),
        skip(changed_elements=-1),
        skip(retention=-1),
        skip(version=10**10, parts=()),
        msgspec.structs.replace(ABANDONED, parts=(part(32, None),)),
    ],
)
def test_each_rule_broken_by_itself_is_refused(route: Route) -> None:
    refused(encode_route(route, hash_function=XXH3))


def test_a_record_of_another_hash_than_its_digests_is_refused() -> None:
    refused(encode_route(skip(), hash_function=hasher("blake3")))


def test_a_later_format_is_unsupported() -> None:
    refused(encode_route(skip(format=3), hash_function=XXH3), UnsupportedFormat)


@given(st.binary(max_size=300))
def test_random_bytes_are_no_route(data: bytes) -> None:
    refused(data)
    refused(b"%b\n%b\n" % (data.replace(b"\n", b""), XXH3.of(data.replace(b"\n", b"")).encode()))


@given(st.data())
def test_any_route_is_read_as_it_was_written(data: st.DataObject) -> None:
    version = data.draw(st.integers(0, 9_999_999_999))
    start = data.draw(st.one_of(st.none(), st.integers(0, version - 1))) if version else None
    count = data.draw(st.integers(0, 4))
    route = Route(
        format=1,
        stream_id=STREAM,
        attempt_id=ATTEMPT,
        kind="anchor" if start is None else "skip",
        version=version,
        created_at="2026-01-02T03:04:05.123456Z",
        commit_id=COMMIT,
        snapshot_id=DIGEST,
        start=start,
        start_commit_id=None if start is None else OTHER,
        parts=tuple(part(version, start, number) for number in range(count)),
        changed_elements=data.draw(st.integers(0, 2**62)),
        invertible=start is not None and data.draw(st.booleans()),
        retention=data.draw(st.integers(0, 100)),
    )
    stored = encode_route(route, hash_function=XXH3)
    assert parse_route(stored, version=version, attempt_id=ATTEMPT) == route
    listing = [ObjectInfo(part.key, part.size) for part in route.parts]
    listing.append(ObjectInfo(route_key(version, ATTEMPT), len(stored)))
    (listed,) = listed_routes(data.draw(st.permutations(listing)))
    assert (listed.version, listed.attempt_id, listed.stored_bytes) == (version, ATTEMPT, route.stored_bytes)
    assert listed.told == bool(count)
    assert listed.start == (start if count else None)
    assert listed.key == route_key(version, ATTEMPT)


def test_a_listing_shows_routes_with_records_alone_and_ignores_what_it_does_not_know() -> None:
    def infos(*keys: str) -> list[ObjectInfo]:
        return [ObjectInfo(key, 7) for key in keys]

    own = f"routes/0000000032/{ATTEMPT}"
    assert listed_routes([]) == []
    assert listed_routes(infos(f"{own}/model-00000.safetensors")) == []
    assert listed_routes(infos(f"{own}/route.json")) == [ListedRoute(32, ATTEMPT, None, 0, told=False)]
    strange = infos(
        f"{own}/route.json",
        f"{own}/0000000016-model-00000.safetensors",
        f"{own}/readme.txt",
        f"{own}/deeper/0000000001-model-00000.safetensors",
        "routes/32/x/route.json",
        f"routes/0000000032/{ATTEMPT[1:]}/route.json",
        "routes/readme.txt",
    )
    assert listed_routes(strange) == [ListedRoute(32, ATTEMPT, 16, 7, told=True)]
    mixed = infos(f"{own}/route.json", f"{own}/0000000016-model-00000.safetensors", f"{own}/model-00001.safetensors")
    assert [route.told for route in listed_routes(mixed)] == [False]


def test_a_route_fits_the_versions_that_it_names_alone() -> None:
    start, end = manifest(3), manifest(5)
    route = skip(
        3,
        5,
        parts=(),
        commit_id=end.commit_id,
        start_commit_id=start.commit_id,
        snapshot_id=end.snapshot_id,
    )
    assert fits(route, start, end)
    for changes in (
        {"commit_id": OTHER},
        {"start_commit_id": OTHER},
        {"snapshot_id": DIGEST},
        {"stream_id": OTHER},
        {"kind": "abandoned"},
    ):
        assert not fits(msgspec.structs.replace(route, **changes), start, end)
    assert not fits(route, manifest(2), end)
    assert not fits(route, start, manifest(6))
    assert not fits(route, None, end)
