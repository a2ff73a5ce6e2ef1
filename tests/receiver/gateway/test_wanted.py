"""What a request says of versions, and that the rest of it stays as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import UsageError
from receiver.gateway.wanted import ANY_VERSION, RequestBody


def wanted(headers=None, **body):
    return RequestBody(json.dumps(body).encode()).take_wanted(headers or {})


@pytest.mark.parametrize(
    ("body", "allowed", "refused"),
    [
        ({}, ["s/1", "anything"], []),
        ({"min_version": None}, ["s/1", "anything"], []),
        ({"min_version": 3}, ["s/3", "s/4", "t/3"], ["s/2", "anything", "s/x"]),
        ({"min_version": "3"}, ["s/3", "s/4"], ["s/2"]),
        ({"min_version": "s/3"}, ["s/3", "s/10"], ["s/2", "t/3", "t/10"]),
        ({"exact_version": 3}, ["s/3", "t/3"], ["s/2", "s/4"]),
        ({"exact_version": "s/3"}, ["s/3"], ["s/2", "s/4", "t/3"]),
        ({"min_version": 2, "exact_version": 1}, [], ["s/1", "s/2"]),
        ({"min_version": 0}, ["s/0"], []),
    ],
)
def test_what_may_answer(body, allowed, refused):
    found = wanted(**body)
    assert all(found.allows(label) for label in allowed)
    assert not any(found.allows(label) for label in refused)


@pytest.mark.parametrize("value", [-1, True, 1.5, "", "x", "s/", "/3", "s/-1", [1], {"a": 1}, "9" * 16, "s t/1"])
@pytest.mark.parametrize("name", ["min_version", "exact_version"])
def test_what_is_no_version_is_refused(name, value):
    with pytest.raises(UsageError, match=name):
        wanted(**{name: value})


def test_headers_say_it_where_the_body_does_not():
    headers = {"x-min-version": "s/3", "x-exact-version": "4"}
    assert wanted(headers).allows("s/4")
    assert not wanted(headers).allows("s/3")
    assert wanted(headers, exact_version=3).allows("s/3")
    assert RequestBody(b"no JSON").take_wanted(headers) == wanted(headers)


spaces = st.sampled_from(["", " ", "\n\t"])
values = st.sampled_from(
    ["1.0", "1e5", '"\\u00e9"', '{"b": [1,  2]}', "null", "-0.0", "123456789012345678901234567890", '"min_version"']
)
others = st.dictionaries(st.sampled_from(["model", "prompt", "seed", "é", "min", 'q"']), values, max_size=4)


@given(others, spaces, st.sampled_from([None, "3", '"s/3"']))
def test_only_the_fields_that_were_taken_out_are_missing(members, space, version):
    told = {**members, **({"min_version": version} if version else {})}
    text = f"{space}{{{','.join(f'{json.dumps(name)}{space}:{space}{value}' for name, value in told.items())}}}{space}"
    body = RequestBody(text.encode())
    body.take_wanted({})
    out = body.encode()
    if version is None:
        assert out == text.encode()
    # Each value is byte for byte what it was.
    assert out.count(b":") - out.count(b'"b":') == len(members)
    assert all(value.encode() in out for value in members.values())
    assert list(json.loads(out)) == list(members)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_what_is_no_object_goes_on_as_it_came(data):
    body = RequestBody(data)
    body.take_wanted({})
    body.salt("s/1")
    if not data.strip().startswith(b"{"):
        assert body.encode() == data


def test_deep_nesting_is_the_engines_to_refuse():
    data = b'{"a":' + b"[" * 100_000 + b"}"
    body = RequestBody(data)
    assert body.take_wanted({}) == ANY_VERSION
    assert body.encode() == data


def salted(label, **given):
    body = RequestBody(json.dumps({"prompt": "x", **given}).encode())
    body.salt(label)
    told = json.loads(body.encode())
    assert told["prompt"] == "x"
    return told["cache_salt"]


def test_the_salt_keeps_versions_apart_and_what_the_client_keeps_apart():
    labels, own = ("s/1", "s/2", "x" * 256), (None, "mine", "m" * 128, "1")
    salts = [salted(label, cache_salt=salt) for label in labels for salt in own]
    assert salted("s/1") == salts[0] == salted("s/1", cache_salt=None)
    assert len(set(salts)) == len(salts)
    # As vLLM takes it.
    assert all(len(salt) <= 128 and set("@/\\\0").isdisjoint(salt) for salt in salts)


@pytest.mark.parametrize("salt", [7, ""])
def test_a_salt_that_the_engine_refuses_is_left_to_it(salt):
    assert salted("s/1", cache_salt=salt) == salt
