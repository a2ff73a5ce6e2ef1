"""What differs between two versions, tensor by tensor, told from chunk tables: no weights are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import VersionNotFound
from .manifest import BASE_VERSION, MAX_PART_BYTES
from .part import parse_part
from .planner import Planner
from .route import Route
from .spool import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .part import Part
    from .plan import Plan, Step
    from .reader import Store
    from .snapshot import Digests, TensorSpec

    Progress = Callable[[str, int, int], object]

__all__ = ["Difference", "TensorDifference", "diff"]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor on the way from one version to another.

    ``differing_chunks``: chunks whose bytes are others in the end. ``changed_elements``, ``touched_chunks``: summed up
    along the way, an element or chunk once for each version that changed it; ``None`` for elements where the way
    starts from an anchor. ``stored_bytes``: what the way holds of this tensor.
    """

    spec: TensorSpec
    differing_chunks: int
    touched_chunks: int
    changed_elements: int | None
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Two versions, the plan from one to the other, and every tensor that the plan touches or that differs."""

    plan: Plan
    total_tensors: int
    tensors: tuple[TensorDifference, ...]


class _Reader:
    """Reads the parts of plans, and says how far it is."""

    def __init__(self, store: Store, progress: Progress | None) -> None:
        self._store = store
        self._progress = progress
        self._done = 0
        self._total = 0

    def expect(self, plan: Plan) -> None:
        """Add a plan's bytes to what will be read."""
        self._total += plan.stored_bytes

    def parts(self, step: Step) -> Iterator[Part]:
        """Yield a step's parts."""
        for reference in step.parts:
            data = read_object(self._store.backend, reference, limit=MAX_PART_BYTES)
            self._done += len(data)
            if self._progress is not None:
                self._progress("read", self._done, self._total)
            yield parse_part(data, step.identity, self._store.schema(), self._store.hash, key=reference.key)


def diff(store: Store, start: int, end: int, *, progress: Progress | None = None) -> Difference:
    """Tell what changed from ``start`` to ``end``. Raises ``VersionForgotten`` when either was let go."""
    store.standing(start)
    reader = _Reader(store, progress)
    planner = Planner(store)
    return planner.follow(planner.plan(start, end), lambda plan: _along(store, plan, reader))


def _along(store: Store, plan: Plan, reader: _Reader) -> Difference:
    schema = store.schema()
    reader.expect(plan)
    before = _digests(store, plan.start or BASE_VERSION, reader) if plan.from_anchor else None
    touched = np.zeros(schema.chunks, np.int64)
    changed = np.zeros(len(schema), np.int64)
    stored = np.zeros(len(schema), np.int64)
    first = np.zeros((schema.chunks, store.hash.size), np.uint8) if before is None else before
    last = first.copy()
    for step in plan.steps:
        for part in reader.parts(step):
            old, new = part.old_digests, part.new_digests
            if step.kind == "inverse":
                old, new = new, old
            if before is None:
                fresh = touched[part.numbers] == 0
                first[part.numbers[fresh]] = old[fresh]
            last[part.numbers] = new
            touched[part.numbers] += step.kind != "anchor"
            np.add.at(changed, part.tensor, part.changed)
            np.add.at(stored, part.tensor, np.diff(part.starts))
    differing = (first != last).any(axis=1)
    tensors = []
    for number, spec in enumerate(schema):
        chunks = slice(int(schema.first_chunk[number]), int(schema.first_chunk[number + 1]))
        found = TensorDifference(
            spec=spec,
            differing_chunks=int(differing[chunks].sum()),
            touched_chunks=int(touched[chunks].sum()),
            changed_elements=None if plan.from_anchor else int(changed[number]),
            stored_bytes=int(stored[number]),
        )
        if found.differing_chunks or found.touched_chunks:
            tensors.append(found)
    return Difference(plan, len(schema), tuple(tensors))


def _digests(store: Store, version: int, reader: _Reader) -> Digests:
    """Return a version's chunk digests, uint8 of shape (chunks, digest size)."""
    try:
        plan = store.plan(None, version)
    except VersionNotFound:
        plan = store.plan(BASE_VERSION, version)
    reader.expect(plan)
    table: np.ndarray[Any, np.dtype[np.uint8]] = store.base_digests().copy()
    for step in plan.steps:
        if step.kind == "anchor" and not isinstance(step.record, Route):
            continue  # the base's table says as much
        for part in reader.parts(step):
            table[part.numbers] = part.old_digests if step.kind == "inverse" else part.new_digests
    return table
