"""The one place that reads the wall clock. Nothing but people and reports depends on it."""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["now"]


def now() -> str:
    """Return the time as records spell it: RFC 3339, UTC, microseconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
