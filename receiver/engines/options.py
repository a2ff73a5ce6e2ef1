"""Adapters' own options, as the command line gives them: text, made into a frozen dataclass by its fields' types."""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed import DataclassInstance

    _Options = TypeVar("_Options", bound=DataclassInstance)

__all__ = ["parse_options", "seconds"]


def parse_options(engine: str, kind: type[_Options], given: Mapping[str, str]) -> _Options:
    """Make the options of an adapter: ``load-timeout=60`` is the field ``load_timeout``. Raises ``UsageError``."""
    known = {field.name.replace("_", "-"): field for field in fields(kind)}
    values: dict[str, Any] = {}
    for option, text in given.items():
        if option not in known:
            hint = f"One of {', '.join(known)}." if known else "No --engine-option."
            raise UsageError(f"engine {engine} has no option {option!r}", key=option, hint=hint)
        values[known[option].name] = _PARSERS[str(known[option].type)](option, text)
    return kind(**values)


def seconds(option: str, text: str) -> float:
    """Parse a number of seconds above 0. Raises ``UsageError``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"engine option {option}={text} is not a number of seconds", key=option, hint="60.")
    return value


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 1 << 20:
        raise UsageError(f"engine option {option}={text} is not a number above 0", key=option, hint="8.")
    return int(text)


def _flag(option: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise UsageError(f"engine option {option}={text} is neither yes nor no", key=option, hint=f"{option}=yes.")
    return text == "yes"


def _text(option: str, text: str) -> str:
    if not text:
        raise UsageError(f"engine option {option} is empty", key=option, hint="no such option at all.")
    return text


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 31 for part in parts):
        raise UsageError(f"engine option {option}={text} is no list of token ids", key=option, hint="1,2,3.")
    return tuple(map(int, parts))


def _arguments(option: str, text: str) -> tuple[str, ...]:
    try:
        found = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"engine option {option}={text} cannot be read: {error}", key=option, hint="quotes."
        ) from error
    if not found:
        raise UsageError(
            f"engine option {option} names no program", key=option, hint="/usr/local/bin/reload {version}."
        )
    return found


_PARSERS: dict[str, Callable[[str, str], object]] = {
    "float": seconds,
    "int": _count,
    "bool": _flag,
    "str | None": _text,
    "tuple[int, ...]": _numbers,
    "tuple[str, ...] | None": _arguments,
}
