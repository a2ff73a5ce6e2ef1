"""Making anchors of small streams, whole or left unfinished, by the shortest way."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltastore import open_checkpoint
from deltastore.clock import now
from deltastore.codec.chunk import ChunkEncoder
from deltastore.commit import commit
from deltastore.compact import anchor
from deltastore.manifest import MODEL, PartRef
from deltastore.part import ChunkRow, PartIdentity, build_part
from deltastore.planner import Planner
from deltastore.record import FORMAT
from deltastore.route import MAX_ROUTE_BYTES, Route, encode_route, route_key, route_part_key
from deltastore.tags import read_standing

if TYPE_CHECKING:
    from deltastore.reader import Store


def begin_anchor(store: Store, version: int, *, holding: int | None = None) -> Route:
    """Write an anchor's parts, or another version's in their place; return the record that would finish it."""
    record = store.retention()
    manifest = store.manifest(version)
    attempt_id = secrets.token_hex(16)
    schema, rows, encoder = store.schema(), [], ChunkEncoder()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "checkpoint"
        store.restore(version if holding is None else holding, directory, workers=1)
        checkpoint = open_checkpoint(directory)
        for number, spec in enumerate(schema):
            for chunk in range(spec.chunks):
                data = np.array(checkpoint.chunk(spec, chunk))
                rows.append(ChunkRow(number, chunk, encoder.full(data, width=spec.width), b"", store.hash.digest(data)))
    data = build_part(rows, PartIdentity(store.stream_id, version, attempt_id, MODEL), digest_size=store.hash.size)
    key = route_part_key(None)(version, attempt_id, "model-00000.safetensors")
    part = PartRef(key, len(data), store.hash.of(data), chunks=len(rows), first=0, last=schema.chunks - 1)
    store.backend.write(key, data)
    return Route(
        format=FORMAT,
        stream_id=store.stream_id,
        attempt_id=attempt_id,
        kind="anchor",
        start=None,
        start_commit_id=None,
        version=version,
        commit_id=manifest.commit_id,
        snapshot_id=manifest.snapshot_id,
        parts=(part,),
        changed_elements=schema.elements,
        invertible=False,
        retention=record.number if record is not None else 0,
        created_at=now(),
    )


def finish_anchor(store: Store, route: Route) -> None:
    """Create an anchor's record; raises ``VersionConflict`` when a collector closed the attempt."""
    data = encode_route(route, hash_function=store.hash)
    commit(store.backend, route_key(route.version, route.attempt_id), data, limit=MAX_ROUTE_BYTES)


def make_anchor(store: Store, version: int) -> str:
    """Make an anchor where there is none; returns the attempt id of one that is there."""
    made = anchor(store, version, workers=1)
    if made is not None:
        return made.attempt_id
    standing, _ = read_standing(store)
    return next(
        (one.attempt_id for one in Planner(store).staying(standing) if (one.version, one.start) == (version, None)), ""
    )
