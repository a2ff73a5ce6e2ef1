"""`deltastore restore STORE VERSION DIR`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import bandwidth_option, cache_options, progress_bar, store_options, trusted_keys_option

__all__ = ["command"]


@click.command("restore")
@store_options
@trusted_keys_option
@click.argument("version")
@click.argument("directory", metavar="DIR")
@click.option("--base", help="A local checkpoint of the stream to start from (default: the store's anchor).")
@bandwidth_option
@cache_options
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    version: str,
    directory: str,
    base: str | None,
    max_bandwidth: int | None,
    cache: str | None,
    cache_bytes: int | None,
) -> None:
    """Build a version as a complete checkpoint directory."""
    opened = open_store(
        store, storage_options=storage_options, cache=cache, cache_bytes=cache_bytes, trusted_keys=trusted_keys
    )
    wanted = opened.resolve(version).version
    with progress_bar() as progress:
        manifest = opened.restore(wanted, directory, base=base, max_bandwidth=max_bandwidth, progress=progress)
    click.echo(f"version {manifest.version}  {manifest.snapshot_id}  {directory}")
