"""Which files a process has open: by name, since other tests' files are closed whenever their garbage is collected."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def open_under(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open, one that was removed as well."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - only numbers
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - may be a deleted file's name
    return sorted(name for name in found if name.startswith(f"{directory}/"))
