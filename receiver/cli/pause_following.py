"""`receiver pause-following`."""

from __future__ import annotations

import click

from deltastore.cli.app import debug_option, json_option

from .asking import order, url_option

__all__ = ["command"]


@click.command("pause-following")
@url_option
@json_option
@debug_option
def command(url: str, as_json: bool) -> None:
    """Have a running receiver stay at what is live, also after it was restarted."""
    order(url, "/pause-following", as_json=as_json)
