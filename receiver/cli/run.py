"""`receiver run`."""

from __future__ import annotations

import logging
import math
import os
import signal
from typing import Any

import click

from deltastore.cli.app import parse_size

from .options import options_from, receiver_options

__all__ = ["command"]

_INTERRUPTED = 130


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which no range keeps out
        raise click.BadParameter(f"{value} is no number of seconds.")
    return value


def _rate(context: click.Context, parameter: click.Parameter, value: str) -> int:
    return 0 if value.strip() == "0" else parse_size(context, parameter, value) or 0


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
def command(listen: str, **values: Any) -> int:
    """Follow a stream until SIGTERM: keep a checkpoint and an engine at the wanted version."""
    from receiver.daemon import Receiver  # noqa: PLC0415 - heavy, and --help does without
    from receiver.status import Status, StatusServer  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    status = Status(store=values["store"], checkpoint=str(values["checkpoint"]), target=values["target"])
    receiver = Receiver(options_from(**values), status)
    seen: list[int] = []

    def stop(number: int, _frame: object) -> None:
        seen.append(number)
        receiver.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with StatusServer(status, listen, token=os.environ.get("RECEIVER_TOKEN"), wake=receiver.wake) as server:
        logging.getLogger("receiver").info("Listening on %s.", server.url)
        receiver.run(url=server.url)
    return _INTERRUPTED if signal.SIGINT in seen else 0
