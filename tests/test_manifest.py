from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from deltastore.digest import HASHES, hasher
from deltastore.errors import CorruptObject, DeltastoreError, UnsupportedFormat, UsageError
from deltastore.manifest import (
    AnchorPolicy,
    Component,
    LatestHint,
    Manifest,
    ObjectRef,
    PartRef,
    StreamRecord,
    anchor_policy,
    encode_latest,
    encode_manifest,
    manifest_key,
    parse_latest,
    parse_manifest,
    part_key,
)
from deltastore.reader import Store

XXH3 = hasher("xxh3-128")
STREAM, COMMIT, ATTEMPT, PARENT = "1" * 32, "2" * 32, "3" * 32, "4" * 32
SNAPSHOT, BEFORE = f"xxh3-128:{'5' * 32}", f"xxh3-128:{'6' * 32}"
DIGEST = f"xxh3-128:{'7' * 32}"


def reference_to(version: int, name: str, **changes: Any) -> dict[str, Any]:
    return {"key": f"parts/{version:010d}/{ATTEMPT}/{name}", "size": 1000, "digest": DIGEST, **changes}


def part_of(version: int, **changes: Any) -> dict[str, Any]:
    return {**reference_to(version, "model-00000.safetensors"), "chunks": 3, "first": 1, "last": 9, **changes}


def delta(**changes: Any) -> dict[str, Any]:
    """Return the fields of a good version 7; a component's field is changed as ``model_<field>``."""
    component = {
        "snapshot_id": SNAPSHOT,
        "snapshot_bytes": 4096,
        "total_elements": 2048,
        "changed_elements": 17,
        "parts": [part_of(7)],
        "invertible": True,
        "digests": None,
    }
    for name in [name for name in changes if name.startswith("model_")]:
        component[name.removeprefix("model_")] = changes.pop(name)
    fields = {
        "format": 1,
        "required_features": [],
        "stream_id": STREAM,
        "version": 7,
        "kind": "delta",
        "commit_id": COMMIT,
        "attempt_id": ATTEMPT,
        "writer_epoch": 2,
        "created_at": "2026-01-02T03:04:05Z",
        "parent_version": 6,
        "parent_commit_id": PARENT,
        "parent_snapshot_id": BEFORE,
        "step": 700,
        "metadata": {"loss": 0.25, "run": "a", "done": False, "note": None, "n": -3},
        "components": {"model": component},
        "stream": None,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not ...}


def base(**changes: Any) -> dict[str, Any]:
    """Return the fields of a good version 0."""
    changes.setdefault("model_parts", [part_of(0)])
    changes.setdefault("model_digests", reference_to(0, "model-digests.safetensors"))
    fields = {
        "version": 0,
        "kind": "base",
        "parent_version": None,
        "parent_commit_id": None,
        "parent_snapshot_id": None,
        "stream": {
            "hash": "xxh3-128",
            "chunk_bytes": 2_097_152,
            "schemas": {"model": reference_to(0, "model-schema.json")},
        },
    }
    return delta(**{**fields, **changes})


def sealed(fields: Any, hash_name: str = "xxh3-128") -> bytes:
    line = fields if isinstance(fields, bytes) else canonical(fields)
    return line + f"\n{hash_name}:{reference.HASHES[hash_name](line).hex()}\n".encode()


def canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def refused(data: bytes, version: int, kind: type[DeltastoreError] = CorruptObject) -> DeltastoreError:
    with pytest.raises(kind) as caught:
        parse_manifest(data, version=version)
    assert type(caught.value) is kind
    assert caught.value.key == f"manifests/{version:010d}.json"
    assert caught.value.key in str(caught.value)
    return caught.value


def test_a_manifest_is_two_lines_as_the_format_says() -> None:
    for fields in (base(), delta()):
        data = sealed(fields)
        manifest = parse_manifest(data, version=fields["version"])
        assert encode_manifest(manifest, hash_function=XXH3) == data


@pytest.mark.parametrize("hash_name", sorted(HASHES))
def test_the_second_line_is_the_digest_of_the_first(hash_name: str) -> None:
    manifest = parse_manifest(sealed(delta()), version=7)
    data = encode_manifest(manifest, hash_function=hasher(hash_name))
    line, digest, rest = data.split(b"\n")
    assert rest == b""
    assert digest.decode() == f"{hash_name}:{reference.HASHES[hash_name](line).hex()}"
    assert line == canonical(delta())
    if hash_name == "xxh3-128":
        assert parse_manifest(data, version=7) == manifest
    else:  # its other digests are xxh3-128, and a manifest has one hash
        refused(data, 7)


def test_every_field_arrives() -> None:
    manifest = parse_manifest(sealed(delta()), version=7)
    assert manifest == Manifest(
        format=1,
        stream_id=STREAM,
        version=7,
        kind="delta",
        commit_id=COMMIT,
        attempt_id=ATTEMPT,
        writer_epoch=2,
        created_at="2026-01-02T03:04:05Z",
        components={
            "model": Component(
                SNAPSHOT,
                4096,
                2048,
                17,
                (PartRef(f"parts/0000000007/{ATTEMPT}/model-00000.safetensors", 1000, DIGEST, 3, 1, 9),),
                True,
            )
        },
        parent_version=6,
        parent_commit_id=PARENT,
        parent_snapshot_id=BEFORE,
        step=700,
        metadata={"loss": 0.25, "run": "a", "done": False, "note": None, "n": -3},
    )
    assert (manifest.snapshot_id, manifest.stored_bytes, manifest.anchored) == (SNAPSHOT, 1000, False)
    first = parse_manifest(sealed(base()), version=0)
    schema = ObjectRef(f"parts/0000000000/{ATTEMPT}/model-schema.json", 1000, DIGEST)
    assert first.stream == StreamRecord("xxh3-128", 2_097_152, {"model": schema})
    assert first.anchored


def test_a_base_without_parts_is_no_anchor_unless_it_is_empty() -> None:
    assert not parse_manifest(sealed(base(model_parts=[])), version=0).anchored
    empty = base(model_parts=[], model_snapshot_bytes=0, model_total_elements=0, model_changed_elements=0)
    assert parse_manifest(sealed(empty), version=0).anchored


@pytest.mark.parametrize("fields", [pytest.param(base(), id="base"), pytest.param(delta(), id="delta")])
def test_every_flipped_bit_of_a_manifest_is_refused_with_its_key(fields: dict[str, Any]) -> None:
    data = sealed(fields)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        refused(bytes(damaged), fields["version"])


@pytest.mark.parametrize("fields", [pytest.param(base(), id="base"), pytest.param(delta(), id="delta")])
def test_every_cut_of_a_manifest_is_refused_with_its_key(fields: dict[str, Any]) -> None:
    data = sealed(fields)
    for end in range(len(data)):
        refused(data[:end], fields["version"])


def test_anything_before_between_or_after_the_two_lines_is_refused() -> None:
    data = sealed(delta())
    line, digest, _ = data.split(b"\n")
    for other in (
        data + b"\n",
        data + b" ",
        data + data,
        b"\n" + data,
        b"\xef\xbb\xbf" + data,
        line + b"\n\n" + digest + b"\n",
        line + b"\r\n" + digest + b"\n",
        line + b" \n" + digest + b"\n",
        line + b"\n" + digest + b"\r\n",
        line + b"\n" + digest.upper() + b"\n",
        line + b"\n" + digest[:-2] + b"\n",
        line + b"\n" + digest.replace(b"xxh3-128", b"md5") + b"\n",
        digest + b"\n" + line + b"\n",
    ):
        refused(other, 7)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"format":1}',
        b'"x"',
        b"\xff",
        b"{" * 50_000,
        b"[" * 200_000,
        b'{"format":1,' + b'"x":[' * 50_000,
        canonical(delta())[:-1],
        canonical(delta()) + b"x",
    ],
)
def test_a_well_sealed_line_that_is_no_manifest_is_refused(line: bytes) -> None:
    refused(sealed(line), 7)


def test_unknown_fields_are_ignored_everywhere() -> None:
    fields = delta(model_parts=[part_of(7, later=1)], model_later=[1, {"x": None}])
    fields["signature"] = {"by": "later"}
    manifest = parse_manifest(sealed(fields), version=7)
    assert manifest == parse_manifest(sealed(delta()), version=7)
    first = base()
    first["stream"]["later"] = True
    first["stream"]["schemas"]["model"]["later"] = 1.5
    assert parse_manifest(sealed(first), version=0) == parse_manifest(sealed(base()), version=0)


def test_what_is_ignored_must_be_utf8_too() -> None:
    line = canonical({**delta(), "zz": "?"})
    assert parse_manifest(sealed(line), version=7).version == 7
    refused(sealed(line.replace(b"?", b"\xff")), 7)
    refused(sealed(line.replace(b"zz", b"\xdc\xea")), 7)
    hint = encode_latest(LatestHint(STREAM, 3))
    assert parse_latest(hint[:-1] + b',"zz":"?"}') == LatestHint(STREAM, 3)
    assert parse_latest(hint[:-1] + b',"zz":"\xff"}') is None


@pytest.mark.parametrize("number", [0, 3, -1, 10**9])
def test_another_format_is_unsupported_whatever_else_the_manifest_says(number: int) -> None:
    refused(sealed(delta(format=number)), 7, UnsupportedFormat)
    refused(sealed({"format": number, "all": "new"}), 7, UnsupportedFormat)


@pytest.mark.parametrize("features", [["x"], ["", "y"], ["deltastore"]])
def test_an_unknown_required_feature_is_unsupported(features: list[str]) -> None:
    error = refused(sealed(delta(required_features=features)), 7, UnsupportedFormat)
    assert features[-1] in str(error)
    refused(sealed({"format": 1, "required_features": features, "kind": "skip"}), 7, UnsupportedFormat)


IDENTIFIERS = ["", "1" * 31, "1" * 33, "G" * 32, "A" * 32, "1" * 32 + "\n", 1, None]
DIGESTS = ["", "5" * 32, "xxh3-128:", f"xxh3-128:{'5' * 31}", f"xxh3-128:{'5' * 64}", f"blake3:{'5' * 32}"]
DIGESTS += [f"md5:{'5' * 32}", f"xxh3-128:{'A' * 32}", f"xxh3-128:{'5' * 32}\n", None, 5]
COUNTS = [-1, 1.0, 1.5, "1", None, True, 2**63, 10**40]


def out_of_limits() -> list[Any]:
    cases: list[tuple[str, Any]] = []
    for field in ("stream_id", "commit_id", "attempt_id"):
        cases += [(field, value) for value in [*IDENTIFIERS, ...]]
    cases += [("parent_commit_id", value) for value in [*IDENTIFIERS, ...]]
    cases += [("parent_snapshot_id", value) for value in [*DIGESTS, ...]]
    cases += [("parent_version", value) for value in [*COUNTS, 5, 7, 8, 0, ...]]
    cases += [("version", value) for value in [*COUNTS, 6, 8, 10**10, ...]]
    cases += [("kind", value) for value in ["base", "skip", "", None, 1, ...]]
    cases += [("writer_epoch", value) for value in [*COUNTS, 0, ...]]
    cases += [("step", value) for value in ["1", 1.5, True, 2**63, [1]]]
    times = ["", "2026-01-02", "2026-01-02T03:04:05", "2026-01-02T03:04:05+00:00", "2026-01-02 03:04:05Z"]
    cases += [("created_at", value) for value in [*times, "2026-01-02T03:04:05Z\n", 5, None, ...]]
    cases += [("metadata", value) for value in [[], None, {"a": []}, {"a": {}}, "x"]]
    cases += [("required_features", value) for value in [None, "x", [1], {}]]
    cases += [("components", value) for value in [None, [], {}, {"Model": {}}, {"model": None}, ...]]
    cases += [("stream", value) for value in [{}, base()["stream"], []]]
    cases += [("model_snapshot_id", value) for value in [*DIGESTS, ...]]
    for field in ("snapshot_bytes", "total_elements", "changed_elements"):
        cases += [(f"model_{field}", value) for value in [*COUNTS, ...]]
    cases += [("model_changed_elements", 2049)]
    cases += [("model_invertible", value) for value in [None, 0, 1, "true", ...]]
    cases += [("model_parts", value) for value in [None, {}, [None], [{}], ...]]
    keys = [
        f"parts/0000000006/{ATTEMPT}/model-00000.safetensors",
        f"parts/0000000007/{'9' * 32}/model-00000.safetensors",
        f"parts/0000000007/{ATTEMPT}/",
        f"parts/0000000007/{ATTEMPT}/../x",
        f"parts/0000000007/{ATTEMPT}/.x",
        f"parts/0000000007/{ATTEMPT}/a/b",
        f"parts/0000000007/{ATTEMPT}/a\\b",
        f"parts/0000000007/{ATTEMPT}/a b",
        f"parts/0000000007/{ATTEMPT}/a\n",
        f"parts/0000000007/{ATTEMPT}/{'a' * 512}",
        f"/parts/0000000007/{ATTEMPT}/a",
        f"x/parts/0000000007/{ATTEMPT}/a",
        f"parts/7/{ATTEMPT}/a",
        f"parts/0000000007/{ATTEMPT}",
        "",
        None,
    ]
    cases += [("model_parts", [part_of(7, key=key)]) for key in keys]
    cases += [("model_parts", [part_of(7, size=size)]) for size in [*COUNTS, 0, (64 << 20) + 1]]
    cases += [("model_parts", [part_of(7, digest=digest)]) for digest in DIGESTS]
    cases += [("model_parts", [part_of(7, chunks=chunks)]) for chunks in COUNTS]
    return [pytest.param(field, value, id=f"{field}={str(value)[:50]!r} {i}") for i, (field, value) in enumerate(cases)]


@pytest.mark.parametrize(("field", "value"), out_of_limits())
def test_a_field_of_another_type_or_outside_its_limits_is_refused(field: str, value: Any) -> None:
    if field.startswith("model_") and value is ...:
        fields = delta()
        del fields["components"]["model"][field.removeprefix("model_")]
    else:
        fields = delta(**{field: value})
    refused(sealed(fields), 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parent_version", 0),
        ("parent_commit_id", PARENT),
        ("parent_snapshot_id", BEFORE),
        ("kind", "delta"),
        ("stream", None),
        ("model_digests", None),
        ("model_parts", [part_of(1)]),
    ],
)
def test_a_base_that_contradicts_itself_is_refused(field: str, value: Any) -> None:
    refused(sealed(base(**{field: value})), 0)


@pytest.mark.parametrize(
    "stream",
    [
        {"hash": "md5"},
        {"hash": "blake3"},
        {"hash": None},
        {"chunk_bytes": 1 << 19},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 20},
        {"chunk_bytes": 2_097_152.0},
        {"schemas": {}},
        {"schemas": {"files": reference_to(0, "x")}},
        {"schemas": {"model": None}},
        {"schemas": {"model": reference_to(0, "x", digest=f"blake3:{'1' * 64}")}},
        {"schemas": {"model": reference_to(0, "x"), "files": reference_to(0, "y")}},
        {"schemas": {"model": reference_to(0, "../x")}},
    ],
)
def test_a_stream_record_that_breaks_the_format_is_refused(stream: dict[str, Any]) -> None:
    data = sealed(base(stream={**base()["stream"], **stream}))
    with pytest.raises(DeltastoreError) as caught:
        Store(NoBackend(), parse_manifest(data, version=0))  # type: ignore[arg-type]
    assert caught.value.key == manifest_key(0)


class NoBackend:
    """Nothing is read before the record was checked."""


def test_a_stream_record_of_the_format_is_accepted() -> None:
    store = Store(NoBackend(), parse_manifest(sealed(base()), version=0))  # type: ignore[arg-type]
    assert store.stream_id == STREAM


@pytest.mark.parametrize("policy", [{}, {"every": 1}, {"every": 500, "when": None}, {"when": 1}, {"when": 2.5}])
def test_a_stream_may_say_when_versions_get_anchors(policy: dict[str, Any]) -> None:
    fields = base()
    fields["stream"]["anchors"] = policy
    stream = parse_manifest(sealed(fields), version=0).stream
    assert stream is not None
    assert stream.anchors == AnchorPolicy(**policy)


@pytest.mark.parametrize(
    "policy", [{"every": 0}, {"every": 1.5}, {"every": 10**10}, {"when": 0.5}, {"when": "often"}, {"when": 1e10}, []]
)
def test_an_anchor_policy_outside_its_limits_is_refused(policy: Any) -> None:
    fields = base()
    fields["stream"]["anchors"] = policy
    refused(sealed(fields), 0)
    if isinstance(policy, dict):
        with pytest.raises(UsageError):
            anchor_policy(policy.get("every"), policy.get("when"))


def test_an_anchor_is_due_on_its_turn_or_when_the_way_costs_too_much() -> None:
    assert anchor_policy(None, None) is None
    turns = AnchorPolicy(every=4)
    assert [turns.due(version, cost=10**9, snapshot_bytes=1) for version in (0, 1, 4, 6, 8)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    share = AnchorPolicy(when=1.5)
    assert not share.due(3, cost=150, snapshot_bytes=100)
    assert share.due(3, cost=151, snapshot_bytes=100)
    assert not share.due(0, cost=151, snapshot_bytes=100)
    assert not AnchorPolicy().due(4, cost=10**9, snapshot_bytes=1)


def test_a_version_that_is_asked_for_under_another_key_is_refused() -> None:
    refused(sealed(delta()), 6)
    refused(sealed(delta()), 0)
    refused(sealed(base()), 1)


def test_digests_belong_to_version_0_alone() -> None:
    refused(sealed(delta(model_digests=reference_to(7, "model-digests.safetensors"))), 7)


def test_metadata_over_64_kib_are_refused() -> None:
    assert parse_manifest(sealed(delta(metadata={"a": "x" * 60_000})), version=7)
    refused(sealed(delta(metadata={"a": "x" * 66_000})), 7)
    refused(sealed(delta(metadata={"a": "é" * 33_000})), 7)


def test_version_1_follows_version_0() -> None:
    fields = delta(version=1, parent_version=0, model_parts=[part_of(1)])
    assert parse_manifest(sealed(fields), version=1).parent_version == 0


def test_the_largest_version_is_one() -> None:
    version = 9_999_999_999
    fields = delta(version=version, parent_version=version - 1, model_parts=[part_of(version)])
    assert parse_manifest(sealed(fields), version=version).version == version
    assert manifest_key(version) == "manifests/9999999999.json"


def test_keys_are_those_of_the_format() -> None:
    assert manifest_key(0) == "manifests/0000000000.json"
    assert part_key(12, ATTEMPT, "model-00003.safetensors") == (f"parts/0000000012/{ATTEMPT}/model-00003.safetensors")


identifiers = st.text("0123456789abcdef", min_size=32, max_size=32)
counts = st.integers(0, 2**62)
scalars = st.one_of(
    st.text(max_size=20),
    st.integers(-(2**63), 2**63),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def manifests(draw: st.DrawFn) -> tuple[Manifest, str]:
    hash_name = draw(st.sampled_from(sorted(HASHES)))
    digests = st.binary(min_size=(size := hasher(hash_name).size), max_size=size).map(
        lambda raw: f"{hash_name}:{raw.hex()}"
    )
    version = draw(st.integers(1, 9_999_999_999))
    attempt = draw(identifiers)
    parts = tuple(
        PartRef(
            part_key(version, attempt, f"model-{i:05d}.safetensors"),
            draw(st.integers(1, 64 << 20)),
            draw(digests),
            chunks := draw(st.integers(1, 2**40)),
            first := draw(st.integers(0, 2**40)),
            first + chunks - 1 + draw(st.integers(0, 9)),
        )
        for i in range(draw(st.integers(0, 3)))
    )
    total = draw(counts)
    manifest = Manifest(
        format=1,
        stream_id=draw(identifiers),
        version=version,
        kind="delta",
        commit_id=draw(identifiers),
        attempt_id=attempt,
        writer_epoch=draw(st.integers(1, 2**62)),
        created_at="2026-01-02T03:04:05.123456Z",
        components={
            "model": Component(
                draw(digests), draw(counts), total, draw(st.integers(0, total)), parts, draw(st.booleans())
            )
        },
        parent_version=version - 1,
        parent_commit_id=draw(identifiers),
        parent_snapshot_id=draw(digests),
        step=draw(st.one_of(st.none(), st.integers(-(2**62), 2**62))),
        metadata=draw(st.dictionaries(st.text(max_size=10), scalars, max_size=4)),
    )
    return manifest, hash_name


@given(manifests())
def test_any_manifest_is_read_as_it_was_written(drawn: tuple[Manifest, str]) -> None:
    manifest, hash_name = drawn
    data = encode_manifest(manifest, hash_function=hasher(hash_name))
    found = parse_manifest(data, version=manifest.version)
    assert found == manifest
    assert encode_manifest(found, hash_function=hasher(hash_name)) == data


@given(st.binary(max_size=300))
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    refused(data, 7)
    with pytest.raises(DeltastoreError):
        parse_manifest(sealed(data.replace(b"\n", b"")), version=7)


def test_the_hint_is_canonical_json() -> None:
    hint = LatestHint(STREAM, 12)
    assert encode_latest(hint) == f'{{"stream_id":"{STREAM}","version":12}}'.encode()
    assert parse_latest(encode_latest(hint)) == hint
    assert parse_latest(f'{{"version":12,"later":1,"stream_id":"{STREAM}"}}'.encode()) == hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"0",
        b"12",
        b"null",
        b"[]",
        b"{}",
        b"\x00" * 100,
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        f'{{"stream_id":"{STREAM}"}}'.encode(),
        f'{{"stream_id":"{STREAM}","version":-1}}'.encode(),
        f'{{"stream_id":"{STREAM}","version":10000000000}}'.encode(),
        f'{{"stream_id":"{STREAM}","version":1.0}}'.encode(),
        f'{{"stream_id":"{STREAM}","version":"1"}}'.encode(),
        f'{{"stream_id":"{STREAM[1:]}","version":1}}'.encode(),
        b'{"stream_id":null,"version":1}',
        f'{{"stream_id":"{STREAM}","version":1}}x'.encode(),
        f'{{"stream_id":"{STREAM}\xff","version":1}}'.encode("latin-1"),
    ],
)
def test_a_hint_that_is_nonsense_is_no_hint(data: bytes) -> None:
    assert parse_latest(data) is None


@given(st.binary(max_size=120))
def test_random_bytes_are_no_hint(data: bytes) -> None:
    assert parse_latest(data) is None


def test_a_hint_with_any_bit_flipped_is_a_hint_or_none() -> None:
    data = encode_latest(LatestHint(STREAM, 12))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        assert isinstance(parse_latest(bytes(damaged)), LatestHint | None)


def test_records_cannot_be_changed() -> None:
    manifest = parse_manifest(sealed(delta()), version=7)
    with pytest.raises(AttributeError):
        manifest.version = 8  # type: ignore[misc]
    assert msgspec.structs.replace(manifest, step=None).step is None
