"""Retention records: which versions are kept, and which objects stay as the way to them. Pure.

Records are numbered from 1; each one's sets lie inside those of the one before, so what one record drops no later one
needs. That is why whatever acts on an old record does no harm (docs/format.md, section 10, has the rules and why).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

from .errors import CorruptObject, VersionForgotten
from .record import MAX_VERSION, CommitTime, Identifier, VersionNumber, encode_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .digest import Hasher
    from .storage.base import Buffer

__all__ = [
    "MAX_RETENTION_BYTES",
    "RETENTION_PREFIX",
    "Ranges",
    "Retention",
    "Spared",
    "Standing",
    "StoredRoute",
    "check_successor",
    "encode_retention",
    "holds",
    "numbers",
    "parse_retention",
    "ranges",
    "ranges_problem",
    "retention_key",
]

RETENTION_PREFIX = "retention/"
MAX_RETENTION_BYTES = 16 << 20

#: Ascending, disjoint runs of versions, both ends included.
Ranges = tuple[tuple[VersionNumber, VersionNumber], ...]


class Retention(msgspec.Struct, frozen=True):
    """One retention record: of the versions up to ``until``, the ``kept`` ones, and the objects that lead to them.

    ``deltas``: the versions whose own parts stay (version 0's are the base itself). ``routes``: the attempt ids of
    the routes that stay.
    """

    format: int
    stream_id: Identifier
    created_at: CommitTime
    number: Annotated[int, Meta(ge=1, le=MAX_VERSION)]
    until: VersionNumber
    kept: Ranges
    deltas: Ranges
    routes: tuple[Identifier, ...]

    def keeps(self, version: int) -> bool:
        """Whether the record, tags aside, keeps a version."""
        return version > self.until or holds(self.kept, version)

    def keeps_parts(self, version: int) -> bool:
        """Whether the record, tags aside, keeps a version's own parts."""
        return version > self.until or holds(self.deltas, version)

    def keeps_route(self, route: StoredRoute) -> bool:
        """Whether the record, tags aside, keeps a route: it is listed, newer than the record, or leads further."""
        place = bisect_left(self.routes, route.attempt_id)
        listed = place < len(self.routes) and self.routes[place] == route.attempt_id
        return listed or route.version > self.until or route.retention >= self.number


class StoredRoute(Protocol):
    """What retention asks of a route: what kind it is, where it starts and leads, whose it is, how old, how large."""

    @property
    def kind(self) -> str:
        """``anchor``, or ``skip``."""

    @property
    def start(self) -> int | None:
        """The version that a skip starts from."""

    @property
    def version(self) -> int:
        """The version that it leads to."""

    @property
    def attempt_id(self) -> str:
        """Whose it is."""

    @property
    def retention(self) -> int:
        """The number of the newest record that its maker had read when it began."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of its parts."""


class Spared(Protocol):
    """What a tag says: the version it keeps, and the objects that lead there."""

    @property
    def version(self) -> int:
        """The version named."""

    @property
    def deltas(self) -> Ranges:
        """The versions whose own parts lead there."""

    @property
    def routes(self) -> tuple[str, ...]:
        """The routes that lead there."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What stays: by the newest retention record (``None``: everything), and by tags that were read after it."""

    record: Retention | None
    tags: Sequence[Spared] = ()

    def keeps(self, version: int) -> bool:
        """Whether a version may be asked for."""
        return self.record is None or self.record.keeps(version) or any(tag.version == version for tag in self.tags)

    def keeps_parts(self, version: int) -> bool:
        """Whether a version's own parts stay."""
        return (
            self.record is None
            or self.record.keeps_parts(version)
            or any(holds(tag.deltas, version) for tag in self.tags)
        )

    def keeps_route(self, route: StoredRoute) -> bool:
        """Whether a route stays."""
        return (
            self.record is None
            or self.record.keeps_route(route)
            or any(route.attempt_id in tag.routes for tag in self.tags)
        )

    def require(self, version: int) -> None:
        """Raise ``VersionForgotten`` unless a version may be asked for."""
        if not self.keeps(version):
            raise VersionForgotten(
                f"Version {version} is forgotten: its manifest is all that is left.",
                key=retention_key(self.record.number) if self.record else None,
                hint="`deltastore log` lists the versions that are kept; ask for one of those, or for latest.",
            )


def ranges(versions: Iterable[int]) -> Ranges:
    """Return versions, in any order, as ascending runs."""
    runs: list[list[int]] = []
    for version in sorted(set(versions)):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return tuple((first, last) for first, last in runs)


def numbers(runs: Ranges) -> Iterator[int]:
    """Yield the versions of ascending runs."""
    for first, last in runs:
        yield from range(first, last + 1)


def holds(runs: Ranges, version: int) -> bool:
    """Whether a version lies in one of the runs."""
    place = bisect_right(runs, version, key=lambda run: run[0])
    return bool(place) and version <= runs[place - 1][1]


def ranges_problem(runs: Ranges) -> str | None:
    """Say what is wrong with runs that should ascend and be disjoint."""
    if any(first > last for first, last in runs):
        return "a range ends before it begins"
    if any(before[1] >= after[0] for before, after in pairwise(runs)):
        return "its ranges overlap or are out of order"
    return None


def retention_key(number: int) -> str:
    """Return the key of a retention record."""
    return f"{RETENTION_PREFIX}{number:010d}.json"


def encode_retention(record: Retention, *, hash_function: Hasher) -> bytes:
    """Return a retention record as it is stored."""
    return encode_record(record, hash_function=hash_function)


def parse_retention(data: Buffer, *, number: int, stream_id: str, hash_name: str) -> Retention:
    """Parse the record found under the key of ``number``; everything in it is checked.

    Raises ``UnsupportedFormat`` for a format or feature of a later release, ``CorruptObject`` for anything else.
    """
    key = retention_key(number)
    record, digest = parse_record(data, Retention, key=key)
    problem = ranges_problem(record.kept) or ranges_problem(record.deltas)
    if record.number != number:
        problem = f"it says that it is number {record.number}"
    elif record.stream_id != stream_id:
        problem = f"it belongs to the stream {record.stream_id}"
    elif not digest.startswith(f"{hash_name}:"):
        problem = "its hash is not the stream's"
    elif not record.kept or record.kept[-1][1] != record.until:
        problem = "it does not keep the version that it reaches to"
    elif record.deltas and record.deltas[-1][1] > record.until:
        problem = "it names parts beyond the version that it reaches to"
    elif list(record.routes) != sorted(set(record.routes)):
        problem = "its routes are out of order, or one stands there twice"
    if problem:
        raise CorruptObject(f"{key} is damaged: {problem}.", key=key, hint="Run `deltastore check` on the store.")
    return record


def check_successor(before: Retention, after: Retention, routes: Iterable[StoredRoute] = ()) -> None:
    """Raise ``CorruptObject`` if a record takes back what the one before it let go. ``routes``: those known."""
    key = retention_key(after.number)
    problem = None
    if after.number != before.number + 1:
        problem = f"it does not follow number {before.number}"
    elif after.until < before.until:
        problem = f"it reaches to version {after.until}, the one before it to {before.until}"
    elif not _inside(after.kept, before.kept, before.until):
        problem = "it keeps a version that was forgotten"
    elif not _inside(after.deltas, before.deltas, before.until):
        problem = "it keeps parts that were let go"
    elif any(route.attempt_id in after.routes and not before.keeps_route(route) for route in routes):
        problem = "it keeps a route that was let go"
    if problem:
        raise CorruptObject(f"{key} is damaged: {problem}.", key=key, hint="Run `deltastore check` on the store.")


def _inside(inner: Ranges, outer: Ranges, until: int) -> bool:
    """Whether every version of ``inner`` up to ``until`` lies in ``outer``."""
    for first, end in inner:
        last = min(end, until)
        if first > last:
            break
        # As runs of neighbours may be written apart, the outer ones are followed from one to the next.
        place = bisect_right(outer, first, key=lambda run: run[0]) - 1
        while first <= last:
            if place < 0 or place >= len(outer) or not outer[place][0] <= first <= outer[place][1]:
                return False
            first = outer[place][1] + 1  # noqa: PLW2901 - what is left of the run
            place += 1
    return True
