"""`receiver once`."""

from __future__ import annotations

from typing import Any

import click

from deltastore.cli.app import emit, json_option

from .options import make_receiver, receiver_options, show_settings, with_environment
from .signals import INTERRUPTED, ended_by_signals

__all__ = ["command"]


@with_environment
@click.command("once")
@receiver_options
@json_option
def command(as_json: bool, print_config: bool, **values: Any) -> int:
    """Bring a checkpoint and an engine to the wanted version, then exit."""
    if print_config:
        show_settings(values)
        return 0
    from receiver.stopping import Stopped  # noqa: PLC0415 - heavy, and --help does without

    receiver, status = make_receiver(**values)
    try:
        with ended_by_signals(receiver, lambda _seen: INTERRUPTED):
            receiver.once()
    except Stopped:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    record = status.record()
    if as_json:
        emit(record)
    else:
        update = record["last_update"]
        start = "it was there" if not update else f"from {'nothing' if update['from'] is None else update['from']}"
        click.echo(f"version {record['version']}  {values['checkpoint']}  ({start})")
    return 0
