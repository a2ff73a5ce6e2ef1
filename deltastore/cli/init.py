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
@click.option("--anchor-every", type=click.IntRange(min=1), metavar="N", help="An anchor at each Nth version.")
@click.option(
    "--anchor-when",
    type=click.FloatRange(min=1),
    metavar="F",
    help="An anchor when the newest version costs a new receiver more than F times its snapshot's bytes.",
)
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    base: str,
    hash_name: str,
    upload_base: bool,
    anchor_every: int | None,
    anchor_when: float | None,
    as_json: bool,
) -> None:
    """Make a stream from a base checkpoint; the base becomes version 0."""
    from deltastore.checkpoint import open_checkpoint  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.init import create_stream  # noqa: PLC0415
    from deltastore.manifest import anchor_policy  # noqa: PLC0415
    from deltastore.storage import open_backend  # noqa: PLC0415

    with progress_bar() as progress:
        opened = create_stream(
            open_backend(store, storage_options=storage_options),
            open_checkpoint(base),
            hash_name=hash_name,
            upload_base=upload_base,
            anchors=anchor_policy(anchor_every, anchor_when),
            progress=progress,
        )
    record = version_record(opened.base)
    if as_json:
        emit({"stream_id": opened.stream_id, **record})
    else:
        stored = human_bytes(record["stored_bytes"]) if upload_base else "not stored"
        click.echo(f"stream {opened.stream_id}")
        click.echo(f"version 0  {record['snapshot_id']}  {human_bytes(record['snapshot_bytes'])}, anchor {stored}")
