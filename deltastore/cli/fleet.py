"""`deltastore fleet STORE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.heartbeat import forget_members, read_fleet
from deltastore.reader import open_store

from .app import emit, json_option, store_options, trusted_keys_option
from .records import table

if TYPE_CHECKING:
    from deltastore.heartbeat import Member

__all__ = ["command"]

_DAY = 86_400.0


@click.command("fleet")
@store_options
@trusted_keys_option
@click.option(
    "--forget-older-than",
    "days",
    type=click.FloatRange(0, 36_500),
    is_flag=False,
    flag_value=7.0,
    metavar="DAYS",
    help="Delete heartbeats that are older (7 days if no number follows), and damaged ones.",
)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    days: float | None,
    as_json: bool,
) -> None:
    """Show what each receiver last said of itself."""
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    members = read_fleet(opened.backend, stream_id=opened.stream_id)
    forgotten = []
    if days is not None:
        forgotten = list(forget_members(opened.backend, members, older_than=days * _DAY))
        members = [member for member in members if member not in forgotten]
    records = [_record(member) for member in members]
    if as_json:
        emit({"receivers": records, "forgotten": [member.receiver_id for member in forgotten]})
        return
    click.echo(table(("receiver", "version", "target", "lag", "age", "group", "state", "host"), [*map(_row, records)]))
    for member in forgotten:
        click.echo(f"forgotten: {member.receiver_id}", err=True)


def _record(member: Member) -> dict[str, Any]:
    heartbeat = member.heartbeat
    if heartbeat is None:
        nothing = dict.fromkeys(("host", "group", "version", "target", "lag", "heartbeat_age", "pinned", "software"))
        unknown = {"state": "damaged", "stages": {}, "silent": True, "paused": None, "error": str(member.error)}
        return {"receiver_id": member.receiver_id, **nothing, **unknown}
    return {
        "receiver_id": heartbeat.receiver_id,
        "host": heartbeat.host,
        "group": heartbeat.group,
        "version": heartbeat.version,
        "target": heartbeat.target,
        "lag": heartbeat.lag,
        "state": heartbeat.state,
        "heartbeat_age": heartbeat.age,
        "silent": heartbeat.silent,
        "pinned": heartbeat.pinned,
        "paused": heartbeat.paused,
        "stages": heartbeat.stages,
        "software": heartbeat.software,
        "error": None,
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    age = record["heartbeat_age"]
    state = f"{record['state']}{', pinned' if record['pinned'] else ''}"
    if record["silent"] and record["error"] is None:
        state += ", silent"
    shown = [record["receiver_id"], *("-" if record[name] is None else str(record[name]) for name in _NUMBERS)]
    return (*shown, "-" if age is None else f"{age:.0f} s", record["group"] or "-", state, record["host"] or "-")


_NUMBERS = ("version", "target", "lag")
