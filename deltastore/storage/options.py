"""URLs and storage options as people type them, made into what file systems take.

A command line has only text, a file system wants booleans, numbers and nested mappings. Credentials are
left exactly as given, and collected so that messages can be cleaned of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AZURE_SCHEMES", "S3_SCHEMES", "clean", "parse_options", "secrets_of", "split_url"]

S3_SCHEMES: Final = ("s3", "s3a")
AZURE_SCHEMES: Final = ("az", "abfs", "abfss")

_SECRET_NAMES: Final = re.compile(r"key|secret|token|password|credential|connection_string|sas", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?\d{1,9}")

# Names whose values are text even when they look like a number or a boolean.
_TEXT: Final = frozenset({"username", "account_name", "project", "profile", "endpoint_url", "region"})


def split_url(url: str) -> tuple[SplitResult, dict[str, object]]:
    """Take a remote URL apart into what may be shown and the credentials in it. Raises ``UsageError``."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    shown = parts._replace(scheme=scheme, path=parts.path.rstrip("/"), query="", fragment="")
    if parts.query or parts.fragment:
        raise UsageError(f"{scheme}:// URLs take no ? or #", hint="give settings and credentials as storage options")
    if not parts.netloc:
        raise UsageError(f"{scheme}:// names no bucket", hint=f"write {scheme}://BUCKET/PREFIX")
    user, at, host = parts.netloc.rpartition("@")
    name, colon, password = user.partition(":")
    if at and not colon and scheme in AZURE_SCHEMES:
        # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/: no credential.
        return shown, {}
    if not at:
        return shown, {}
    if not colon or scheme not in S3_SCHEMES:
        raise UsageError(f"a {scheme}:// URL cannot carry a user", hint="give credentials as storage options")
    return shown._replace(netloc=host), {"key": unquote(name), "secret": unquote(password)}


def clean(text: str, secrets: frozenset[str]) -> str:
    """Return a library's message on one line, shortened, and without credentials."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", "***", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def parse_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return options with nested mappings for dotted names and values for text.

    ``true``, ``false`` and whole numbers become values, a text in braces is parsed as JSON; a name that
    holds a credential or an account keeps its text. Raises ``UsageError`` for JSON that cannot be parsed.
    """
    parsed: dict[str, object] = {}
    for name, value in options.items():
        *parents, last = name.split(".")
        target = parsed
        for parent in parents:
            inner = target.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise UsageError(f"the storage option {parent} is given both whole and in parts")
            target = inner
        value = _value(name, last, value)  # noqa: PLW2901 - the text has no use beside its value
        known = target.get(last)
        target[last] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return parsed


def secrets_of(options: Mapping[str, object]) -> frozenset[str]:
    """Return every text among the options, at any depth, that must not be shown to anyone."""
    return frozenset(_secrets(options))


def _secrets(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and value and _SECRET_NAMES.search(name):
            yield value


def _value(name: str, last: str, value: object) -> object:
    """Return what a text stands for under its name."""
    if isinstance(value, Mapping):
        return {inner: _value(f"{name}.{inner}", str(inner), item) for inner, item in value.items()}
    if not isinstance(value, str):
        return value
    if last in _TEXT or _SECRET_NAMES.search(last):
        return value
    if value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            raise UsageError(f"the storage option {name} is not valid JSON") from None
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    return int(value) if _NUMBER.fullmatch(value) else value
