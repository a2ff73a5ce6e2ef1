"""Ledgers: numbered records of which the newest holds, each created exclusively (docs/format.md, section 15.1).

No answer but what is found afterwards is believed: after every attempt the newest record is listed and read again. So
lost answers, losers of a race, and who slept between its look and its attempt all come to the same.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from .digest import DEFAULT_HASH, hasher
from .errors import CorruptObject, ObjectExists, ObjectNotFound, StorageError
from .record import Identifier, VersionNumber, encode_record, parse_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from .storage.base import Backend, Buffer

__all__ = [
    "MAX_COORDINATION_BYTES",
    "Choice",
    "Ledger",
    "Number",
    "Numbered",
    "encode_coordination",
    "parse_coordination",
]

#: Of one object of a group or of turns, as it is stored.
MAX_COORDINATION_BYTES = 256 << 10

Number = Annotated[int, Meta(ge=1, le=9_999_999_999)]

_NUMBER = re.compile(r"(\d{10})\.json\Z", re.ASCII)
_KEPT = 8
#: How often a change is tried anew before the store is said to be at fault: that many others can hardly have won.
_TRIES = 64


class Numbered(Protocol):
    """What every record of a ledger says of itself."""

    @property
    def number(self) -> int:
        """Counted from 1; the highest one holds."""
        ...


class Choice(msgspec.Struct, frozen=True):
    """A version, and whose commit it is."""

    version: VersionNumber
    commit_id: Identifier


_Record = TypeVar("_Record", bound=msgspec.Struct)
_Kept = TypeVar("_Kept", bound=Numbered)


def encode_coordination(record: msgspec.Struct) -> bytes:
    """Return an object of section 15 as it is stored."""
    return encode_record(record, hash_function=hasher(DEFAULT_HASH))


def parse_coordination(data: Buffer, record_type: type[_Record], *, key: str) -> _Record:
    """Parse an object of section 15 strictly; raises ``CorruptObject`` or ``UnsupportedFormat``."""
    if len(data) > MAX_COORDINATION_BYTES:
        raise CorruptObject(f"{key} is larger than it may be.", key=key)
    record, digest = parse_record(data, record_type, key=key)
    if not digest.startswith(f"{DEFAULT_HASH}:"):
        raise CorruptObject(f"{key} is damaged: its hash is not {DEFAULT_HASH}.", key=key)
    return record


class Ledger(Generic[_Kept]):
    """The records below one prefix.

    ``parse`` takes bytes, key and number, and refuses what is not this ledger's; ``mend`` tells, for the key of a
    record that is damaged, what to do.
    """

    def __init__(
        self,
        backend: Backend,
        prefix: str,
        *,
        parse: Callable[[bytes, str, int], _Kept],
        encode: Callable[[_Kept], bytes],
        mend: Callable[[str], str],
    ) -> None:
        self._backend = backend
        self._prefix = prefix
        self._parse = parse
        self._encode = encode
        self._mend = mend

    def key(self, number: int) -> str:
        """Return the key of a record."""
        return f"{self._prefix}{number:010d}.json"

    def newest(self) -> _Kept | None:
        """Return the record that holds, ``None`` before the first.

        Raises ``StorageError``, and ``CorruptObject`` or ``UnsupportedFormat`` where that record cannot be read: nobody
        may go by the one before it.
        """
        return self._look()[0]

    def has(self, number: int) -> bool:
        """Tell whether there is a record of this number: one small read."""
        try:
            self._backend.read(self.key(number), limit=MAX_COORDINATION_BYTES)
        except ObjectNotFound:
            return False
        except CorruptObject:
            return True
        return True

    def change(self, how: Callable[[_Kept | None], _Kept | None]) -> _Kept | None:
        """Change the state until ``how`` has nothing more to change, and return it as it then is.

        ``how`` makes the next record of the newest one (``None``: there is none), or returns ``None`` when that is to
        stay. It is asked again after every attempt. Raises ``CorruptObject`` and ``StorageError``.
        """
        failure: StorageError | None = None
        failures = 0
        for _ in range(_TRIES):
            record, numbers = self._look()
            wanted = how(record)
            if wanted is None:
                return record
            if failure is not None and failures > 1:
                raise failure
            failure = None
            try:
                self._backend.create(self.key(wanted.number), self._encode(wanted))
            except ObjectExists:
                continue
            except StorageError as error:  # it may be there all the same
                failure, failures = error, failures + 1
            else:
                self._clean(numbers, wanted.number)
        raise StorageError(f"{self._prefix} could not be changed: others always were first.", key=self._prefix)

    def _look(self) -> tuple[_Kept | None, list[int]]:
        while True:
            listed = (info.key.removeprefix(self._prefix) for info in self._backend.list(self._prefix))
            numbers = sorted(int(found[1]) for name in listed if (found := _NUMBER.fullmatch(name)))
            if not numbers:
                return None, numbers
            key = self.key(numbers[-1])
            with suppress(ObjectNotFound):  # so many newer ones since the listing that it was deleted
                return self._read(key, numbers[-1]), numbers

    def _read(self, key: str, number: int) -> _Kept:
        try:
            return self._parse(self._backend.read(key, limit=MAX_COORDINATION_BYTES), key, number)
        except CorruptObject as error:
            raise CorruptObject(error.message, key=key, hint=self._mend(key)) from error

    def _clean(self, numbers: list[int], newest: int) -> None:
        with suppress(StorageError):  # the next one does it
            for number in numbers:
                if number < newest - _KEPT:
                    self._backend.delete(self.key(number))
