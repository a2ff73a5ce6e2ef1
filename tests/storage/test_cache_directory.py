"""A directory of copies: what it gives out is what was put in, whatever happens to its files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from caching import content, part
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.errors import ObjectNotFound
from deltastore.storage.cache_directory import CacheDirectory

LIMIT = 1 << 20
SEAL = 32
THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"


class Fetch:
    """A store's part in a read: counts, and says what is there."""

    def __init__(self, data):
        self.data = data
        self.count = 0

    def __call__(self):
        self.count += 1
        return self.data


def never():
    raise AssertionError("the store was asked")


def files(root):
    return [path for path in sorted((root / "objects").glob("*/*")) if path.is_file()]


def used(root):
    return sum(path.stat().st_size for path in files(root))


@pytest.fixture
def cache(tmp_path):
    return CacheDirectory(tmp_path / "cache", max_bytes=LIMIT)


def read(cache, number, fetch=never, limit=LIMIT):
    return cache.read(part(number), limit=limit, fetch=fetch)


def test_a_second_read_needs_no_store(cache, tmp_path):
    assert read(cache, 1, Fetch(content(1))) == content(1)
    assert read(cache, 1) == content(1)
    other = CacheDirectory(tmp_path / "cache", max_bytes=LIMIT)
    assert read(other, 1) == content(1)
    assert type(read(cache, 1)) is bytes


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 4096, 300_000])
def test_sizes(cache, size):
    assert read(cache, 1, Fetch(content(1, size))) == content(1, size)
    assert read(cache, 1) == content(1, size)
    with cache.open(part(1)) as copy:
        assert copy.size == size
        assert copy.read(0, size) == content(1, size)
        assert copy.read(size // 2, size) == content(1, size)[size // 2 :]


def test_what_the_store_raises_is_raised_and_not_kept(cache):
    def absent():
        raise ObjectNotFound("absent")

    for _ in range(2):
        with pytest.raises(ObjectNotFound):
            read(cache, 1, absent)
    assert read(cache, 1, Fetch(b"now")) == b"now"


def test_a_copy_over_the_limit_is_none(cache):
    read(cache, 1, Fetch(content(1)))
    assert read(cache, 1, Fetch(b"short"), limit=999) == b"short"
    assert read(cache, 1, limit=5) == b"short"


def test_a_forgotten_copy_is_fetched_anew(cache):
    read(cache, 1, Fetch(b"wrong"))
    cache.forget(part(1))
    cache.forget(part(1))
    assert cache.open(part(1)) is None
    assert read(cache, 1, Fetch(b"right")) == b"right"
    assert read(cache, 1) == b"right"


@pytest.mark.parametrize("opened", [False, True])
def test_every_flipped_bit_and_every_truncation_is_found(cache, tmp_path, opened):
    data = content(7, 40)
    read(cache, 7, Fetch(data))
    [path] = files(tmp_path / "cache")
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    damaged += [
        bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]]) for at in range(len(whole)) for bit in range(8)
    ]
    for harm in damaged:
        path.write_bytes(harm)
        if opened:
            assert cache.open(part(7)) is None
            assert not path.exists()
        else:
            fetch = Fetch(data)
            assert read(cache, 7, fetch) == data
            assert fetch.count == 1
            assert path.read_bytes() == whole


def test_a_copy_of_another_key_is_none(cache, tmp_path):
    read(cache, 1, Fetch(content(1)))
    [one] = files(tmp_path / "cache")
    read(cache, 2, Fetch(content(2)))
    [two] = {*files(tmp_path / "cache")} - {one}
    shutil.copy(one, two)
    assert read(cache, 2, Fetch(content(2))) == content(2)
    shutil.copy(one, two)
    assert cache.open(part(2)) is None


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "huge"])
def test_what_is_no_file_is_no_copy(cache, tmp_path, kind):
    read(cache, 1, Fetch(content(1)))
    [path] = files(tmp_path / "cache")
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"x" * 100)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    for _ in range(2):
        assert read(cache, 1, Fetch(content(1))) == content(1)
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == b"x" * 100


# The bound


def test_the_least_recently_read_go_first(tmp_path):
    cache = CacheDirectory(tmp_path, max_bytes=10 * (1000 + SEAL))
    for number in range(10):
        read(cache, number, Fetch(content(number)))
        os.utime(files_by_number(cache, number), ns=(number, number))
    assert read(cache, 0) == content(0)
    read(cache, 10, Fetch(content(10)))
    assert used(tmp_path) <= 10 * (1000 + SEAL)
    assert read(cache, 0) == content(0)
    assert read(cache, 10) == content(10)
    assert cache.open(part(1)) is None
    assert cache.open(part(9)) is not None


def files_by_number(cache, number):
    return cache._path(part(number))


def test_an_object_over_the_bound_is_not_kept_and_drops_nothing(tmp_path):
    cache = CacheDirectory(tmp_path, max_bytes=2 * (1000 + SEAL))
    read(cache, 1, Fetch(content(1)))
    assert read(cache, 2, Fetch(content(2, 5000))) == content(2, 5000)
    assert cache.open(part(2)) is None
    assert read(cache, 1) == content(1)
    exact = 2 * (1000 + SEAL) - SEAL
    read(cache, 3, Fetch(content(3, exact)))
    assert read(cache, 3) == content(3, exact)


def test_an_open_copy_outlives_its_eviction(tmp_path):
    cache = CacheDirectory(tmp_path, max_bytes=1000 + SEAL)
    read(cache, 1, Fetch(content(1)))
    with cache.open(part(1)) as copy:
        read(cache, 2, Fetch(content(2)))
        assert cache.open(part(1)) is None
        assert copy.read(0, 1000) == content(1)


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "objects" / "ab").mkdir(parents=True)
    strangers = [tmp_path / "notes.txt", tmp_path / "objects" / "x", tmp_path / "objects" / "ab" / "strange.file"]
    for path in strangers:
        path.write_bytes(b"mine")
    cache = CacheDirectory(tmp_path, max_bytes=2000)
    for number in range(5):
        read(cache, number, Fetch(content(number)))
    assert all(path.read_bytes() == b"mine" for path in strangers)


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    cache = CacheDirectory(tmp_path, max_bytes=4000)
    read(cache, 1, Fetch(content(1)))
    [path] = files(tmp_path)
    dead, alive = (path.with_name(f"{path.name}.{end}") for end in ("0000dead", "0000beef"))
    dead.write_bytes(bytes(1000))
    with alive.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(bytes(1000))
        writer.flush()
        (tmp_path / "usage").unlink()
        for number in range(2, 8):
            assert read(cache, number, Fetch(content(number))) == content(number)
            assert used(tmp_path) <= 4000
    assert not dead.exists()
    assert alive.exists()


@pytest.mark.parametrize("harm", [b"", b"garbage", bytes(16), None])
def test_a_damaged_count_is_made_anew(tmp_path, harm):
    cache = CacheDirectory(tmp_path, max_bytes=5000)
    for number in range(20):
        usage = tmp_path / "usage"
        if harm is not None:
            usage.write_bytes(harm)
        elif usage.exists():
            usage.unlink()
        read(cache, number, Fetch(content(number)))
        assert used(tmp_path) <= 5000
    assert len(files(tmp_path)) >= 3


ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 9)),
    st.tuples(st.just("open"), st.integers(0, 9)),
    st.tuples(st.just("forget"), st.integers(0, 9)),
    st.tuples(st.just("flip"), st.integers(0, 9), st.integers(0, 10**6)),
    st.tuples(st.just("cut"), st.integers(0, 9), st.integers(0, 10**6)),
    st.tuples(st.just("swap"), st.integers(0, 9), st.integers(0, 10**6)),
    st.tuples(st.just("usage"), st.binary(max_size=20)),
    st.tuples(st.just("other")),
    st.tuples(st.just("clear")),
)


def damage(cache, word, number, place):
    """Change an object's file without a byte more in all files together."""
    path = cache._path(part(number))
    data = bytearray(path.read_bytes()) if path.exists() else None
    if not data:
        return
    if word == "flip":
        at = place % (8 * len(data))
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
    elif word == "cut":
        path.write_bytes(data[: place % len(data)])
    else:
        other = cache._path(part(place % 10))
        if other.exists():
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)


@given(st.lists(ACTIONS, max_size=60), st.integers(500, 6000))
@settings(max_examples=1000 if THOROUGH else 150)
def test_any_order_of_reads_evictions_and_damage(tmp_path_factory, actions, bound):
    root = tmp_path_factory.mktemp("cache")
    caches = [CacheDirectory(root, max_bytes=bound) for _ in range(2)]
    model = {number: content(number, 97 * number) for number in range(10)}
    for word, *arguments in actions:
        match word:
            case "read":
                assert read(caches[0], arguments[0], Fetch(model[arguments[0]])) == model[arguments[0]]
                assert used(root) <= bound
            case "open":
                copy = caches[0].open(part(arguments[0]))
                if copy is not None:
                    with copy:
                        assert copy.read(0, copy.size) == model[arguments[0]]
            case "forget":
                caches[0].forget(part(arguments[0]))
            case "usage":
                root.joinpath("usage").write_bytes(arguments[0])
            case "other":
                caches.reverse()
            case "clear":
                shutil.rmtree(root)
                root.mkdir()
            case _:
                damage(caches[0], word, *arguments)
    shutil.rmtree(root)


# Many at once


def test_threads_that_ask_at_once_make_one_fetch(cache):
    go, entered = threading.Event(), threading.Event()
    fetch = Fetch(content(1, 100_000))

    def slow():
        entered.set()
        assert go.wait(30)
        return fetch()

    with ThreadPoolExecutor(30) as pool:
        first = pool.submit(read, cache, 1, slow)
        assert entered.wait(30)
        others = [pool.submit(read, cache, 1, slow) for _ in range(29)]
        # Another object is not held up by it.
        assert read(cache, 2, Fetch(content(2))) == content(2)
        go.set()
        assert {future.result(30) for future in [first, *others]} == {content(1, 100_000)}
    assert fetch.count == 1


def test_after_a_failed_fetch_the_next_one_tries(cache):
    go, entered = threading.Event(), threading.Semaphore(0)
    outcomes = iter([ObjectNotFound("once"), None, AssertionError("too many")])

    def fetch():
        entered.release()
        assert go.wait(30)
        if error := next(outcomes):
            raise error
        return content(1)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(read, cache, 1, fetch) for _ in range(4)]
        assert entered.acquire(timeout=30)
        go.set()
        results = [future.exception(30) or future.result() for future in futures]
    assert results.count(content(1)) == 3


def test_patience_ends_and_then_one_fetches_oneself(tmp_path):
    cache = CacheDirectory(tmp_path, max_bytes=LIMIT, patience=0.05)
    lock = tmp_path / "locks" / cache._path(part(1)).name[:3]
    lock.parent.mkdir(parents=True)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert read(cache, 1, Fetch(content(1))) == content(1)
    assert read(cache, 1) == content(1)


def test_waiting_can_be_given_up(tmp_path):
    class Stopped(Exception):
        pass

    def stop(_seconds):
        raise Stopped

    cache = CacheDirectory(tmp_path, max_bytes=LIMIT, sleep=stop)
    lock = tmp_path / "locks" / cache._path(part(1)).name[:3]
    lock.parent.mkdir(parents=True)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(Stopped):
            read(cache, 1)
    assert read(cache, 1, Fetch(content(1))) == content(1)


def test_a_file_system_without_locks_serves_too(cache, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert read(cache, 1, Fetch(content(1))) == content(1)
    assert read(cache, 1) == content(1)


WORKER = """
import sys, os, pathlib
from deltastore.storage.cache_directory import CacheDirectory
sys.path.insert(0, {tests!r})
from caching import content, part
cache = CacheDirectory(pathlib.Path(sys.argv[1]), max_bytes=int(sys.argv[2]))
log = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
size = int(sys.argv[5])
for turn in range(int(sys.argv[4])):
    for number in range(20):
        def fetch():
            os.write(log, b"%d\\n" % number)
            return content(number, size)
        assert cache.read(part(number), limit=size, fetch=fetch) == content(number, size)
print("done")
"""


def start_workers(tmp_path, count, *, bound, turns=1, size=200_000):
    code = WORKER.format(tests=str(Path(__file__).parents[1]))
    words = [sys.executable, "-c", code, tmp_path / "cache", bound, tmp_path / "log", turns, size]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    workers = [
        subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(count)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return workers


def end(worker):
    out, _ = worker.communicate(timeout=60)
    return out, worker.returncode


def test_eight_processes_fetch_each_object_once(tmp_path):
    workers = start_workers(tmp_path, 8, bound=1 << 30)
    assert [end(worker) for worker in workers] == [("done\n", 0)] * 8
    fetched = (tmp_path / "log").read_text().split()
    assert sorted(fetched, key=int) == [str(number) for number in range(20)]


def test_processes_keep_the_bound_together(tmp_path):
    bound = 1_500_000
    workers = start_workers(tmp_path, 3, bound=bound, turns=15)
    most = 0
    (tmp_path / "cache").mkdir(exist_ok=True)
    for worker in workers:
        while worker.poll() is None:
            # While nothing is on its way in: a sum over a directory that changes is of no one moment.
            with (tmp_path / "cache" / "usage").open("a+") as usage:
                fcntl.flock(usage, fcntl.LOCK_EX)
                most = max(most, sum(size_of(path) for path in files(tmp_path / "cache")))
            with suppress(subprocess.TimeoutExpired):
                worker.wait(0.02)
    assert [end(worker) for worker in workers] == [("done\n", 0)] * 3
    assert 500_000 < most <= bound


def test_a_copy_gets_its_name_while_nobody_counts(tmp_path, monkeypatch):
    counting = []
    seen = []

    def write(descriptor, data):
        if not counting:
            counting.append((tmp_path / "cache" / "usage").open("a+"))
            fcntl.flock(counting[0], fcntl.LOCK_EX)
        os.write(descriptor, data)

    def sleep(_):
        seen.extend((path.suffix, size_of(path)) for path in files(tmp_path / "cache"))
        counting[0].close()

    monkeypatch.setattr("deltastore.storage.cache_directory._write", write)
    cache = CacheDirectory(tmp_path / "cache", max_bytes=LIMIT, sleep=sleep)
    assert read(cache, 1, Fetch(content(1, 1000))) == content(1, 1000)
    [(suffix, size)] = seen
    assert suffix
    assert size == 1000 + SEAL
    [copy] = files(tmp_path / "cache")
    assert not copy.suffix
    assert read(cache, 1) == content(1, 1000)


def size_of(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("seed", range(12 if THOROUGH else 3))
def test_sigkill_while_filling_leaves_nothing_wrong(tmp_path, seed):
    bound = 3_000_000
    for kill in range(5):
        [worker] = start_workers(tmp_path, 1, bound=bound, turns=10**6)
        until_fetched(tmp_path / "log", more_than=(7 * kill + 3 * seed) % 11)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        (tmp_path / "log").unlink()
    cache = CacheDirectory(tmp_path / "cache", max_bytes=bound)
    for number in range(40):
        data = content(number, 200_000)
        assert read(cache, number, Fetch(data)) == data
        assert used(tmp_path / "cache") <= bound
    assert all("." not in path.name for path in files(tmp_path / "cache"))


def until_fetched(log, *, more_than):
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().count("\n") > more_than):
        assert time.monotonic() < deadline
        time.sleep(0.001)


# A disk that fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["write", "ftruncate", "open", "pwrite", "rename", "mkdir"])
def test_a_disk_that_takes_nothing_fails_no_read(tmp_path, monkeypatch, caplog, code, call):
    cache = CacheDirectory(tmp_path / "cache", max_bytes=LIMIT)
    working = getattr(os, call)

    def failing(*arguments, **options):
        if call == "open" and not arguments[1] & os.O_CREAT:
            return working(*arguments, **options)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, failing)
        for _ in range(3):
            assert read(cache, 1, Fetch(content(1))) == content(1)
    assert len(caplog.records) == 1
    assert files(tmp_path / "cache") == []
    assert read(cache, 1, Fetch(content(1))) == content(1)
    assert read(cache, 1) == content(1)


def test_a_disk_that_cannot_be_read_fails_no_read(cache, monkeypatch):
    read(cache, 1, Fetch(content(1)))

    class Broken:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read(self, _size):
            raise OSError(errno.ESTALE, "stale file handle")

    def fdopen(descriptor, _mode):
        os.close(descriptor)
        return Broken()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", fdopen)
        assert read(cache, 1, Fetch(content(1))) == content(1)


def test_a_directory_that_vanishes_is_made_again(cache, tmp_path):
    read(cache, 1, Fetch(content(1)))
    shutil.rmtree(tmp_path / "cache")
    assert read(cache, 1, Fetch(content(1))) == content(1)
    assert read(cache, 1) == content(1)


def test_a_file_in_the_directorys_place_fails_no_read(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        cache = CacheDirectory(root, max_bytes=LIMIT)
        assert read(cache, 1, Fetch(content(1))) == content(1)
        cache.forget(part(1))
        assert cache.open(part(1)) is None
