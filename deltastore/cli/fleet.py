"""`deltastore fleet STORE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from deltastore.errors import CorruptObject, DeltastoreError, UnsupportedFormat, UsageError
from deltastore.groups import Members, group_names, left, members_ledger
from deltastore.heartbeat import forget_members, read_fleet
from deltastore.reader import open_store
from deltastore.turns import Turns, fleet_names, given_back, turns_ledger

from .app import emit, json_option, store_options, trusted_keys_option
from .records import table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.heartbeat import Member
    from deltastore.ledger import Ledger
    from deltastore.reader import Store

__all__ = ["command"]

_DAY = 86_400.0
_DAMAGE = 3
_Record = TypeVar("_Record", Turns, Members)


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
@click.option("--clear-turn", metavar="RECEIVER_ID", help="Take a turn from a receiver that is gone.")
@click.option("--clear-member", metavar="RECEIVER_ID", help="Take a receiver that is gone out of its group.")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    days: float | None,
    clear_turn: str | None,
    clear_member: str | None,
    as_json: bool,
) -> None:
    """Show what each receiver last said of itself, who holds a turn, and who belongs to which group.

    Exits with 3 when any of these records is damaged.
    """
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    if clear_turn is not None:
        _clear_turn(opened, clear_turn)
    if clear_member is not None:
        _clear_member(opened, clear_member)
    members = read_fleet(opened.backend, stream_id=opened.stream_id)
    forgotten = []
    if days is not None:
        forgotten = list(forget_members(opened.backend, members, older_than=days * _DAY))
        members = [member for member in members if member not in forgotten]
    records = [_record(member) for member in members]
    silent = {record["receiver_id"]: record["silent"] for record in records}
    errors = [member.error for member in members if member.error is not None]
    fleets, groups = _fleets(opened, silent, errors), _groups(opened, errors)
    damaged = [{"kind": error.kind, "key": error.key, "hint": error.hint or str(error)} for error in errors]
    if as_json:
        forgotten_ids = [member.receiver_id for member in forgotten]
        emit({"receivers": records, "forgotten": forgotten_ids, "fleets": fleets, "groups": groups, "damaged": damaged})
    else:
        _show(records, fleets, groups)
        for record in damaged:
            click.echo(f"damaged: {record['kind']}  {record['key']}  {record['hint']}")
        for member in forgotten:
            click.echo(f"forgotten: {member.receiver_id}", err=True)
    if damaged:
        raise click.exceptions.Exit(_DAMAGE)


def _show(records: list[dict[str, Any]], fleets: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    click.echo(table(("receiver", "version", "target", "lag", "age", "group", "state", "host"), [*map(_row, records)]))
    for fleet in fleets:
        for turn in fleet["turns"]:
            gone = ", who is silent: the rollout waits for it, or for --clear-turn" if turn["silent"] else ""
            click.echo(f"turn of {fleet['fleet']}: {turn['receiver_id']} for version {turn['version']}{gone}")
    for group in groups:
        missing = group["size"] - len(group["members"])
        click.echo(
            f"group {group['group']}: {', '.join(group['members'])}"
            f"{f', and {missing} that have not joined' if missing else ''}; leader {group['leader'] or '-'}"
        )


def _newest(ledger: Ledger[_Record], errors: list[DeltastoreError]) -> _Record | None:
    """Return the record that holds; one that cannot be read is among the errors, and nothing is said instead of it."""
    try:
        return ledger.newest()
    except (CorruptObject, UnsupportedFormat) as error:
        errors.append(error)
        return None


def _fleets(store: Store, silent: Mapping[str, bool], errors: list[DeltastoreError]) -> list[dict[str, Any]]:
    fleets = []
    for name in fleet_names(store.backend):
        turns = _newest(turns_ledger(store.backend, stream_id=store.stream_id, fleet=name), errors)
        if turns is not None:
            held = [
                {
                    "receiver_id": holder.receiver_id,
                    "version": holder.version,
                    "seconds": holder.seconds,
                    "silent": silent.get(holder.receiver_id, True),
                }
                for holder in turns.holders
            ]
            fleets.append({"fleet": name, "turns": held, "promoted": [choice.version for choice in turns.promoted]})
    return fleets


def _groups(store: Store, errors: list[DeltastoreError]) -> list[dict[str, Any]]:
    groups = []
    for name in group_names(store.backend):
        members = _newest(members_ledger(store.backend, stream_id=store.stream_id, group=name), errors)
        if members is not None:
            ids = [member.receiver_id for member in members.members]
            groups.append({"group": name, "size": members.size, "members": ids, "leader": members.leader})
    return groups


def _clear_turn(store: Store, receiver_id: str) -> None:
    cleared, errors = False, list[DeltastoreError]()
    for name in fleet_names(store.backend):
        ledger = turns_ledger(store.backend, stream_id=store.stream_id, fleet=name)
        turns = _newest(ledger, errors)
        if turns is not None and turns.holds(receiver_id):
            ledger.change(lambda turns: given_back(turns, receiver_id=receiver_id, by="operator"))
            cleared = True
    if not cleared and errors:  # it may hold one
        raise errors[0]
    if not cleared:
        raise UsageError(f"{receiver_id} holds no turn.", hint="`deltastore fleet` shows who does.")


def _clear_member(store: Store, receiver_id: str) -> None:
    cleared, errors = False, list[DeltastoreError]()
    for name in group_names(store.backend):
        ledger = members_ledger(store.backend, stream_id=store.stream_id, group=name)
        members = _newest(ledger, errors)
        if members is not None and receiver_id in members.ids:
            ledger.change(lambda members: left(members, receiver_id=receiver_id))
            cleared = True
    if not cleared and errors:  # it may be a member there
        raise errors[0]
    if not cleared:
        raise UsageError(f"{receiver_id} is in no group.", hint="`deltastore fleet` shows who is.")


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
