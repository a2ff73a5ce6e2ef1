"""On what a measurement was made: date, processor, memory, versions."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["machine", "today"]

_LIBRARIES = ("numpy", "numba", "torch", "zstandard", "xxhash")


def today() -> str:
    """Return the date, UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def machine() -> dict[str, Any]:
    """Return what identifies this machine's speed, and the versions of what the hot paths call."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)
