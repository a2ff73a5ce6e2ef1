"""Settings: where they come from, which goes first, and what is told of those that are wrong."""

from __future__ import annotations

import os

import msgspec
import pytest
from click.testing import CliRunner

from deltastore.errors import UsageError
from receiver.cli import once, run
from receiver.config import effective, read_settings, shown_url

FULL = """
store = "s3://bucket/run"
checkpoint = "/models/m"
base = "/models/base"
target = 7
poll = 2
engine = "torch"
engine-url = "http://127.0.0.1:8000"
gateway-url = "http://127.0.0.1:9331"
in-flight = "abort"
drain-deadline = 5
at-deadline = "give-up"
kv-cache = "keep"
unsafe-keep-kv = true
load-tries = 3
probe-expect = "/models/probes.json"
self-test = true
workers = 3
max-bandwidth = "50MB"
memory-budget = 536870912
nice = 10
io-priority = "best-effort:7"
durability = "none"
unsafe-file-system = true
scrub-rate = 0
cache = "/cache"
cache-size = "1MiB"
trusted-keys = ["aa", "bb"]
group = "rack 1"
group-size = 2
group-ready-timeout = 60.0
group-load-timeout = 30.0
fleet = "west"
max-unavailable = 3
canary = "host-1"
promote-by = "tag:good"
receiver-id = "r1"
heartbeat = false
heartbeat-every = 60
listen = "127.0.0.1:9400"
log-format = "json"
log-level = "warning"

[engine-options]
load-timeout = 900

[storage-options]
secret = "hush"
anon = true
region = "here"
"""


def printed(*words, command=run.command, env=None):
    outcome = CliRunner().invoke(command, [*map(str, words), "--print-config"], env=env or {})
    assert outcome.exit_code == 0, outcome.output
    return msgspec.toml.decode(outcome.stdout)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "receiver.toml"
        path.write_text(text)
        return path

    return write


def test_every_setting_can_stand_in_a_file_and_is_printed_without_secrets(written):
    shown = printed("--config", written(FULL))
    wanted = msgspec.toml.decode(FULL)
    wanted |= {"target": "7", "poll": 2.0, "drain-deadline": 5.0, "engine-options": {"load-timeout": "900"}}
    wanted |= {"cache-size": 1 << 20, "max-bandwidth": 50_000_000}
    wanted["storage-options"] = {"secret": "***", "anon": "true", "region": "here"}
    assert shown == wanted


def test_what_is_printed_means_the_same_when_it_is_read(written):
    text = FULL.replace('secret = "hush"\n', "")
    first = printed("--config", written(text))
    assert printed("--config", written(msgspec.toml.encode(first).decode())) == first


def test_flags_go_before_the_environment_and_that_before_the_file(written):
    config = written(FULL)
    environment = {
        "RECEIVER_STORE": "/from/environment",
        "RECEIVER_POLL": "3",
        "RECEIVER_CACHE_SIZE": "2MiB",
        "RECEIVER_TRUSTED_KEYS": "cc dd",
        "RECEIVER_STORAGE_OPTIONS": "a=b c=d",
        "RECEIVER_HEARTBEAT": "true",
        "RECEIVER_CONFIG": str(config),
    }
    shown = printed("--poll", 4, "--trusted-key", "ee", env=environment)
    assert (shown["store"], shown["poll"], shown["engine"]) == ("/from/environment", 4.0, "torch")
    assert (shown["cache-size"], shown["trusted-keys"]) == (2 << 20, ["ee"])
    assert shown["storage-options"] == {"a": "b", "c": "d"}
    assert shown["heartbeat"] is True
    assert printed("--store", "s", "--checkpoint", "c")["poll"] == 1.0


def test_every_flag_of_run_is_a_setting_of_the_file(written):
    text = written(FULL)
    names = {parameter.name for parameter in run.command.params}
    assert names - {"config", "print_config", "debug"} == set(read_settings(text))
    assert {parameter.name for parameter in once.command.params} - names == {"as_json"}


def test_once_takes_the_same_file(written):
    shown = printed("--config", written(FULL), command=once.command)
    assert shown["store"] == "s3://bucket/run"
    assert "listen" not in shown


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('shop = "x"\nbase2 = 1', "base2, shop"),
        ("poll = 'fast'", "poll"),
        ("trusted-keys = 'aa'", "trusted-keys"),
        ("[storage-options]\nx = [1]", "storage-options"),
        ("engine_url = 'x'", "engine_url"),
        ("store = ", "no TOML"),
        ("a = " + "[" * 100_000, "no TOML"),
        ("poll = " + "1" * 5000, "no TOML"),
        ("\x00", "no TOML"),
        ("store = 1", "store"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(written, text, told):
    with pytest.raises(UsageError, match=told) as caught:
        read_settings(written(text))
    assert caught.value.hint


def test_a_setting_that_is_nearly_one_is_guessed(written):
    with pytest.raises(UsageError) as caught:
        read_settings(written('chekpoint = "x"'))
    assert caught.value.hint == "Is it checkpoint?"


def test_a_file_that_is_not_there_and_a_value_out_of_range_are_wrong_use(commands, written, tmp_path):
    words = ["receiver", "run", "--store", tmp_path, "--checkpoint", tmp_path / "live", "--config"]
    missing = commands.run(*words, tmp_path / "none.toml")
    assert (missing.code, "Try:" in missing.err) == (2, True)
    for text, told in (
        ("poll = 0", "--poll"),
        ("log-format = 'xml'", "--log-format"),
        ("heartbeat-every = 1", "every"),
    ):
        ended = commands.run(*words, written(text))
        assert ended.code == 2
        assert told in ended.err
    assert not (tmp_path / "live").exists()


def test_passwords_in_urls_are_not_shown():
    for password in ("secret", "sec/ret", "sec@ret", "sec:ret", "/@:"):
        assert shown_url(f"s3://key:{password}@bucket/x") == "s3://***@bucket/x"
    assert shown_url("s3://bucket/a:b") == "s3://bucket/a:b"
    assert shown_url("abfs://box@account.dfs.core.windows.net/x") == "abfs://box@account.dfs.core.windows.net/x"
    assert "secret" not in effective({"store": "s3://key:secret@bucket/x", "storage_options": {"api_key": "secret"}})


@pytest.mark.parametrize("name", ["checkpoint", "base", "probe-expect", "config"])
def test_an_empty_path_is_no_current_directory_and_a_zero_byte_is_in_none(name, written):
    others = () if name == "checkpoint" else ("--checkpoint", "m")
    outcome = CliRunner().invoke(run.command, ["--store", "s", *others, f"--{name}", "", "--print-config"])
    assert outcome.exit_code == 2
    assert "is no path" in outcome.output
    if name != "config":
        path = written(f'store = "s"\n{name} = "a\\u0000b"\n')
        outcome = CliRunner().invoke(run.command, ["--config", str(path), *others, "--print-config"])
        assert outcome.exit_code == 2
        assert "is no path" in outcome.output


def test_a_path_that_is_no_unicode_is_shown():
    outcome = printed("--store", "s", "--checkpoint", os.fsdecode(b"/models/\xff"))
    assert outcome["checkpoint"] == "/models/?"
