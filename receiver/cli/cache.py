"""`receiver cache`."""

from __future__ import annotations

import logging
import resource
import signal
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click

from deltastore.cli.app import cache_size_option, debug_option, local_path, storage_options
from deltastore.errors import DeltastoreError, StorageError
from deltastore.tokens import read_token

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command"]

_INTERRUPTED = 130


@click.command("cache")
@click.option("--store", required=True, metavar="URL", help="The store whose parts are served.")
@click.option("--cache", required=True, metavar="DIR", type=local_path, help="The directory that keeps them.")
@cache_size_option
@click.option(
    "--listen", default="127.0.0.1:9320", show_default=True, metavar="HOST:PORT", help="Where receivers reach it."
)
@storage_options
@debug_option
def command(store: str, cache: Path, cache_bytes: int | None, listen: str, storage_options: dict[str, str]) -> int:
    """Serve a store's parts to a site until SIGTERM, each fetched once: receivers say `--cache http://HOST:PORT`."""
    from deltastore.reader import store_at  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.storage import close_backend, open_backend  # noqa: PLC0415
    from deltastore.storage.cache import DEFAULT_CACHE_BYTES  # noqa: PLC0415
    from deltastore.storage.cache_client import TOKEN_NAME  # noqa: PLC0415
    from deltastore.storage.cache_directory import CacheDirectory  # noqa: PLC0415
    from receiver.cache_server import CacheServer  # noqa: PLC0415
    from receiver.stopping import wait_unless  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("receiver")
    stopping: SimpleQueue[None] = SimpleQueue()  # an Event's lock would not bear a signal's handler
    seen: list[int] = []

    def stop(number: int, _frame: object) -> None:
        seen.append(number)
        stopping.put(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def sleep(seconds: float) -> None:
        wait_unless(lambda: bool(seen), seconds)
        if seen:
            raise StorageError("The cache server was told to stop.", transient=False)

    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    backend = open_backend(store, storage_options=storage_options, sleep=sleep)
    directory = CacheDirectory(cache, max_bytes=cache_bytes or DEFAULT_CACHE_BYTES, sleep=sleep)
    with CacheServer(backend, directory, listen, token=read_token(TOKEN_NAME)) as server:
        log.info("Listening on %s.", server.url)
        try:
            store_at(backend)
        except DeltastoreError as error:
            # Receivers do without a cache that has nothing; the store may come, or come back.
            log.warning("%s It is served as soon as it is there.", error)
        stopping.get()
    close_backend(backend)
    return _INTERRUPTED if signal.SIGINT in seen else 0
