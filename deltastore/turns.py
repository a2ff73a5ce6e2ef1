"""Turns: how many receivers of a fleet may be unavailable at once, and what its canary promoted.

A ledger of the holders (docs/format.md, section 15.2). A turn is given back by its holder or by an operator, never by
time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from .clock import now, seconds_since
from .errors import CorruptObject
from .heartbeat import ReceiverId, is_receiver_id
from .ledger import Choice, Ledger, Number, encode_coordination, parse_coordination
from .record import FORMAT, CommitTime, Identifier, VersionNumber

if TYPE_CHECKING:
    from .storage.base import Backend

__all__ = [
    "TURNS_PREFIX",
    "Holder",
    "Turns",
    "fleet_names",
    "given_back",
    "promoting",
    "taken",
    "turns_ledger",
]

TURNS_PREFIX = "turns/"
_KEY = re.compile(r"turns/([^/]+)/\d{10}\.json\Z", re.ASCII)
_MOST_HOLDERS = 1024
_MOST_PROMOTED = 64


class Holder(msgspec.Struct, frozen=True):
    """Who holds a turn, for which version, since when."""

    receiver_id: ReceiverId
    version: VersionNumber
    at: CommitTime

    @property
    def seconds(self) -> float | None:
        """How long ago it was taken, by this machine's clock against the holder's."""
        return seconds_since(self.at)


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet's turns at one moment."""

    format: int = FORMAT
    stream_id: Identifier
    fleet: ReceiverId
    number: Number
    holders: Annotated[tuple[Holder, ...], Meta(max_length=_MOST_HOLDERS)]
    promoted: Annotated[tuple[Choice, ...], Meta(max_length=_MOST_PROMOTED)] = ()
    by: ReceiverId
    at: CommitTime

    def holds(self, receiver_id: str) -> bool:
        """Whether a receiver holds a turn."""
        return any(holder.receiver_id == receiver_id for holder in self.holders)


def turns_ledger(backend: Backend, *, stream_id: str, fleet: str) -> Ledger[Turns]:
    """Return the ledger of a fleet's turns."""

    def parse(data: bytes, key: str, number: int) -> Turns:
        turns = parse_coordination(data, Turns, key=key)
        ids = [holder.receiver_id for holder in turns.holders]
        if (turns.stream_id, turns.fleet, turns.number) != (stream_id, fleet, number) or len(set(ids)) != len(ids):
            raise CorruptObject(f"{key} is not what its key says.", key=key)
        return turns

    return Ledger(backend, f"{TURNS_PREFIX}{fleet}/", parse=parse, encode=encode_coordination, mend=_mend)


def _mend(key: str) -> str:
    # Who holds a turn is not known: the record before it may lack one who is at work.
    return f"When no receiver of the fleet is activating anything, delete {key}; the record before it holds then."


def fleet_names(backend: Backend) -> list[str]:
    """Return the names of the fleets that have turns."""
    found = (_KEY.match(info.key) for info in backend.list(TURNS_PREFIX))
    return sorted({match[1] for match in found if match and is_receiver_id(match[1])})


def taken(
    turns: Turns | None, *, stream_id: str, fleet: str, receiver_id: str, version: int, most: int
) -> Turns | None:
    """Return the record with a turn for a receiver; ``None`` when it has one, or ``most`` are held already."""
    if turns is None:
        turns = Turns(stream_id=stream_id, fleet=fleet, number=1, holders=(), by=receiver_id, at=now())
        number = 1
    else:
        number = turns.number + 1
    if turns.holds(receiver_id) or len(turns.holders) >= most:
        return None
    holders = (*turns.holders, Holder(receiver_id, version, now()))
    return msgspec.structs.replace(turns, number=number, holders=holders, by=receiver_id, at=now())


def given_back(turns: Turns | None, *, receiver_id: str, by: str | None = None) -> Turns | None:
    """Return the record without a receiver's turn; ``None`` when it has none. ``by``: an operator's name."""
    if turns is None or not turns.holds(receiver_id):
        return None
    holders = tuple(holder for holder in turns.holders if holder.receiver_id != receiver_id)
    return msgspec.structs.replace(turns, number=turns.number + 1, holders=holders, by=by or receiver_id, at=now())


def promoting(turns: Turns | None, choice: Choice, *, stream_id: str, fleet: str, receiver_id: str) -> Turns | None:
    """Return the record with a version that a canary promotes as the latest; ``None`` when it is that already."""
    if turns is None:
        return Turns(
            stream_id=stream_id, fleet=fleet, number=1, holders=(), promoted=(choice,), by=receiver_id, at=now()
        )
    if turns.promoted[-1:] == (choice,):
        return None
    promoted = (*(known for known in turns.promoted if known != choice), choice)[-_MOST_PROMOTED:]
    return msgspec.structs.replace(turns, number=turns.number + 1, promoted=promoted, by=receiver_id, at=now())
