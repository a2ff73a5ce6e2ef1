"""Which version comes next, and what it costs to know."""

from __future__ import annotations

import pytest
import training

from deltastore import Writer, open_store
from deltastore.errors import StreamMismatch, UsageError, VersionNotFound
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import FaultyBackend
from receiver.follower import Follower


@pytest.fixture
def url(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        for seed in (1, 2):
            writer.publish(training.small_snapshot(seed)).result()
    return tmp_path / "store"


def test_the_newest_version_is_found_and_followed_with_one_read_a_poll(url):
    backend = FaultyBackend(LocalBackend(url))
    follower = Follower(store_at(backend), "latest")
    assert follower.wanted().version == 2
    backend.calls.clear()
    assert follower.wanted().version == 2
    assert backend.calls == [("read", "manifests/0000000003.json")]
    with Writer(url) as writer:
        for seed in range(20):
            writer.publish(training.small_snapshot(seed)).result()
    assert follower.wanted().version == 22
    assert all(operation == "read" for operation, _ in backend.calls)


@pytest.mark.parametrize("hint", [b"", b'{"stream_id":"0","version":7}'])
def test_catching_up_without_a_hint_takes_a_logarithm_of_reads(url, hint):
    with Writer(url) as writer:
        for seed in range(60):
            writer.publish(training.small_snapshot(seed)).result()
    (url / "LATEST").write_bytes(hint)
    backend = FaultyBackend(LocalBackend(url))
    assert Follower(store_at(backend), "latest").wanted().version == 62
    assert len(backend.calls) < 20


def test_a_number_is_kept(url):
    follower = Follower(open_store(url), "1")
    assert follower.wanted().version == 1
    later = Follower(open_store(url), "3")
    with pytest.raises(VersionNotFound):
        later.wanted()
    with Writer(url) as writer:
        writer.publish(training.small_snapshot(9)).result()
    assert later.wanted().version == 3
    assert follower.wanted().version == 1


def test_a_store_rolled_back_is_told_at_each_poll_until_it_is_mended(url):
    follower = Follower(open_store(url), "latest")
    assert follower.wanted().version == 2
    newest = url / "manifests" / "0000000002.json"
    data = newest.read_bytes()
    newest.unlink()
    for _ in range(29):
        assert follower.wanted().version == 2
    for _ in range(3):
        with pytest.raises(StreamMismatch):
            follower.wanted()
    newest.write_bytes(data)
    assert follower.wanted().version == 2


@pytest.mark.parametrize("target", ["", "newest", "-1", "1.0", "²", " 1", "LATEST"])
def test_what_is_no_target_is_refused(url, target):
    with pytest.raises(UsageError):
        Follower(open_store(url), target)
