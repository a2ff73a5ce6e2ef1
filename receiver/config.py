"""The daemon's settings: what a configuration file may hold, and what is in effect, as TOML.

A setting is called like its flag, in the plural where that may be repeated. Flags go before the environment
(``RECEIVER_STORE``, …), the environment before the file, and the file before the defaults: click does that, once it has
the file's settings as its map of defaults.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from deltastore.errors import UsageError
from deltastore.shown import unicode_text
from deltastore.storage.options import secrets_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Settings", "effective", "read_settings", "shown_url"]

_MAX_BYTES = 1 << 20
_PASSWORD = re.compile(r"(://)[^/@:]*:.*@", re.DOTALL)

Scalar = str | bool | int | float


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab", kw_only=True):
    """What may stand in a file. Sizes are bytes or a text such as ``50GiB``; times are seconds."""

    store: str | UnsetType = UNSET
    checkpoint: str | UnsetType = UNSET
    base: str | UnsetType = UNSET
    target: str | int | UnsetType = UNSET
    poll: float | UnsetType = UNSET
    engine: str | UnsetType = UNSET
    engine_url: str | UnsetType = UNSET
    gateway_url: str | UnsetType = UNSET
    in_flight: str | UnsetType = UNSET
    drain_deadline: float | UnsetType = UNSET
    at_deadline: str | UnsetType = UNSET
    kv_cache: str | UnsetType = UNSET
    unsafe_keep_kv: bool | UnsetType = UNSET
    load_tries: int | UnsetType = UNSET
    probe_expect: str | UnsetType = UNSET
    self_test: bool | UnsetType = UNSET
    workers: int | UnsetType = UNSET
    max_bandwidth: str | int | UnsetType = UNSET
    memory_budget: str | int | UnsetType = UNSET
    nice: int | UnsetType = UNSET
    io_priority: str | UnsetType = UNSET
    durability: str | UnsetType = UNSET
    unsafe_file_system: bool | UnsetType = UNSET
    scrub_rate: str | int | UnsetType = UNSET
    cache: str | UnsetType = UNSET
    cache_size: str | int | UnsetType = UNSET
    trusted_keys: tuple[str, ...] | UnsetType = UNSET
    group: str | UnsetType = UNSET
    group_size: int | UnsetType = UNSET
    group_ready_timeout: float | UnsetType = UNSET
    group_load_timeout: float | UnsetType = UNSET
    fleet: str | UnsetType = UNSET
    max_unavailable: int | UnsetType = UNSET
    canary: str | UnsetType = UNSET
    promote_by: str | UnsetType = UNSET
    receiver_id: str | UnsetType = UNSET
    heartbeat: bool | UnsetType = UNSET
    heartbeat_every: float | UnsetType = UNSET
    listen: str | UnsetType = UNSET
    log_format: str | UnsetType = UNSET
    log_level: str | UnsetType = UNSET
    engine_options: dict[str, Scalar] | UnsetType = UNSET
    storage_options: dict[str, Scalar] | UnsetType = UNSET


#: Those whose parameter of the command has another name.
_PARAMETERS = {"cache_size": "cache_bytes"}
#: Those that may be numbers in a file, and are texts on the command line.
_TEXTS = frozenset({"target", "cache_size", "max_bandwidth", "memory_budget", "scrub_rate"})
_FIELDS = {field.encode_name: field.name for field in msgspec.structs.fields(Settings)}


def read_settings(path: Path) -> dict[str, Any]:
    """Return a file's settings by the names and in the types of the command's parameters; raises ``UsageError``."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES)
        table = msgspec.toml.decode(data, type=dict[str, Any])
    except OSError as error:
        raise UsageError(
            f"The configuration {path} cannot be read: {error.strerror}.", key=str(path), hint="Give --config a file."
        ) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no TOML: {error}.", key=str(path), hint="Mend it; docs/operations.md has one."
        ) from error
    _refuse_unknown(path, table)
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        told = str(error).replace("`$.", "`")
        raise UsageError(f"{path}: {told}.", key=str(path), hint="docs/operations.md lists the settings.") from error
    given = {name: getattr(settings, name) for name in _FIELDS.values()}
    return {_PARAMETERS.get(name, name): _typed(name, value) for name, value in given.items() if value is not UNSET}


def _refuse_unknown(path: Path, table: Mapping[str, Any]) -> None:
    unknown = sorted(set(table) - set(_FIELDS))
    if not unknown:
        return
    near = [match for name in unknown for match in difflib.get_close_matches(name, _FIELDS, 1)]
    raise UsageError(
        f"{path} has settings that there are not: {', '.join(unknown)}.",
        key=str(path),
        hint=f"Is it {', '.join(near)}?" if near else "docs/operations.md lists the settings.",
    )


def _typed(name: str, value: Any) -> Any:
    """Return a value as its flag takes it."""
    if isinstance(value, dict):
        return [f"{key}={_text(item)}" for key, item in value.items()]
    return str(value) if name in _TEXTS else value


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def effective(values: Mapping[str, Any]) -> str:
    """Return settings as a file would hold them, without secrets. ``values`` are the command's parameters."""
    table: dict[str, Any] = {}
    for written, name in _FIELDS.items():
        value = values.get(_PARAMETERS.get(name, name))
        if value is None or value == {}:
            continue
        if isinstance(value, dict):
            secret = secrets_of(value)
            value = {key: "***" if item in secret else item for key, item in value.items()}
        elif isinstance(value, (tuple, list)):
            value = list(value)
        elif not isinstance(value, (bool, int, float)):
            value = unicode_text(shown_url(str(value)))
        table[written] = value
    return msgspec.toml.encode(table).decode()


def shown_url(url: str) -> str:
    """Return a URL without the password that it may hold."""
    return _PASSWORD.sub(r"\1***@", url)
