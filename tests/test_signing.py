"""Signed streams: what a reader with keys takes, and everything that it does not."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import training
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519
from hypothesis import given
from hypothesis import strategies as st

import deltastore.compact
import deltastore.reader
import deltastore.segment
from deltastore import Writer, open_checkpoint, open_store
from deltastore.compact import anchor, compact
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DeltastoreError, SignatureMismatch, UsageError, VersionForgotten
from deltastore.fsck import check
from deltastore.gc import collect, forget
from deltastore.init import create_stream
from deltastore.manifest import Manifest, encode_manifest, manifest_key, parse_base, parse_manifest
from deltastore.policy import Policy
from deltastore.record import encode_record, parse_record
from deltastore.route import route_key
from deltastore.segment import parse_segment, segment_key
from deltastore.signing import Signer, Verifier, generate_key, load_public_key
from deltastore.storage.local import LocalBackend
from deltastore.tags import delete_tag, encode_tag, set_tag, tag_key, tag_names

BLAKE3 = hasher("blake3")
#: RFC 8032, section 7.1, test 1: a secret key and its public one.
PRIVATE = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
OTHER_PRIVATE = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
OTHER = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"


def signer(secret: str = PRIVATE) -> Signer:
    return Signer(ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A signed stream of three versions, and its key."""
    root = tmp_path_factory.mktemp("signed")
    (root / "key").write_text(PRIVATE)
    snapshots = [training.small_snapshot(0)]
    base = training.save(root / "base", snapshots[0])
    with Writer(root / "store", base=base, sign_key=root / "key", hash_name="blake3") as writer:
        for number in (1, 2):
            snapshots.append(training.step(snapshots[-1], number))
            writer.publish(snapshots[-1], step=number).result()
    return root, snapshots


@pytest.fixture
def store(made, tmp_path):
    """A copy to do harm to."""
    shutil.copytree(made[0] / "store", tmp_path / "store")
    return tmp_path / "store"


def manifest_path(store, version):
    return store / manifest_key(version)


def lines(path):
    line, digest, signature = path.read_bytes().splitlines(keepends=True)
    return line.rstrip(b"\n"), digest, signature


def forged(path, change, key=None):
    """Change fields of a manifest and make its digest fit; sign it anew with ``key``, or keep the old signature."""
    line, _, signature = lines(path)
    fields = msgspec.json.decode(line)
    change(fields)
    line = msgspec.json.encode(fields, order="sorted")
    if key is not None:
        signature = key.sign("manifest", line) + b"\n"
    path.write_bytes(line + b"\n" + BLAKE3.of(line).encode() + b"\n" + signature)


def test_a_signed_stream_is_read_with_its_key_and_without(made, tmp_path):
    root, snapshots = made
    for keys in ([PUBLIC], [PUBLIC.upper(), OTHER], None):
        store = open_store(root / "store", trusted_keys=keys)
        assert [manifest.version for manifest in store.log()] == [0, 1, 2]
        store.restore(2, tmp_path / "out")
        training.assert_holds(tmp_path / "out", snapshots[2])
        shutil.rmtree(tmp_path / "out")
    assert store.stream.signers == (PUBLIC,)
    assert all(manifest.required_features == ("signed",) for manifest in store.log())
    for keys in (None, frozenset({PUBLIC})):
        assert check(LocalBackend(root / "store"), read_data=True, trusted_keys=keys).ok


def test_the_third_line_is_what_the_format_says(made):
    for version in range(3):
        line, digest, signature = lines(manifest_path(made[0] / "store", version))
        assert digest.decode() == BLAKE3.of(line) + "\n"
        name, key, value = signature.decode().split(":")
        assert (name, key) == ("ed25519", PUBLIC)
        assert re.fullmatch(r"[0-9a-f]{128}\n", value)
        public_key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public_key.verify(bytes.fromhex(value), b"deltastore/manifest/1\0" + line)


def test_a_stream_that_is_not_signed_is_as_it_was(tmp_path):
    base = open_checkpoint(training.save(tmp_path / "base", training.small_snapshot(0)))
    store = create_stream(LocalBackend(tmp_path / "store"), base)
    data = manifest_path(tmp_path / "store", 0).read_bytes()
    assert data.count(b"\n") == 2
    assert b"sign" not in data
    assert store.base.required_features == ()
    with pytest.raises(SignatureMismatch):
        open_store(tmp_path / "store", trusted_keys=[PUBLIC])


HARM = {
    "a changed field": lambda path: forged(path, lambda fields: fields.update(step=9)),
    "a changed field, signed by an unknown key": lambda path: forged(
        path, lambda fields: fields.update(step=9), signer(OTHER_PRIVATE)
    ),
    "no signature": lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2])),
    "an empty signature": lambda path: path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b"\n"
    ),
    "the signature of another manifest": lambda path: path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + lines(path.with_name("0000000002.json"))[2]
    ),
    "the signature of another kind": lambda path: path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + signer().sign("tag", lines(path)[0]) + b"\n"
    ),
    "two signatures": lambda path: path.write_bytes(path.read_bytes() + lines(path)[2]),
    "no last newline": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "capitals": lambda path: path.write_bytes(
        b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + lines(path)[2].upper()
    ),
}


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("keys", [[PUBLIC], [PUBLIC, OTHER], None], ids=["its key", "two keys", "no key"])
@pytest.mark.parametrize("harm", HARM)
def test_a_forged_manifest_is_refused(harm, keys, version, store):
    HARM[harm](manifest_path(store, version))
    with pytest.raises(SignatureMismatch) as caught:
        open_store(store, trusted_keys=keys).manifest(version)
    assert caught.value.key == manifest_key(version)
    assert caught.value.hint
    report = check(LocalBackend(store), trusted_keys=None if keys is None else frozenset(keys))
    assert (SignatureMismatch.kind, manifest_key(version)) in {(entry.kind, entry.key) for entry in report.problems}


def test_what_the_store_says_of_its_signers_convinces_nobody_who_has_a_key(store, tmp_path):
    """Somebody with another key makes the whole stream theirs, properly signed."""
    mallory = signer(OTHER_PRIVATE)
    for version in range(3):

        def change(fields):
            fields["step"] = 9
            if fields["stream"] is not None:
                fields["stream"]["signers"] = sorted([PUBLIC, OTHER])

        forged(manifest_path(store, version), change, mallory)
    assert open_store(store).latest().step == 9  # who trusts nobody in particular cannot tell
    assert check(LocalBackend(store)).ok
    with pytest.raises(SignatureMismatch, match=OTHER):
        open_store(store, trusted_keys=[PUBLIC])
    (tmp_path / "key").write_text(PRIVATE)
    with pytest.raises(SignatureMismatch):  # nor does a trainer go on with it
        Writer(store, resume=True, sign_key=tmp_path / "key")
    assert not check(LocalBackend(store), trusted_keys=frozenset({PUBLIC})).ok


def test_a_stream_stripped_of_all_its_signatures_is_refused(store):
    for version in range(3):
        line, _, _ = lines(manifest_path(store, version))
        fields = msgspec.json.decode(line)
        fields["required_features"] = []
        if version == 0:
            del fields["stream"]["signers"]
        line = msgspec.json.encode(fields, order="sorted")
        manifest_path(store, version).write_bytes(line + f"\n{BLAKE3.of(line)}\n".encode())
    open_store(store).log()
    with pytest.raises(SignatureMismatch, match="not signed"):
        open_store(store, trusted_keys=[PUBLIC])


def test_a_key_that_is_trusted_but_is_no_signer_of_the_stream_is_not_taken(store):
    forged(manifest_path(store, 1), lambda fields: None, signer(OTHER_PRIVATE))
    with pytest.raises(SignatureMismatch, match=OTHER):
        open_store(store, trusted_keys=[PUBLIC, OTHER]).manifest(1)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("how", ["changed", "exchanged"])
def test_parts_put_in_anothers_place_are_found(how, version, store, tmp_path):
    """The signature covers the manifest, the manifest the parts' blake3 digests."""
    (part,) = (store / f"parts/{version:010d}").rglob("model-0*.safetensors")
    (other,) = (store / "parts/0000000002").rglob("model-0*.safetensors")
    if how == "changed":
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
    else:
        part.write_bytes(other.read_bytes())
    with pytest.raises(CorruptObject):
        open_store(store, trusted_keys=[PUBLIC]).restore(1, tmp_path / "out")


def test_the_manifests_of_two_versions_cannot_change_places(store):
    one, two = manifest_path(store, 1).read_bytes(), manifest_path(store, 2).read_bytes()
    manifest_path(store, 1).write_bytes(two)
    manifest_path(store, 2).write_bytes(one)
    for version in (1, 2):
        with pytest.raises(CorruptObject, match="version"):
            open_store(store, trusted_keys=[PUBLIC]).manifest(version)


def test_going_back_to_an_older_head_is_no_forgery(store):
    """Signatures do not tell that something newer was there; a receiver that had it does."""
    manifest_path(store, 2).unlink()
    assert open_store(store, trusted_keys=[PUBLIC]).latest().version == 1


def test_routes_need_no_signature_and_one_that_is_not_right_is_refused(store, made, tmp_path, monkeypatch):
    """Whoever compacts has no key: what a route leads to is proven against the signed manifests."""
    monkeypatch.setattr(deltastore.compact, "SPANS", (2,))
    (skip,) = compact(open_store(store, trusted_keys=[PUBLIC])).routes
    made_anchor = anchor(open_store(store, trusted_keys=[PUBLIC]), 1)
    assert made_anchor is not None

    def steps(start, end):
        return [step.kind for step in open_store(store, trusted_keys=[PUBLIC]).plan(start, end).steps]

    assert steps(0, 2) == ["skip"]
    assert check(LocalBackend(store), trusted_keys=frozenset({PUBLIC}), read_data=True).ok
    open_store(store, trusted_keys=[PUBLIC]).restore(2, tmp_path / "restored", base=made[0] / "base")
    training.assert_holds(tmp_path / "restored", made[1][2])

    path = store / route_key(skip.version, skip.attempt_id)
    line, digest = path.read_bytes().splitlines()
    for kind, key, taken in [
        ("route", signer(), True),
        ("route", signer(OTHER_PRIVATE), False),
        ("tag", signer(), False),
    ]:
        path.write_bytes(line + b"\n" + digest + b"\n" + key.sign(kind, line) + b"\n")
        assert steps(0, 2) == (["skip"] if taken else ["delta", "delta"])
        found = check(LocalBackend(store), trusted_keys=frozenset({PUBLIC})).problems
        assert [problem.key for problem in found] == ([] if taken else [route_key(skip.version, skip.attempt_id)])


def test_a_tag_in_a_signed_stream_is_signed(store):
    opened = open_store(store, trusted_keys=[PUBLIC])
    for key in (None, signer(OTHER_PRIVATE)):
        with pytest.raises(UsageError):
            set_tag(opened, "best", 1, signer=key)
    assert tag_names(opened) == []
    tag = set_tag(opened, "best", 1, signer=signer())
    assert set_tag(opened, "best", 1, signer=signer()) == tag
    path = store / tag_key("best")
    data = path.read_bytes()
    assert opened.resolve("tag:best").version == 1
    moved = msgspec.structs.replace(tag, version=2, commit_id=opened.manifest(2).commit_id)
    line, digest, signature = data.splitlines(keepends=True)
    forged = [
        line + digest,
        encode_tag(opened, moved),
        encode_tag(opened, moved) + signature,
        encode_tag(opened, moved, signer(OTHER_PRIVATE)),
        encode_record(moved, hash_function=BLAKE3, signer=signer(), kind="manifest"),
    ]
    for wrong in forged:
        path.write_bytes(wrong)
        for reader in (opened, open_store(store)):
            with pytest.raises(SignatureMismatch):
                reader.resolve("tag:best")
        with pytest.raises(SignatureMismatch):
            collect(opened)  # it may be what keeps something
        assert tag_key("best") in {problem.key for problem in check(LocalBackend(store)).problems}
    set_tag(opened, "best", 1, signer=signer())
    assert opened.resolve("tag:best").version == 1
    path.write_bytes(forged[0])
    delete_tag(opened, "best")
    assert tag_names(opened) == []


def test_retention_records_need_no_signature_and_change_no_byte(store, made, tmp_path):
    opened = open_store(store, trusted_keys=[PUBLIC])
    set_tag(opened, "first", 1, signer=signer())
    assert forget(opened, Policy(keep_last=1)).number == 1
    collect(opened)
    for version in (1, 2):
        opened.restore(version, tmp_path / f"out{version}")
        training.assert_holds(tmp_path / f"out{version}", made[1][version])
    with pytest.raises(VersionForgotten):
        opened.plan(None, 0)
    with pytest.raises(UsageError):
        set_tag(open_store(store), "second", 2)
    assert check(LocalBackend(store), read_data=True).ok


def test_a_log_segment_of_a_signed_stream_is_taken_with_its_signatures_only(store, monkeypatch):
    for module in (deltastore.segment, deltastore.compact):
        monkeypatch.setattr(module, "SEGMENT_VERSIONS", 3)
    monkeypatch.setattr(deltastore.reader, "_WORTH_A_SEGMENT", 1)
    monkeypatch.setattr(deltastore.compact, "SPANS", ())
    assert compact(open_store(store, trusted_keys=[PUBLIC])).segments == (0,)
    stored = [manifest_path(store, version).read_bytes() for version in range(3)]
    assert [
        entry.version
        for entry in parse_segment((store / segment_key(0)).read_bytes(), first=0, verifier=Verifier({PUBLIC}))
    ] == [0, 1, 2]
    forged(manifest_path(store, 1), lambda fields: fields.update(step=9), signer(OTHER_PRIVATE))
    data = deltastore.segment.build_segment([stored[0], manifest_path(store, 1).read_bytes(), stored[2]])
    (store / segment_key(0)).write_bytes(data)
    manifest_path(store, 1).write_bytes(stored[1])
    with pytest.raises(SignatureMismatch):
        parse_segment(data, first=0, verifier=Verifier({PUBLIC}))
    assert [entry.step for entry in open_store(store, trusted_keys=[PUBLIC]).log()] == [None, 1, 2]
    found = check(LocalBackend(store), trusted_keys=frozenset({PUBLIC})).problems
    assert [problem.kind for problem in found] == ["signature-mismatch"]


def test_a_signature_has_no_place_in_a_stream_that_is_not_signed(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        writer.publish(training.small_snapshot(1)).result()
    for version in (0, 1):
        path = manifest_path(tmp_path / "store", version)
        data = path.read_bytes()
        path.write_bytes(data + signer().sign("manifest", data.split(b"\n")[0]) + b"\n")
        with pytest.raises(CorruptObject, match="not signed"):
            open_store(tmp_path / "store").manifest(version)
        path.write_bytes(data)


BASE = {
    "signers twice": {"stream": {"signers": [PUBLIC, PUBLIC]}},
    "no signers": {"stream": {"signers": []}},
    "signers of another form": {"stream": {"signers": [PUBLIC.upper()]}},
    "no feature": {"required_features": []},
    "another hash": {},
}


@pytest.mark.parametrize("case", BASE)
def test_a_base_that_contradicts_itself_is_refused_though_it_is_signed(case, store):
    path = manifest_path(store, 0)
    if case == "another hash":
        line = lines(path)[0]
        sealed = b"%b\n%b\n%b\n" % (line, hasher("xxh3-128").of(line).encode(), signer().sign("manifest", line))
        path.write_bytes(sealed)
    else:

        def change(fields):
            fields["stream"] |= BASE[case].get("stream", {})
            fields["required_features"] = BASE[case].get("required_features", ["signed"])

        forged(path, change, signer())
    for keys in ([PUBLIC], None):
        with pytest.raises(DeltastoreError) as caught:
            open_store(store, trusted_keys=keys)
        assert isinstance(caught.value, CorruptObject | SignatureMismatch)


def test_a_manifest_must_say_that_it_is_signed(store):
    forged(manifest_path(store, 1), lambda fields: fields.update(required_features=[]), signer())
    with pytest.raises(CorruptObject, match="signed"):
        open_store(store).manifest(1)


@pytest.fixture(scope="module")
def manifests(made):
    return [manifest_path(made[0] / "store", version).read_bytes() for version in range(3)]


@given(data=st.data())
def test_every_other_byte_in_a_signed_manifest_is_refused(data, manifests):
    version = data.draw(st.sampled_from([0, 1]))
    original = manifests[version]
    # The signature's line has few of the bytes and most of what is new here.
    low = data.draw(st.sampled_from([0, original.index(b"\n") + 1]))
    place = data.draw(st.integers(low, len(original) - 1))
    changed = bytearray(original)
    changed[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != original[place]))
    with pytest.raises((CorruptObject, SignatureMismatch)) as caught:
        read(bytes(changed), version)
    assert caught.value.key == manifest_key(version)


@given(data=st.data())
def test_every_cut_of_a_signed_manifest_and_anything_added_is_refused(data, manifests):
    version = data.draw(st.sampled_from([0, 1]))
    end = data.draw(st.integers(0, len(manifests[version])))
    more = data.draw(st.binary(max_size=20))
    changed = manifests[version][:end] + more
    if changed != manifests[version]:
        with pytest.raises((CorruptObject, SignatureMismatch)):
            read(changed, version)


def read(data, version):
    if version == 0:
        return parse_base(data, trusted_keys=frozenset({PUBLIC}))[0]
    return parse_manifest(data, version=version, verifier=Verifier({PUBLIC}))


@given(line=st.binary(max_size=200), other=st.binary(max_size=200))
def test_a_signature_holds_for_its_own_line_and_kind(line, other):
    verifier = Verifier({PUBLIC})
    kinds = ("manifest", "route", "tag")
    for kind in kinds:
        signature = signer().sign(kind, line) + b"\n"
        verifier.check(kind, line, signature, key="k")
        for wrong_kind, wrong_line in [(name, line) for name in kinds if name != kind] + [(kind, other)] * (
            line != other
        ):
            with pytest.raises(SignatureMismatch):
                verifier.check(wrong_kind, wrong_line, signature, key="k")


class Record(msgspec.Struct, frozen=True):
    format: int = 1
    value: int = 7


def test_records_of_other_kinds_are_signed_in_the_same_way():
    for kind in ("route", "tag"):
        data = encode_record(Record(), hash_function=BLAKE3, signer=signer(), kind=kind)
        assert parse_record(data, Record, key="k", kind=kind, verifier=Verifier({PUBLIC}))[0] == Record()
        for verifier, as_kind in ((Verifier({OTHER}), kind), (Verifier({PUBLIC}), "manifest")):
            with pytest.raises(SignatureMismatch):
                parse_record(data, Record, key="k", kind=as_kind, verifier=verifier)
    bare = encode_record(Record(), hash_function=BLAKE3)
    assert parse_record(bare, Record, key="k", kind="route", verifier=Verifier({PUBLIC}))[0] == Record()
    with pytest.raises(SignatureMismatch):
        parse_record(bare, Record, key="k", kind="tag", verifier=Verifier({PUBLIC}))


# Writers and their keys


def test_a_stream_goes_on_only_with_a_key_of_its_signers(store, tmp_path):
    (tmp_path / "other").write_text(OTHER_PRIVATE)
    with pytest.raises(UsageError, match="signed"):
        Writer(store, resume=True)
    with pytest.raises(SignatureMismatch):
        Writer(store, resume=True, sign_key=tmp_path / "other")
    with pytest.raises(UsageError, match=OTHER):
        Writer(store, resume=True, sign_key=tmp_path / "other", trusted_keys=[PUBLIC])
    assert open_store(store).latest().version == 2
    plain = tmp_path / "plain"
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    with Writer(plain, base=base):
        pass
    with pytest.raises(SignatureMismatch):
        Writer(plain, resume=True, sign_key=tmp_path / "other")


def test_a_second_signer_named_at_the_start_takes_over_from_the_first(tmp_path):
    (tmp_path / "other").write_text(OTHER_PRIVATE)
    base = open_checkpoint(training.save(tmp_path / "base", training.small_snapshot(0)))
    url = tmp_path / "store"
    create_stream(LocalBackend(url), base, hash_name="blake3", signer=signer(), other_signers=[OTHER])
    with Writer(url, resume=True, takeover=True, sign_key=tmp_path / "other", trusted_keys=[PUBLIC, OTHER]) as writer:
        writer.publish(training.small_snapshot(1)).result()
    assert [manifest.version for manifest in open_store(url, trusted_keys=[PUBLIC, OTHER]).log()] == [0, 1, 2]
    with pytest.raises(SignatureMismatch, match=OTHER):
        open_store(url, trusted_keys=[PUBLIC]).latest()


def test_signing_needs_a_hash_that_nobody_can_bend(tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    (tmp_path / "key").write_text(PRIVATE)
    with pytest.raises(UsageError, match="blake3"):
        Writer(tmp_path / "store", base=base, sign_key=tmp_path / "key")
    with pytest.raises(UsageError, match="signers"):
        create_stream(
            LocalBackend(tmp_path / "store"), open_checkpoint(base), hash_name="blake3", other_signers=[OTHER]
        )
    assert not (tmp_path / "store" / "manifests").exists()


def test_no_trusted_keys_are_not_all_keys(store):
    with pytest.raises(UsageError):
        open_store(store, trusted_keys=[])


# Key files


def pem(key, password=None):
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


def public_pem(key):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def test_a_new_key_is_its_owners_alone_and_is_loaded_again(tmp_path):
    public = generate_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert Signer.load(tmp_path / "key").public_key == public == load_public_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(UsageError):
        generate_key(tmp_path / "key")
    with pytest.raises(UsageError):
        generate_key(tmp_path / "missing" / "key")
    assert (tmp_path / "key").read_bytes() == before
    assert generate_key(tmp_path / "second") != public


def test_keys_are_read_in_each_form(tmp_path):
    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(PRIVATE))
    for data in (PRIVATE.encode(), PRIVATE.upper().encode() + b"\n", pem(key)):
        (tmp_path / "key").write_bytes(data)
        assert Signer.load(tmp_path / "key").public_key == PUBLIC
    for data in (PUBLIC.encode(), PUBLIC.upper().encode() + b"\n", public_pem(key), pem(key)):
        (tmp_path / "public").write_bytes(data)
        assert load_public_key(tmp_path / "public") == PUBLIC
    assert load_public_key(PUBLIC.upper()) == PUBLIC


def test_what_is_no_key_is_refused(tmp_path):
    key = ed448.Ed448PrivateKey.generate()
    ed = ed25519.Ed25519PrivateKey.generate()
    for data in (
        b"",
        b"\xff\x00",
        PRIVATE[:-1].encode(),
        b"-----BEGIN PRIVATE KEY-----\nx",
        pem(key),
        pem(ed, b"word"),
    ):
        (tmp_path / "key").write_bytes(data)
        with pytest.raises(UsageError) as caught:
            Signer.load(tmp_path / "key")
        assert caught.value.hint
        with pytest.raises(UsageError):
            load_public_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(public_pem(key))
    with pytest.raises(UsageError):
        load_public_key(tmp_path / "key")
    for load in (Signer.load, load_public_key):
        with pytest.raises(UsageError):
            load(tmp_path / "missing")


def test_without_the_package_signatures_say_what_to_install_and_all_else_works(made, tmp_path):
    code = f"""
import sys
sys.modules["cryptography"] = None
from deltastore import open_store
from deltastore.errors import UsageError
try:
    open_store({str(made[0] / "store")!r})
except UsageError as error:
    assert "deltastore[signing]" in error.hint
else:
    raise AssertionError
import deltastore.writer, deltastore.cli.init, receiver.daemon
"""
    root = str(Path(__file__).resolve().parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root, "PATH": ""})


def test_nothing_of_the_package_is_loaded_where_nothing_is_signed(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))):
        pass
    code = (
        f"import sys; from deltastore import open_store; open_store({str(tmp_path / 'store')!r}).log(); "
        "assert not {'cryptography', 'torch', 'numba'} & set(sys.modules)"
    )
    root = str(Path(__file__).resolve().parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root, "PATH": ""})


def test_an_unsigned_manifest_is_encoded_as_before():
    manifest = Manifest(
        format=1, stream_id="1" * 32, version=1, kind="delta", commit_id="2" * 32, attempt_id="3" * 32,
        writer_epoch=1, created_at="2026-01-02T03:04:05Z", components={},
    )  # fmt: skip
    data = encode_manifest(manifest, hash_function=BLAKE3)
    signed = encode_manifest(manifest, hash_function=BLAKE3, signer=signer())
    assert data.count(b"\n") == 2
    assert signed.startswith(data)
