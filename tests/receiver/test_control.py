"""What an operator told, kept on disk: read strictly, never half."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.digest import hasher
from deltastore.errors import SlotError, StorageError
from deltastore.record import encode_record
from receiver.control import Control, read_control, write_control

CONTROLS = [Control(), Control(pinned="7"), Control(pinned="tag:good", paused=True), Control(pinned="latest")]


@pytest.mark.parametrize("control", CONTROLS)
def test_what_was_written_is_read(tmp_path, control):
    path = tmp_path / "control.json"
    assert read_control(path) == Control()
    write_control(path, control)
    assert read_control(path) == control
    assert [entry.name for entry in tmp_path.iterdir()] == ["control.json"]


def test_every_flipped_bit_and_every_cut_is_found(tmp_path):
    path = tmp_path / "control.json"
    write_control(path, Control(pinned="tag:good", paused=True))
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(SlotError) as caught:
                read_control(path)
        path.write_bytes(whole[:place])
        with pytest.raises(SlotError) as caught:
            read_control(path)
        assert "receiver pin" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [{"format": 3}, {"format": 1, "pinned": "../x"}, {"format": 1, "paused": 1}, [], {"format": 1, "pinned": 3}],
)
def test_what_has_a_digest_and_makes_no_sense_is_refused(tmp_path, content):
    path = tmp_path / "control.json"
    path.write_bytes(encode_record(content, hash_function=hasher("xxh3-128")))
    with pytest.raises(SlotError):
        read_control(path)


@given(st.binary(max_size=5000))
def test_no_bytes_are_anything_but_refused(tmp_path, data):
    path = tmp_path / "control.json"
    path.write_bytes(data)
    with pytest.raises(SlotError):
        read_control(path)


def test_what_cannot_be_read_is_not_taken_for_nothing(tmp_path):
    (tmp_path / "control.json").mkdir()
    with pytest.raises(StorageError):
        read_control(tmp_path / "control.json")
