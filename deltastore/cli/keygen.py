"""`deltastore keygen --out FILE`."""

from __future__ import annotations

import click

from .app import debug_option

__all__ = ["command"]


@click.command("keygen")
@click.option("--out", required=True, metavar="FILE", help="Where the private key goes; only its owner may read it.")
@debug_option
def command(out: str) -> None:
    """Make a key that signs a stream: the private one goes into a new file, the public one to standard output."""
    from deltastore.signing import generate_key  # noqa: PLC0415 - --help does without

    click.echo(generate_key(out))
