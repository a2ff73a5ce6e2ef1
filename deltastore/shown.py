"""What is shown to people and scripts, whatever it holds: a path need not be Unicode, and JSON has to be."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["json_bytes", "unicode_text"]


def unicode_text(text: str) -> str:
    """Return a text with a ``?`` for each byte of it that was no Unicode."""
    return text.encode("utf-8", "replace").decode()


def json_bytes(value: object) -> bytes:
    """Return a value as JSON; a number that is not finite becomes ``null``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_unicode(msgspec.to_builtins(value)))


def _unicode(value: Any) -> Any:
    if isinstance(value, str):
        return unicode_text(value)
    if isinstance(value, dict):
        return {_unicode(key): _unicode(item) for key, item in value.items()}
    return [_unicode(item) for item in value] if isinstance(value, (list, tuple)) else value
