"""Make the golden stores of the format that is written today, from the versions of the oldest ones.

    PYTHONPATH=.:tests python tests/golden/make.py

To be run once for a format, before its first release: what it made stays for ever, and every later release reads it. It
refuses to touch what is there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from deltastore import Writer, open_store
from deltastore.checkpoint import open_checkpoint
from deltastore.compact import anchor
from deltastore.record import FORMAT

HERE = Path(__file__).parent
SOURCE = HERE / "1" / "xxh3-128" / "store"
HASHES = ("xxh3-128", "blake3")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make(home: Path, versions: list[Path], hash_name: str) -> None:
    """Publish the versions at level max to a store in ``home``, with an anchor at version 3; note what is expected."""
    source = open_store(SOURCE)
    with Writer(home / "store", base=versions[0], hash_name=hash_name, level="max") as writer:
        for version, directory in enumerate(versions[1:], 1):
            record = source.manifest(version)
            writer.publish(open_checkpoint(directory), step=record.step, metadata=record.metadata).result()
    store = open_store(home / "store")
    anchor(store, 3)
    checkpoints = [open_checkpoint(directory) for directory in versions]
    expected = {
        "hash": hash_name,
        "versions": [
            {
                "version": version,
                "snapshot_id": store.manifest(version).snapshot_id,
                "sha256": {spec.name: sha256(checkpoint.tensor(spec.name).tobytes()) for spec in checkpoint.schema},
            }
            for version, checkpoint in enumerate(checkpoints)
        ],
        "files": {name: sha256(checkpoints[0].read_other_file(name)) for name in checkpoints[0].other_files},
    }
    (home / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    """Make a store for each hash."""
    with tempfile.TemporaryDirectory() as scratch:
        source = open_store(SOURCE)
        versions = [Path(scratch) / str(version) for version in range(source.latest().version + 1)]
        for version, directory in enumerate(versions):
            source.restore(version, directory)
        for hash_name in HASHES:
            home = HERE / str(FORMAT) / hash_name
            home.mkdir(parents=True)
            make(home, versions, hash_name)
            shutil.rmtree(home / "store" / ".tmp", ignore_errors=True)


if __name__ == "__main__":
    main()
