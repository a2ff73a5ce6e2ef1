"""`receiver once`."""

from __future__ import annotations

from typing import Any

import click

from deltastore.cli.app import emit, json_option

from .options import options_from, receiver_options

__all__ = ["command"]


@click.command("once")
@receiver_options
@json_option
def command(as_json: bool, **values: Any) -> None:
    """Bring a checkpoint and an engine to the wanted version, then exit."""
    from receiver.daemon import Receiver  # noqa: PLC0415 - heavy, and --help does without
    from receiver.status import Status  # noqa: PLC0415

    status = Status(store=values["store"], checkpoint=str(values["checkpoint"]), target=values["target"])
    Receiver(options_from(**values), status).once()
    record = status.record()
    if as_json:
        emit(record)
    else:
        update = record["last_update"]
        start = "it was there" if not update else f"from {'nothing' if update['from'] is None else update['from']}"
        click.echo(f"version {record['version']}  {values['checkpoint']}  ({start})")
