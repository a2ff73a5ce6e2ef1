"""For authors of backends and for tests: a contract suite, a faulty backend, an S3 server.

``storage_contract`` needs pytest and is imported by its own name; so is ``s3_server``, which needs the
server's binary.
"""

from __future__ import annotations

from deltastore.storage.faults import Effect, Fault, FaultyBackend, flip_bit, oversize, truncate
from deltastore.storage.lagging import LaggingBackend

__all__ = ["Effect", "Fault", "FaultyBackend", "LaggingBackend", "flip_bit", "oversize", "truncate"]
