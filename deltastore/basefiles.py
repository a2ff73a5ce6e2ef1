"""Small components of version 0 in memory: the base's other files and its weight files' headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoint import is_safe_path
from .errors import CorruptObject, VersionNotFound
from .manifest import BASE_VERSION, MAX_PART_BYTES, manifest_key
from .part import PartIdentity, parse_part
from .patch import Patch, write_each
from .spool import read_object

if TYPE_CHECKING:
    from .reader import Store
    from .snapshot import TensorSpec

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["read_base_files"]


def read_base_files(store: Store, component: str) -> dict[str, bytes]:
    """Return the component's files by relative name, proven against its snapshot id; every name is safe as a path."""
    entry = store.base.components.get(component)
    if entry is None:
        raise VersionNotFound(
            f"The store at {store.backend.url} does not hold the base checkpoint.",
            hint="Give the base checkpoint with --base.",
        )
    schema = store.schema(component)
    for spec in schema:
        if not is_safe_path(spec.name) or spec.dtype != "U8" or len(spec.shape) != 1:
            raise CorruptObject(f"The stored file {spec.name!r} is none.", key=manifest_key(BASE_VERSION))
    identity = PartIdentity(store.stream_id, BASE_VERSION, store.base.attempt_id, component)
    patch = Patch(schema, store.hash, before=None)
    patch.add_anchor(
        [
            parse_part(
                read_object(store.backend, reference, limit=MAX_PART_BYTES),
                identity,
                schema,
                store.hash,
                key=reference.key,
            )
            for reference in entry.parts
        ]
    )
    patch.seal(entry.snapshot_id)
    files = {spec.name: np.empty(spec.nbytes, np.uint8) for spec in schema}

    def write(spec: TensorSpec, chunk: int, data: Bytes) -> None:
        start, end = spec.chunk_range(chunk)
        files[spec.name][start:end] = data

    def read(*_: object) -> None:
        raise AssertionError("an anchor reads nothing")

    patch.run(read, write_each(write), everything=True, workers=1)
    return {name: data.tobytes() for name, data in files.items()}
