"""Checking a store: structure always, every byte on request. Finds damage; changes nothing."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .codec import Encoding
from .errors import CorruptObject, DeltastoreError, StoreNotFound
from .fsck_retention import check_retention
from .manifest import (
    BASE_VERSION,
    MAX_MANIFEST_BYTES,
    MAX_PART_BYTES,
    MODEL,
    manifest_key,
    parse_base,
    parse_manifest,
)
from .part import PartIdentity, parse_part
from .plan import check_link
from .planner import read_route
from .reader import Store
from .route import ROUTES_PREFIX, fits, listed_routes, route_key
from .segment import MAX_SEGMENT_BYTES, SEGMENTS_PREFIX, parse_segment
from .signing import Verifier
from .snapshot import snapshot_id
from .spool import read_object
from .storage.base import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .manifest import Component, Manifest, ObjectRef, PartRef
    from .part import Part
    from .retention import Standing
    from .route import Route
    from .snapshot import Digests
    from .storage import Backend

__all__ = ["Problem", "Report", "check"]

_SEGMENT_KEY = re.compile(r"segments/(\d{10})\.zst\Z", re.ASCII)
_MANIFEST_KEY = re.compile(r"manifests/(\d{10})\.json\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: its kind (a stable word), the object's key, and what it means or what to do."""

    kind: str
    key: str
    hint: str


@dataclass(slots=True)
class Report:
    """What a check found: objects looked at, bytes read of parts and tables, problems."""

    objects: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, error: DeltastoreError, key: str) -> None:
        """Note an error as a problem."""
        self.problems.append(Problem(error.kind, error.key or key, str(error)))


def check(
    backend: Backend,
    *,
    read_data: bool = False,
    subset_percent: float = 0.0,
    seed: int | None = None,
    trusted_keys: frozenset[str] | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Report:
    """Check a store: manifests, their chain, and that every object is there with its size.

    ``read_data`` also reads every part and table: digests, formats, and that each version's chunk digests make its
    snapshot id. ``subset_percent`` reads that share of the parts, chosen at random, digests and formats only.
    ``trusted_keys`` is as for ``store_at``. Raises ``StoreNotFound``.
    """
    report = Report()
    history, verifier = _manifests(backend, report, trusted_keys, progress)
    if history and history[0].version == BASE_VERSION:
        store = Store(backend, history[0], verifier)
        sizes = {info.key: info.size for prefix in ("parts/", ROUTES_PREFIX) for info in backend.list(prefix)}
        routes = _routes(store, history, sizes, report)
        standing = check_retention(
            store, history, routes, sizes, lambda *problem: report.problems.append(Problem(*problem))
        )
        routes = [route for route in routes if standing.keeps_route(route) and _is_whole(route, sizes, report)]
        _check_segments(store, history, report)
        history = [_without_what_was_let_go(manifest, standing) for manifest in history]
        for manifest in history:
            _check_presence(manifest, sizes, report)
        if read_data:
            _replay(store, history, standing, routes, report, progress)
        elif subset_percent:
            chosen = [pair for pair in _all_parts(history) if random.Random(seed).random() * 100 < subset_percent]  # noqa: S311
            for manifest, name, reference in chosen:
                _read_part(store, manifest, name, reference, report)
            for route in routes:
                for reference in route.parts:
                    if random.Random(seed).random() * 100 < subset_percent:  # noqa: S311
                        _read_part(store, route, MODEL, reference, report)
    return report


def _manifests(
    backend: Backend,
    report: Report,
    trusted_keys: frozenset[str] | None,
    progress: Callable[[str, int, int], object] | None,
) -> tuple[list[Manifest], Verifier | None]:
    """Read all manifests that the listing shows; note damaged ones, gaps, and links that do not fit."""
    keys = {info.key for info in backend.list("manifests/")}
    if not keys:
        raise StoreNotFound(
            f"There is no store at {backend.url}.", key=backend.url, hint="Make one with `deltastore init`."
        )
    # By what is there, not by counting up: a stray object may carry any number.
    versions = sorted(int(found[1]) for key in keys if (found := _MANIFEST_KEY.match(key)))
    history: list[Manifest] = []
    verifier = None if trusted_keys is None else Verifier(trusted_keys)
    expected = BASE_VERSION
    for version in versions:
        key = manifest_key(version)
        report.objects += 1
        if version > expected:
            last = "" if version == expected + 1 else f" to {version - 1}"
            hint = f"Version {expected}{last} is not there, but later ones are: restore it from a backup."
            report.problems.append(Problem("missing-manifest", manifest_key(expected), hint))
        expected = version + 1
        try:
            data = backend.read(key, limit=MAX_MANIFEST_BYTES)
            if version == BASE_VERSION:
                manifest, verifier = parse_base(data, trusted_keys=trusted_keys)
            else:
                manifest = parse_manifest(data, version=version, verifier=verifier)
            if history and history[-1].version == version - 1:
                check_link(history[-1], manifest)
            history.append(manifest)
        except DeltastoreError as error:
            report.add(error, key)
        if progress is not None:
            progress("manifests", len(history), len(versions))
    report.problems.extend(
        Problem("foreign-object", key, "Not a manifest of this format: remove it.")
        for key in sorted(keys)
        if not _MANIFEST_KEY.match(key)
    )
    return history, verifier


def _routes(store: Store, history: list[Manifest], sizes: Mapping[str, int], report: Report) -> list[Route]:
    """Read all route records that the listing shows; returns those between versions of this history."""
    objects = [ObjectInfo(key, size) for key, size in sizes.items() if key.startswith(ROUTES_PREFIX)]
    manifests = {manifest.version: manifest for manifest in history}
    routes = []
    for listed in listed_routes(objects):
        report.objects += 1
        try:
            route = read_route(store, listed.version, listed.attempt_id)
        except DeltastoreError as error:
            report.add(error, listed.key)
            continue
        if route.kind == "abandoned":
            continue
        end, start = manifests.get(route.version), None if route.start is None else manifests.get(route.start)
        if end is None or not fits(route, start, end):
            hint = f"It is no route of this history to version {route.version}: readers ignore it."
            report.problems.append(Problem("foreign-object", listed.key, hint))
            continue
        routes.append(route)
    return routes


def _is_whole(route: Route, sizes: Mapping[str, int], report: Report) -> bool:
    """Tell whether all parts of a route are there; note those that are not."""
    without = f"Readers take another way to version {route.version}, or have none."
    there = [_is_present(part, sizes, report, without) for part in route.parts]
    return all(there)


def _check_segments(store: Store, history: list[Manifest], report: Report) -> None:
    """Read all log segments, and compare them with the manifests."""
    commits = {manifest.version: manifest.commit_id for manifest in history}
    for info in store.backend.list(SEGMENTS_PREFIX):
        found = _SEGMENT_KEY.match(info.key)
        if found is None:
            continue
        report.objects += 1
        try:
            data = store.backend.read(info.key, limit=MAX_SEGMENT_BYTES)
            segment = parse_segment(data, first=int(found[1]), verifier=store.verifier)
        except DeltastoreError as error:
            report.add(error, info.key)
            continue
        if any(commits.get(manifest.version) != manifest.commit_id for manifest in segment):
            hint = "It does not hold the manifests of this history: readers read those by themselves."
            report.problems.append(Problem("foreign-object", info.key, hint))


def _without_what_was_let_go(manifest: Manifest, standing: Standing) -> Manifest:
    """Return a manifest without parts that may be gone: whether they are is no concern of a check."""
    if standing.keeps_parts(manifest.version):
        return manifest
    model = msgspec.structs.replace(manifest.model, parts=())
    return msgspec.structs.replace(manifest, components={**manifest.components, MODEL: model})


def _references(manifest: Manifest) -> Iterator[ObjectRef | PartRef]:
    if manifest.stream is not None:
        yield from manifest.stream.schemas.values()
    for component in manifest.components.values():
        yield from component.parts
        if component.digests is not None:
            yield component.digests


def _check_presence(manifest: Manifest, sizes: Mapping[str, int], report: Report) -> None:
    for reference in _references(manifest):
        _is_present(reference, sizes, report, f"Version {manifest.version} cannot be built without it.")


def _is_present(reference: ObjectRef | PartRef, sizes: Mapping[str, int], report: Report, without: str) -> bool:
    """Note an object that is missing or has another size; ``without`` says what its absence means."""
    report.objects += 1
    size = sizes.get(reference.key)
    if size is None:
        report.problems.append(Problem("missing-object", reference.key, without))
    elif size != reference.size:
        hint = f"It has {size} bytes instead of {reference.size}."
        report.problems.append(Problem("wrong-size", reference.key, hint))
    return size == reference.size


def _all_parts(history: list[Manifest]) -> Iterator[tuple[Manifest, str, PartRef]]:
    for manifest in history:
        for name, component in manifest.components.items():
            for reference in component.parts:
                yield manifest, name, reference


def _read_part(store: Store, owner: Manifest | Route, name: str, reference: PartRef, report: Report) -> Part | None:
    """Read and parse one part of a version or route; note what is wrong with it."""
    try:
        data = read_object(store.backend, reference, limit=MAX_PART_BYTES)
        report.bytes_read += len(data)
        identity = PartIdentity(store.stream_id, owner.version, owner.attempt_id, name)
        part = parse_part(data, identity, store.schema(name), store.hash, key=reference.key)
        if len(part) != reference.chunks:
            raise CorruptObject(
                f"{reference.key} has {len(part)} chunks instead of {reference.chunks}.", key=reference.key
            )
    except DeltastoreError as error:
        report.add(error, reference.key)
        return None
    return part


def _replay(
    store: Store,
    history: list[Manifest],
    standing: Standing,
    routes: list[Route],
    report: Report,
    progress: Callable[[str, int, int], object] | None,
) -> None:
    """Follow every component's chunk digests through all versions, and over the routes between them.

    Where parts were let go it goes on from where a route leads.
    """
    tables: dict[str, Digests] = {}
    total = sum(manifest.stored_bytes for manifest in history) + sum(route.stored_bytes for route in routes)
    anchors: dict[int, list[Route]] = {}
    skips: dict[int, list[Route]] = {}
    for route in routes:
        if route.start is None:
            anchors.setdefault(route.version, []).append(route)
        else:
            skips.setdefault(route.start, []).append(route)
    #: What the skips that were followed lead to, where the deltas to it were let go.
    arrivals: dict[int, Digests] = {}
    for manifest in history:
        version = manifest.version
        if version != BASE_VERSION and not standing.keeps_parts(version):
            tables.pop(MODEL, None)
        _replay_version(store, manifest, tables, report)
        found = [_replay_route(store, route, None, report) for route in anchors.get(version, ())]
        led = [arrivals.pop(version, None), *found]
        if MODEL not in tables and (table := next((one for one in led if one is not None), None)) is not None:
            tables[MODEL] = table
        for route in skips.get(version, ()):
            after = _replay_route(store, route, tables.get(MODEL), report) if MODEL in tables else None
            if after is None and MODEL not in tables:
                _read_parts(store, route, report)
            if after is not None and not all(map(standing.keeps_parts, range(version + 1, route.version + 1))):
                arrivals[route.version] = after
        if progress is not None:
            progress("data", report.bytes_read, total)


def _replay_version(store: Store, manifest: Manifest, tables: dict[str, Digests], report: Report) -> None:
    """Follow a version's parts from the tables of the one before; a model that has none is only read."""
    for name, component in manifest.components.items():
        try:
            if manifest.version == BASE_VERSION:
                tables[name] = store.base_digests(name).copy()
            if name in tables:
                _replay_component(store, manifest, name, component, tables, report)
            elif name == MODEL:
                for reference in component.parts:
                    _read_part(store, manifest, name, reference, report)
        except DeltastoreError as error:
            report.add(error, manifest_key(manifest.version))
            tables.pop(name, None)  # later versions cannot be judged by it


def _read_parts(store: Store, route: Route, report: Report) -> list[Part] | None:
    """Read a route's parts; ``None`` when one of them is not right."""
    parts = [_read_part(store, route, MODEL, reference, report) for reference in route.parts]
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def _replay_route(store: Store, route: Route, table: Digests | None, report: Report) -> Digests | None:
    """Follow a route's chunk digests from those of the version that it starts from (``None``: from nothing).

    Returns those that it leads to, or ``None`` when it does not lead to its version.
    """
    found = _read_parts(store, route, report)
    if found is None:
        return None
    try:
        schema = store.schema()
    except DeltastoreError as error:
        report.add(error, route_key(route.version, route.attempt_id))
        return None
    after = np.zeros((schema.chunks, store.hash.size), np.uint8) if table is None else table.copy()
    for part in found:
        if table is None and (part.encoding != Encoding.FULL).any():
            report.problems.append(
                Problem("corrupt-object", part.key, "It belongs to an anchor, but holds differences.")
            )
        if table is not None and (table[part.numbers] != part.old_digests).any():
            hint = f"It does not start from version {route.start}: readers take another way."
            report.problems.append(Problem("corrupt-object", part.key, hint))
        after[part.numbers] = part.new_digests
    if snapshot_id(schema, after, store.hash) != route.snapshot_id:
        key = route_key(route.version, route.attempt_id)
        hint = f"It does not lead to version {route.version}: readers take another way."
        report.problems.append(Problem("corrupt-object", key, hint))
        return None
    return after


def _replay_component(
    store: Store, manifest: Manifest, name: str, component: Component, tables: dict[str, Digests], report: Report
) -> None:
    table = tables[name]
    is_base = manifest.version == BASE_VERSION
    covered = 0
    for reference in component.parts:
        part = _read_part(store, manifest, name, reference, report)
        if part is None:
            tables.pop(name, None)
            continue
        covered += len(part)
        known = part.new_digests if is_base else part.old_digests
        if (table[part.numbers] != known).any():
            raise CorruptObject(
                f"{reference.key} does not fit the {'digest table' if is_base else 'version before'}.",
                key=reference.key,
            )
        table[part.numbers] = part.new_digests
    if name not in tables:
        return
    if is_base and component.parts and covered != len(table):
        raise CorruptObject(f"The anchor of {name} has {covered} chunks of {len(table)}.", key=manifest_key(0))
    found = snapshot_id(store.schema(name), table, store.hash)
    if found != component.snapshot_id:
        raise CorruptObject(
            f"Version {manifest.version} leads to {found} instead of {component.snapshot_id}.",
            key=manifest_key(manifest.version),
        )
    tables[name] = np.ascontiguousarray(table)
