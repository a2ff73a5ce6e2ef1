"""Prove that a place keeps the promises that a store needs of it (``storage.base``), by trying each.

Its objects are below ``probes/<random>/`` and are removed again. Nothing here trusts a listing.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import DeltastoreError, ObjectExists, ObjectNotFound, StorageError
from .manifest import MAX_PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .storage import Backend

__all__ = ["Check", "ProbeReport", "probe", "require_exclusive_creation"]

_RACERS: Final = 8
_HINT: Final = "use a local directory, NFS, or an S3 service with conditional writes"


class _NotKept(Exception):
    """A promise is broken: the message says how."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, tried: ``detail`` says what was seen, ``seconds`` how long it took."""

    name: str
    ok: bool
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was tried at a place, in order; after a first failure to write and read, nothing else is."""

    url: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether a store may be made there."""
        return all(check.ok for check in self.checks)

    def require(self) -> None:
        """Raise ``StorageError`` with what is not kept."""
        broken = [f"{check.name} ({check.detail})" for check in self.checks if not check.ok]
        if broken:
            raise StorageError(
                f"{self.url} does not keep what a store needs: {'; '.join(broken)}",
                transient=False,
                key=self.url,
                hint=_HINT,
            )


def probe(
    backend: Backend,
    *,
    rounds: int = 5,
    large_bytes: int = MAX_PART_BYTES,
    progress: Callable[[str, int, int], object] | None = None,
) -> ProbeReport:
    """Try every promise at a place: ``rounds`` races and overwrites, one object of ``large_bytes``."""
    trials: dict[str, Callable[[_Place], str]] = {
        "read after write": _read_after_write,
        "exclusive creation": lambda place: _exclusive_creation(place, rounds),
        "overwrite": lambda place: _overwrite(place, rounds),
        "listing": _listing,
        "ranged reads": _ranged_reads,
        "large object": lambda place: _large_object(place, large_bytes),
        "delete": _delete,
    }
    checks: list[Check] = []
    with _place(backend) as place:
        for name, trial in trials.items():
            if progress is not None:
                progress("probe", len(checks), len(trials))
            started = time.monotonic()
            try:
                ok, detail = True, trial(place)
            except (_NotKept, DeltastoreError) as error:
                ok, detail = False, str(error)
            checks.append(Check(name, ok, time.monotonic() - started, detail))
            if not checks[0].ok:
                break  # it cannot be reached or used at all, and each further trial would wait for that again
    return ProbeReport(backend.url, tuple(checks))


def require_exclusive_creation(backend: Backend, *, rounds: int = 1) -> None:
    """Raise ``StorageError`` where two writers could each believe that they had created the same object."""
    with _place(backend) as place:
        try:
            _exclusive_creation(place, rounds)
        except _NotKept as error:
            raise StorageError(
                f"{backend.url} does not create objects exclusively: {error}",
                transient=False,
                key=backend.url,
                hint=_HINT,
            ) from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a probe's objects are; ``used`` is all that may be there."""

    backend: Backend
    prefix: str
    used: set[str]

    def key(self, name: str) -> str:
        """Return the key of an object that the probe is about to make."""
        key = f"{self.prefix}{name}"
        self.used.add(key)
        return key

    def clear(self) -> None:
        """Remove all that may be there."""
        for key in self.used:
            with suppress(StorageError):  # what was found, or what went wrong before, is what has to be told
                self.backend.delete(key)

    def read(self, key: str, size: int) -> bytes:
        """Read an object of about ``size`` bytes that was just made."""
        try:
            return self.backend.read(key, limit=size + 1024)
        except ObjectNotFound:
            raise _NotKept("an object that was just stored is not found") from None


@contextmanager
def _place(backend: Backend) -> Iterator[_Place]:
    place = _Place(backend, f"probes/{secrets.token_hex(16)}/", set())
    try:
        yield place
    finally:
        try:
            place.clear()
        except BaseException:  # to the end even if it is interrupted once
            place.clear()
            raise


def _read_after_write(place: _Place) -> str:
    for number in range(3):
        key, data = place.key(f"read-{number}"), os.urandom(1000)
        with suppress(ObjectNotFound):
            place.backend.read(key, limit=1000)
            raise _NotKept("an object is found that nobody stored")
        # Asked for before it was there, as a poll does: an absence that was seen once must not be believed again.
        if number:
            place.backend.write(key, data)
        else:
            place.backend.create(key, data)
        if place.read(key, len(data)) != data:
            raise _NotKept("other bytes are read than were stored")
    return "what was stored is read at once, also where it was looked for before"


def _exclusive_creation(place: _Place, rounds: int) -> str:
    """Create one key twice, one after the other, then with many at once."""
    key = place.key("create")
    place.backend.create(key, b"first")
    if _creates(place.backend, key, b"second") or place.read(key, 16) != b"first":
        raise _NotKept("a second creation replaces the first")
    with ThreadPoolExecutor(_RACERS) as pool:
        for number in range(rounds):
            _race(place, place.key(f"race-{number}"), pool)
    return f"{rounds} races of {_RACERS}, never two winners"


def _race(place: _Place, key: str, pool: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(_RACERS)
    contents = [f"racer {number} ".encode() * 50 for number in range(_RACERS)]

    def run(content: bytes) -> bool:
        barrier.wait()
        return _creates(place.backend, key, content)

    won = [content for content, winner in zip(contents, [*pool.map(run, contents)], strict=True) if winner]
    if len(won) > 1:
        raise _NotKept(f"{len(won)} of {_RACERS} who created one object at once were each told that it is theirs")
    found = place.read(key, len(contents[0]))
    # Nobody may have won: the winner's answer was lost. Then it is any one of theirs, whole.
    if found not in (won or contents):
        raise _NotKept("the object is not the one whose creation succeeded")


def _creates(backend: Backend, key: str, data: bytes) -> bool:
    """Whether a creation succeeds. An outcome that is not known counts as none."""
    try:
        backend.create(key, data)
    except ObjectExists:
        return False
    except StorageError as error:
        if not error.transient and not _is_there(backend, key):
            raise  # refused, and not because the key is taken
        return False
    return True


def _is_there(backend: Backend, key: str) -> bool:
    try:
        backend.read(key, limit=1024)
    except ObjectNotFound:
        return False
    return True


def _overwrite(place: _Place, rounds: int) -> str:
    key = place.key("overwrite")
    for number in range(rounds):
        data = os.urandom(1000 - number)
        place.backend.write(key, data)
        if place.read(key, 1000) != data:
            raise _NotKept("after an overwrite the old bytes are read")
    return f"{rounds} overwrites, each read at once"


def _listing(place: _Place) -> str:
    sizes = {place.key(f"list/{number}"): number for number in range(5)}
    for key, size in sizes.items():
        place.backend.write(key, b"x" * size)
    listed = {info.key: info.size for info in place.backend.list(f"{place.prefix}list/")}
    if not listed.items() <= sizes.items():
        raise _NotKept("a listing shows what is not there, or another size")
    missing = len(sizes) - len(listed)
    return (
        f"it lags: {missing} of {len(sizes)} objects are not shown yet" if missing else "it shows all objects at once"
    )


def _ranged_reads(place: _Place) -> str:
    key, data = place.key("ranges"), os.urandom(100_000)
    place.backend.write(key, data)
    ranges = [(0, 1), (0, len(data)), (70_000, 70_001), (1234, 98_765), (len(data) - 1, len(data))]
    with ThreadPoolExecutor(len(ranges)) as pool:
        found = [*pool.map(lambda pair: place.backend.read_range(key, *pair), ranges)]
    if found != [data[start:end] for start, end in ranges]:
        raise _NotKept("a ranged read returns other bytes")
    return f"{len(ranges)} ranges, in threads"


def _large_object(place: _Place, size: int) -> str:
    key, data = place.key("large"), os.urandom(size)
    started = time.monotonic()
    place.backend.write(key, data)
    written = time.monotonic()
    if place.read(key, size) != data:
        raise _NotKept("a large object is not read as it was stored")
    up, down = (size / 1e6 / max(seconds, 1e-9) for seconds in (written - started, time.monotonic() - written))
    place.backend.delete(key)
    return f"{size >> 20} MiB, {up:.0f} MB/s up, {down:.0f} MB/s down"


def _delete(place: _Place) -> str:
    key = place.key("delete")
    place.backend.write(key, b"x")
    place.backend.delete(key)
    if _is_there(place.backend, key):
        raise _NotKept("a deleted object is still read")
    place.backend.delete(key)
    place.backend.create(key, b"y")
    if place.read(key, 1) != b"y":
        raise _NotKept("what was created after a deletion is not what is read")
    return "gone at once, and the key is free again"
