"""A probe passes what keeps the promises, names each that is broken, and leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing

import pytest
import training

from deltastore import open_checkpoint
from deltastore.errors import AccessDenied, ObjectExists, ObjectNotFound, StorageError
from deltastore.init import create_stream
from deltastore.probe import probe, require_exclusive_creation
from deltastore.storage import ObjectInfo, open_backend
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend, LaggingBackend

_names = itertools.count()
LARGE = 1 << 20


def broken(report):
    return [check.name for check in report.checks if not check.ok]


def left(backend):
    return [*backend.list("")]


@pytest.mark.parametrize("kind", ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_what_keeps_the_promises(kind, request, tmp_path):
    url, options = {"local": (str(tmp_path / "store"), {}), "memory": (f"memory://probe-{next(_names)}/run", {})}.get(
        kind, (None, None)
    )
    if url is None:
        server = request.getfixturevalue("s3")
        url, options = f"{server.url}/probe", {**server.storage_options, "client": "obstore"}
    backend = open_backend(url, storage_options=options)
    report = probe(backend, rounds=2)
    assert report.ok, report
    assert report.url == url
    report.require()
    assert [check.name for check in report.checks] == [
        "read after write", "exclusive creation", "overwrite", "listing", "ranged reads", "large object", "delete"
    ]  # fmt: skip
    assert all(check.detail and check.seconds >= 0 for check in report.checks)
    assert left(backend) == []


class Overwrites(LocalBackend):
    """Creation replaces what is there."""

    def create(self, key, data):
        self.write(key, data)


class ChecksThenSets(LocalBackend):
    """As most file systems and fsspec's local one do it: exclusive only as long as nobody else is there."""

    def __init__(self, root):
        super().__init__(root)
        self.meeting = threading.Barrier(2)

    def create(self, key, data):
        try:
            self.read(key, limit=1 << 20)
        except ObjectNotFound:
            if "/race-" in key:
                try:
                    self.meeting.wait(0.3)
                except threading.BrokenBarrierError:
                    raise StorageError("late") from None
        else:
            raise ObjectExists("taken", key=key)
        self.write(key, data)


class LosesTheWinner(LocalBackend):
    """The last one wins, and the first is told that it did."""

    def create(self, key, data):
        try:
            super().create(key, data)
        except ObjectExists:
            self.write(key, data)
            raise


class StaleReads(LocalBackend):
    """Goes on answering what it answered before."""

    def __init__(self, root):
        super().__init__(root)
        self.seen = {}

    def read(self, key, *, limit):
        return self.seen.setdefault(key, super().read(key, limit=limit))


class RemembersAbsence(LocalBackend):
    """What was not there is not there for a while."""

    def __init__(self, root):
        super().__init__(root)
        self.absent = set()

    def read(self, key, *, limit):
        if key not in self.absent:
            try:
                return super().read(key, limit=limit)
            except ObjectNotFound:
                self.absent.add(key)
        raise ObjectNotFound("absent", key=key)


class IgnoresRanges(LocalBackend):
    def read_range(self, key, start, end):
        return self.read(key, limit=1 << 30)


class ListsGhosts(LocalBackend):
    def list(self, prefix):
        yield ObjectInfo(f"{prefix}ghost", 1)


class KeepsDeleted(LocalBackend):
    def delete(self, key):
        if not key.endswith("/delete"):
            super().delete(key)


class CutsLarge(LocalBackend):
    def write(self, key, data):
        super().write(key, data[: LARGE - 1])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Overwrites, {"exclusive creation"}),
        (ChecksThenSets, {"exclusive creation"}),
        (LosesTheWinner, {"exclusive creation"}),
        (StaleReads, {"overwrite"}),
        (RemembersAbsence, {"read after write"}),
        (IgnoresRanges, {"ranged reads"}),
        (ListsGhosts, {"listing"}),
        (KeepsDeleted, {"delete"}),
        (CutsLarge, {"large object"}),
    ],
)
def test_a_broken_promise_is_named(kind, names, tmp_path):
    report = probe(kind(tmp_path), rounds=2, large_bytes=LARGE)
    assert set(broken(report)) == names
    with pytest.raises(StorageError) as caught:
        report.require()
    assert all(name in str(caught.value) for name in names)
    assert caught.value.hint
    if kind is not KeepsDeleted:
        assert left(LocalBackend(tmp_path)) == []


def test_a_listing_that_lags_is_told_and_no_failure(tmp_path):
    report = probe(LaggingBackend(LocalBackend(tmp_path)), large_bytes=LARGE)
    assert report.ok
    assert [check.detail for check in report.checks if "lags" in check.detail] == [
        "it lags: 5 of 5 objects are not shown yet"
    ]


def test_lost_answers_are_no_failure(tmp_path):
    backend = FaultyBackend(LocalBackend(tmp_path))
    backend.add(Fault(operation="create", effect=Effect.NONE))  # the first of two in turn
    backend.add(*[Fault(operation="create", effect=Effect.AFTER)] * 9)
    require_exclusive_creation(backend)
    assert left(backend.inner) == []


@pytest.mark.parametrize("operation", ["read", "write", "create"])
def test_a_place_that_cannot_be_used_is_not_asked_for_more(operation, tmp_path):
    backend = FaultyBackend(LocalBackend(tmp_path))
    backend.add(*[Fault(operation=operation, error=lambda: AccessDenied("no", hint="ask"))] * 99)
    report = probe(backend)
    assert broken(report) == ["read after write"]
    assert len(report.checks) == 1
    if operation != "write":  # creation alone writes nothing
        with pytest.raises(AccessDenied):
            require_exclusive_creation(backend)


def test_an_interruption_leaves_nothing(tmp_path):
    for operation in ("read", "write", "create", "list", "read_range", "delete"):
        backend = FaultyBackend(LocalBackend(tmp_path))
        # The first read finds nothing, as it should: there is no moment after it.
        effect = Effect.BEFORE if operation == "read" else Effect.AFTER
        backend.add(Fault(operation=operation, effect=effect, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            probe(backend, large_bytes=LARGE)
        assert left(backend.inner) == []


def test_only_an_unsafe_option_makes_a_stream_where_creation_overwrites(tmp_path):
    base = open_checkpoint(training.save(tmp_path / "base", training.small_snapshot(0)))
    backend = Overwrites(tmp_path / "store")
    with pytest.raises(StorageError, match="exclusively"):
        create_stream(backend, base)
    assert left(backend) == []
    assert create_stream(backend, base, unsafe_skip_probe=True).base.version == 0


def test_the_command(tmp_path, commands):
    ended = commands.run("deltastore", "probe", tmp_path / "store", "--rounds", "2").ok()
    assert "exclusive creation" in ended.out
    record = commands.run("deltastore", "probe", tmp_path / "store", "--json").ok().json
    assert record["ok"] is True
    assert record["url"] == str(tmp_path / "store")
    assert all(set(check) == {"name", "ok", "seconds", "detail"} for check in record["checks"])
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    commands.run("deltastore", "init", tmp_path / "store", "--base", base, "--unsafe-skip-probe").ok()
    ended = commands.run("deltastore", "probe", "/proc/store", "--json")
    assert ended.code == 1
    assert ended.json["ok"] is False
    assert "read after write" in ended.err
    assert "Try:" in ended.err


@pytest.mark.s3
def test_the_command_on_a_server(s3, commands):
    flags = [word for name, value in s3.storage_options.items() for word in ("--storage-option", f"{name}={value}")]
    commands.run("deltastore", "probe", f"{s3.url}/command", "--rounds", "1", *flags).ok()
    with closing(open_backend(f"{s3.url}/command", storage_options=s3.storage_options)) as backend:
        assert left(backend) == []
