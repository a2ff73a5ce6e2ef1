"""`deltastore forget STORE --keep-last N`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from deltastore.errors import UsageError
from deltastore.reader import open_store

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes, human_ranges

if TYPE_CHECKING:
    from deltastore.gc import Forgotten
    from deltastore.policy import Policy
    from deltastore.reader import Store

__all__ = ["command"]


@click.command("forget")
@store_options
@trusted_keys_option
@click.option("--keep-last", required=True, type=click.IntRange(min=1), metavar="N", help="Keep the N newest versions.")
@click.option("--keep-tagged", is_flag=True, help="Keep tagged versions even after their tags are deleted.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep every K-th version from 0 on.")
@click.option("--keep-held", is_flag=True, help="Keep the versions that receivers hold, as their heartbeats say.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be forgotten.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    keep_last: int,
    keep_tagged: bool,
    keep_every: int | None,
    keep_held: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget all versions but those to keep; `deltastore gc` then removes what only they needed.

    This cannot be undone. Tagged versions stay as long as their tags do.
    """
    from deltastore.gc import forget  # noqa: PLC0415 - --help does without
    from deltastore.policy import Policy  # noqa: PLC0415

    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    policy = Policy(keep_last=keep_last, keep_tagged=keep_tagged, keep_every=keep_every)
    held = _held(opened) if keep_held else frozenset()
    if not dry_run and not yes:
        _ask(opened, policy, held)
    with progress_bar() as progress:
        result = forget(opened, policy, advised=held, dry_run=dry_run, progress=progress)
    if as_json:
        emit(_record(result, dry_run=dry_run))
    else:
        word = "would be" if dry_run else "are"
        click.echo(f"{_count(result)} {word} forgotten; {human_ranges(result.kept)} kept")
        click.echo(f"{human_bytes(result.freed_bytes)} may be removed by `deltastore gc`, where no tag needs them")
    for attempt_id in result.refused_routes:
        click.echo(f"The route {attempt_id} did not hold when it was read back, and is let go.", err=True)
    if result.anchor_first is not None:
        click.echo(
            f"An anchor of version {result.anchor_first}, made first, lets {human_bytes(result.anchor_saves)} more go: "
            f"`deltastore anchor {store} {result.anchor_first}`",
            err=True,
        )


def _held(store: Store) -> frozenset[int]:
    """Return the versions that receivers said they hold or go to; what cannot be read advises nothing."""
    from deltastore.heartbeat import read_fleet  # noqa: PLC0415 - only where it is asked for

    members = read_fleet(store.backend, stream_id=store.stream_id)
    versions = {heartbeat.version for member in members if (heartbeat := member.heartbeat) is not None}
    targets = {heartbeat.target for member in members if (heartbeat := member.heartbeat) is not None}
    return frozenset(version for version in versions | targets if version is not None)


def _ask(store: Store, policy: Policy, held: frozenset[int]) -> None:
    from deltastore.gc import forget  # noqa: PLC0415 - as above

    if not sys.stdin.isatty():
        raise UsageError(
            "Forgetting cannot be undone, and nobody is here to ask.", hint="Look with --dry-run, or say --yes."
        )
    result = forget(store, policy, advised=held, dry_run=True)
    click.confirm(f"{_count(result)} will be forgotten for ever. Go on?", abort=True, err=True)


def _count(result: Forgotten) -> str:
    count = sum(last - first + 1 for first, last in result.forgotten)
    return f"{count} versions" + (f" ({human_ranges(result.forgotten)})" if count else "")


def _record(result: Forgotten, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "number": result.number,
        "until": result.until,
        "kept": result.kept,
        "forgotten": result.forgotten,
        "dropped_parts": result.dropped_parts,
        "dropped_routes": result.dropped_routes,
        "freed_bytes": result.freed_bytes,
        "anchor_first": result.anchor_first,
        "anchor_saves": result.anchor_saves,
        "refused_routes": result.refused_routes,
    }
