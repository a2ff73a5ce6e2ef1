"""Inference engines: the protocol, the adapters, and one call that picks an adapter by its name.

Importing this package imports neither torch nor httpx.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from deltastore.errors import UsageError
from receiver.engines.base import Engine, EngineInfo, InFlight, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Engine", "EngineInfo", "InFlight", "Probe", "engine_names", "make_engine"]


def make_engine(name: str, *, url: str | None = None, options: Mapping[str, str] | None = None) -> Engine:
    """Build the adapter called ``name``.

    ``url`` is where the engine listens, for those that do. ``options`` are the adapter's own, as the
    command line gives them: ``torch`` takes ``connect-timeout``, ``request-timeout``, ``pause-timeout``,
    ``load-timeout`` and ``confirm-timeout`` in seconds. What does not fit is a ``UsageError``.
    """
    if name not in _ADAPTERS:
        known = ", ".join(engine_names())
        raise UsageError(f"no engine is named {name!r}", key=name, hint=f"--engine with one of {known}.")
    return _ADAPTERS[name](url, dict(options or {}))


def engine_names() -> tuple[str, ...]:
    """Return the names ``make_engine`` knows, sorted."""
    return tuple(sorted(_ADAPTERS))


def _make_none(url: str | None, options: dict[str, str]) -> Engine:
    from receiver.engines.none import NoEngine  # noqa: PLC0415 (see the module's docstring)

    if url is not None:
        raise UsageError("engine none has no URL", key=url, hint="--engine torch, or no --engine-url.")
    _refuse_unknown("none", options, ())
    return NoEngine()


def _make_torch(url: str | None, options: dict[str, str]) -> Engine:
    from receiver.engines.torch_server import Timeouts, TorchServerEngine  # noqa: PLC0415 (as above)

    if url is None:
        raise UsageError("engine torch needs a URL", key="torch", hint="--engine-url http://127.0.0.1:PORT.")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"engine URL {url!r} is not HTTP", key=url, hint="http://127.0.0.1:PORT.")
    names = {f"{field.name}-timeout": field.name for field in fields(Timeouts)}
    _refuse_unknown("torch", options, tuple(names))
    return TorchServerEngine(
        url, timeouts=Timeouts(**{names[key]: _seconds(key, text) for key, text in options.items()})
    )


def _seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"engine option {option}={text} is not a number of seconds", key=option, hint="60.")
    return value


def _refuse_unknown(engine: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            hint = f"One of {', '.join(known)}." if known else "No --engine-option."
            raise UsageError(f"engine {engine} has no option {option!r}", key=option, hint=hint)


_ADAPTERS: dict[str, Callable[[str | None, dict[str, str]], Engine]] = {
    "none": _make_none,
    "torch": _make_torch,
}
