"""Going on without a shadow: the weights that a trainer has loaded are proven to be a version of the stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import BaseMismatch, VersionNotFound
from .manifest import BASE_VERSION, MAX_PART_BYTES
from .part import parse_part
from .patch import seal
from .planner import Planner
from .snapshot import Schema, snapshot_id, tensor_digests
from .spool import read_object
from .tensors import is_tied_alias, named_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .manifest import Manifest
    from .plan import Plan
    from .reader import Store
    from .shadow import Shadow
    from .snapshot import Digests, TensorSpec

__all__ = ["take_weights"]

_HINT = "Give the weights of the newest version, or leave them out: then the store's anchor is used."


def take_weights(
    store: Store, shadow: Shadow, weights: Mapping[str, Any] | Iterable[tuple[str, Any]], *, workers: int
) -> Manifest:
    """Fill the shadow with weights and return the newest version of the stream that they are.

    Pairs are taken one at a time: an iterator may reuse a tensor's memory. Raises ``BaseMismatch``, naming the first
    tensors that do not fit the stream, or that differ from its newest version, when they are none of its versions.
    """
    schema = store.schema()
    given: dict[str, TensorSpec] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="hash") as pool:
        for tensor in named_tensors(weights, schema):
            spec, wanted = tensor.spec, schema.get(tensor.spec.name)
            if spec.name in given:
                raise _mismatch(f"{spec.name} comes twice", (spec.name,))
            if wanted is None and is_tied_alias(spec.name):
                continue  # its partner stands for it: the stream does not have it
            given[spec.name] = spec
            if wanted is not None and (wanted.dtype, wanted.shape) == (spec.dtype, spec.shape):
                list(pool.map(partial(shadow.take, wanted, tensor.bytes), range(wanted.chunks)))
    if lines := schema.differences(Schema(given.values())):
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise _mismatch("; ".join(lines[:3]) + more, tuple(line.split(" is ", 1)[0] for line in lines[:10]))
    found = snapshot_id(schema, shadow.digests, store.hash)
    newest = store.latest()
    match = newest if newest.snapshot_id == found else store.find_snapshot(found)
    if match is None:
        names = _differing(store, newest, shadow.digests)
        first = f"; {len(names)} of {len(schema)} tensors differ from version {newest.version}, first " if names else ""
        raise _mismatch(f"they are none of its versions{first}{', '.join(names[:3])}", names[:10])
    return match


def _mismatch(problem: str, tensors: tuple[str, ...]) -> BaseMismatch:
    return BaseMismatch(f"The weights are not the stream's: {problem}.", tensors=tensors, hint=_HINT)


def _differing(store: Store, newest: Manifest, digests: Digests) -> tuple[str, ...]:
    """Name the tensors that differ from the newest version; none when the store no longer tells its chunks' digests."""
    schema = store.schema()
    with suppress(VersionNotFound):
        wanted = tensor_digests(schema, _version_digests(store, newest), store.hash)
        found = tensor_digests(schema, digests, store.hash)
        return tuple(spec.name for spec, one, other in zip(schema, wanted, found, strict=True) if one != other)
    return ()


def _version_digests(store: Store, manifest: Manifest) -> Digests:
    """Return a version's chunk digests, uint8 of shape (chunks, digest size), from the tables on the way to it."""
    planner = Planner(store)

    def follow(plan: Plan) -> Digests:
        table = store.base_digests().copy()
        for step in plan.steps:
            for reference in step.parts:
                data = read_object(store.backend, reference, limit=MAX_PART_BYTES)
                part = parse_part(data, step.identity, store.schema(), store.hash, key=reference.key)
                table[part.numbers] = part.old_digests if step.kind == "inverse" else part.new_digests
        seal(store.schema(), store.hash, table, manifest.snapshot_id, key=None)
        return table

    return planner.follow(planner.plan(BASE_VERSION, manifest.version), follow)
