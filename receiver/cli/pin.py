"""`receiver pin`."""

from __future__ import annotations

import click

from deltastore.cli.app import debug_option, json_option

from .asking import order, url_option

__all__ = ["command"]


@click.command("pin")
@click.argument("version")
@url_option
@json_option
@debug_option
def command(version: str, url: str, as_json: bool) -> None:
    """Have a running receiver follow VERSION: a number, `latest` or `tag:NAME`, also after it was restarted.

    It takes the place of --target; pinning what --target says takes the pin away.
    """
    order(url, "/pin", {"version": version}, as_json=as_json)
