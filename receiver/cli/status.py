"""`receiver status`."""

from __future__ import annotations

import os

import click

from deltastore.cli.app import debug_option, emit, json_option
from deltastore.errors import StorageError

__all__ = ["command"]


@click.command("status")
@click.option("--url", default="http://127.0.0.1:9310", show_default=True, help="Where the receiver listens.")
@json_option
@debug_option
def command(url: str, as_json: bool) -> None:
    """Ask a running receiver how it is; exits with 1 when it is not ready."""
    import httpx  # noqa: PLC0415 - --help does without

    token = os.environ.get("RECEIVER_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/status", headers=headers, timeout=5, trust_env=False)
        answer.raise_for_status()
        record = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StorageError(
            f"No receiver answers at {url}: {error}.", key=url, hint="Start it with `receiver run`, or give its --url."
        ) from error
    if as_json:
        emit(record)
    else:
        for name in ("state", "ready", "version", "serving", "target", "lag", "store", "checkpoint", "stream_id"):
            click.echo(f"{name:12} {record[name]}")
        stages = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in record["stages"].items())
        click.echo(f"{'stages':12} {stages}")
        if record["error"]:
            click.echo(f"{'error':12} {record['error']['message']}")
    if not record["ready"]:
        raise click.exceptions.Exit(1)
