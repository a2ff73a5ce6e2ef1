"""What the verbs share that ask or tell a running receiver something."""

from __future__ import annotations

import os
from typing import Any

import click

from deltastore.cli.app import emit
from deltastore.errors import DeltastoreError, SlotError, StorageError, UsageError

__all__ = ["ask", "show_control", "url_option"]

_SECONDS = 10.0

url_option = click.option(
    "--url",
    default="http://127.0.0.1:9310",
    show_default=True,
    envvar="RECEIVER_URL",
    help="Where the receiver listens; RECEIVER_TOKEN holds its token.",
)


def ask(url: str, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Send one request to a running receiver and return its answer; raises what stands in the way."""
    import httpx  # noqa: PLC0415 - --help does without

    token = os.environ.get("RECEIVER_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(
            method, f"{url.rstrip('/')}{path}", json=body, headers=headers, timeout=_SECONDS, trust_env=False
        )
        record = answer.json() if answer.headers.get("content-type") == "application/json" else None
        if isinstance(record, dict) and isinstance(record.get("error"), dict) and answer.is_error:
            raise _refusal(record["error"])
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StorageError(
            f"No receiver answers at {url}: {error}.",
            key=url,
            hint="Start it with `receiver run`, or give its --url, and its token in RECEIVER_TOKEN.",
        ) from error
    if not isinstance(record, dict):
        raise StorageError(f"What answers at {url} is no receiver.", key=url, hint="Give another --url.")
    return record


def _refusal(told: dict[str, Any]) -> DeltastoreError:
    kinds: dict[object, type[DeltastoreError]] = {kind.kind: kind for kind in (UsageError, SlotError)}
    return kinds.get(told.get("kind"), StorageError)(str(told.get("message")), hint=told.get("hint"))


def show_control(record: dict[str, Any], *, as_json: bool) -> None:
    """Print what is in force now."""
    if as_json:
        emit(record)
        return
    click.echo(f"{'pinned':12} {record['pinned'] or 'no'}")
    click.echo(f"{'paused':12} {'yes' if record['paused'] else 'no'}")
