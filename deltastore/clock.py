"""The one place that reads the wall clock. Nothing but people and reports depends on it."""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["now", "seconds_since"]


def now() -> str:
    """Return the time as records spell it: RFC 3339, UTC, microseconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_since(time: str) -> float | None:
    """Return how long ago a record's time was, never below 0: clocks differ. ``None`` when it is no time."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    try:
        then = datetime.strptime(f"{whole}.{fraction[:6] or '0'}+0000", "%Y-%m-%dT%H:%M:%S.%f%z")
    except ValueError:
        return None
    return max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
