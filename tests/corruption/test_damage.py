"""Whatever lies in a store, a wrong byte never reaches a checkpoint: an error names the object, nothing is touched."""

# ruff: noqa: PT017 - whether an error comes at all is part of what is tried

from __future__ import annotations

import random
import shutil
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import training

import deltastore.attempt
import receiver.mending
from deltastore import Writer, open_checkpoint, open_store
from deltastore.container import build_header, parse_header
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DeltastoreError, StreamMismatch, UnsupportedFormat
from deltastore.fsck import check
from deltastore.manifest import encode_manifest, manifest_key, parse_manifest
from deltastore.snapshot import Schema, TensorSpec
from deltastore.storage.local import LocalBackend
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.status import Status

HASH = hasher("xxh3-128")
SNAPSHOTS = [training.small_snapshot(seed, elements=3000) for seed in range(4)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A stream of four versions with several parts each."""
    root = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltastore.attempt, "_PART_ROWS", 1)
        with Writer(root / "store", base=training.save(root / "base", SNAPSHOTS[0])) as writer:
            for snapshot in SNAPSHOTS[1:]:
                writer.publish(snapshot).result()
    assert len(open_store(root / "store").manifest(2).model.parts) == 3
    return root


@pytest.fixture
def store(pristine, tmp_path):
    shutil.copytree(pristine / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def live(pristine, tmp_path):
    """A receiver's checkpoint at version 1."""
    once(pristine / "store", tmp_path / "host" / "live", target="1")
    return tmp_path / "host" / "live"


def once(store, live, *, target="latest"):
    status = Status(store=str(store), checkpoint=str(live), target=target)
    Receiver(Options(store=str(store), checkpoint=live, target=target), status).once()


@contextmanager
def refused(store, live, tmp_path, *, key=None, kinds=(CorruptObject, StreamMismatch, UnsupportedFormat)):
    """Try everything that reads; fail unless each is refused, names the object, and leaves things as they were."""
    yield
    before = training.tree(live)
    errors = []
    with pytest.raises(kinds) as caught:
        once(store, live)
    errors.append(caught.value)
    assert training.tree(live) == before
    training.assert_holds(live, SNAPSHOTS[1])
    with pytest.raises(kinds) as caught:
        open_store(store).restore(3, tmp_path / "restored")
    errors.append(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if "restored" in path.name) == []
    for error in errors:
        assert key is None or key in f"{error} {error.key}", error
    report = check(LocalBackend(store), read_data=True)
    assert not report.ok
    assert key is None or any(key in problem.key for problem in report.problems), report.problems


def overwrite(path, data):
    path.unlink()
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "one byte long": lambda data: data + b"\0",
    "twice as long": lambda data: data + data,
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :],
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["part", "manifest"])
def test_a_damaged_object_is_refused_by_name(what, damage, store, live, tmp_path):
    key = manifest_key(2) if what == "manifest" else open_store(store).manifest(2).model.parts[1].key
    with refused(store, live, tmp_path, key=key):
        overwrite(store / key, DAMAGES[damage]((store / key).read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["schema", "digests", "anchor", "base manifest"])
def test_damage_of_what_the_base_brought_is_refused_by_name(what, damage, store, tmp_path):
    base = open_store(store).base
    key = {
        "schema": base.stream.schemas["model"].key,
        "digests": base.model.digests.key,
        "anchor": base.model.parts[1].key,
        "base manifest": manifest_key(0),
    }[what]
    overwrite(store / key, DAMAGES[damage]((store / key).read_bytes()))
    for attempt in (
        lambda: once(store, tmp_path / "live"),
        lambda: open_store(store).restore(3, tmp_path / "restored"),
        lambda: Writer(store),
    ):
        if what == "digests":
            break  # nobody who starts from the anchor reads it
        with pytest.raises(CorruptObject) as caught:
            attempt()
        assert key in f"{caught.value} {caught.value.key}"
    assert not (tmp_path / "live").exists()
    assert not (tmp_path / "restored").exists()
    report = check(LocalBackend(store), read_data=True)
    assert not report.ok
    assert any(key in problem.key for problem in report.problems)


def test_two_parts_exchanged_are_refused(store, live, tmp_path):
    parts = open_store(store).manifest(2).model.parts
    with refused(store, live, tmp_path, key="parts/0000000002"):
        one, other = (store / part.key for part in parts[:2])
        data = one.read_bytes()
        overwrite(one, other.read_bytes())
        overwrite(other, data)


def rewrite(store, number, /, **changes):
    """Replace a manifest by a well-formed one with other fields."""
    path = store / manifest_key(number)
    manifest = parse_manifest(path.read_bytes(), version=number)
    overwrite(path, encode_manifest(msgspec.structs.replace(manifest, **changes), hash_function=HASH))


def with_parts(manifest, parts, **more):
    return {"model": msgspec.structs.replace(manifest.model, parts=tuple(parts), **more)}


def put_part(store, manifest, number, data):
    """Put other bytes in a part's place, and have the manifest agree with them."""
    parts = list(manifest.model.parts)
    overwrite(store / parts[number].key, data)
    parts[number] = msgspec.structs.replace(parts[number], size=len(data), digest=HASH.of(data))
    rewrite(store, manifest.version, components=with_parts(manifest, parts))


def test_a_part_of_another_version_under_a_matching_manifest_is_refused(store, live, tmp_path):
    opened = open_store(store)
    two, three = opened.manifest(2), opened.manifest(3)
    with refused(store, live, tmp_path, key=two.model.parts[0].key):
        put_part(store, two, 0, (store / three.model.parts[0].key).read_bytes())


def test_a_part_of_another_stream_under_a_matching_manifest_is_refused(store, live, tmp_path):
    two = open_store(store).manifest(2)
    data = (store / two.model.parts[0].key).read_bytes()
    with refused(store, live, tmp_path, key=two.model.parts[0].key):
        put_part(store, two, 0, data.replace(two.stream_id.encode(), b"0" * 32))


@pytest.mark.parametrize(
    "parts",
    [lambda two: [*two.model.parts, two.model.parts[0]], lambda two: two.model.parts[1:], lambda two: []],
    ids=["twice", "missing", "none"],
)
def test_a_part_that_comes_twice_or_not_at_all_is_refused(parts, store, live, tmp_path):
    two = open_store(store).manifest(2)
    with refused(store, live, tmp_path):
        rewrite(store, 2, components=with_parts(two, parts(two)))


@pytest.mark.parametrize("seed", range(25))
def test_any_damage_of_a_parts_inside_is_refused_though_its_digest_fits(seed, store, live, tmp_path):
    draw = random.Random(seed)
    two = open_store(store).manifest(2)
    number = draw.randrange(3)
    data = bytearray((store / two.model.parts[number].key).read_bytes())
    header = parse_header(bytes(data), key="part")
    # In the tables or in the payload: headers have tests of their own.
    position = draw.randrange(header.size, len(data))
    data[position] ^= 1 << draw.randrange(8)
    # A wrong new digest shows where the next version does not continue from it: nobody can tell which is to blame.
    blamed = [two.model.parts[number].key, *(part.key for part in open_store(store).manifest(3).model.parts)]
    put_part(store, two, number, bytes(data))
    for attempt in (lambda: once(store, live), lambda: open_store(store).restore(3, tmp_path / "restored")):
        try:
            attempt()
        except DeltastoreError as error:
            assert isinstance(error, CorruptObject), error
            assert any(part in f"{error} {error.key}" for part in blamed)
            training.assert_holds(live, SNAPSHOTS[1])
        else:
            # A count that says nothing about bytes, or a bit of padding: then the bytes are right all the same.
            training.assert_holds(live, SNAPSHOTS[3])
    if (tmp_path / "restored").exists():
        training.assert_holds(tmp_path / "restored", SNAPSHOTS[3])


def test_a_manifest_of_another_stream_is_refused(store, live, tmp_path, pristine):
    with Writer(tmp_path / "foreign", base=pristine / "base") as writer:
        writer.publish(SNAPSHOTS[1]).result()
        writer.publish(SNAPSHOTS[2]).result()
    with refused(store, live, tmp_path, key=manifest_key(2)):
        overwrite(store / manifest_key(2), (tmp_path / "foreign" / manifest_key(2)).read_bytes())


@pytest.mark.parametrize(
    "changes",
    [
        {"writer_epoch": 1},
        {"parent_commit_id": "0" * 32},
        {"parent_snapshot_id": "xxh3-128:" + "0" * 32},
        {"stream_id": "0" * 32},
        {"attempt_id": "0" * 32},
        {"version": 3},
        {"parent_version": 0},
        {"kind": "base"},
        {"format": 3},
        {"required_features": ("time travel",)},
        {"components": {}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_that_does_not_fit_is_refused(changes, store, live, tmp_path):
    if "writer_epoch" in changes:
        rewrite(store, 1, writer_epoch=5)
        shutil.rmtree(live.parent)
        once(store, live, target="1")
    with refused(store, live, tmp_path, key=manifest_key(2)):
        rewrite(store, 2, **changes)


def test_a_manifest_that_promises_another_snapshot_is_refused(store, live, tmp_path):
    three = open_store(store).manifest(3)
    with refused(store, live, tmp_path):
        rewrite(store, 3, components=with_parts(three, three.model.parts, snapshot_id="xxh3-128:" + "1" * 32))


def test_a_part_said_to_be_larger_than_the_format_allows_is_not_read(store, live, tmp_path):
    two = open_store(store).manifest(2)
    large = msgspec.structs.replace(two.model.parts[0], size=(64 << 20) + 1)
    with refused(store, live, tmp_path, key=manifest_key(2)):
        rewrite(store, 2, components=with_parts(two, [large, *two.model.parts[1:]]))


@pytest.mark.parametrize("shape", ["dtype", "shape", "two tensors", "no tensor", "short"])
def test_a_digest_table_in_another_form_is_refused(shape, store, tmp_path, pristine):
    base = open_store(store).base
    reference = base.model.digests
    data = (store / reference.key).read_bytes()
    header = parse_header(data, key="table")
    chunks, size = header.tensors[0].spec.shape
    body = data[header.size :]
    forms = {
        "dtype": ([("digests", "U16", (chunks, size))], body + body),
        "shape": ([("digests", "U8", (size, chunks))], body),
        "two tensors": ([("digests", "U8", (chunks, size)), ("more", "U8", (0,))], body),
        "no tensor": ([], b""),
        "short": ([("digests", "U8", (chunks - 1, size))], body[:-size]),
    }
    tensors, content = forms[shape]
    made = build_header(tensors, {"format": "deltastore.digests/1", "component": "model"}) + content
    overwrite(store / reference.key, made)
    table = msgspec.structs.replace(reference, size=len(made), digest=HASH.of(made))
    model = msgspec.structs.replace(base.model, digests=table)
    rewrite(store, 0, components={**base.components, "model": model})
    with pytest.raises(CorruptObject):
        open_store(store).base_digests()
    wrong = training.save(tmp_path / "wrong", training.small_snapshot(77, elements=3000))
    with pytest.raises(CorruptObject):
        open_store(store).restore(3, tmp_path / "restored", base=wrong)
    assert not check(LocalBackend(store), read_data=True).ok


@pytest.mark.parametrize("component", ["model", "files", "headers"])
@pytest.mark.parametrize("tensors", [1, 40, 30_000], ids=lambda count: f"{count} tensors")
def test_a_schema_that_claims_more_than_the_base_has_costs_no_memory(component, tensors, store, tmp_path):
    base, schema = open_store(store).base, open_store(store).schema(component)
    reference = base.stream.schemas[component]
    huge = [TensorSpec(f"huge.{number}", "U8", (1 << 48,)) for number in range(tensors)]
    made = Schema([*schema.tensors, *huge]).to_json()
    overwrite(store / reference.key, made)
    forged = msgspec.structs.replace(reference, size=len(made), digest=HASH.of(made))
    rewrite(store, 0, stream=msgspec.structs.replace(base.stream, schemas={**base.stream.schemas, component: forged}))
    with pytest.raises(CorruptObject) as caught:
        open_store(store).schema(component)
    assert caught.value.key == reference.key
    with pytest.raises(CorruptObject):
        open_store(store).restore(3, tmp_path / "restored")
    assert not check(LocalBackend(store), read_data=True).ok
    if component == "model":
        with pytest.raises(CorruptObject):
            Writer(store, resume=True)


@pytest.mark.parametrize("component", ["files", "headers"])
@pytest.mark.parametrize("name", ["../escape", "/etc/escape", ".hidden", "a/../b", "a//b", "a\\b", "c:d"])
def test_a_file_name_that_leads_elsewhere_is_refused(component, name, store, tmp_path):
    base = open_store(store).base
    reference = base.stream.schemas[component]
    schema = open_store(store).schema(component)
    first = schema.tensors[0]
    made = Schema([TensorSpec(name, "U8", first.shape), *schema.tensors[1:]]).to_json()
    overwrite(store / reference.key, made)
    schemas = {
        **base.stream.schemas,
        component: msgspec.structs.replace(reference, size=len(made), digest=HASH.of(made)),
    }
    rewrite(store, 0, stream=msgspec.structs.replace(base.stream, schemas=schemas))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CorruptObject):
        open_store(store).restore(3, tmp_path / "deep" / "restored")
    (tmp_path / "deep").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b"\xff" * 2000, b'{"stream_id":"x","version":-1}'])
def test_the_hint_may_be_nonsense(content, store, live):
    overwrite(store / "LATEST", content)
    once(store, live)
    training.assert_holds(live, SNAPSHOTS[3])


@pytest.mark.parametrize("version", [0, 1, 3, 4, 9_999_999_999])
def test_the_hint_may_be_of_any_version(version, store, live):
    stream = open_store(store).stream_id
    overwrite(store / "LATEST", b'{"stream_id":"%s","version":%d}' % (stream.encode(), version))
    assert open_store(store).latest().version == 3
    once(store, live)
    training.assert_holds(live, SNAPSHOTS[3])


@pytest.fixture
def not_mended(monkeypatch):
    """A way to run without repairs, which find no bytes anywhere."""

    @contextmanager
    def without():
        def fail(*_, **__):
            raise CorruptObject("It is nowhere to be had.", hint="Remove the link.")

        with monkeypatch.context() as patch:
            patch.setattr(receiver.mending, "repair", fail)
            yield

    return without


def test_a_damaged_live_slot_is_named_never_patched_further_and_mended(store, live, not_mended, caplog):
    checkpoint = open_checkpoint(live)
    file, start = checkpoint.places.tensor(checkpoint.schema.position("b.weight"))
    path = live / checkpoint.layout.files[file].name
    del checkpoint
    with path.open("r+b") as stream:
        stream.seek(start + 5)
        stream.write(bytes([stream.read(1)[0] ^ 2]))
    before = training.tree(live)
    with not_mended(), pytest.raises(CorruptObject, match="nowhere"):
        once(store, live)
    assert "b.weight" in caplog.text
    assert training.tree(live) == before
    once(store, live)
    training.assert_holds(live, SNAPSHOTS[3])


@pytest.mark.parametrize("record", ["a.json", "a.digests"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "middle bit", "gone"])
@pytest.mark.parametrize("how", ["by itself", "as told"])
def test_a_damaged_record_of_the_live_slot_is_told_and_mended(record, damage, how, store, live, not_mended):
    path = live.with_name("live.slots") / record.replace("a.", f"{live.readlink().name}.")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    if how == "as told":
        with not_mended(), pytest.raises(DeltastoreError) as caught:
            once(store, live)
        assert caught.value.hint
        training.assert_holds(live, SNAPSHOTS[1])
        live.unlink()
    once(store, live)
    training.assert_holds(live, SNAPSHOTS[3])


def test_a_snapshot_is_compared_by_bits(tmp_path):
    """Negative zeros, NaN payloads and denormals are values like any other."""
    base = training.small_snapshot(0)
    base["b.weight"].view(-1)[:4] = 0.0
    changed = {name: tensor.clone() for name, tensor in base.items()}
    bits = changed["b.weight"].view(-1).view(__import__("torch").int32)
    bits[0], bits[1], bits[2] = -(2**31), 0x7FC00001, 0x7F800001
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", base)) as writer:
        published = writer.publish(changed).result()
    assert published.changed_elements == 3
    open_store(tmp_path / "store").restore(1, tmp_path / "one")
    training.assert_holds(tmp_path / "one", changed)
    assert np.isnan(changed["b.weight"].view(-1)[1].item())
