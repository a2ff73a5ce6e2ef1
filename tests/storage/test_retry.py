"""What is repeated and what is not."""

from __future__ import annotations

import pytest

from deltastore.errors import CorruptObject, DiskFull, ObjectExists, ObjectNotFound, StorageError
from deltastore.storage.local import LocalBackend
from deltastore.storage.retry import RetryingBackend
from deltastore.testing import Effect, Fault, FaultyBackend
from deltastore.testing.storage_contract import StorageContract


class TestRetryingBackend(StorageContract):
    race_rounds = 10

    @pytest.fixture
    def open_another(self, tmp_path):
        return lambda: RetryingBackend(LocalBackend(tmp_path))


@pytest.fixture
def faulty(tmp_path):
    backend = FaultyBackend(LocalBackend(tmp_path))
    backend.inner.write("a", b"x")
    return backend


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def retrying(faulty, pauses):
    return RetryingBackend(faulty, deadline=1e9, sleep=pauses.append)


CALLS = {
    "read": lambda backend: backend.read("a", limit=9),
    "read_range": lambda backend: backend.read_range("a", 0, 1),
    "write": lambda backend: backend.write("a", b"x"),
    "list": lambda backend: [*backend.list("")],
    "delete": lambda backend: backend.delete("a"),
    "create": lambda backend: backend.create("b", b"x"),
}


@pytest.mark.parametrize("operation", ["read", "read_range", "write", "list", "delete"])
@pytest.mark.parametrize("effect", [Effect.BEFORE, Effect.AFTER])
def test_repeats(faulty, retrying, pauses, operation, effect):
    faulty.add(*[Fault(operation=operation, effect=effect)] * 5)
    expected = CALLS[operation](faulty.inner)
    assert CALLS[operation](retrying) == expected
    assert len(faulty.calls) == 6
    assert len(pauses) == 5


@pytest.mark.parametrize("effect", [Effect.BEFORE, Effect.AFTER])
def test_never_repeats_create(faulty, retrying, effect):
    faulty.add(Fault(operation="create", effect=effect))
    with pytest.raises(StorageError):
        CALLS["create"](retrying)
    assert len(faulty.calls) == 1


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("kind", [ObjectNotFound, ObjectExists, DiskFull, CorruptObject, KeyboardInterrupt])
def test_passes_through(faulty, retrying, operation, kind):
    faulty.add(Fault(operation=operation, error=lambda: kind("no")))
    with pytest.raises(kind):
        CALLS[operation](retrying)
    assert len(faulty.calls) == 1


@pytest.mark.parametrize("operation", CALLS)
def test_passes_lasting_errors_through(faulty, retrying, operation):
    faulty.add(Fault(operation=operation, error=lambda: StorageError("denied", transient=False)))
    with pytest.raises(StorageError, match="denied"):
        CALLS[operation](retrying)
    assert len(faulty.calls) == 1


@pytest.mark.parametrize("operation", [name for name in CALLS if name != "create"])
def test_gives_up_at_the_deadline_with_the_last_error(faulty, operation):
    faulty.add(*[Fault(operation=operation)] * 100)
    retrying = RetryingBackend(faulty, deadline=0.05, first_pause=0.005, longest_pause=0.01)
    with pytest.raises(StorageError, match="connection was lost"):
        CALLS[operation](retrying)
    assert 1 < len(faulty.calls) < 100


def test_pauses_grow_and_are_bounded(faulty, pauses):
    faulty.add(*[Fault(operation="read")] * 200)
    RetryingBackend(faulty, deadline=1e9, first_pause=0.1, longest_pause=3.0, sleep=pauses.append).read("a", limit=1)
    assert pauses[0] <= 0.1
    assert max(pauses) <= 3.0
    assert max(pauses) > 1.0


def test_a_broken_listing_yields_nothing_twice(faulty, retrying):
    faulty.inner.write("b", b"")
    faulty.add(Fault(operation="list", effect=Effect.AFTER))
    assert sorted(info.key for info in retrying.list("")) == ["a", "b"]
