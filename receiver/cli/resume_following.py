"""`receiver resume-following`."""

from __future__ import annotations

import click

from deltastore.cli.app import debug_option, json_option

from .asking import order, url_option

__all__ = ["command"]


@click.command("resume-following")
@url_option
@json_option
@debug_option
def command(url: str, as_json: bool) -> None:
    """Have a running receiver follow again."""
    order(url, "/resume-following", as_json=as_json)
