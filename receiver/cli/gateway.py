"""`receiver gateway`."""

from __future__ import annotations

import logging
import resource
import signal
from queue import SimpleQueue

import click

from deltastore.cli.app import debug_option, size_option
from deltastore.tokens import read_token

__all__ = ["command"]

_INTERRUPTED = 130


@click.command("gateway")
@click.option("--engine-url", required=True, metavar="URL", help="The engine whose clients come this way.")
@click.option(
    "--listen", default="127.0.0.1:9330", show_default=True, metavar="HOST:PORT", help="Where clients reach it."
)
@click.option(
    "--control",
    default="127.0.0.1:9331",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the engine's receiver reaches it (its --gateway-url).",
)
@click.option("--receiver-url", metavar="URL", help="The engine's receiver, woken when it has to open the gate.")
@click.option(
    "--hold",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Seconds that a request waits while the weights are updated.",
)
@size_option("--max-body", help="Bytes of a request at most (default: 32MiB).")
@click.option("--cache-salt", is_flag=True, help="Keep the engine's prefix cache apart per version (vLLM).")
@debug_option
def command(
    engine_url: str,
    listen: str,
    control: str,
    receiver_url: str | None,
    hold: float,
    max_body: int | None,
    cache_salt: bool,
) -> int:
    """Stand before an engine until SIGTERM: say which version made an answer, and keep clients out during updates."""
    from receiver.gateway.server import CLIENT_TOKEN_NAME, GatewayServer  # noqa: PLC0415 - heavy, and --help does without

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    log = logging.getLogger("receiver")
    stopping: SimpleQueue[int] = SimpleQueue()  # an Event's lock would not bear a signal's handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda seen, _frame: stopping.put(seen))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    server = GatewayServer(
        engine_url,
        listen,
        control=control,
        token=read_token(CLIENT_TOKEN_NAME),
        control_token=read_token("RECEIVER_TOKEN"),
        receiver=receiver_url,
        hold=hold,
        most_body=max_body or 32 << 20,
        salt=cache_salt,
    )
    with server:
        log.info("Listening on %s; the receiver's --gateway-url is %s.", server.url, server.control_url)
        seen = stopping.get()
    return _INTERRUPTED if seen == signal.SIGINT else 0
