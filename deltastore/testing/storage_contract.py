"""What every backend must do, as a pytest suite that each backend's tests subclass.

    class TestMyBackend(StorageContract):
        @pytest.fixture
        def open_another(self, tmp_path):
            return lambda: MyBackend(tmp_path)

``open_another`` returns a function that opens one more backend on the same place each time it is called,
as another process would. The place is empty at the start of each test.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.commit import commit
from deltastore.errors import (
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UsageError,
    VersionConflict,
)
from deltastore.storage.base import ObjectInfo
from deltastore.storage.faults import Effect, Fault, FaultyBackend
from deltastore.storage.lagging import LaggingBackend
from deltastore.testing.races import race_creates

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.base import Backend, Buffer

__all__ = ["StorageContract"]

# pytest shows what an assertion compared only where it rewrites it, and a suite is made of assertions.
# ruff: noqa: S101, D102

_LIMIT = 1 << 24
_BINARY = bytes(range(256)) * 17 + b"\r\n\0\xff"
_BAD_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    ".hidden",
    "a/.tmp/b",
    "a b",
    "a\\b",
    "ä",
    "a\n",
    "a?b",
    "a%2fb",
    "x" * 256,
    "/".join(["abcdefg"] * 65),
)


class StorageContract:
    """Subclass it, name the class ``Test...``, and give it the fixture ``open_another``."""

    race_rounds = 1000
    """How many races ``create`` is put to; a slow backend takes fewer by default."""
    racers = 8
    """How many writers take part in each."""

    @pytest.fixture
    def open_another(self) -> Callable[[], Backend]:
        raise NotImplementedError("the subclass provides the fixture open_another")

    @pytest.fixture
    def backend(self, open_another: Callable[[], Backend]) -> Backend:
        return open_another()

    @pytest.mark.parametrize("data", [b"", b"x", _BINARY], ids=["empty", "one byte", "binary"])
    def test_reads_what_was_written(self, backend: Backend, data: bytes) -> None:
        backend.write("a/b.c-d_e/0", data)
        assert backend.read("a/b.c-d_e/0", limit=_LIMIT) == data

    @pytest.mark.parametrize("data", [b"", b"x", _BINARY], ids=["empty", "one byte", "binary"])
    def test_reads_what_was_created(self, backend: Backend, data: bytes) -> None:
        backend.create("a/b.c-d_e/0", data)
        assert backend.read("a/b.c-d_e/0", limit=_LIMIT) == data

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_takes_any_buffer(self, backend: Backend, kind: Callable[[bytes], Buffer]) -> None:
        backend.write("written", kind(_BINARY))
        backend.create("created", kind(_BINARY))
        assert backend.read("written", limit=_LIMIT) == _BINARY
        assert backend.read("created", limit=_LIMIT) == _BINARY

    def test_returns_bytes(self, backend: Backend) -> None:
        backend.write("a", b"x")
        assert type(backend.read("a", limit=1)) is bytes

    def test_holds_a_large_object(self, backend: Backend) -> None:
        data = _BINARY * (8 * (1 << 20) // len(_BINARY))
        backend.write("large", data)
        assert backend.read("large", limit=len(data)) == data

    def test_write_replaces(self, backend: Backend) -> None:
        backend.write("a", b"a long first content")
        backend.write("a", b"second")
        assert backend.read("a", limit=_LIMIT) == b"second"

    def test_takes_the_longest_key(self, backend: Backend) -> None:
        key = "x" * 255 + "/" + "y" * 255
        backend.write(key, b"x")
        assert backend.read(key, limit=1) == b"x"
        assert [*backend.list("")] == [ObjectInfo(key, 1)]

    def test_missing_object(self, backend: Backend) -> None:
        with pytest.raises(ObjectNotFound) as caught:
            backend.read("a/missing", limit=_LIMIT)
        assert caught.value.key == "a/missing"

    def test_a_prefix_is_no_object(self, backend: Backend) -> None:
        backend.write("a/b", b"x")
        with pytest.raises(StorageError):
            backend.read("a", limit=_LIMIT)

    def test_nothing_below_an_object(self, backend: Backend) -> None:
        backend.write("a", b"x")
        with pytest.raises(ObjectNotFound):
            backend.read("a/b", limit=_LIMIT)

    @pytest.mark.parametrize("size", [1, 1000])
    def test_limit(self, backend: Backend, size: int) -> None:
        backend.write("a", b"x" * size)
        assert len(backend.read("a", limit=size)) == size
        with pytest.raises(CorruptObject) as caught:
            backend.read("a", limit=size - 1)
        assert caught.value.key == "a"

    def test_limit_of_an_empty_object(self, backend: Backend) -> None:
        backend.write("a", b"")
        assert backend.read("a", limit=0) == b""

    @pytest.mark.parametrize(
        ("start", "end"), [(0, 1), (0, len(_BINARY)), (100, 1000), (len(_BINARY) - 1, len(_BINARY))]
    )
    def test_reads_a_range(self, backend: Backend, start: int, end: int) -> None:
        backend.write("a/b", _BINARY)
        found = backend.read_range("a/b", start, end)
        assert found == _BINARY[start:end]
        assert type(found) is bytes

    @pytest.mark.parametrize(("size", "start", "end"), [(10, 5, 11), (10, 10, 11), (10, 1000, 2000), (0, 0, 1)])
    def test_a_range_that_the_object_does_not_have(self, backend: Backend, size: int, start: int, end: int) -> None:
        backend.write("a", b"x" * size)
        with pytest.raises(CorruptObject) as caught:
            backend.read_range("a", start, end)
        assert caught.value.key == "a"

    def test_a_range_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(ObjectNotFound) as caught:
            backend.read_range("a/missing", 0, 1)
        assert caught.value.key == "a/missing"

    @pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 5), (5, 4), (-1, 4), (-4, -1)])
    def test_refuses_what_is_no_range(self, backend: Backend, start: int, end: int) -> None:
        backend.write("a", _BINARY)
        with pytest.raises(UsageError):
            backend.read_range("a", start, end)

    def test_threads_read_ranges_of_one_object(self, backend: Backend) -> None:
        data = b"".join(number.to_bytes(4, "big") for number in range(1 << 16))
        backend.write("a", data)
        starts = range(0, len(data), len(data) // 64)
        ends = [start + len(data) // 64 for start in starts]
        with ThreadPoolExecutor(16) as pool:
            assert b"".join(pool.map(backend.read_range, ["a"] * 64, starts, ends)) == data

    def test_create_leaves_what_is_there(self, backend: Backend) -> None:
        backend.create("a", b"first")
        with pytest.raises(ObjectExists) as caught:
            backend.create("a", b"second")
        assert caught.value.key == "a"
        assert backend.read("a", limit=_LIMIT) == b"first"

    def test_create_after_write_and_delete(self, backend: Backend) -> None:
        backend.write("a", b"first")
        with pytest.raises(ObjectExists):
            backend.create("a", b"second")
        backend.delete("a")
        backend.create("a", b"third")
        assert backend.read("a", limit=_LIMIT) == b"third"

    def test_one_creator_wins(self, open_another: Callable[[], Backend]) -> None:
        races = race_creates([open_another(), open_another()], self.race_rounds, racers=self.racers)
        # A winner whose answer was lost is told that the key is taken: none may win, two never.
        assert races.won + races.unknown == self.race_rounds
        assert races.won

    def test_a_lost_answer_is_found_on_reading_back(self, open_another: Callable[[], Backend]) -> None:
        one, other = FaultyBackend(open_another()), open_another()
        one.add(Fault(operation="create", effect=Effect.AFTER))
        commit(one, "a/b", b"ours", limit=_LIMIT)
        assert one.calls == [("create", "a/b"), ("read", "a/b")]
        assert other.read("a/b", limit=_LIMIT) == b"ours"
        with pytest.raises(VersionConflict):
            commit(other, "a/b", b"theirs", limit=_LIMIT)

    def test_nothing_but_listings_depends_on_listings(self, open_another: Callable[[], Backend]) -> None:
        one, other = LaggingBackend(open_another()), LaggingBackend(open_another())
        commit(one, "a/b", b"ours", limit=_LIMIT)
        assert [*other.list("")] == []
        assert other.read("a/b", limit=_LIMIT) == b"ours"
        assert other.read_range("a/b", 1, 3) == b"ur"
        with pytest.raises(VersionConflict):
            commit(other, "a/b", b"theirs", limit=_LIMIT)
        other.delete("a/b")
        with pytest.raises(ObjectNotFound):
            one.read("a/b", limit=_LIMIT)
        commit(one, "a/b", b"ours again", limit=_LIMIT)
        other.catch_up()
        assert [*other.list("")] == [ObjectInfo("a/b", 10)]

    def test_readers_see_whole_objects(self, open_another: Callable[[], Backend]) -> None:
        writer, reader = open_another(), open_another()
        contents = [bytes([number]) * 200_000 for number in range(6)]
        writer.write("a", contents[0])
        done = threading.Event()

        def read() -> set[bytes]:
            seen = set()
            while not done.is_set():
                seen.add(reader.read("a", limit=_LIMIT))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for data in contents:
                    writer.write("a", data)
            finally:
                done.set()
            assert set().union(*(each.result() for each in readers)) <= set(contents)

    def test_lists_all_objects(self, backend: Backend) -> None:
        sizes = {"a": 0, "b/c": 1, "b/d/e": 2, "b/d/f": 3, "bb/c": 4}
        for key, size in sizes.items():
            backend.write(key, b"x" * size)
        expected = {key: ObjectInfo(key, size) for key, size in sizes.items()}
        assert sorted(backend.list(""), key=_key) == sorted(expected.values(), key=_key)
        assert sorted(backend.list("b/"), key=_key) == [expected["b/c"], expected["b/d/e"], expected["b/d/f"]]
        assert sorted(backend.list("b/d/"), key=_key) == [expected["b/d/e"], expected["b/d/f"]]

    def test_lists_nothing(self, backend: Backend) -> None:
        backend.write("a", b"x")
        assert [*backend.list("missing/")] == []
        assert [*backend.list("a/")] == []

    def test_delete(self, backend: Backend) -> None:
        backend.write("a/b", b"x")
        backend.write("a/c", b"y")
        backend.delete("a/b")
        backend.delete("a/b")
        backend.delete("never/was/there")
        with pytest.raises(ObjectNotFound):
            backend.read("a/b", limit=_LIMIT)
        assert [*backend.list("")] == [ObjectInfo("a/c", 1)]

    def test_others_see_changes_at_once(self, open_another: Callable[[], Backend]) -> None:
        one, other = open_another(), open_another()
        with pytest.raises(ObjectNotFound):
            other.read("a/b", limit=_LIMIT)
        assert [*other.list("a/")] == []
        one.create("a/b", b"x")
        assert other.read("a/b", limit=_LIMIT) == b"x"
        assert [*other.list("a/")] == [ObjectInfo("a/b", 1)]
        with pytest.raises(ObjectExists):
            other.create("a/b", b"y")
        one.write("a/b", b"yy")
        assert other.read("a/b", limit=_LIMIT) == b"yy"
        one.delete("a/b")
        with pytest.raises(ObjectNotFound):
            other.read("a/b", limit=_LIMIT)
        assert [*other.list("a/")] == []

    @pytest.mark.parametrize("key", _BAD_KEYS)
    def test_refuses_bad_keys(self, backend: Backend, key: str) -> None:
        for call in (
            lambda: backend.read(key, limit=1),
            lambda: backend.read_range(key, 0, 1),
            lambda: backend.write(key, b"x"),
            lambda: backend.create(key, b"x"),
            lambda: backend.delete(key),
        ):
            with pytest.raises(UsageError):
                call()

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "a/../", ".tmp/"])
    def test_refuses_bad_prefixes(self, backend: Backend, prefix: str) -> None:
        with pytest.raises(UsageError):
            [*backend.list(prefix)]

    def test_has_a_url(self, backend: Backend) -> None:
        assert backend.url


def _key(info: ObjectInfo) -> str:
    return info.key
