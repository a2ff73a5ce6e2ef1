"""Storage options as people type them."""

from __future__ import annotations

import pytest

from deltastore.errors import UsageError
from deltastore.storage.options import parse_options, secrets_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"anon": "true"}, {"anon": True}),
        ({"anon": "False"}, {"anon": False}),
        ({"max_concurrency": "4"}, {"max_concurrency": 4}),
        ({"key": "123", "secret": "true"}, {"key": "123", "secret": "true"}),
        ({"account_name": "42"}, {"account_name": "42"}),
        ({"endpoint_url": "http://127.0.0.1:1"}, {"endpoint_url": "http://127.0.0.1:1"}),
        ({"client_kwargs": '{"verify": false}'}, {"client_kwargs": {"verify": False}}),
        ({"client_kwargs.verify": "false"}, {"client_kwargs": {"verify": False}}),
        ({"client_kwargs": {"verify": "false"}}, {"client_kwargs": {"verify": False}}),
        (
            {"client_kwargs": '{"a": 1}', "client_kwargs.verify": "/ca.pem", "client_kwargs.a": "2"},
            {"client_kwargs": {"a": 2, "verify": "/ca.pem"}},
        ),
        ({"client_kwargs.b": "1", "client_kwargs": {"a": 1}}, {"client_kwargs": {"a": 1, "b": 1}}),
        (
            {"config_kwargs.s3.addressing_style": "path"},
            {"config_kwargs": {"s3": {"addressing_style": "path"}}},
        ),
        ({"anon": True, "timeout": 1.5}, {"anon": True, "timeout": 1.5}),
    ],
)
def test_values(given, expected):
    assert parse_options(given) == expected


@pytest.mark.parametrize("given", [{"client_kwargs": "{broken"}, {"a": "1", "a.b": "2"}])
def test_refused(given):
    with pytest.raises(UsageError):
        parse_options(given)


def test_secrets():
    options = {"key": "one", "client_kwargs": {"aws_session_token": "two"}, "anon": False, "region": "here"}
    assert secrets_of(options) == {"one", "two"}
