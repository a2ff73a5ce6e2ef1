"""Tokens of HTTP servers, as the environment has them."""

from __future__ import annotations

import os

from .errors import UsageError

__all__ = ["read_token"]


def read_token(name: str) -> str | None:
    """Return the token in a variable of the environment, ``None`` where there is none; raises ``UsageError``.

    White space round it, as the newline of a file that it was read from, is no part of it.
    """
    token = os.environ.get(name, "").strip()
    if token and not (token.isascii() and token.isprintable()):
        raise UsageError(f"{name} holds what no header can carry.", key=name, hint="Use printable ASCII.")
    return token or None
