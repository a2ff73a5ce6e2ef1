"""`deltastore check STORE`."""

from __future__ import annotations

from dataclasses import asdict

import click

from .app import emit, json_option, progress_bar, store_options, trusted_keys_option
from .records import human_bytes

__all__ = ["command"]

_DAMAGE = 3


def _percent(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    try:
        percent = float(value.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise click.BadParameter(f"{value!r} is no share from 0 to 100 %.")
    return percent


@click.command("check")
@store_options
@trusted_keys_option
@click.option("--read-data", is_flag=True, help="Read every part and prove every version's snapshot id.")
@click.option(
    "--read-data-subset",
    default="0",
    metavar="PERCENT",
    callback=_percent,
    help="Read a share of the parts, chosen at random: 5 or 5%.",
)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    read_data: bool,
    read_data_subset: float,
    as_json: bool,
) -> None:
    """Check a store for damage; exits with 3 when there is any."""
    from deltastore.fsck import check  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.signing import load_public_keys  # noqa: PLC0415
    from deltastore.storage import open_backend  # noqa: PLC0415

    keys = load_public_keys(trusted_keys) if trusted_keys is not None else None
    backend = open_backend(store, storage_options=storage_options)
    with progress_bar() as progress:
        report = check(
            backend, read_data=read_data, subset_percent=read_data_subset, trusted_keys=keys, progress=progress
        )
    if as_json:
        emit({"ok": report.ok, **asdict(report)})
    else:
        for problem in report.problems:
            click.echo(f"{problem.kind}  {problem.key}  {problem.hint}")
        verdict = "no problems" if report.ok else f"{len(report.problems)} problems"
        click.echo(f"{report.objects} objects, {human_bytes(report.bytes_read)} read: {verdict}")
    if not report.ok:
        raise click.exceptions.Exit(_DAMAGE)
