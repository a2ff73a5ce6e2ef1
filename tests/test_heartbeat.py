"""Heartbeats as they lie in a store: strictly parsed, and never in anybody's way."""

from __future__ import annotations

from datetime import datetime, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.clock import now, seconds_since
from deltastore.digest import hasher
from deltastore.errors import CorruptObject, DeltastoreError, UnsupportedFormat
from deltastore.heartbeat import (
    MAX_HEARTBEAT_BYTES,
    Heartbeat,
    encode_heartbeat,
    forget_members,
    heartbeat_key,
    is_receiver_id,
    parse_heartbeat,
    read_fleet,
)
from deltastore.record import encode_record
from deltastore.storage.local import LocalBackend

STREAM = "a" * 32


def beat(receiver_id="r1", **changes):
    given = {
        "stream_id": STREAM,
        "receiver_id": receiver_id,
        "host": "host",
        "group": "rack 1",
        "version": 3,
        "target": 5,
        "state": "following",
        "stages": {"fetch": 0.25},
        "software": "deltastore 0",
        "every": 30.0,
        "sent_at": now(),
    }
    return Heartbeat(**{**given, **changes})


def parsed(data, receiver_id="r1"):
    return parse_heartbeat(data, key=heartbeat_key(receiver_id), stream_id=STREAM)


def test_it_comes_back_as_it_was_sent():
    sent = beat()
    assert parsed(encode_heartbeat(sent)) == sent
    assert sent.lag == 2
    assert beat(version=None).lag is None
    assert sent.age < 60
    assert not sent.silent


def test_one_is_silent_after_missing_three():
    old = "2020-01-01T00:00:00.000000Z"
    assert beat(sent_at=old).silent
    assert beat(sent_at=old).age > 86_400
    assert not beat(sent_at="2999-01-01T00:00:00Z").silent
    assert beat(sent_at="2999-01-01T00:00:00Z").age == 0


def test_every_flipped_bit_is_found():
    whole = encode_heartbeat(beat())
    for place in range(len(whole)):
        for bit in range(8):
            with pytest.raises((CorruptObject, UnsupportedFormat)):
                parsed(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_else(data):
    with pytest.raises(CorruptObject):
        parsed(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.sampled_from(sorted(msgspec.to_builtins(beat()))), VALUES)
def test_a_field_of_any_content_is_taken_whole_or_refused(name, value):
    record = {**msgspec.to_builtins(beat()), name: value}
    data = encode_record(record, hash_function=hasher("xxh3-128"))
    try:
        heartbeat = parsed(data)
    except DeltastoreError as error:
        assert error.key == heartbeat_key("r1")  # noqa: PT017 - either way is fine
        return
    shown = f"{heartbeat.host}{heartbeat.group}{heartbeat.state}{heartbeat.pinned}{heartbeat.software}"
    assert shown.isprintable()
    assert heartbeat.lag is None or isinstance(heartbeat.lag, int)


@pytest.mark.parametrize(
    "changes",
    [
        {"receiver_id": "other"},
        {"stream_id": "b" * 32},
        {"host": "a\x1b[2J"},
        {"host": "x" * 256},
        {"stages": {"x" * 40: 1.0}},
        {"stages": {f"s{number}": 1.0 for number in range(65)}},
        {"stages": {"fetch": -1.0}},
        {"version": -1},
        {"sent_at": "yesterday"},
        {"sent_at": "2026-13-01T00:00:00Z"},
    ],
)
def test_what_no_receiver_sends_is_refused(changes):
    with pytest.raises(CorruptObject):
        parsed(encode_heartbeat(beat(**changes)))


def test_one_that_is_too_large_is_refused():
    with pytest.raises(CorruptObject):
        parsed(b" " * (MAX_HEARTBEAT_BYTES + 1))


def test_a_fleet_is_read_with_what_is_damaged_and_forgotten_by_age(tmp_path):
    backend = LocalBackend(tmp_path)
    assert read_fleet(backend, stream_id=STREAM) == []
    for number in range(30):
        backend.write(heartbeat_key(f"r{number:02d}"), encode_heartbeat(beat(f"r{number:02d}")))
    backend.write(heartbeat_key("old"), encode_heartbeat(beat("old", sent_at="2020-01-01T00:00:00Z")))
    backend.write(heartbeat_key("torn"), b"{}")
    backend.write(heartbeat_key("huge"), bytes(MAX_HEARTBEAT_BYTES + 1))
    backend.write("fleet/elsewhere/r1.json", b"")
    fleet = read_fleet(backend, stream_id=STREAM)
    assert len(fleet) == 33
    assert [member.receiver_id for member in fleet if member.error is not None] == ["huge", "torn"]
    gone = forget_members(backend, fleet, older_than=7 * 86_400)
    assert [member.receiver_id for member in gone] == ["huge", "old", "torn"]
    assert len(read_fleet(backend, stream_id=STREAM)) == 30
    assert len(list(forget_members(backend, fleet, older_than=-1))) == 33
    assert read_fleet(backend, stream_id=STREAM) == []


@pytest.mark.parametrize("text", ["", ".", "..", ".x", "a/b", "a b", "é", "x" * 129, "a\n"])
def test_ids_cannot_lead_elsewhere(text):
    assert not is_receiver_id(text)


def test_times_are_read_as_they_are_written():
    assert seconds_since(now()) < 60
    assert seconds_since("2020-02-30T00:00:00Z") is None
    assert seconds_since("2020-02-03T00:00:00.123456789Z") > 0
    instant = datetime.now(timezone.utc).replace(microsecond=0)
    assert seconds_since(instant.strftime("%Y-%m-%dT%H:%M:%SZ")) < 60
