"""Inference engines: the protocol, the adapters, and one call that picks an adapter by its name.

Importing this package imports neither torch nor httpx.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from deltastore.errors import UsageError
from receiver.config import shown_url
from receiver.engines.base import Engine, EngineInfo, InFlight, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Engine", "EngineInfo", "InFlight", "Probe", "engine_names", "make_engine"]


def make_engine(name: str, *, url: str | None = None, options: Mapping[str, str] | None = None) -> Engine:
    """Build the adapter called ``name``.

    ``url`` is where the engine listens, for those that do. ``options`` are the adapter's own, as the
    command line gives them: ``torch`` takes ``connect-timeout``, ``request-timeout``, ``pause-timeout``,
    ``load-timeout`` and ``confirm-timeout`` in seconds; for the others they are the fields of ``VllmOptions``,
    ``SglangOptions`` and ``CommandOptions``, with hyphens. What does not fit is a ``UsageError``.
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
    from receiver.engines.options import seconds  # noqa: PLC0415 (as above)
    from receiver.engines.torch_server import Timeouts, TorchServerEngine  # noqa: PLC0415 (as above)

    url = _checked_url("torch", url)
    names = {f"{field.name}-timeout": field.name for field in fields(Timeouts)}
    _refuse_unknown("torch", options, tuple(names))
    return TorchServerEngine(
        url, timeouts=Timeouts(**{names[key]: seconds(key, text) for key, text in options.items()})
    )


def _make_vllm(url: str | None, options: dict[str, str]) -> Engine:
    from receiver.engines.options import parse_options  # noqa: PLC0415 (as above)
    from receiver.engines.vllm import VllmEngine, VllmOptions  # noqa: PLC0415 (as above)

    return VllmEngine(_checked_url("vllm", url), options=parse_options("vllm", VllmOptions, options))


def _make_sglang(url: str | None, options: dict[str, str]) -> Engine:
    from receiver.engines.options import parse_options  # noqa: PLC0415 (as above)
    from receiver.engines.sglang import SglangEngine, SglangOptions  # noqa: PLC0415 (as above)

    return SglangEngine(_checked_url("sglang", url), options=parse_options("sglang", SglangOptions, options))


def _make_command(url: str | None, options: dict[str, str]) -> Engine:
    from receiver.engines.command import CommandEngine, CommandOptions  # noqa: PLC0415 (as above)
    from receiver.engines.options import parse_options  # noqa: PLC0415 (as above)

    if url is not None:
        raise UsageError("engine command has no URL", key=url, hint="its hooks as options, and no --engine-url.")
    return CommandEngine(parse_options("command", CommandOptions, options))


def _checked_url(engine: str, url: str | None) -> str:
    if url is None:
        raise UsageError(f"engine {engine} needs a URL", key=engine, hint="--engine-url http://127.0.0.1:PORT.")
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"engine URL {shown_url(url)!r} is not HTTP", key=shown_url(url), hint="http://127.0.0.1:PORT."
        )
    return url


def _refuse_unknown(engine: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    for option in options:
        if option not in known:
            hint = f"One of {', '.join(known)}." if known else "No --engine-option."
            raise UsageError(f"engine {engine} has no option {option!r}", key=option, hint=hint)


_ADAPTERS: dict[str, Callable[[str | None, dict[str, str]], Engine]] = {
    "command": _make_command,
    "none": _make_none,
    "sglang": _make_sglang,
    "torch": _make_torch,
    "vllm": _make_vllm,
}
