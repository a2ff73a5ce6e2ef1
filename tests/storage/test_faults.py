"""The faulty backend does what its script says."""

from __future__ import annotations

import pytest

from deltastore.errors import ObjectNotFound, StorageError
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend, flip_bit, oversize, truncate
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
