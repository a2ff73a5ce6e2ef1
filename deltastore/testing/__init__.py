"""For authors of backends and for tests: a contract suite, a faulty backend, an S3 server.

``storage_contract`` needs pytest and is imported by its own name; so is ``s3_server``, which needs the
server's binary.
"""

from __future__ import annotations

from deltastore.storage.faults import (
    Effect,
    Fault,
    FaultKind,
    FaultyBackend,
    RandomFaults,
    flip_bit,
    make_fault,
    oversize,
    truncate,
)
from deltastore.storage.lagging import LaggingBackend

__all__ = [
    "Effect",
    "Fault",
    "FaultKind",
    "FaultyBackend",
    "LaggingBackend",
    "RandomFaults",
    "flip_bit",
    "make_fault",
    "oversize",
    "truncate",
]
