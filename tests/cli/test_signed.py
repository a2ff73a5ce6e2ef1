"""Keys, signed streams and forks on the command line."""

from __future__ import annotations

import stat

import pytest
import training

from deltastore import open_store
from deltastore.manifest import manifest_key


@pytest.fixture
def signed(tmp_path, commands):
    """A signed stream of two versions; returns it, its key's file and its public key."""
    key = tmp_path / "key"
    public = commands.run("deltastore", "keygen", "--out", key).ok().out.strip()
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    store = tmp_path / "store"
    commands.run("deltastore", "init", store, "--base", base, "--hash", "blake3", "--sign-key", key).ok()
    checkpoint = training.save(tmp_path / "one", training.small_snapshot(1))
    commands.run("deltastore", "publish", store, checkpoint, "--sign-key", key).ok()
    return store, key, public


def test_a_key_is_made_once(tmp_path, commands):
    made = commands.run("deltastore", "keygen", "--out", tmp_path / "key").ok()
    assert len(made.out.strip()) == 64
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    again = commands.run("deltastore", "keygen", "--out", tmp_path / "key")
    assert again.code == 2
    assert "Try: " in again.err


def reading(store, tmp_path):
    yield "deltastore", "log", store
    yield "deltastore", "show", store, "latest", "--tensors"
    yield "deltastore", "plan", store, "--from", "none"
    yield "deltastore", "restore", store, "latest", tmp_path / "out"
    yield "deltastore", "check", store, "--read-data"
    yield "receiver", "once", "--store", store, "--checkpoint", tmp_path / "live"
    yield "deltastore", "init", tmp_path / "fork", "--from", store, "latest"
    yield "deltastore", "diff", store, "0", "1"
    yield "deltastore", "stats", store
    yield "deltastore", "forget", store, "--keep-last", "1", "--dry-run"
    yield "deltastore", "gc", store, "--dry-run"


@pytest.mark.parametrize("verb", range(11))
def test_every_reader_takes_what_is_signed_and_nothing_else(verb, signed, tmp_path, commands):
    store, key, public = signed
    words = list(reading(store, tmp_path))[verb]
    other = commands.run("deltastore", "keygen", "--out", tmp_path / "other").ok().out.strip()
    ended = commands.run(*words, "--trusted-key", other)
    assert ended.code == (3 if "check" in words else 12)
    assert public in ended.err + ended.out
    for place in ("out", "live", "fork"):
        assert not (tmp_path / place).exists()
    path = store / manifest_key(1)
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    for more in (["--trusted-key", public], []):
        ended = commands.run(*words, *more)
        assert ended.code == (3 if "check" in words else 12)
        assert "not signed" in ended.err + ended.out
    path.write_bytes(data)
    commands.run(*words, "--trusted-key", other, "--trusted-key", key).ok()


def test_a_running_receiver_takes_only_what_is_signed(signed, tmp_path, commands):
    store, _, public = signed
    path = store / manifest_key(1)
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    words = ["receiver", "run", "--store", store, "--checkpoint", tmp_path / "live", "--listen", "127.0.0.1:0"]
    ended = commands.run(*words, "--trusted-key", public)
    assert ended.code == 12
    assert not (tmp_path / "live").exists()


def test_writing_to_a_signed_stream_needs_its_key(signed, tmp_path, commands):
    store = signed[0]
    ended = commands.run("deltastore", "publish", store, tmp_path / "base")
    assert ended.code == 2
    assert "Try: " in ended.err
    commands.run("deltastore", "keygen", "--out", tmp_path / "other").ok()
    assert commands.run("deltastore", "publish", store, tmp_path / "base", "--sign-key", tmp_path / "other").code == 12
    assert open_store(store).latest().version == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--base", "{base}", "--sign-key", "{key}"],
        ["--base", "{base}", "--sign-key", "{key}", "--hash", "xxh3-128"],
        ["--base", "{base}", "--sign-key", "{base}/config.json", "--hash", "blake3"],
        ["--base", "{base}", "--signer", "{key}", "--hash", "blake3"],
        ["--base", "{base}", "--trusted-key", "{key}"],
        ["--base", "{base}", "--from-storage-option", "a=b"],
        ["--from", "{store}"],
        ["--from", "{store}", "newest"],
        ["--from", "{store}", "0", "--trusted-key", "nonsense"],
    ],
    ids=str,
)
def test_an_init_that_makes_no_sense_is_wrong_use(words, signed, tmp_path, commands):
    store, key, _ = signed
    given = [word.format(base=tmp_path / "base", key=key, store=store) for word in words]
    ended = commands.run("deltastore", "init", tmp_path / "new", *given)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert not (tmp_path / "new").exists()


def test_a_fork_on_the_command_line(signed, tmp_path, commands):
    store, _, public = signed
    fork = tmp_path / "fork"
    words = ["--from", store, "1", "--trusted-key", public]
    record = commands.run("deltastore", "init", fork, *words, "--json").ok().json
    source = open_store(store).manifest(1)
    assert record["metadata"] == {
        "forked_from": source.stream_id,
        "forked_from_version": 1,
        "forked_from_snapshot_id": source.snapshot_id,
    }
    assert record["snapshot_id"] == source.snapshot_id
    commands.run("deltastore", "publish", fork, tmp_path / "base").ok()
    commands.run("deltastore", "restore", fork, "latest", tmp_path / "out").ok()
    training.assert_holds(tmp_path / "out", training.small_snapshot(0))
    assert commands.run("deltastore", "init", fork, *words).code == 11
    assert commands.run("deltastore", "init", tmp_path / "new", "--from", store, "2").code == 10
    assert commands.run("deltastore", "init", tmp_path / "new", "--from", tmp_path / "nothing", "0").code == 10
