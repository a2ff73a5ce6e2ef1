"""Groups: their members, and the objects of their rounds, as they lie in a store (docs/format.md, section 15)."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from .clock import now
from .errors import CorruptObject, ObjectExists, ObjectNotFound, StorageError, UsageError
from .heartbeat import ReceiverId, is_receiver_id
from .ledger import MAX_COORDINATION_BYTES, Choice, Ledger, Number, encode_coordination, parse_coordination
from .record import FORMAT, CommitTime, Identifier

if TYPE_CHECKING:
    from .storage.base import Backend

__all__ = [
    "GROUPS_PREFIX",
    "MOST_MEMBERS",
    "Go",
    "GroupMember",
    "Loaded",
    "Members",
    "Outcome",
    "Ready",
    "RoundObjects",
    "Wanted",
    "group_names",
    "joined",
    "left",
    "members_ledger",
]

GROUPS_PREFIX = "groups/"
MOST_MEMBERS = 1024
_KEY = re.compile(r"groups/([^/]+)/members/\d{10}\.json\Z", re.ASCII)
_ROUND = re.compile(r"(\d{10})/wanted\.json\Z", re.ASCII)
_OBJECT = re.compile(r"(\d{10})/[^/]", re.ASCII)
_KEPT_ROUNDS = 4

Ids = Annotated[tuple[ReceiverId, ...], Meta(max_length=MOST_MEMBERS)]


class GroupMember(msgspec.Struct, frozen=True):
    """One receiver of a group, and whether it has an engine."""

    receiver_id: ReceiverId
    engine: bool


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """A group's members at one moment, in the order in which they joined."""

    format: int = FORMAT
    stream_id: Identifier
    group: ReceiverId
    number: Number
    size: Annotated[int, Meta(ge=1, le=MOST_MEMBERS)]
    members: Annotated[tuple[GroupMember, ...], Meta(max_length=MOST_MEMBERS)]
    at: CommitTime

    @property
    def ids(self) -> frozenset[str]:
        """All their ids."""
        return frozenset(member.receiver_id for member in self.members)

    @property
    def leader(self) -> str | None:
        """Who chooses versions: the first with an engine, or the first of all where none has one."""
        chosen = next((member for member in self.members if member.engine), next(iter(self.members), None))
        return chosen.receiver_id if chosen is not None else None


class _OfRound(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    stream_id: Identifier
    group: ReceiverId
    number: Number
    by: ReceiverId
    at: CommitTime


class Wanted(_OfRound, frozen=True, kw_only=True):
    """A round has begun: what it is to activate, what was served before, and what failed since."""

    wanted: Choice
    served: Choice | None
    failed: Choice | None


class Ready(_OfRound, frozen=True, kw_only=True):
    """A member holds what is wanted, and keeps it."""

    receiver_id: ReceiverId


class Go(_OfRound, frozen=True, kw_only=True):
    """Commit (these members pause and load), or the round is over."""

    commit: bool
    members: Ids


class Loaded(_OfRound, frozen=True, kw_only=True):
    """Whether a member loaded and confirmed what is wanted."""

    receiver_id: ReceiverId
    loaded: bool


class Outcome(_OfRound, frozen=True, kw_only=True):
    """Generation goes on, or the next round decides."""

    resume: bool


_Object = TypeVar("_Object", Wanted, Ready, Go, Loaded, Outcome)


def group_names(backend: Backend) -> list[str]:
    """Return the names of the groups that have members."""
    found = (_KEY.match(info.key) for info in backend.list(GROUPS_PREFIX))
    return sorted({match[1] for match in found if match and is_receiver_id(match[1])})


def members_ledger(backend: Backend, *, stream_id: str, group: str) -> Ledger[Members]:
    """Return the ledger of a group's members."""

    def parse(data: bytes, key: str, number: int) -> Members:
        members = parse_coordination(data, Members, key=key)
        said = (members.stream_id, members.group, members.number)
        if said != (stream_id, group, number) or not len(members.ids) == len(members.members) <= members.size:
            raise CorruptObject(f"{key} is not what its key says.", key=key)
        return members

    return Ledger(
        backend,
        f"{GROUPS_PREFIX}{group}/members/",
        parse=parse,
        encode=encode_coordination,
        mend=lambda _: _delete(group),
    )


def joined(
    members: Members | None, *, stream_id: str, group: str, size: int, receiver_id: str, engine: bool
) -> Members | None:
    """Return the record with a receiver in it; ``None`` when it is in it, as it is.

    Raises ``UsageError`` when the group is of another size, or complete without it.
    """
    me = GroupMember(receiver_id, engine)
    if members is None or not members.members:
        number = 1 if members is None else members.number + 1
        return Members(stream_id=stream_id, group=group, number=number, size=size, members=(me,), at=now())
    if members.size != size:
        raise UsageError(
            f"The group {group} has {members.size} members, not {size}, say {', '.join(sorted(members.ids))}.",
            hint=f"Give all of them one --group-size; {_clear(group)}",
        )
    if me in members.members:
        return None
    if receiver_id in members.ids:
        changed = tuple(me if member.receiver_id == receiver_id else member for member in members.members)
    elif len(members.members) < size:
        changed = (*members.members, me)
    else:
        raise UsageError(
            f"The group {group} has its {size} members already: {', '.join(sorted(members.ids))}.",
            hint=f"If {receiver_id} is to take the place of one, {_clear(group)}",
        )
    return msgspec.structs.replace(members, number=members.number + 1, members=changed, at=now())


def left(members: Members | None, *, receiver_id: str) -> Members | None:
    """Return the record without a receiver; ``None`` when it is not in it."""
    if members is None or receiver_id not in members.ids:
        return None
    others = tuple(member for member in members.members if member.receiver_id != receiver_id)
    return msgspec.structs.replace(members, number=members.number + 1, members=others, at=now())


def _clear(group: str) -> str:
    return f"`deltastore fleet STORE --clear-member ID` removes one that is gone from {group}."


def _delete(group: str) -> str:
    return f"Stop the receivers of {group} and delete {GROUPS_PREFIX}{group}/."


class RoundObjects:
    """The objects of a group's rounds: each is created once, and what is found is what holds."""

    def __init__(self, backend: Backend, *, stream_id: str, group: str, receiver_id: str) -> None:
        self._backend = backend
        self._prefix = f"{GROUPS_PREFIX}{group}/rounds/"
        self._stream_id = stream_id
        self._group = group
        self._receiver_id = receiver_id

    def newest(self) -> int:
        """Return the number of the newest round that has begun, 0 before the first; a listing."""
        listed = (info.key.removeprefix(self._prefix) for info in self._backend.list(self._prefix))
        return max((int(found[1]) for name in listed if (found := _ROUND.fullmatch(name))), default=0)

    def wanted(self, number: int) -> Wanted | None:
        """Return how a round began, ``None`` if it has not."""
        return self._read(Wanted, number, "wanted")

    def go(self, number: int) -> Go | None:
        """Return the decision to load, or not to."""
        return self._read(Go, number, "go")

    def outcome(self, number: int) -> Outcome | None:
        """Return the decision to resume, or not to."""
        return self._read(Outcome, number, "outcome")

    def ready(self, number: int, receiver_id: str) -> bool:
        """Tell whether a member said that it is ready."""
        return self._read(Ready, number, f"ready/{receiver_id}") is not None

    def loaded(self, number: int, receiver_id: str) -> bool | None:
        """Return what a member said of its load, ``None`` if nothing."""
        said = self._read(Loaded, number, f"loaded/{receiver_id}")
        return said.loaded if said is not None else None

    def begin(self, number: int, *, wanted: Choice, served: Choice | None, failed: Choice | None) -> None:
        """Try to begin a round; somebody else's beginning is none of an error."""
        self._create("wanted", Wanted(wanted=wanted, served=served, failed=failed, **self._common(number)))

    def report_ready(self, number: int) -> None:
        """Say that this member is ready."""
        name = f"ready/{self._receiver_id}"
        self._create(name, Ready(receiver_id=self._receiver_id, **self._common(number)))

    def report_loaded(self, number: int, *, loaded: bool) -> None:
        """Say whether this member has loaded; what it said first stays."""
        name = f"loaded/{self._receiver_id}"
        self._create(name, Loaded(receiver_id=self._receiver_id, loaded=loaded, **self._common(number)))

    def decide_go(self, number: int, *, commit: bool, members: frozenset[str]) -> None:
        """Try to decide whether to load; the decision that there is has to be read."""
        self._create("go", Go(commit=commit, members=tuple(sorted(members)), **self._common(number)))

    def decide_outcome(self, number: int, *, resume: bool) -> None:
        """Try to decide whether to resume; the decision that there is has to be read."""
        self._create("outcome", Outcome(resume=resume, **self._common(number)))

    def clean(self, committed: int) -> None:
        """Delete rounds well before one that committed: all members have left them."""
        with suppress(StorageError):  # the next one does it
            for info in list(self._backend.list(self._prefix)):
                found = _OBJECT.match(info.key.removeprefix(self._prefix))
                if found and int(found[1]) < committed - _KEPT_ROUNDS:
                    self._backend.delete(info.key)

    def _common(self, number: int) -> dict[str, Any]:
        common = {"stream_id": self._stream_id, "group": self._group, "number": number}
        return {**common, "by": self._receiver_id, "at": now()}

    def _create(self, name: str, record: _Object) -> None:
        # What is there is read before anything depends on it, so that whose it is makes no difference.
        with suppress(ObjectExists):
            self._backend.create(self._key(record.number, name), encode_coordination(record))

    def _key(self, number: int, name: str) -> str:
        return f"{self._prefix}{number:010d}/{name}.json"

    def _read(self, kind: type[_Object], number: int, name: str) -> _Object | None:
        key = self._key(number, name)
        try:
            data = self._backend.read(key, limit=MAX_COORDINATION_BYTES)
        except ObjectNotFound:
            return None
        try:
            record = parse_coordination(data, kind, key=key)
        except CorruptObject as error:
            raise CorruptObject(error.message, key=key, hint=_delete(self._group)) from error
        said = (record.stream_id, record.group, record.number)
        of_id = isinstance(record, (Ready, Loaded)) and not name.endswith(f"/{record.receiver_id}")
        if said != (self._stream_id, self._group, number) or of_id:
            raise CorruptObject(f"{key} is not what its key says.", key=key, hint=_delete(self._group))
        return record
