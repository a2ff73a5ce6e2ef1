"""What a check asks of retention records, tags and routes: that they fit each other, and what they lead to is there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .errors import CorruptObject, DeltastoreError, VersionNotFound
from .manifest import MODEL
from .retention import RETENTION_PREFIX, Standing, check_successor, numbers, retention_key
from .tags import read_tag, tag_key, tag_names, tagged_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .manifest import Manifest, PartRef
    from .reader import Store
    from .retention import Retention
    from .route import Route
    from .tags import Tag

    Note = Callable[[str, str, str], object]

__all__ = ["check_retention"]

_KEY = re.compile(r"retention/(\d{10})\.json\Z", re.ASCII)


def check_retention(
    store: Store, history: Sequence[Manifest], routes: Sequence[Route], sizes: Mapping[str, int], note: Note
) -> Standing:
    """Check records and tags, and that what they keep is there; returns what stays.

    ``sizes``: of the objects below ``parts/`` and ``routes/``. ``note`` takes a problem's kind, key, and hint.
    """
    record = _check_records(store, history, routes, note)
    tags = [tag for tag in _check_tags(store, note) if _is_whole(tag, record, history, routes, sizes, note)]
    return Standing(record, tags)


def _check_records(store: Store, history: Sequence[Manifest], routes: Sequence[Route], note: Note) -> Retention | None:
    """Read all retention records; returns the newest sound one."""
    keys = sorted(info.key for info in store.backend.list(RETENTION_PREFIX))
    found = [int(match[1]) for key in keys if (match := _KEY.match(key))]
    for key in keys:
        if not _KEY.match(key):
            note("foreign-object", key, "Not a retention record of this format: remove it.")
    last: Retention | None = None
    for place, number in enumerate(found, 1):
        if number != place:
            note("missing-retention", retention_key(place), "Later records are there: restore it from a backup.")
            break
        try:
            record = store.retention_record(number)
            if record is None:
                continue
            if last is not None:
                check_successor(last, record, routes)
            if record.until > history[-1].version:
                key = retention_key(number)
                raise CorruptObject(f"{key} reaches to version {record.until}, which is not there.", key=key)
        except DeltastoreError as error:
            note(error.kind, error.key or retention_key(number), str(error))
            break
        last = record
    return last


def _check_tags(store: Store, note: Note) -> Iterator[Tag]:
    """Yield the tags that are sound."""
    for name in tag_names(store):
        try:
            tag = read_tag(store, name)
            tagged_manifest(store, tag)
        except VersionNotFound:
            continue  # deleted meanwhile
        except DeltastoreError as error:
            note(error.kind, error.key or tag_key(name), str(error))
        else:
            yield tag


def _is_whole(
    tag: Tag,
    record: Retention | None,
    history: Sequence[Manifest],
    routes: Sequence[Route],
    objects: Mapping[str, int],
    note: Note,
) -> bool:
    """Whether all is there that a tag alone keeps; note it if not: then the tag was set too late."""
    if record is None:
        return True
    versions = {manifest.version: manifest for manifest in history}
    known = {route.attempt_id: route for route in routes}
    needed: list[PartRef] = []
    for version in numbers(tag.deltas):
        if version in versions and not record.keeps_parts(version):
            needed += versions[version].components[MODEL].parts
    for attempt_id in tag.routes:
        if attempt_id in known and not record.keeps_route(known[attempt_id]):
            needed += known[attempt_id].parts
    gone = [part.key for part in needed if part.key not in objects]
    gone += sorted(set(tag.routes) - set(known))
    if gone:
        remedy = "Set" if record.keeps(tag.version) else "Its version is forgotten: delete"
        hint = f"{gone[0]} was let go before the tag was set. {remedy} the tag{' again' * (remedy == 'Set')}."
        note("tag-to-nothing", tag_key(tag.name), hint)
    return not gone
