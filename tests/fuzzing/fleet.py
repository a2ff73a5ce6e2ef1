"""What receivers write: heartbeats, turns, groups' members and rounds, and the records beside their slots."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from deltastore.errors import CorruptObject, UnsupportedFormat
from deltastore.groups import GroupMember, Members, Wanted, members_ledger
from deltastore.heartbeat import Heartbeat, encode_heartbeat, parse_heartbeat
from deltastore.ledger import Choice, encode_coordination, parse_coordination
from deltastore.storage.base import ObjectInfo
from deltastore.turns import Holder, Turns, turns_ledger
from receiver.records import File, OtherFile, SlotRecord, read_record, record_bytes

from .damage import Damage, record_case
from .decoder import Decoder, memory_within, refused

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM, NOW = "1" * 32, "2026-01-02T03:04:05.678Z"
CHOICE = Choice(7, "2" * 32)


def _heartbeat(damage: Damage) -> bytes:
    return encode_heartbeat(
        Heartbeat(
            stream_id=STREAM,
            receiver_id="r",
            host="h",
            version=damage.random.choice((None, 3)),
            state="following",
            stages={"fetch": 0.5},
            software="receiver 1",
            every=30.0,
            sent_at=NOW,
        )
    )


def _turns(damage: Damage) -> bytes:
    holders = tuple(Holder(f"r{i}", 7, NOW) for i in range(damage.random.randrange(3)))
    return encode_coordination(
        Turns(stream_id=STREAM, fleet="f", number=1, holders=holders, promoted=(CHOICE,), by="r", at=NOW)
    )


def _members(damage: Damage) -> bytes:
    members = tuple(GroupMember(f"r{i}", i == 0) for i in range(damage.random.randrange(3)))
    return encode_coordination(Members(stream_id=STREAM, group="g", number=1, size=2, members=members, at=NOW))


def _wanted(damage: Damage) -> bytes:
    served = damage.random.choice((None, CHOICE))
    round_ = Wanted(wanted=CHOICE, served=served, failed=None, stream_id=STREAM, group="g", number=1, by="r", at=NOW)
    return encode_coordination(round_)


def _slot(damage: Damage) -> bytes:
    files = tuple(File(f"m{i}", 9, 8, 7) for i in range(damage.random.randrange(3)))
    other = (OtherFile("config.json", "xxh3-128:0"),)
    return record_bytes(SlotRecord(1, STREAM, 7, "2" * 32, "s", "xxh3-128", "boot", files, other))


def _attempt(parse: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Callable[[bytes], bool]:
    """Return what tries one record: whatever is accepted is the same when it is written and read again."""

    def attempt(data: bytes) -> bool:
        try:
            with memory_within(200 * len(data) + (512 << 10)):
                record = parse(data)
        except (CorruptObject, UnsupportedFormat) as error:
            return refused(error)
        assert parse(encode(record)) == record
        return True

    return attempt


class _One:
    """A place with one object, as far as a ledger asks."""

    def __init__(self, key: str, data: bytes) -> None:
        self._key, self._data = key, data

    def list(self, _prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(self._key, len(self._data))]

    def read(self, _key: str, *, limit: int) -> bytes:
        if len(self._data) > limit:
            raise CorruptObject(f"{self._key} is too large.", key=self._key)
        return self._data


def _newest(ledger: Callable[[Any], Any], key: str) -> Callable[[bytes], Any]:
    """Return what reads a ledger whose only record is given."""
    return lambda data: ledger(_One(key, data)).newest()


def _read_slot(data: bytes) -> SlotRecord:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "a.json"
        path.write_bytes(data)
        try:
            return read_record(path, SlotRecord)
        except msgspec.DecodeError as error:
            raise CorruptObject(str(error), key=str(path)) from error


def _record(name: str, make: Callable[[Damage], bytes], parse: Callable[[bytes], Any], encode: Any) -> Decoder:
    return Decoder(name, lambda damage: record_case(damage, make), len, _attempt(parse, encode))


DECODERS = (
    _record(
        "heartbeat",
        _heartbeat,
        lambda data: parse_heartbeat(data, key="fleet/r.json", stream_id=STREAM),
        encode_heartbeat,
    ),
    _record(
        "turns",
        _turns,
        _newest(lambda place: turns_ledger(place, stream_id=STREAM, fleet="f"), "turns/f/0000000001.json"),
        encode_coordination,
    ),
    _record(
        "members",
        _members,
        _newest(lambda place: members_ledger(place, stream_id=STREAM, group="g"), "groups/g/members/0000000001.json"),
        encode_coordination,
    ),
    _record("round", _wanted, lambda data: parse_coordination(data, Wanted, key="a round"), encode_coordination),
    _record("slot", _slot, _read_slot, record_bytes),
)
