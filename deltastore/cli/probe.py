"""`deltastore probe STORE`."""

from __future__ import annotations

from dataclasses import asdict

import click

from .app import emit, json_option, progress_bar, store_options
from .records import table

__all__ = ["command"]


@click.command("probe")
@store_options
@click.option("--rounds", type=click.IntRange(1), default=5, help="Races and overwrites to try.", show_default=True)
@json_option
def command(store: str, storage_options: dict[str, str], rounds: int, as_json: bool) -> None:
    """Try whether a place keeps what a store needs of it; exits with 1 when it does not."""
    from deltastore.probe import probe  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.storage import open_backend  # noqa: PLC0415

    with progress_bar() as progress:
        report = probe(open_backend(store, storage_options=storage_options), rounds=rounds, progress=progress)
    if as_json:
        emit({"ok": report.ok, **asdict(report)})
    else:
        rows = [
            ("ok" if check.ok else "FAILED", f"{check.seconds:.2f} s", check.name, check.detail)
            for check in report.checks
        ]
        click.echo(table(("", "took", "promise", "seen"), rows))
    report.require()
