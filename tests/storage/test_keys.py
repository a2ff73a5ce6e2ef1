"""The rules of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import UsageError
from deltastore.storage.keys import MAX_KEY_LENGTH, check_key, check_prefix, is_key


@pytest.mark.parametrize("key", ["a", "0", "a/b/c", "manifests/000001", "a-_.b", "-", "_", "a..b", "x" * 255])
def test_good_keys(key):
    check_key(key)
    check_prefix(key + "/")


def test_length():
    longest = "/".join(["x" * 127] * 4) + "y"
    assert len(longest) == MAX_KEY_LENGTH
    check_key(longest)
    with pytest.raises(UsageError):
        check_key(longest + "z")


def test_messages_are_short():
    with pytest.raises(UsageError) as caught:
        check_key(" " * 100_000)
    assert len(str(caught.value)) < 200
    assert caught.value.hint


@given(st.text())
def test_a_key_stays_below_the_root(text):
    if is_key(text):
        assert not text.startswith("/")
        assert all(part and not part.startswith(".") for part in text.split("/"))
        assert text.isascii()
        assert text.isprintable()
