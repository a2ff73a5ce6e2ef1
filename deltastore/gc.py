"""Letting versions go, and removing what nothing needs any more. Safe beside writers, readers, taggers, collectors.

``forget`` writes a retention record and removes nothing; ``collect`` removes what that record, and manifests that
exist, allow (docs/format.md, section 10). Both may be killed at any point and started again; neither is safe because
of any clock.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from .clock import now
from .commit import commit
from .errors import CommitInDoubt, CorruptObject, ObjectNotFound, SignatureMismatch, VersionConflict, VersionNotFound
from .manifest import BASE_VERSION
from .planner import READERS, Planner, read_route
from .policy import PlannedAnchor, choose
from .record import FORMAT
from .retention import MAX_RETENTION_BYTES, Retention, Standing, encode_retention, numbers, ranges, retention_key
from .route import MAX_ROUTE_BYTES, ROUTES_PREFIX, Route, encode_route, route_key
from .tags import read_standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from .manifest import Manifest
    from .policy import Choice, Policy
    from .reader import Store
    from .retention import Ranges
    from .storage import ObjectInfo
    from .tags import Tag

    Progress = Callable[[str, int, int], object]

__all__ = ["DEFAULT_GRACE", "Collected", "Doomed", "Forgotten", "collect", "forget"]

#: Seconds that an unfinished route is left alone, where it says when it was begun.
DEFAULT_GRACE = 3600.0
#: A record that another one was faster than is computed anew; so often in a row that is no accident.
_TRIES = 10
_DELETERS = 8

_PART_KEY = re.compile(r"parts/(\d{10})/([0-9a-f]{32})/[^/]+\Z", re.ASCII)
_ROUTE_KEY = re.compile(r"routes/(\d{10})/([0-9a-f]{32})/([^/]+)\Z", re.ASCII)
_ROUTE_RECORD, _BEGUN = "route.json", "begun.json"
_MAX_BEGUN_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What ``forget`` did, or would do.

    ``number``: the new record's, ``None`` where there was nothing to let go (or nothing was to be done yet).
    ``freed_bytes``: what ``collect`` may remove for it, tags aside. ``anchor_first``: the version of which an anchor,
    made before, would let ``anchor_saves`` bytes more go. ``refused_routes``: routes that did not hold when they were
    read back, and are let go.
    """

    number: int | None
    until: int
    kept: Ranges
    forgotten: Ranges
    dropped_parts: Ranges
    dropped_routes: tuple[str, ...]
    freed_bytes: int
    anchor_first: int | None = None
    anchor_saves: int = 0
    refused_routes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object that may go.

    ``reason``: ``superseded`` (of an attempt that lost), ``forgotten`` (parts of a version), ``dropped`` (of a route),
    ``abandoned`` (of a route that was never finished).
    """

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What ``collect`` removed, or would; ``young``: unfinished routes that were left alone for now."""

    objects: tuple[Doomed, ...]
    young: int

    @property
    def freed_bytes(self) -> int:
        """Bytes of all those objects."""
        return sum(doomed.size for doomed in self.objects)

    def by_reason(self) -> dict[str, tuple[int, int]]:
        """Return for each reason how many objects, and how many bytes."""
        totals: dict[str, tuple[int, int]] = {}
        for doomed in self.objects:
            objects, size = totals.get(doomed.reason, (0, 0))
            totals[doomed.reason] = (objects + 1, size + doomed.size)
        return totals


# Forgetting


@dataclass(frozen=True, slots=True)
class _Situation:
    """Everything that a choice depends on, read in the order that makes it safe: the record first."""

    record: Retention | None
    history: list[Manifest]
    routes: list[Route]
    tags: list[Tag]
    #: Routes that were listed, but cannot be used.
    unusable: frozenset[str]
    refused: frozenset[str] = frozenset()

    @property
    def newest(self) -> int:
        return self.history[-1].version

    def choose(self, policy: Policy, advised: AbstractSet[int], *more: PlannedAnchor) -> Choice:
        """Choose what stays, as if ``more`` anchors were there."""
        return choose(
            self.record,
            self.newest,
            policy,
            part_bytes={manifest.version: _model_bytes(manifest) for manifest in self.history},
            base_stored=self.history[BASE_VERSION].anchored,
            routes=[*(route for route in self.routes if route.attempt_id not in self.refused), *more],
            tagged={tag.version for tag in self.tags},
            advised=advised,
        )

    def consequences(self, choice: Choice) -> Forgotten:
        """Return what a record of this choice lets go that stood before."""
        before = Standing(self.record)
        kept, staying, routes = set(numbers(choice.kept)), set(numbers(choice.deltas)), set(choice.routes)
        versions = range(self.newest + 1)
        parts = [version for version in versions if version not in staying and before.keeps_parts(version)]
        if not self.history[BASE_VERSION].anchored:
            parts = [version for version in parts if version != BASE_VERSION]
        dropped = [
            route
            for route in self.routes
            if route.version <= self.newest and route.attempt_id not in routes and before.keeps_route(route)
        ]
        freed = sum(_model_bytes(self.history[version]) for version in parts)
        return Forgotten(
            number=None,
            until=self.newest,
            kept=choice.kept,
            forgotten=ranges(version for version in versions if version not in kept and before.keeps(version)),
            dropped_parts=ranges(parts),
            dropped_routes=tuple(sorted(route.attempt_id for route in dropped)),
            freed_bytes=freed + sum(route.stored_bytes for route in dropped),
        )


def _model_bytes(manifest: Manifest) -> int:
    return sum(part.size for part in manifest.model.parts)


def forget(
    store: Store,
    policy: Policy,
    *,
    advised: AbstractSet[int] = frozenset(),
    dry_run: bool = False,
    make_anchor: Callable[[int], object] | None = None,
    progress: Progress | None = None,
) -> Forgotten:
    """Write the retention record that a policy asks for; the newest version is always kept. Removes nothing.

    ``advised``: versions to keep as well, such as those that receivers hold. ``make_anchor`` makes an anchor of a
    version where that lets more go; without it the result says which one. Every route that the record is the first to
    list is read back and proven; the record does without those that do not hold. Raises ``CorruptObject`` when nothing
    leads to a version to keep, ``CommitInDoubt`` when it cannot be said whether the record was written.
    """
    for _ in range(_TRIES):
        situation = _read_situation(store)
        try:
            result = _forget_once(store, situation, policy, advised, make_anchor, dry_run=dry_run, progress=progress)
        except VersionConflict:
            continue  # another one was first: what it let go must not come back
        except (CorruptObject, ObjectNotFound):
            if _is_newest(store, situation.record):
                raise
            continue  # what is missing was let go, and collected, since the record was read
        if result is not None:
            return result
        make_anchor = None  # one is enough; whatever it came to, the choice is made anew
    raise VersionConflict(
        f"Others wrote {_TRIES} retention records while this one was made.",
        key=store.backend.url,
        hint="Try again when no other `deltastore forget` runs.",
    )


def _forget_once(
    store: Store,
    situation: _Situation,
    policy: Policy,
    advised: AbstractSet[int],
    make_anchor: Callable[[int], object] | None,
    *,
    dry_run: bool,
    progress: Progress | None,
) -> Forgotten | None:
    """Choose, prove what is relied on, and write the record; ``None``: an anchor was made, so look again.

    Raises ``VersionConflict`` when another record was first.
    """
    choice = situation.choose(policy, advised)
    result = situation.consequences(choice)
    anchor = _anchor_worth_making(situation, policy, advised, choice)
    if anchor is not None and make_anchor is not None and not dry_run:
        make_anchor(anchor[0])
        return None
    if anchor is not None:
        result = replace(result, anchor_first=anchor[0], anchor_saves=anchor[1])
    if dry_run or not (result.forgotten or result.dropped_parts or result.dropped_routes):
        return result
    unsound = _unsound_routes(store, situation, choice, progress)
    if unsound:  # without them, and their going is part of the record
        without = replace(situation, refused=situation.refused | unsound)
        return _forget_once(store, without, policy, advised, None, dry_run=dry_run, progress=progress)
    number = situation.record.number + 1 if situation.record is not None else 1
    _write_record(store, number, situation.newest, choice)
    return replace(result, number=number, refused_routes=tuple(sorted(situation.refused)))


def _write_record(store: Store, number: int, until: int, choice: Choice) -> None:
    record = Retention(
        format=FORMAT,
        stream_id=store.stream_id,
        created_at=now(),
        number=number,
        until=until,
        kept=choice.kept,
        deltas=choice.deltas,
        routes=choice.routes,
    )
    data = encode_retention(record, hash_function=store.hash)
    try:
        commit(store.backend, retention_key(number), data, limit=MAX_RETENTION_BYTES)
    except CommitInDoubt as error:
        raise CommitInDoubt(
            f"It cannot be said whether {retention_key(number)} was written: {error}",
            key=error.key,
            hint="Run it again when the store answers; a record that arrives late does no harm.",
        ) from error


def _is_newest(store: Store, record: Retention | None) -> bool:
    """Whether what a record keeps must still be there: no later one can have let it go."""
    newest = store.retention()
    return (newest.number if newest else 0) == (record.number if record else 0)


def _read_situation(store: Store) -> _Situation:
    standing, tags = read_standing(store)
    history = store.log()
    planner = Planner(store)
    routes = planner.read_all()
    return _Situation(standing.record, history, routes, tags, planner.left_out)


def _anchor_worth_making(
    situation: _Situation, policy: Policy, advised: AbstractSet[int], choice: Choice
) -> tuple[int, int] | None:
    """Return the version whose anchor would let more go than it costs, and how much more."""
    base = situation.history[BASE_VERSION]
    cost = _model_bytes(base) or base.model.snapshot_bytes
    window = max(BASE_VERSION, situation.newest + 1 - policy.keep_last)
    version = next(version for version in numbers(choice.kept) if version >= window)  # the newest at the latest
    if version == BASE_VERSION:
        return None
    saves = choice.stored_bytes - situation.choose(policy, advised, PlannedAnchor(version, cost)).stored_bytes
    return (version, saves) if saves > 0 else None


def _unsound_routes(store: Store, situation: _Situation, choice: Choice, progress: Progress | None) -> frozenset[str]:
    """Read back the routes that a record would be the first to list; returns those that do not hold.

    So every route that a record lists was proven once. Raises ``CorruptObject`` when one does not hold that a tag needs
    whose version the record would be the first to let go.
    """
    from .verify import verify_route  # noqa: PLC0415 - brings numba, which a dry run does without

    before = Standing(situation.record)
    listed = set(situation.record.routes) if situation.record is not None else set()
    kept = set(numbers(choice.kept))
    tagged = {
        attempt_id
        for tag in situation.tags
        if tag.version <= situation.newest and tag.version not in kept and before.keeps(tag.version)
        for attempt_id in tag.routes
    }
    if lost := tagged & situation.unusable:
        raise CorruptObject(
            f"The route {min(lost)} cannot be read, and a tag needs it.",
            key=ROUTES_PREFIX,
            hint="Run `deltastore check` on the store; set the tag again to keep its version by another way.",
        )
    unsound = set()
    for route in situation.routes:
        if route.attempt_id not in (tagged | set(choice.routes)) - listed:
            continue
        try:
            verify_route(store, route, progress=progress)
        except (CorruptObject, ObjectNotFound):
            if route.attempt_id in tagged or not _is_newest(store, situation.record):
                raise
            unsound.add(route.attempt_id)
    return frozenset(unsound)


# Collecting


def collect(
    store: Store, *, dry_run: bool = False, grace: float = DEFAULT_GRACE, progress: Progress | None = None
) -> Collected:
    """Remove what nothing needs, and nothing else.

    ``grace``: seconds for which unfinished routes are left alone where they say when they were begun; a courtesy to
    whoever is at work. Raises ``CorruptObject``, with nothing removed, when a record or tag is damaged (it may be what
    keeps something), and ``StreamMismatch`` when the store was replaced meanwhile.
    """
    standing, _ = read_standing(store)
    doomed = [*_doomed_parts(store, standing)]
    attempts = _route_attempts(store.backend.list(ROUTES_PREFIX))
    young = 0
    last: list[Doomed] = []  # the records of routes, after all their parts

    def judge(attempt: tuple[int, str]) -> str:
        return _judge_route(store, standing, *attempt, attempts[attempt], grace=grace, dry_run=dry_run)

    with ThreadPoolExecutor(READERS, thread_name_prefix="routes") as pool:
        verdicts = list(pool.map(judge, attempts))
    for objects, verdict in zip(attempts.values(), verdicts, strict=True):
        young += verdict == "young"
        if verdict in {"dropped", "abandoned"}:
            for name, info in objects.items():
                if name != _ROUTE_RECORD:
                    doomed.append(Doomed(info.key, info.size, verdict))
                elif verdict == "dropped":
                    last.append(Doomed(info.key, info.size, verdict))
    if not dry_run:
        # A store that was replaced or rolled back while it was looked at must not be judged by what it was.
        store.recheck(store.base)
        store.recheck(store.latest())
        total = len(doomed) + len(last)
        _delete(store, doomed, 0, total, progress)
        _delete(store, last, len(doomed), total, progress)
    return Collected((*doomed, *last), young)


def _delete(store: Store, doomed: list[Doomed], done: int, total: int, progress: Progress | None) -> None:
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="delete") as pool:
        for count, _ in enumerate(pool.map(store.backend.delete, [one.key for one in doomed]), done + 1):
            if progress is not None:
                progress("delete", count, total)


def _doomed_parts(store: Store, standing: Standing) -> Iterator[Doomed]:
    """Yield parts of attempts that lost their version to another, and parts of versions that were let go."""
    objects: dict[int, list[tuple[str, ObjectInfo]]] = {}
    for info in store.backend.list("parts/"):
        if match := _PART_KEY.match(info.key):
            objects.setdefault(int(match[1]), []).append((match[2], info))
    newest = store.latest().version
    for version, manifest in sorted(store.manifests(sorted(v for v in objects if v <= newest)).items()):
        own = {part.key for part in manifest.model.parts}
        gone = not standing.keeps_parts(version)
        if any(attempt_id != manifest.attempt_id for attempt_id, _ in objects[version]):
            store.recheck(manifest)  # it may be known from a log segment, which an older history left
        for attempt_id, info in objects[version]:
            if attempt_id != manifest.attempt_id:
                yield Doomed(info.key, info.size, "superseded")
            elif gone and info.key in own:
                yield Doomed(info.key, info.size, "forgotten")


def _route_attempts(listing: Iterable[ObjectInfo]) -> dict[tuple[int, str], dict[str, ObjectInfo]]:
    """Sort the objects below ``routes/`` by attempt and name."""
    attempts: dict[tuple[int, str], dict[str, ObjectInfo]] = {}
    for info in listing:
        if match := _ROUTE_KEY.match(info.key):
            attempts.setdefault((int(match[1]), match[2]), {})[match[3]] = info
    return attempts


def _judge_route(
    store: Store,
    standing: Standing,
    version: int,
    attempt_id: str,
    objects: Mapping[str, ObjectInfo],
    *,
    grace: float,
    dry_run: bool,
) -> str:
    """Say what a route attempt is: ``kept``, ``dropped``, ``abandoned``, or ``young``; close one that was left."""
    try:
        route = read_route(store, version, attempt_id)
    except ObjectNotFound:
        if grace > 0 and _is_young(store, objects, grace):
            return "young"
        if dry_run or _close(store, version, attempt_id):
            return "abandoned"
        return "kept"  # finished, or closed by another collector, at this very moment: the next one sees to it
    except (CorruptObject, SignatureMismatch):
        return "kept"  # damage is what `check` reports; nothing is removed on its word
    if route.kind == "abandoned":
        return "abandoned"
    ours = route.stream_id == store.stream_id
    return "dropped" if ours and not standing.keeps_route(route) else "kept"


def _is_young(store: Store, objects: Mapping[str, ObjectInfo], grace: float) -> bool:
    """Whether an attempt says that it was begun less than ``grace`` seconds ago. Only a courtesy depends on it."""
    info = objects.get(_BEGUN)
    if info is None:
        return False
    try:
        text = json.loads(store.backend.read(info.key, limit=_MAX_BEGUN_BYTES))["created_at"]
        begun = datetime.fromisoformat(text.replace("Z", "+00:00"))
        age = (datetime.now(timezone.utc) - begun).total_seconds()
    except (ObjectNotFound, CorruptObject, ValueError, TypeError, KeyError, AttributeError):
        return False
    return abs(age) < grace


def _close(store: Store, version: int, attempt_id: str) -> bool:
    """Create an attempt's record as abandoned, so that its maker never can; tells whether that was done."""
    try:
        store.manifest(version)
    except VersionNotFound:
        return False  # a route to nowhere: nothing says what it is
    route = Route(
        format=FORMAT,
        stream_id=store.stream_id,
        attempt_id=attempt_id,
        kind="abandoned",
        version=version,
        created_at=now(),
    )
    data = encode_route(route, hash_function=store.hash)
    try:
        commit(store.backend, route_key(version, attempt_id), data, limit=MAX_ROUTE_BYTES)
    except (VersionConflict, CommitInDoubt):
        return False
    return True
