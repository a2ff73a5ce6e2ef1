"""`deltastore gc STORE`."""

from __future__ import annotations

import click

from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes, table

__all__ = ["command"]


@click.command("gc")
@store_options
@trusted_keys_option
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0, max=1e9),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Leave routes alone that were begun less than so long ago.",
)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    dry_run: bool,
    grace: float,
    as_json: bool,
) -> None:
    """Remove objects that nothing needs any more. Safe at any time, beside anything."""
    from deltastore.gc import collect  # noqa: PLC0415 - --help does without

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    with progress_bar() as progress:
        result = collect(opened, dry_run=dry_run, grace=grace, progress=progress)
    reasons = result.by_reason()
    if as_json:
        emit(
            {
                "dry_run": dry_run,
                "objects": len(result.objects),
                "freed_bytes": result.freed_bytes,
                "reasons": {name: {"objects": count, "bytes": size} for name, (count, size) in reasons.items()},
                "young": result.young,
            }
        )
        return
    if reasons:
        rows = [(str(count), human_bytes(size), name) for name, (count, size) in sorted(reasons.items())]
        click.echo(table(("objects", "bytes", "reason"), rows))
    word = "would be removed" if dry_run else "removed"
    click.echo(f"{len(result.objects)} objects, {human_bytes(result.freed_bytes)} {word}")
    if result.young:
        click.echo(f"{result.young} unfinished routes were begun a short while ago and are left alone.", err=True)
