"""Tags: names for versions. A tag keeps its version, with the objects that lead there, as long as it stands.

The objects are written into the tag, so that whoever reads it knows them without looking at anything else: two
collectors that see different routes still spare the same ones (docs/format.md, section 11).
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from .clock import now
from .errors import (
    CorruptObject,
    ObjectNotFound,
    SignatureMismatch,
    UsageError,
    VersionForgotten,
    VersionNotFound,
)
from .manifest import BASE_VERSION
from .record import FORMAT, CommitTime, Identifier, VersionNumber, encode_record, parse_record
from .retention import Ranges, Standing, numbers, ranges, ranges_problem
from .route import Route

if TYPE_CHECKING:
    from .manifest import Manifest
    from .plan import Plan
    from .reader import Store
    from .retention import Retention
    from .signing import Signer, Verifier
    from .storage.base import Buffer

__all__ = [
    "MAX_TAG_BYTES",
    "TAGS_PREFIX",
    "Tag",
    "delete_tag",
    "encode_tag",
    "parse_tag",
    "read_standing",
    "read_tag",
    "read_tags",
    "set_tag",
    "tag_key",
    "tag_names",
    "tagged_manifest",
]

TAGS_PREFIX = "tags/"
MAX_TAG_BYTES = 16 << 20

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_KEY = re.compile(rf"tags/({_NAME})\.json\Z", re.ASCII)

#: How often a way is chosen anew when the newest record turns out to keep the version by another one.
_TRIES = 5


class Tag(msgspec.Struct, frozen=True):
    """One tag: its name, the version with its commit id, and the objects on the way there from an anchor.

    ``deltas``: the versions whose own parts are on it (version 0's are the base itself); ``routes``: attempt ids.
    """

    format: int
    stream_id: Identifier
    name: Annotated[str, Meta(pattern=rf"^{_NAME}\Z")]
    version: VersionNumber
    commit_id: Identifier
    created_at: CommitTime
    deltas: Ranges
    routes: tuple[Identifier, ...]


def tag_key(name: str) -> str:
    """Return the key of a tag; raises ``UsageError`` for what is no name."""
    if name == "latest" or not re.fullmatch(_NAME, name, re.ASCII):
        raise UsageError(
            f"{name!r} is no name for a tag.",
            hint="Use up to 63 letters, digits, dots, dashes and underscores, a letter or digit first, and not latest.",
        )
    return f"{TAGS_PREFIX}{name}.json"


def encode_tag(store: Store, tag: Tag, signer: Signer | None = None) -> bytes:
    """Return a tag as it is stored."""
    return encode_record(tag, hash_function=store.hash, signer=signer, kind="tag")


def parse_tag(data: Buffer, *, name: str, stream_id: str, hash_name: str, verifier: Verifier | None = None) -> Tag:
    """Parse the tag found under the key of ``name``.

    ``verifier``: that of a signed stream. Raises ``CorruptObject``, ``SignatureMismatch`` or ``UnsupportedFormat``.
    """
    key = tag_key(name)
    tag, digest = parse_record(data, Tag, key=key, kind="tag", verifier=verifier)
    problem = ranges_problem(tag.deltas)
    if tag.name != name:
        problem = f"it says that it is {tag.name}"
    elif tag.stream_id != stream_id:
        problem = f"it belongs to the stream {tag.stream_id}"
    elif not digest.startswith(f"{hash_name}:"):
        problem = "its hash is not the stream's"
    if problem:
        raise CorruptObject(f"{key} is damaged: {problem}.", key=key, hint=_AGAIN)
    return tag


_AGAIN = "Set the tag again, or delete it with `deltastore tag STORE NAME --delete`."


def read_tag(store: Store, name: str) -> Tag:
    """Return a tag as it is; raises ``VersionNotFound`` when there is none of this name."""
    try:
        data = store.backend.read(tag_key(name), limit=MAX_TAG_BYTES)
    except ObjectNotFound as error:
        raise VersionNotFound(
            f"There is no tag {name} in {store.backend.url}.",
            key=tag_key(name),
            hint="`deltastore tags` lists the tags there are.",
        ) from error
    return parse_tag(data, name=name, stream_id=store.stream_id, hash_name=store.hash.name, verifier=store.verifier)


def tagged_manifest(store: Store, tag: Tag) -> Manifest:
    """Return the manifest that a tag names; raises ``CorruptObject`` when that version is another commit's."""
    try:
        manifest = store.manifest(tag.version)
    except VersionNotFound:
        manifest = None
    if manifest is None or manifest.commit_id != tag.commit_id:
        key = tag_key(tag.name)
        there = "is not there" if manifest is None else f"is {manifest.commit_id}"
        raise CorruptObject(
            f"{key} names version {tag.version}, commit {tag.commit_id}; that version {there}.", key=key, hint=_AGAIN
        )
    return manifest


def read_standing(store: Store) -> tuple[Standing, list[Tag]]:
    """Return what stays of all versions, and the tags: read in the order that makes it safe, the record first.

    A tag set after the record was read is seen by its setter to be too late, one set before is seen here.
    """
    record = store.retention()
    tags = read_tags(store)
    return Standing(record, tags), tags


def read_tags(store: Store) -> list[Tag]:
    """Return all tags by name; raises ``CorruptObject`` for a damaged one, ``SignatureMismatch`` for a forged one."""
    tags = []
    for name in tag_names(store):
        with suppress(VersionNotFound):  # deleted meanwhile
            tags.append(read_tag(store, name))
    return tags


def tag_names(store: Store) -> list[str]:
    """Return the names of all tags, damaged ones among them."""
    # Twice: some file systems' listings can miss a name whose file is replaced at that very moment.
    listed = chain(store.backend.list(TAGS_PREFIX), store.backend.list(TAGS_PREFIX))
    return sorted({found[1] for info in listed if (found := _KEY.match(info.key))} - {"latest"})


def set_tag(store: Store, name: str, version: str | int, *, signer: Signer | None = None) -> Tag:
    """Create a tag, or move it; returns it once it is sure that the version stays as long as the tag does.

    ``signer``: the key of one of a signed stream's signers. Raises ``UsageError`` when it is not, and
    ``VersionForgotten`` when the version was forgotten before the tag was sure. The tag then is gone, unless it named
    this very version before: such a one is given the way that is cheapest now, and stands as it did if that fails.
    """
    key = tag_key(name)
    _check_signer(store, signer)
    manifest = store.resolve(version)
    known = _standing_tag(store, name, manifest)
    ours = known is None
    for _ in range(_TRIES):
        _require(store.retention(), manifest.version)
        plan = _plan(store, manifest.version)
        tag = _tag(store, name, manifest, plan)
        written = tag if known is None else _joined(known, tag)
        if written != known:
            store.backend.write(key, encode_tag(store, written, signer))
        # Only now is it known that every collector of a later record sees the tag: it reads its record first. What
        # the newest record keeps, no collector of an earlier one takes.
        record = store.retention()
        if _leads(record, plan):
            if (written.deltas, written.routes) == (tag.deltas, tag.routes):
                return written
            store.backend.write(key, encode_tag(store, tag, signer))
            return tag
        known = written
        if record is not None and not record.keeps(manifest.version):
            break  # else the version is kept by another way than a moment ago
    if ours:
        _take_back(store, key, encode_tag(store, written, signer))
    raise _forgotten(manifest.version)


def _check_signer(store: Store, signer: Signer | None) -> None:
    """Raise ``UsageError`` when nobody would believe what ``signer`` signs, or does not sign."""
    signers = store.stream.signers
    if signers and (signer is None or signer.public_key not in signers):
        raise UsageError(
            "The stream is signed, and so are its tags.", key=store.backend.url, hint="Give the key of a signer."
        )
    if signer is not None and not signers:
        raise UsageError("The stream is not signed, nor are its tags.", key=store.backend.url, hint="Give no key.")


def _standing_tag(store: Store, name: str, manifest: Manifest) -> Tag | None:
    """Return the tag of this name if it names this very version already."""
    with suppress(VersionNotFound, CorruptObject, SignatureMismatch):
        known = read_tag(store, name)
        if (known.version, known.commit_id) == (manifest.version, manifest.commit_id):
            return known
    return None


def _tag(store: Store, name: str, manifest: Manifest, plan: Plan) -> Tag:
    records = [step.record for step in plan.steps]
    return Tag(
        format=FORMAT,
        stream_id=store.stream_id,
        name=name,
        version=manifest.version,
        commit_id=manifest.commit_id,
        created_at=now(),
        deltas=ranges(record.version for record in records if not isinstance(record, Route)),
        routes=tuple(sorted({record.attempt_id for record in records if isinstance(record, Route)})),
    )


def _joined(known: Tag, tag: Tag) -> Tag:
    """Return the known tag with the new one's way beside its own."""
    deltas = ranges(chain(numbers(known.deltas), numbers(tag.deltas)))
    return msgspec.structs.replace(known, deltas=deltas, routes=tuple(sorted({*known.routes, *tag.routes})))


def _plan(store: Store, version: int) -> Plan:
    """Return the way to a version from the store alone; where that is impossible, from the base."""
    try:
        return store.plan(None, version)
    except VersionNotFound:
        return store.plan(BASE_VERSION, version)


def _require(record: Retention | None, version: int) -> None:
    """Raise ``VersionForgotten`` unless the record itself, tags aside, keeps a version."""
    if record is not None and not record.keeps(version):
        raise _forgotten(version)


def _forgotten(version: int) -> VersionForgotten:
    return VersionForgotten(
        f"No tag can be set on version {version}: it is forgotten, or was while the tag was set.",
        hint="Choose a version that `deltastore log` shows as kept.",
    )


def _leads(record: Retention | None, plan: Plan) -> bool:
    """Whether the record itself, tags aside, keeps the version that a plan ends at, and all that the plan uses."""
    return record is None or (
        record.keeps(plan.end)
        and all(
            record.keeps_route(used) if isinstance(used, Route) else record.keeps_parts(used.version)
            for used in (step.record for step in plan.steps)
        )
    )


def _take_back(store: Store, key: str, data: bytes) -> None:
    """Delete a tag that lost to a retention record, unless somebody has set it to something else meanwhile."""
    with suppress(ObjectNotFound):
        if store.backend.read(key, limit=MAX_TAG_BYTES) == data:
            store.backend.delete(key)


def delete_tag(store: Store, name: str) -> None:
    """Delete a tag; raises ``VersionNotFound`` when there is none of this name."""
    with suppress(CorruptObject, SignatureMismatch):  # a damaged or forged one is deleted as well
        read_tag(store, name)
    store.backend.delete(tag_key(name))
