"""What `run` and `once` share: their options, and what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.app import (
    bandwidth_option,
    cache_options,
    debug_option,
    key_value_option,
    local_path,
    size_option,
    storage_options,
    trusted_keys_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from receiver.daemon import Receiver
    from receiver.status import Status

__all__ = ["make_receiver", "place_options", "receiver_options", "show_settings", "with_environment"]


def _read_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is not None:
        from receiver.config import read_settings  # noqa: PLC0415 - --help does without

        known = {parameter.name for parameter in context.command.params}
        context.default_map = {name: value for name, value in read_settings(path).items() if name in known}


_PLACE = (
    click.option(
        "--durability",
        type=click.Choice(["none", "version"]),
        default="version",
        show_default=True,
        help="What is on the disk before a version is live: all of it, or (for a tmpfs) nothing is waited for.",
    ),
    click.option(
        "--unsafe-file-system",
        is_flag=True,
        help="Take a file system that may not keep locks and renames, such as NFS.",
    ),
)


def place_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --durability and --unsafe-file-system."""
    for option in reversed(_PLACE):
        function = option(function)
    return function


_ACTIVATION = (
    click.option(
        "--in-flight",
        type=click.Choice(["wait", "abort", "keep"]),
        default="wait",
        show_default=True,
        help="Requests that run when an activation begins: they end first, are ended, or go on with the new weights.",
    ),
    click.option(
        "--drain-deadline",
        type=click.FloatRange(0, 86400),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="How long --in-flight wait waits.",
    ),
    click.option(
        "--at-deadline",
        type=click.Choice(["abort", "keep", "give-up"]),
        default="keep",
        show_default=True,
        help="What then becomes of those that still run; give-up leaves the old version serving for now.",
    ),
    click.option(
        "--kv-cache",
        type=click.Choice(["flush", "keep"]),
        default="flush",
        show_default=True,
        help="What was computed under the old weights; keep also needs --unsafe-keep-kv.",
    ),
    click.option("--unsafe-keep-kv", is_flag=True, help="Yes, old keys and values under new weights."),
    click.option(
        "--load-tries",
        type=click.IntRange(1, 10),
        default=2,
        show_default=True,
        help="Loads of one version before the version before is loaded back.",
    ),
    click.option(
        "--probe-expect",
        metavar="FILE",
        type=local_path,
        help="The log-probabilities that versions' probes must give, as JSON.",
    ),
    click.option("--self-test", is_flag=True, help="First have the engine reload the live version, and compare."),
)


_SHARED = (
    click.option(
        "--config",
        metavar="FILE",
        type=local_path,
        envvar="RECEIVER_CONFIG",
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="Settings as TOML; flags and RECEIVER_… variables go before them.",
    ),
    click.option("--print-config", is_flag=True, help="Print the settings in effect as TOML, and exit."),
    click.option("--store", required=True, metavar="URL", help="The store to follow."),
    click.option(
        "--checkpoint", required=True, metavar="DIR", type=local_path, help="The local checkpoint; becomes a link."
    ),
    click.option("--base", metavar="DIR", type=local_path, help="A checkpoint of the stream to start from."),
    click.option("--target", default="latest", show_default=True, metavar="VERSION", help="The wanted version."),
    click.option(
        "--engine",
        default="none",
        show_default=True,
        metavar="NAME",
        help="The kind of engine: none, torch, vllm, sglang or command.",
    ),
    click.option("--engine-url", metavar="URL", help="Where the engine listens."),
    click.option(
        "--gateway-url", metavar="URL", help="The control address of the `receiver gateway` before the engine, if any."
    ),
    key_value_option("--engine-option", "engine_options", help="An option for the engine's adapter; may be repeated."),
    *_ACTIVATION,
    click.option("--workers", type=click.IntRange(1, 256), help="Threads for chunks (default: one a core)."),
    bandwidth_option,
    size_option("--memory-budget", help="Take at most so much memory, all included (default: no bound)."),
    click.option("--nice", type=click.IntRange(0, 19), metavar="N", help="The nice value of the threads that patch."),
    click.option(
        "--io-priority", metavar="CLASS", help="The I/O priority of these threads: idle, or best-effort:0 to 7."
    ),
    place_options,
    cache_options,
    trusted_keys_option,
    storage_options,
    click.option(
        "--log-format",
        type=click.Choice(["human", "json"]),
        default="human",
        show_default=True,
        help="How the log is written.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="What is logged.",
    ),
    debug_option,
)

#: Not called like the parameter.
_VARIABLES = {"cache_bytes": "RECEIVER_CACHE_SIZE", "receiver_id": "RECEIVER_ID"}
_NO_SETTINGS = frozenset({"config", "print_config", "as_json", "debug"})


#: The options of `run` that say with whom it is coordinated, and what they are called there.
_COORDINATION = {
    "group": "group",
    "group_size": "size",
    "group_ready_timeout": "ready_timeout",
    "group_load_timeout": "load_timeout",
    "fleet": "fleet",
    "max_unavailable": "max_unavailable",
    "canary": "canary",
    "promote_by": "promote_by",
}


def receiver_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `run` and `once` share."""
    for option in reversed(_SHARED):
        function = option(function)
    return function


def with_environment(command: click.Command) -> click.Command:
    """Let each setting be given by a variable, too: ``RECEIVER_STORE`` for ``--store``."""
    for parameter in command.params:
        if parameter.name is not None and parameter.name not in _NO_SETTINGS:
            parameter.envvar = _VARIABLES.get(parameter.name, f"RECEIVER_{parameter.name.upper()}")
    return command


def show_settings(values: Mapping[str, Any]) -> None:
    """Print what is in effect."""
    from receiver.config import effective  # noqa: PLC0415 - heavy, and --help does without

    click.echo(effective(values), nl=False)


def make_receiver(*, heartbeat: float | None = None, **values: Any) -> tuple[Receiver, Status]:
    """Make the daemon, and its log, of a command line's settings."""
    from receiver.activation import Policy  # noqa: PLC0415 - heavy, and --help does without
    from receiver.config import shown_url  # noqa: PLC0415
    from receiver.coordination import Coordination  # noqa: PLC0415
    from receiver.daemon import Receiver  # noqa: PLC0415
    from receiver.logs import set_up_logs  # noqa: PLC0415
    from receiver.options import Options  # noqa: PLC0415
    from receiver.status import Status  # noqa: PLC0415

    set_up_logs(values.pop("log_format"), values.pop("log_level"))
    status = Status(store=shown_url(values["store"]), checkpoint=str(values["checkpoint"]), target=values["target"])
    policy = Policy(
        keep_kv=values.pop("kv_cache") == "keep",
        tries=values.pop("load_tries"),
        **{name: values.pop(name) for name in ("in_flight", "drain_deadline", "at_deadline", "unsafe_keep_kv")},
    )
    coordination = Coordination(**{field: values.pop(name) for name, field in _COORDINATION.items() if name in values})
    options = Options(**values, policy=policy, coordination=coordination, heartbeat=heartbeat)
    return Receiver(options, status), status
