"""Records that seal themselves: manifests, routes, retention, tags; and the hint at the newest version."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

from deltastore.digest import hasher
from deltastore.errors import CorruptObject, UnsupportedFormat
from deltastore.manifest import (
    Component,
    LatestHint,
    Manifest,
    ObjectRef,
    PartRef,
    StreamRecord,
    encode_latest,
    encode_manifest,
    parse_latest,
    parse_manifest,
    part_key,
)
from deltastore.record import MAX_VERSION, encode_record
from deltastore.retention import Retention, encode_retention, parse_retention, ranges, ranges_problem
from deltastore.route import Route, encode_route, parse_route, route_part_key
from deltastore.segment import MAX_CONTENT_BYTES, SEGMENT_VERSIONS, build_segment, parse_segment
from deltastore.snapshot import CHUNK_BYTES
from deltastore.tags import Tag, parse_tag

from .damage import Damage, json_case, record_case, resealed
from .decoder import Decoder, memory_within, refused

XXH3 = hasher("xxh3-128")


def _valid_manifest(damage: Damage) -> bytes:
    return _manifest(damage.random.choice((0, 7)), step=damage.random.choice((None, -1, 10)))


def _manifest(version: int, *, step: int | None) -> bytes:
    attempt, digest = "3" * 32, XXH3.of(b"x")
    reference_to = lambda name: ObjectRef(part_key(version, attempt, name), 1000, digest)  # noqa: E731 - a maker
    parts = tuple(
        PartRef(part_key(version, attempt, f"model-{i:05d}.safetensors"), 99, digest, 3, 3 * i, 3 * i + 2)
        for i in range(2)
    )
    component = Component(digest, 4096, 2048, 17, parts, version > 0, None if version else reference_to("t"))
    manifest = Manifest(
        format=1,
        stream_id="1" * 32,
        version=version,
        kind="delta" if version else "base",
        commit_id=f"{version:032x}",
        attempt_id=attempt,
        writer_epoch=1,
        created_at="2026-01-02T03:04:05.678Z",
        components={"model": component},
        parent_version=version - 1 if version else None,
        parent_commit_id=f"{version - 1:032x}" if version else None,
        parent_snapshot_id=digest if version else None,
        step=step,
        metadata={"loss": 0.5, "note": "é", "n": 3, "none": None, "true": True},
        stream=None if version else StreamRecord("xxh3-128", CHUNK_BYTES, {"model": reference_to("s")}),
    )
    return encode_manifest(manifest, hash_function=XXH3)


def _valid_route(damage: Damage) -> bytes:
    start = damage.random.choice((None, 0, 3))
    attempt, digest = "3" * 32, XXH3.of(b"x")
    parts = tuple(
        PartRef(route_part_key(start)(7, attempt, f"model-{i:05d}.safetensors"), 99, digest, 3, 3 * i, 3 * i + 2)
        for i in range(damage.random.randrange(3))
    )
    route = Route(
        format=1,
        stream_id="1" * 32,
        attempt_id=attempt,
        kind="anchor" if start is None else "skip",
        version=7,
        created_at="2026-01-02T03:04:05.678Z",
        commit_id="2" * 32,
        snapshot_id=digest,
        start=start,
        start_commit_id=None if start is None else "4" * 32,
        parts=parts,
        changed_elements=17,
        invertible=start is not None,
    )
    return encode_route(route, hash_function=XXH3)


def _attempt_route(data: bytes) -> bool:
    try:
        with memory_within(200 * len(data) + (512 << 10)):
            route = parse_route(data, version=7, attempt_id="3" * 32)
    except (CorruptObject, UnsupportedFormat) as error:
        return refused(error)
    again = parse_route(encode_route(route, hash_function=XXH3), version=7, attempt_id="3" * 32)
    assert again == route
    assert (route.kind == "skip") == (route.start is not None)
    prefix = route_part_key(route.start)(7, "3" * 32, "model-")
    assert all(part.key.startswith(prefix) for part in route.parts)
    return True


def _some_ranges(damage: Damage, last: int) -> tuple[tuple[int, int], ...]:
    return ranges(damage.random.sample(range(last + 1), damage.random.randrange(last + 1)))


def _valid_retention(damage: Damage) -> bytes:
    record = Retention(
        format=1,
        stream_id="1" * 32,
        created_at="2026-01-02T03:04:05.678Z",
        number=7,
        until=12,
        kept=ranges([12, *damage.random.sample(range(12), 4)]),
        deltas=_some_ranges(damage, 12),
        routes=tuple(f"{number:032x}" for number in range(damage.random.randrange(4))),
    )
    return encode_retention(record, hash_function=XXH3)


def _attempt_retention(data: bytes) -> bool:
    def parse(data: bytes) -> Retention:
        return parse_retention(data, number=7, stream_id="1" * 32, hash_name=XXH3.name)

    try:
        with memory_within(200 * len(data) + (512 << 10)):
            record = parse(data)
    except (CorruptObject, UnsupportedFormat) as error:
        return refused(error)
    assert parse(encode_retention(record, hash_function=XXH3)) == record
    assert record.keeps(record.until)
    assert ranges_problem(record.kept) is None
    assert ranges_problem(record.deltas) is None
    assert list(record.routes) == sorted(set(record.routes))
    return True


def _valid_tag(damage: Damage) -> bytes:
    tag = Tag(
        format=1,
        stream_id="1" * 32,
        name="best",
        version=damage.random.choice((0, 7, MAX_VERSION)),
        commit_id="2" * 32,
        created_at="2026-01-02T03:04:05.678Z",
        deltas=_some_ranges(damage, 7),
        routes=tuple(f"{number:032x}" for number in range(damage.random.randrange(4))),
    )
    return encode_record(tag, hash_function=XXH3, kind="tag")


def _attempt_tag(data: bytes) -> bool:
    def parse(data: bytes) -> Tag:
        return parse_tag(data, name="best", stream_id="1" * 32, hash_name=XXH3.name)

    try:
        with memory_within(200 * len(data) + (512 << 10)):
            tag = parse(data)
    except (CorruptObject, UnsupportedFormat) as error:
        return refused(error)
    assert parse(encode_record(tag, hash_function=XXH3, kind="tag")) == tag
    assert tag.name == "best"
    assert ranges_problem(tag.deltas) is None
    return True


def _attempt_manifest(data: bytes) -> bool:
    accepted = []
    for version in (0, 7):
        try:
            with memory_within(200 * len(data) + (512 << 10)):
                manifest = parse_manifest(data, version=version)
        except (CorruptObject, UnsupportedFormat) as error:
            refused(error)
            continue
        accepted.append(manifest)
        assert manifest.version == version
        line, seal = data.split(b"\n")[:2]
        assert seal.decode() == XXH3.of(line)
        assert parse_manifest(encode_manifest(manifest, hash_function=XXH3), version=version) == manifest
        # Nothing was made up: every digest and key stands in the line.
        for component in manifest.components.values():
            for part in component.parts:
                assert part.key in json.dumps(json.loads(line))
    assert len(accepted) <= 1
    return bool(accepted)


def _attempt_latest(data: bytes) -> bool:
    with memory_within(200 * len(data) + (512 << 10)):
        hint = parse_latest(data)
    if hint is None:
        return False
    record = json.loads(data)
    assert hint == LatestHint(record["stream_id"], record["version"])
    assert 0 <= hint.version <= MAX_VERSION
    return True


def _valid_latest(damage: Damage) -> bytes:
    return encode_latest(LatestHint("1" * 32, damage.random.choice((0, 5, MAX_VERSION))))


@cache
def _chain() -> tuple[bytes, ...]:
    return tuple(_manifest(version, step=None) for version in range(SEGMENT_VERSIONS))


def _segment_case(damage: Damage) -> bytes:
    """Return as many manifests as a segment has, one of them damaged, or a frame of them that is."""
    chance, stored = damage.random, [*_chain()]
    which = chance.randrange(SEGMENT_VERSIONS)
    kind = chance.randrange(8)
    if kind == 0:
        return damage.bytes(3000)
    if kind == 1:
        stored[which] = damage.damaged(stored[which], stored[which - 1])
    elif kind == 2:
        stored[which] = resealed(damage.damaged(stored[which].split(b"\n")[0], stored[which - 1]))
    data = build_segment(stored)
    assert data is not None
    return damage.damaged(data, data) if kind == 3 else data


def _attempt_segment(data: bytes) -> bool:
    try:
        with memory_within(2 * MAX_CONTENT_BYTES):
            manifests = parse_segment(data, first=0)
    except (CorruptObject, UnsupportedFormat) as error:
        return refused(error)
    assert [manifest.version for manifest in manifests] == [*range(SEGMENT_VERSIONS)]
    for parent, child in pairwise(manifests):
        assert child.parent_commit_id == parent.commit_id
    again = build_segment([encode_manifest(manifest, hash_function=XXH3) for manifest in manifests])
    assert parse_segment(again, first=0) == manifests
    return True


DECODERS = (
    Decoder("segment", _segment_case, len, _attempt_segment),
    Decoder("manifest", lambda damage: record_case(damage, _valid_manifest), len, _attempt_manifest),
    Decoder("retention", lambda damage: record_case(damage, _valid_retention), len, _attempt_retention),
    Decoder("tag", lambda damage: record_case(damage, _valid_tag), len, _attempt_tag),
    Decoder("route", lambda damage: record_case(damage, _valid_route), len, _attempt_route),
    Decoder("latest", lambda damage: json_case(damage, _valid_latest), len, _attempt_latest),
)
