"""Reading a route back, before anything else is let go for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .errors import CorruptObject
from .manifest import MAX_PART_BYTES, MODEL
from .part import PartIdentity, parse_part
from .patch import Patch, default_workers
from .route import route_key
from .spool import read_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from .manifest import PartRef
    from .part import Part
    from .reader import Store
    from .route import Route

    Progress = Callable[[str, int, int], object]

__all__ = ["verify_route"]

#: Parts of an anchor that are decoded together: at most so many times 64 MiB are held.
_TOGETHER = 4


def verify_route(store: Store, route: Route, *, workers: int | None = None, progress: Progress | None = None) -> None:
    """Read all of a route's parts and raise ``CorruptObject`` unless they are what its record says.

    An anchor is decoded whole, and must make its version's snapshot. A skip's parts must have the digests of the bytes
    that its maker proved.
    """
    manifest = store.manifest(route.version)
    if (route.commit_id, route.snapshot_id) != (manifest.commit_id, manifest.snapshot_id):
        raise CorruptObject(
            f"The route {route.attempt_id} leads to another version {route.version} than the stream's.",
            key=route_key(route.version, route.attempt_id),
        )
    schema = store.schema()
    digests = np.zeros((schema.chunks, store.hash.size), np.uint8)
    covered = np.zeros(schema.chunks, bool)
    done = 0
    for first in range(0, len(route.parts), _TOGETHER):
        references = route.parts[first : first + _TOGETHER]
        parts = [_read_part(store, route, reference) for reference in references]
        if route.kind == "anchor":
            for part in parts:
                _decode(store, part, digests, covered, workers=workers or default_workers())
        done += sum(reference.size for reference in references)
        if progress is not None:
            progress("verify", done, route.stored_bytes)
    if route.kind == "anchor":
        Patch(schema, store.hash, before=digests).seal(manifest.snapshot_id)
        if not covered.all():
            raise CorruptObject(
                f"The anchor of version {route.version} lacks {int((~covered).sum())} chunks.",
                key=route_key(route.version, route.attempt_id),
            )


def _read_part(store: Store, route: Route, reference: PartRef) -> Part:
    data = read_object(store.backend, reference, limit=MAX_PART_BYTES)
    identity = PartIdentity(store.stream_id, route.version, route.attempt_id, MODEL)
    return parse_part(data, identity, store.schema(), store.hash, key=reference.key)


def _decode(
    store: Store, part: Part, digests: np.ndarray[Any, Any], covered: np.ndarray[Any, Any], *, workers: int
) -> None:
    """Decode an anchor's part, stretch by stretch of neighbouring chunks, and note the digests of what came out."""
    if covered[part.numbers].any():
        raise CorruptObject(f"{part.key} holds a chunk that another part holds too.", key=part.key)
    covered[part.numbers] = True
    for stretch in np.split(part.numbers, np.flatnonzero(np.diff(part.numbers) != 1) + 1):
        window = range(int(stretch[0]), int(stretch[-1]) + 1)
        patch = Patch(store.schema(), store.hash, before=None, after=digests, window=window)
        patch.add_anchor([part])
        patch.run(_nothing, _drop, everything=True, workers=workers)


def _nothing(*_: object) -> NoReturn:
    raise AssertionError("an anchor reads no old bytes")


def _drop(*_: object) -> None:
    """Do without what was decoded: that it has its digest is all that is asked."""
