"""What a run of the bench is told: how much data, how often, where, and with how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from deltastore.patch import default_workers

__all__ = ["MIB", "Settings", "default_cache"]

MIB = 1 << 20


def default_cache() -> Path:
    """Return where trained snapshots are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltastore-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``mib`` and ``sizes`` (MiB) override a bench's own model sizes; ``directory`` is a scratch place on disk."""

    directory: Path
    cache: Path
    quick: bool = False
    rounds: int = 7
    mib: int | None = None
    sizes: tuple[int, ...] | None = None
    case: str = ""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError("at least one round is needed")

    @property
    def threads(self) -> tuple[int, ...]:
        """One thread, and one for each core if there are more."""
        return tuple(sorted({1, default_workers()}))

    def model_bytes(self, full: int, quick: int) -> int:
        """Return the size of a model: as told, or ``full`` or ``quick`` MiB."""
        return (self.mib or (quick if self.quick else full)) * MIB

    def model_sizes(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        """Return several sizes in bytes: as told, or ``full`` or ``quick`` MiB."""
        return tuple(size * MIB for size in self.sizes or (quick if self.quick else full))
