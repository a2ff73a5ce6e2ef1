"""The faulty backend does what its script says."""

from __future__ import annotations

import pytest

from deltastore.digest import hasher
from deltastore.errors import AccessDenied, CorruptObject, ObjectNotFound, StorageError, UsageError
from deltastore.manifest import ObjectRef
from deltastore.spool import read_object
from deltastore.storage.local import LocalBackend
from deltastore.storage.retry import RetryingBackend
from deltastore.testing import (
    Effect,
    Fault,
    FaultKind,
    FaultyBackend,
    RandomFaults,
    flip_bit,
    make_fault,
    oversize,
    truncate,
)
from deltastore.testing.storage_contract import StorageContract


class TestFaultyBackendWithoutFaults(StorageContract):
    race_rounds = 10

    @pytest.fixture
    def open_another(self, tmp_path):
        return lambda: FaultyBackend(LocalBackend(tmp_path))


@pytest.fixture
def backend(tmp_path):
    return FaultyBackend(LocalBackend(tmp_path))


def test_before_and_after(backend):
    backend.add(Fault(operation="write"), Fault(operation="write", effect=Effect.AFTER))
    with pytest.raises(StorageError):
        backend.write("a", b"1")
    with pytest.raises(ObjectNotFound):
        backend.read("a", limit=9)
    with pytest.raises(StorageError):
        backend.write("a", b"2")
    assert backend.read("a", limit=9) == b"2"
    backend.write("a", b"3")
    assert backend.read("a", limit=9) == b"3"
    assert backend.remaining == 0


def test_late(backend):
    backend.add(Fault(operation="create", effect=Effect.LATE), Fault(operation="create", effect=Effect.LATE))
    for data in (b"1", b"2"):
        with pytest.raises(StorageError):
            backend.create("a", data)
    with pytest.raises(ObjectNotFound):
        backend.read("a", limit=9)
    backend.land()
    assert backend.read("a", limit=9) == b"1"


@pytest.mark.parametrize(
    ("damage", "expected"), [(truncate, b"ab"), (flip_bit(8), b"accd"), (oversize, b"abcd\0\0\0\0\0")]
)
def test_damage(backend, damage, expected):
    backend.write("a", b"abcd")
    backend.add(Fault(operation="read", effect=Effect.NONE, damage=damage))
    assert backend.read("a", limit=9) == expected
    assert backend.read("a", limit=9) == b"abcd"


def test_chooses_by_key_and_operation(backend):
    backend.add(Fault(operation="write", key_prefix="b"), Fault(operation="read"))
    backend.write("a", b"1")
    with pytest.raises(StorageError):
        backend.write("b", b"1")
    with pytest.raises(StorageError):
        backend.read("a", limit=9)
    assert backend.calls == [("write", "a"), ("write", "b"), ("read", "a")]


def test_hooks(backend):
    seen = []
    backend.add(
        Fault(
            operation="write",
            effect=Effect.NONE,
            hook=lambda: seen.append([*backend.inner.list("")]),
            after=lambda: seen.append([*backend.inner.list("")]),
        )
    )
    backend.write("a", b"1")
    assert [len(each) for each in seen] == [0, 1]


DAMAGES = {FaultKind.TRUNCATE, FaultKind.FLIP}
OPERATIONS = ("read", "read_range", "write", "create", "list", "delete")


def call(backend, operation):
    calls = {
        "read": lambda: backend.read("a", limit=9),
        "read_range": lambda: backend.read_range("a", 1, 3),
        "write": lambda: backend.write("a", b"changed"),
        "create": lambda: backend.create("b", b"x"),
        "list": lambda: [*backend.list("")],
        "delete": lambda: backend.delete("a"),
    }
    return calls[operation]()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_of_fault_does_what_it_is_named_for(backend, kind, operation):
    backend.write("a", b"abcd")
    if kind in DAMAGES and not operation.startswith("read"):
        with pytest.raises(UsageError):
            make_fault(kind, operation)
        return
    slept = []
    backend.add(make_fault(kind, operation, bit=3, seconds=7, sleep=slept.append))
    before = [(info, backend.inner.read(info.key, limit=9)) for info in backend.inner.list("")]
    caught = None
    try:
        call(backend, operation)
    except StorageError as error:
        caught = error
    after = [(info, backend.inner.read(info.key, limit=9)) for info in backend.inner.list("")]
    assert (caught is None) == (kind in DAMAGES | {FaultKind.SLOW})
    assert isinstance(caught, AccessDenied) == (kind is FaultKind.DENY)
    assert slept == ([7] if kind in {FaultKind.STALL, FaultKind.SLOW} else [])
    done = kind in {FaultKind.SLOW, FaultKind.LOSE_ANSWER} and operation in {"write", "create", "delete"}
    assert (before != after) == done


def test_chance_is_the_same_for_the_same_seed(backend):
    backend.write("a", b"abcd")

    def run(seed):
        chance = RandomFaults(seed=seed, share=0.5, sleep=lambda _: None)
        return [chance.draw(OPERATIONS[number % 6]) for number in range(100)]

    def shape(faults):
        return [fault and (fault.operation, fault.effect, fault.damage is None, fault.hook is None) for fault in faults]

    assert shape(run(1)) == shape(run(1))
    assert shape(run(1)) != shape(run(2))
    assert 20 < sum(fault is not None for fault in run(1)) < 80


def test_under_any_faults_what_is_read_is_right_or_refused(backend):
    data = bytes(range(256))
    reference = ObjectRef("a", len(data), hasher("xxh3-128").of(data))
    backend.chance = RandomFaults(seed=3, share=0.6, sleep=lambda _: None)
    retrying = RetryingBackend(backend, deadline=1e9, sleep=lambda _: None)
    outcomes = []
    for _ in range(300):
        try:
            retrying.write("a", data)
            outcomes.append(read_object(retrying, reference, limit=999) == data)
        except (AccessDenied, CorruptObject) as error:
            outcomes.append(error.kind)
    assert set(outcomes) == {True, "access-denied", "corrupt-object"}
