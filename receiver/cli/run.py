"""`receiver run`."""

from __future__ import annotations

import math
import signal
from typing import Any

import click

from deltastore.cli.app import parse_size
from deltastore.tokens import read_token

from .options import make_receiver, receiver_options, show_settings, with_environment
from .signals import INTERRUPTED, ended_by_signals

__all__ = ["command"]


def _code(seen: list[int]) -> int:
    return INTERRUPTED if signal.SIGINT in seen else 0


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which no range keeps out
        raise click.BadParameter(f"{value} is no number of seconds.")
    return value


def _rate(context: click.Context, parameter: click.Parameter, value: str) -> int:
    return 0 if value.strip() == "0" else parse_size(context, parameter, value) or 0


@with_environment
@click.command("run")
@receiver_options
@click.option(
    "--poll",
    type=click.FloatRange(0.01, 86400),
    default=1.0,
    show_default=True,
    callback=_finite,
    help="Seconds between polls.",
)
@click.option(
    "--scrub-rate",
    default="20MiB",
    show_default=True,
    metavar="SIZE",
    callback=_rate,
    help="Bytes a second at which the live slot is read over while there is nothing else to do; 0 for never.",
)
@click.option(
    "--listen", default="127.0.0.1:9310", show_default=True, metavar="HOST:PORT", help="Where status is served."
)
@click.option("--group", metavar="NAME", help="What this receiver belongs to, for `deltastore fleet`.")
@click.option(
    "--group-size",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Members of the group, which activate versions together: all of them, or none.",
)
@click.option(
    "--group-ready-timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    default=600.0,
    show_default=True,
    callback=_finite,
    help="Seconds to wait until all members have a version, while all serve the one before.",
)
@click.option(
    "--group-load-timeout",
    type=click.FloatRange(0, 86400, min_open=True),
    default=300.0,
    show_default=True,
    callback=_finite,
    help="Seconds to wait until all members have loaded it, while all are paused.",
)
@click.option("--fleet", default="fleet", show_default=True, metavar="NAME", help="The receivers that share turns.")
@click.option(
    "--max-unavailable",
    type=click.IntRange(1, 1024),
    metavar="K",
    help="Activate only while fewer than so many of the fleet are unavailable (default: any number).",
)
@click.option("--canary", metavar="RECEIVER_ID", help="Who goes first; the others wait until a version is promoted.")
@click.option(
    "--promote-by",
    default="probe",
    show_default=True,
    metavar="probe|tag:NAME",
    help="What promotes a version: that the canary serves it, confirmed, or that the tag names it.",
)
@click.option("--receiver-id", metavar="ID", help="Its name in the fleet (default: made once, and kept).")
@click.option("--heartbeat/--no-heartbeat", default=True, help="Leave word in the store for `deltastore fleet`.")
@click.option(
    "--heartbeat-every",
    type=click.FloatRange(5, 86400),
    default=30.0,
    show_default=True,
    callback=_finite,
    help="Seconds between heartbeats while nothing changes.",
)
def command(print_config: bool, **values: Any) -> int:
    """Follow a stream until SIGTERM: keep a checkpoint and an engine at the wanted version."""
    if print_config:
        show_settings(values)
        return 0
    from receiver.logs import tell  # noqa: PLC0415 - heavy, and --help does without
    from receiver.status import StatusServer  # noqa: PLC0415

    listen, every = values.pop("listen"), values.pop("heartbeat_every")
    receiver, status = make_receiver(**{**values, "heartbeat": every if values["heartbeat"] else None})
    with (
        ended_by_signals(receiver, _code) as seen,
        StatusServer(status, listen, token=read_token("RECEIVER_TOKEN"), receiver=receiver) as server,
    ):
        tell("listening", f"Listening on {server.url}.", url=server.url)
        receiver.run(url=server.url)
    return _code(seen)
