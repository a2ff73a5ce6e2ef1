"""What the verbs share that ask or tell a running receiver something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.app import emit
from deltastore.errors import DeltastoreError, SlotError, StorageError, UsageError
from deltastore.tokens import read_token

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ask", "order", "url_option"]

_SECONDS = 10.0

url_option = click.option(
    "--url",
    default="http://127.0.0.1:9310",
    show_default=True,
    envvar="RECEIVER_URL",
    help="Where the receiver listens; RECEIVER_TOKEN holds its token.",
)


def ask(url: str, method: str, path: str, body: object = None, *, fields: Iterable[str]) -> dict[str, Any]:
    """Send one request to a running receiver and return its answer; raises what stands in the way.

    An answer without ``fields`` is no receiver's.
    """
    import httpx  # noqa: PLC0415 - --help does without

    token = read_token("RECEIVER_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(
            method, f"{url.rstrip('/')}{path}", json=body, headers=headers, timeout=_SECONDS, trust_env=False
        )
        record = answer.json() if answer.headers.get("content-type") == "application/json" else None
        if answer.is_error and isinstance(record, dict) and (refusal := _refusal(record.get("error"))) is not None:
            raise refusal
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
        raise StorageError(
            f"No receiver answers at {url}: {error}.",
            key=url,
            hint="Start it with `receiver run`, or give its --url, and its token in RECEIVER_TOKEN.",
        ) from error
    if not isinstance(record, dict) or not record.keys() >= set(fields):
        raise StorageError(f"What answers at {url} is no receiver.", key=url, hint="Give another --url.")
    return record


def order(url: str, path: str, body: object = None, *, as_json: bool) -> None:
    """Tell a running receiver something, and print what is in force now."""
    record = ask(url, "POST", path, body, fields=("pinned", "paused"))
    if as_json:
        emit(record)
        return
    click.echo(f"{'pinned':12} {record['pinned'] or 'no'}")
    click.echo(f"{'paused':12} {'yes' if record['paused'] else 'no'}")


def _refusal(told: object) -> DeltastoreError | None:
    """Return what a receiver refused, as the error that it was there; ``None`` for what is none."""
    if not isinstance(told, dict) or not isinstance(told.get("message"), str):
        return None
    kinds: dict[object, type[DeltastoreError]] = {kind.kind: kind for kind in (UsageError, SlotError)}
    hint = told.get("hint")
    return kinds.get(told.get("kind"), StorageError)(told["message"], hint=hint if isinstance(hint, str) else None)
