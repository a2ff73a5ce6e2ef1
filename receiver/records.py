"""What is written beside the slots: small records, each with its own digest, so that a torn one is never believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from deltastore.digest import DEFAULT_HASH, HASHES, hasher

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMAT", "File", "Goal", "OtherFile", "ScrubRecord", "SlotRecord", "read_record", "record_bytes"]

FORMAT = 1


class File(msgspec.Struct, frozen=True, array_like=True):
    """A weight file as it was before it was verified: its name, size, modification time (ns) and inode."""

    name: str
    size: int
    modified_ns: int
    inode: int


class OtherFile(msgspec.Struct, frozen=True, array_like=True):
    """A file beside the weights: its name and its digest."""

    name: str
    digest: str


class SlotRecord(msgspec.Struct, frozen=True):
    """What a slot holds. ``boot_id`` is that of the kernel under which the bytes were last hashed."""

    format: int
    stream_id: str
    version: int
    commit_id: str
    snapshot_id: str
    hash: str
    boot_id: str
    files: tuple[File, ...]
    other_files: tuple[OtherFile, ...]


class Goal(msgspec.Struct, frozen=True):
    """What a half-written slot is to become: a version, and everything about its files but the tensors' bytes."""

    format: int
    stream_id: str
    commit_id: str
    outline: str


class ScrubRecord(msgspec.Struct, frozen=True):
    """How far the live slot's chunks were read over, and when all of them last were."""

    format: int
    slot: str
    commit_id: str
    chunk: int
    passed_at: str | None


_Record = TypeVar("_Record", SlotRecord, Goal, ScrubRecord)


def record_bytes(record: SlotRecord | Goal | ScrubRecord) -> bytes:
    """Return a record as it is kept: a line of JSON, and its digest."""
    line = msgspec.json.encode(record, order="sorted")
    return b"%b\n%b\n" % (line, hasher(DEFAULT_HASH).of(line).encode())


def read_record(path: Path, kind: type[_Record]) -> _Record:
    """Read a record; raises ``OSError``, or ``msgspec.DecodeError`` for one that is torn, damaged or of the future."""
    line, _, rest = path.read_bytes().partition(b"\n")
    algorithm = rest.partition(b":")[0].decode("ascii", "replace")
    if algorithm not in HASHES or hasher(algorithm).of(line).encode() + b"\n" != rest:
        raise msgspec.DecodeError("its digest does not fit")
    record = msgspec.json.decode(line, type=kind)
    if record.format != FORMAT:
        raise msgspec.DecodeError(f"it has the format {record.format}, this release knows {FORMAT}")
    return record
