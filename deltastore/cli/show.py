"""`deltastore show STORE VERSION`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deltastore.errors import VersionForgotten
from deltastore.manifest import MAX_PART_BYTES, MODEL
from deltastore.reader import open_store
from deltastore.tags import read_standing

from .app import emit, json_option, store_options, trusted_keys_option
from .records import human_bytes, table, version_record

if TYPE_CHECKING:
    from deltastore.manifest import Manifest
    from deltastore.reader import Store

__all__ = ["command"]


@click.command("show")
@store_options
@trusted_keys_option
@click.argument("version")
@click.option("--tensors", is_flag=True, help="Also list what changed in each tensor (reads the version's parts).")
@json_option
def command(
    store: str,
    storage_options: dict[str, str],
    trusted_keys: tuple[str, ...] | None,
    version: str,
    tensors: bool,
    as_json: bool,
) -> None:
    """Show one version."""
    opened = open_store(store, storage_options=storage_options, trusted_keys=trusted_keys)
    manifest = opened.resolve(version)
    standing, tags = read_standing(opened)
    anchored = opened.anchored(range(manifest.version, manifest.version + 1), standing)
    record = version_record(manifest, standing, tags, anchored)
    record["stream_id"] = manifest.stream_id
    record["attempt_id"] = manifest.attempt_id
    record["invertible"] = manifest.model.invertible
    record["parts"] = [{"key": part.key, "size": part.size, "digest": part.digest} for part in manifest.model.parts]
    if tensors:
        standing.require(manifest.version)
        if not standing.keeps_parts(manifest.version):
            raise VersionForgotten(
                f"The parts that led to version {manifest.version} were let go; it is reached by another way.",
                hint="`deltastore diff` compares it with any version that is kept.",
            )
        record["tensors"] = _tensors(opened, manifest)
    if as_json:
        emit(record)
        return
    for name, value in record.items():
        if name not in ("parts", "tensors", "tags"):
            click.echo(f"{name:20} {value}")
    click.echo(f"{'parts':20} {len(record['parts'])}")
    if tensors:
        rows = [
            (
                f"{row['changed_elements'] / max(row['elements'], 1):.2%}",
                f"{row['changed_chunks']}/{row['chunks']}",
                human_bytes(row["encoded_bytes"]),
                f"{row['dtype']}{row['shape']}",
                row["name"],
            )
            for row in record["tensors"]
        ]
        click.echo(table(("changed", "chunks", "encoded", "dtype", "tensor"), rows))


def _tensors(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    from deltastore.part import PartIdentity, parse_part  # noqa: PLC0415 - only where parts are read
    from deltastore.spool import read_object  # noqa: PLC0415

    schema = store.schema()
    rows: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "elements": spec.elements,
            "chunks": spec.chunks,
            "changed_elements": 0,
            "changed_chunks": 0,
            "encoded_bytes": 0,
        }
        for spec in schema
    ]
    identity = PartIdentity(store.stream_id, manifest.version, manifest.attempt_id, MODEL)
    for reference in manifest.model.parts:
        data = read_object(store.backend, reference, limit=MAX_PART_BYTES)
        part = parse_part(data, identity, schema, store.hash, key=reference.key)
        for index in range(len(part)):
            row = rows[int(part.tensor[index])]
            row["changed_elements"] += int(part.changed[index])
            row["changed_chunks"] += 1
            row["encoded_bytes"] += int(part.starts[index + 1] - part.starts[index])
    return rows
