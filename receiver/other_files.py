"""A slot's files beside its weights (config, tokenizer): known by their digests, so that one that is lost is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import CorruptObject

from .records import OtherFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from deltastore.checkpoint import Checkpoint
    from deltastore.digest import Hasher

__all__ = ["damaged_files", "files_again", "recorded_files"]


def recorded_files(checkpoint: Checkpoint, hash_function: Hasher) -> tuple[OtherFile, ...]:
    """Return what a checkpoint's other files are now; raises ``CheckpointError``."""
    return tuple(OtherFile(name, hash_function.of(checkpoint.read_other_file(name))) for name in checkpoint.other_files)


def damaged_files(directory: Path, files: Iterable[OtherFile], hash_function: Hasher) -> tuple[str, ...]:
    """Return the names of the files that are not there, or not what was recorded. Others than those do not count."""
    return tuple(file.name for file in files if _bytes_of(directory, file, hash_function) is None)


def files_again(
    files: Iterable[OtherFile],
    hash_function: Hasher,
    *,
    directories: Iterable[Path],
    stored: Callable[[], Mapping[str, bytes]],
) -> dict[str, bytes]:
    """Return all files as they were recorded: from the first directory that has them so, else from what is ``stored``.

    Raises ``CorruptObject`` when one is nowhere to be had.
    """
    found: dict[str, bytes] = {}
    for file in files:
        pieces = (_bytes_of(directory, file, hash_function) for directory in directories)
        data = next((piece for piece in pieces if piece is not None), None)
        if data is None:
            data = stored().get(file.name)
            if data is None or hash_function.of(data) != file.digest:
                raise CorruptObject(
                    f"{file.name} is damaged, and nowhere to be had again.",
                    key=file.name,
                    hint="Put it back as it was, or have it taken as it is (docs/receiver.md tells how).",
                )
        found[file.name] = data
    return found


def _bytes_of(directory: Path, file: OtherFile, hash_function: Hasher) -> bytes | None:
    try:
        data = (directory / file.name).read_bytes()
    except OSError:
        return None
    return data if hash_function.of(data) == file.digest else None
