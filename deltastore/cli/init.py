"""`deltastore init STORE --base DIR`."""

from __future__ import annotations

import click

from .app import emit, json_option, progress_bar, store_options
from .records import human_bytes, version_record

__all__ = ["command"]


@click.command("init")
@store_options
@click.option("--base", required=True, help="The checkpoint directory that both sides start from.")
@click.option("--hash", "hash_name", default="xxh3-128", type=click.Choice(["xxh3-128", "blake3"]), show_default=True)
@click.option("--upload-base/--no-upload-base", default=True, help="Store the base as anchor 0.", show_default=True)
@click.option(
    "--unsafe-skip-probe",
    is_flag=True,
    help="Do not try whether the place creates objects exclusively. Where it does not, versions may be lost.",
)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    base: str,
    hash_name: str,
    upload_base: bool,
    unsafe_skip_probe: bool,
    as_json: bool,
) -> None:
    """Make a stream from a base checkpoint; the base becomes version 0."""
    from deltastore.checkpoint import open_checkpoint  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.init import create_stream  # noqa: PLC0415
    from deltastore.storage import open_backend  # noqa: PLC0415

    with progress_bar() as progress:
        opened = create_stream(
            open_backend(store, storage_options=storage_options),
            open_checkpoint(base),
            hash_name=hash_name,
            upload_base=upload_base,
            unsafe_skip_probe=unsafe_skip_probe,
            progress=progress,
        )
    record = version_record(opened.base)
    if as_json:
        emit({"stream_id": opened.stream_id, **record})
    else:
        stored = human_bytes(record["stored_bytes"]) if upload_base else "not stored"
        click.echo(f"stream {opened.stream_id}")
        click.echo(f"version 0  {record['snapshot_id']}  {human_bytes(record['snapshot_bytes'])}, anchor {stored}")
