"""Byte-exact weight deltas through shared storage: the format, the store, and the writer.

>>> from deltastore import Writer, open_store
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, open_checkpoint
    from .errors import DeltastoreError
    from .fork import fork_stream
    from .publication import Publication, Published
    from .reader import Store, open_store
    from .writer import Writer

__all__ = [
    "Checkpoint",
    "DeltastoreError",
    "Publication",
    "Published",
    "Store",
    "Writer",
    "__version__",
    "fork_stream",
    "open_checkpoint",
    "open_store",
]

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "DeltastoreError": "errors",
    "Publication": "publication",
    "Published": "publication",
    "Store": "reader",
    "Writer": "writer",
    "fork_stream": "fork",
    "open_checkpoint": "checkpoint",
    "open_store": "reader",
}


def __getattr__(name: str) -> object:
    """Import public names when they are first used: reading a log needs neither numba nor torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only for the lazy names

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
