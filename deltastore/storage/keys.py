"""What a key, a prefix and a range may look like, checked before any backend sees them.

Keys come from manifests that others wrote, and a local backend makes paths of them. The alphabet is the
one that every backend stores unchanged, and no component can be hidden, empty, ``.`` or ``..``.
"""

from __future__ import annotations

import re
from typing import Final

from deltastore.errors import UsageError

__all__ = ["MAX_KEY_LENGTH", "check_key", "check_prefix", "check_range", "is_key"]

MAX_KEY_LENGTH: Final = 512

# 255 is the longest file name that common file systems take.
_COMPONENT: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEY: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_HINT: Final = (
    f"use a relative key of at most {MAX_KEY_LENGTH} characters whose components are made of "
    "A-Z a-z 0-9 . _ - and do not start with a dot"
)


def is_key(text: str) -> bool:
    """Whether ``text`` may name an object."""
    return len(text) <= MAX_KEY_LENGTH and _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raise ``UsageError`` unless ``key`` may name an object."""
    if not is_key(key):
        raise UsageError(f"{_shown(key)} is not a valid object key", key=key, hint=_HINT)


def check_prefix(prefix: str) -> None:
    """Raise ``UsageError`` unless ``prefix`` is empty or a valid key followed by one ``/``."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise UsageError(
            f"{_shown(prefix)} is not a valid key prefix", key=prefix, hint="end the prefix with one slash"
        )


def check_range(key: str, start: int, end: int) -> None:
    """Raise ``UsageError`` unless ``key`` may name an object and the range has bytes."""
    check_key(key)
    if not 0 <= start < end:
        raise UsageError(f"{start} to {end} is no range of bytes of {key}", key=key, hint="ask for at least one byte")


def _shown(text: str) -> str:
    """Quote what was given, cut to a length that fits a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
