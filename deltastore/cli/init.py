"""`deltastore init STORE --base DIR`, `deltastore init STORE --from STORE VERSION`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.errors import UsageError
from deltastore.retention import Standing

from .app import (
    emit,
    json_option,
    key_value_option,
    progress_bar,
    sign_key_option,
    store_options,
    trusted_keys_option,
)
from .records import human_bytes, version_record

if TYPE_CHECKING:
    from deltastore.reader import Store

__all__ = ["command"]


@click.command("init")
@store_options
@click.option("--base", metavar="DIR", help="The checkpoint directory that both sides start from.")
@click.option("--from", "source", nargs=2, metavar="STORE VERSION", help="Fork: start from a version of this stream.")
@key_value_option("--from-storage-option", "source_options", help="A storage option for the stream that is forked.")
@trusted_keys_option
@click.option(
    "--hash", "hash_name", type=click.Choice(["xxh3-128", "blake3"]), help="Default: xxh3-128, or that of --from."
)
@click.option("--upload-base/--no-upload-base", default=True, help="Store the base as anchor 0.", show_default=True)
@click.option("--anchor-every", type=click.IntRange(min=1), metavar="N", help="An anchor at each Nth version.")
@click.option(
    "--anchor-when",
    type=click.FloatRange(min=1),
    metavar="F",
    help="An anchor when the newest version costs a new receiver more than F times its snapshot's bytes.",
)
@click.option(
    "--unsafe-skip-probe",
    is_flag=True,
    help="Do not try whether the place creates objects exclusively. Where it does not, versions may be lost.",
)
@sign_key_option
@click.option(
    "--signer", "signers", multiple=True, metavar="HEX|FILE", help="Another public key that may sign; may be repeated."
)
@json_option
def command(as_json: bool, **values: Any) -> None:
    """Make a stream from a base checkpoint; the base becomes version 0.

    With --from the base is a version of another stream. --trusted-key is then for that stream, and --base a local
    checkpoint of it to start from.
    """
    opened = _made(**values)
    record = version_record(opened.base, Standing(None))
    if as_json:
        emit({"stream_id": opened.stream_id, **record})
    else:
        stored = human_bytes(record["stored_bytes"]) if opened.base.anchored else "not stored"
        click.echo(f"stream {opened.stream_id}")
        click.echo(f"version 0  {record['snapshot_id']}  {human_bytes(record['snapshot_bytes'])}, anchor {stored}")


def _made(
    *,
    store: str,
    storage_options: dict[str, str],
    base: str | None,
    source: tuple[str, str] | None,
    source_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    hash_name: str | None,
    upload_base: bool,
    anchor_every: int | None,
    anchor_when: float | None,
    unsafe_skip_probe: bool,
    sign_key: str | None,
    signers: tuple[str, ...],
) -> Store:
    from deltastore.checkpoint import open_checkpoint  # noqa: PLC0415 - heavy, and --help does without
    from deltastore.digest import DEFAULT_HASH  # noqa: PLC0415
    from deltastore.fork import fork_stream  # noqa: PLC0415
    from deltastore.init import create_stream  # noqa: PLC0415
    from deltastore.manifest import anchor_policy  # noqa: PLC0415
    from deltastore.reader import open_store  # noqa: PLC0415
    from deltastore.signing import Signer, load_public_key  # noqa: PLC0415
    from deltastore.storage import open_backend  # noqa: PLC0415

    anchors = anchor_policy(anchor_every, anchor_when)
    with progress_bar() as progress:
        if source is not None:
            forked = open_store(source[0], storage_options=source_options, trusted_keys=trusted_keys)
            return fork_stream(
                store,
                forked,
                forked.resolve(source[1]).version,
                base=base,
                hash_name=hash_name,
                upload_base=upload_base,
                anchors=anchors,
                unsafe_skip_probe=unsafe_skip_probe,
                sign_key=sign_key,
                other_signers=signers,
                storage_options=storage_options,
                progress=progress,
            )
        if base is None:
            raise UsageError("There is nothing to start from.", hint="Give --base DIR, or --from STORE VERSION.")
        if source_options or trusted_keys is not None:
            raise UsageError(
                "--from-storage-option and --trusted-key are for a stream that is forked.", hint="Give --from too."
            )
        return create_stream(
            open_backend(store, storage_options=storage_options),
            open_checkpoint(base),
            hash_name=hash_name or DEFAULT_HASH,
            upload_base=upload_base,
            anchors=anchors,
            unsafe_skip_probe=unsafe_skip_probe,
            signer=Signer.load(sign_key) if sign_key is not None else None,
            other_signers=[load_public_key(key) for key in signers],
            progress=progress,
        )
