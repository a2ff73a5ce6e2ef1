"""``python -m tools.bench storage``: what the S3 clients cost this process, beside a local directory.

The server's own work is the limit on a small machine, so the figure to compare is the client's processor seconds for
a GB; the rates are those of this machine with the server on it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.storage import close_backend, open_backend
from deltastore.testing.s3_server import s3_server

from .report import Column, Report, Section, rate, size, text
from .settings import MIB
from .timing import gigabytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage import Backend

    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_THREADS = 2
_COLUMNS = (
    Column("client", "client", text),
    Column("call", "call", text),
    Column("each", "object_bytes", size),
    Column("GB/s", "gbps", rate),
    Column("client CPU s/GB", "cpu_seconds_per_gb", rate),
)


def run(settings: Settings) -> Report:
    """Move the same objects by each client in turn: whole parts and small ones, up, down, and in ranges."""
    home = Path(tempfile.mkdtemp(dir=settings.directory))
    total = settings.model_bytes(128, 8)
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(home / "server"))
        backends = {"local": open_backend(str(home / "local"))}
        for client in ("s3fs", "obstore"):
            options = {**server.storage_options, "client": client}
            backends[client] = open_backend(f"{server.url}/{client}", storage_options=options)
            stack.callback(close_backend, backends[client])
        rows = [
            row
            for each in (min(64 * MIB, total // 2), min(MIB, total // 2))
            for row in _measure(backends, each, total // each, settings.rounds)
        ]
    title = f"Storage: {total // MIB} MiB by {_THREADS} threads, S3 server on the same machine"
    return Report("storage", (Section("storage", title, _COLUMNS, rows),))


def _measure(backends: dict[str, Backend], each: int, count: int, rounds: int) -> list[Row]:
    data = os.urandom(each)
    keys = [f"object-{each}-{number}" for number in range(count)]
    piece = max(each // 16, 1)
    calls: dict[str, Callable[[Backend, str], object]] = {
        "upload": lambda backend, key: backend.write(key, data),
        "download": lambda backend, key: backend.read(key, limit=each),
        "ranges": lambda backend, key: [
            backend.read_range(key, start, start + piece) for start in range(0, each - piece + 1, piece)
        ],
    }
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for turn in range(rounds + 1):  # one more, to warm up
            for call, action in calls.items():
                for client, backend in backends.items():
                    wall, processor = time.perf_counter(), time.process_time()
                    list(pool.map(action, [backend] * count, keys))
                    if turn:
                        spent = (time.perf_counter() - wall, time.process_time() - processor)
                        taken.setdefault((client, call), []).append(spent)
    return [
        {
            "client": client,
            "call": call,
            "object_bytes": each,
            "bytes": each * count,
            "gbps": gigabytes(each * count, statistics.median(wall for wall, _ in times)),
            "cpu_seconds_per_gb": statistics.median(processor for _, processor in times) / (each * count / 1e9),
        }
        for (client, call), times in taken.items()
    ]
