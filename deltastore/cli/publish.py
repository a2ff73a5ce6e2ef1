"""`deltastore publish STORE CHECKPOINT_DIR`."""

from __future__ import annotations

import click

from deltastore.retention import Standing

from .app import (
    emit,
    json_option,
    key_value_option,
    parse_scalar,
    progress_bar,
    sign_key_option,
    store_options,
    trusted_keys_option,
)
from .records import human_bytes, version_record

__all__ = ["command"]


@click.command("publish")
@store_options
@click.argument("checkpoint_dir")
@click.option("--step", type=int, help="The trainer's own count.")
@key_value_option("--meta", "metadata", help="A metadata field; may be repeated.")
@click.option("--level", type=click.Choice(["fast", "max"]), default="fast", show_default=True)
@click.option("--base", help="A local checkpoint of the stream, to compare with (default: the store's anchor).")
@sign_key_option
@trusted_keys_option
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    checkpoint_dir: str,
    step: int | None,
    metadata: dict[str, str],
    level: str,
    base: str | None,
    sign_key: str | None,
    trusted_keys: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Publish a checkpoint directory as exactly one new version."""
    from deltastore.checkpoint import open_checkpoint  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.writer import Writer  # noqa: PLC0415

    checkpoint = open_checkpoint(checkpoint_dir)
    fields = {name: parse_scalar(value) for name, value in metadata.items()}
    with (
        progress_bar() as progress,
        Writer(
            store,
            resume=True,  # a stream must be there: --base is no wish to make one
            base=base,
            level=level,
            sign_key=sign_key,
            trusted_keys=trusted_keys,
            storage_options=storage_options,
            progress=progress,
        ) as writer,
    ):
        published = writer.publish(checkpoint, step=step, metadata=fields).result()
        manifest = writer.head
    record = version_record(manifest, Standing(None))
    if as_json:
        emit({"stream_id": manifest.stream_id, **record, "timings": dict(published.timings)})
    else:
        click.echo(
            f"version {published.version}  {published.snapshot_id}  {record['changed_fraction']:.2%} changed, "
            f"{human_bytes(published.stored_bytes)} stored "
            f"({record['ratio']:.2%} of {human_bytes(record['snapshot_bytes'])})"
        )
