"""Heartbeats: what each receiver last said of itself, one small object under ``fleet/`` in the store.

They are for people to look at. Nothing that a trainer or a receiver does depends on one.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from .clock import seconds_since
from .digest import DEFAULT_HASH, hasher
from .errors import CorruptObject, DeltastoreError, ObjectNotFound, UnsupportedFormat
from .record import FORMAT, CommitTime, Identifier, VersionNumber, encode_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .storage.base import Backend, Buffer

__all__ = [
    "FLEET",
    "MAX_HEARTBEAT_BYTES",
    "Heartbeat",
    "Member",
    "encode_heartbeat",
    "forget_members",
    "heartbeat_key",
    "is_receiver_id",
    "is_word",
    "parse_heartbeat",
    "read_fleet",
]

FLEET = "fleet/"
MAX_HEARTBEAT_BYTES = 16 << 10

_RECEIVER_ID = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_KEY = re.compile(rf"fleet/({_RECEIVER_ID})\.json\Z", re.ASCII)
_READERS = 16
#: After so many intervals without a heartbeat, and this many seconds more, a receiver is called silent.
_MISSED_INTERVALS = 3
_GRACE_SECONDS = 15.0

# Shown on terminals: printable ASCII and nothing else.
_WORD = r"[ -~]{1,255}"
Word = Annotated[str, Meta(pattern=rf"^{_WORD}\Z")]
State = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
ReceiverId = Annotated[str, Meta(pattern=rf"^{_RECEIVER_ID}\Z")]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver at one moment. ``stages`` are the seconds of its last update, ``every`` those between heartbeats."""

    format: int = FORMAT
    stream_id: Identifier
    receiver_id: ReceiverId
    host: Word
    group: Word | None = None
    version: VersionNumber | None = None
    target: VersionNumber | None = None
    state: State
    pinned: Word | None = None
    paused: bool = False
    stages: Annotated[dict[State, Seconds], Meta(max_length=64)]
    software: Word
    every: Seconds
    sent_at: CommitTime

    @property
    def lag(self) -> int | None:
        """Versions between what it holds and what it wants; negative on the way back."""
        return None if self.version is None or self.target is None else self.target - self.version

    @property
    def age(self) -> float | None:
        """Seconds since it was sent, by this machine's clock against the sender's."""
        return seconds_since(self.sent_at)

    @property
    def silent(self) -> bool:
        """Whether heartbeats that should have come since did not."""
        return self.age is None or self.age > _MISSED_INTERVALS * self.every + _GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Member:
    """What lies under one key of the fleet: a heartbeat, or why it is none."""

    key: str
    heartbeat: Heartbeat | None = None
    error: DeltastoreError | None = None

    @property
    def receiver_id(self) -> str:
        """The receiver's id, or what its key says."""
        return self.key.removeprefix(FLEET).removesuffix(".json")


def is_receiver_id(text: str) -> bool:
    """Tell whether a text may name a receiver."""
    return re.fullmatch(_RECEIVER_ID, text, re.ASCII) is not None


def is_word(text: str) -> bool:
    """Tell whether a text can be shown anywhere: printable ASCII, not too long."""
    return re.fullmatch(_WORD, text, re.ASCII) is not None


def heartbeat_key(receiver_id: str) -> str:
    """Return the key of a receiver's heartbeat."""
    return f"{FLEET}{receiver_id}.json"


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Return a heartbeat as it is stored."""
    return encode_record(heartbeat, hash_function=hasher(DEFAULT_HASH))


def parse_heartbeat(data: Buffer, *, key: str, stream_id: str) -> Heartbeat:
    """Parse a stored heartbeat strictly; raises ``CorruptObject`` or ``UnsupportedFormat``."""
    if len(data) > MAX_HEARTBEAT_BYTES:
        raise CorruptObject(f"{key} is larger than a heartbeat may be.", key=key)
    heartbeat, _ = parse_record(data, Heartbeat, key=key)
    if heartbeat_key(heartbeat.receiver_id) != key:
        raise CorruptObject(f"{key} is the heartbeat of another receiver, {heartbeat.receiver_id}.", key=key)
    if heartbeat.stream_id != stream_id:
        raise CorruptObject(f"{key} is of another stream, {heartbeat.stream_id}.", key=key)
    if heartbeat.age is None:
        raise CorruptObject(f"{key} was sent at no time that there is.", key=key)
    return heartbeat


def read_fleet(backend: Backend, *, stream_id: str) -> list[Member]:
    """Return all receivers that left a heartbeat, by id. One that is damaged is returned as such.

    Raises ``StorageError`` when the store cannot be listed or read.
    """
    keys = sorted(info.key for info in backend.list(FLEET) if _KEY.match(info.key))

    def read(key: str) -> Member | None:
        try:
            return Member(
                key, parse_heartbeat(backend.read(key, limit=MAX_HEARTBEAT_BYTES), key=key, stream_id=stream_id)
            )
        except ObjectNotFound:
            return None  # it was stopped meanwhile
        except (CorruptObject, UnsupportedFormat) as error:
            return Member(key, error=error)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="fleet") as pool:
        return [member for member in pool.map(read, keys) if member is not None]


def forget_members(backend: Backend, members: Iterable[Member], *, older_than: float) -> Iterator[Member]:
    """Delete heartbeats older than so many seconds, and damaged ones; yields each when it is gone.

    A receiver that still runs writes its own anew.
    """
    for member in members:
        age = member.heartbeat.age if member.heartbeat is not None else None
        if age is None or age > older_than:
            backend.delete(member.key)
            yield member
