"""Acting on a plan beside collectors: what vanishes under it was let go, and another plan is made, or none needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .errors import DeltastoreError, ObjectNotFound, VersionForgotten

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan import Plan
    from .reader import Store

__all__ = ["on_plan"]

_Result = TypeVar("_Result")

#: More than that many retention records do not come while one version is built.
_PLANS = 5


def on_plan(store: Store, start: int | None, end: int, build: Callable[[Plan], _Result]) -> _Result:
    """Plan from ``start`` to ``end`` and ``build``; when an object of the plan is gone, plan and build again.

    Raises ``VersionForgotten`` when ``end`` was let go meanwhile, ``ObjectNotFound`` when the object is still on the
    only way: then the store is damaged.
    """
    plan = store.plan(start, end)
    for _ in range(_PLANS):
        try:
            return build(plan)
        except ObjectNotFound as error:
            another = store.plan(start, end)
            if another == plan:
                raise _lost(store, end, error) from error
            plan = another
    return build(plan)


def _lost(store: Store, end: int, error: ObjectNotFound) -> DeltastoreError:
    """Return what it means that an object of the only plan is gone."""
    record = store.retention()
    if record is None or record.keeps(end):
        return error
    return VersionForgotten(
        f"Version {end} is forgotten: whoever set its tag was stopped before it was sure, and {error.key} is gone.",
        key=error.key,
        hint="Delete the tag with `deltastore tag STORE NAME --delete`, and ask for a version that is kept.",
    )
