"""`receiver status`."""

from __future__ import annotations

import click

from deltastore.cli.app import debug_option, emit, json_option

from .asking import ask, url_option

__all__ = ["command"]

_SHOWN = (
    "state", "ready", "version", "serving", "target", "lag", "wanted", "pinned", "paused", "store", "checkpoint",
    "stream_id", "receiver_id", "seconds_since_success",
)  # fmt: skip


@click.command("status")
@url_option
@json_option
@debug_option
def command(url: str, as_json: bool) -> None:
    """Ask a running receiver how it is; exits with 1 when it is not ready."""
    record = ask(url, "GET", "/status", fields=(*_SHOWN, "stages", "error"))
    if as_json:
        emit(record)
    else:
        for name in _SHOWN:
            value = record[name]
            click.echo(f"{name:22} {f'{value:.1f}' if isinstance(value, float) else value}")
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in record["stages"].items())
        click.echo(f"{'stages':22} {stages}")
        if record["error"]:
            click.echo(f"{'error':22} {record['error']['message']}")
            if record["error"]["hint"]:
                click.echo(f"{'':22} Try: {record['error']['hint']}")
    if not record["ready"]:
        raise click.exceptions.Exit(1)
