"""The demonstration's last page: sizes and pauses, a bar a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tools.demo.scene import Row

__all__ = ["draw"]

_INK, _BLUE, _ORANGE, _GREEN = "#333333", "#3b6ea5", "#d9822b", "#4c9a62"


def draw(rows: Sequence[Row], path: Path, *, full_bytes: int, title: str) -> None:
    """Draw stored bytes against the full checkpoint, the stages of each update, and tokens a second."""
    versions = [row.version for row in rows]
    figure, (sizes, stages, rates) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    figure.suptitle(title, color=_INK)
    sizes.bar(versions, [row.stored_bytes / 1024 for row in rows], color=_BLUE)
    sizes.set_ylabel("stored, KiB")
    sizes.set_title(
        f"Bytes a version: {sum(row.stored_bytes for row in rows) / len(rows) / full_bytes:.2%} of the "
        f"{full_bytes / 2**20:.1f} MiB checkpoint on average",
        fontsize=10,
    )
    bottom = [0.0] * len(rows)
    for name, color in (("publish", _BLUE), ("fetch", _GREEN), ("patch", "#8fbf9f"), ("pause", _ORANGE)):
        seconds = [1000 * getattr(row, name) for row in rows]
        stages.bar(versions, seconds, bottom=bottom, color=color, label=name)
        bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    stages.set_ylabel("milliseconds")
    stages.set_ylim(top=1.2 * max(bottom))  # room for the legend
    stages.set_title("Where the time of an update goes: generation stands still only in the pause", fontsize=10)
    stages.legend(ncols=4, fontsize=8, frameon=False)
    for name, color in (("before", _INK), ("during", _GREEN), ("after", _BLUE)):
        rates.plot(versions, [getattr(row, name) for row in rows], color=color, marker="o", ms=4, label=name)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("tokens/s")
    rates.set_xlabel("version")
    rates.set_title("Generation before, during (publish, fetch, patch) and after each update", fontsize=10)
    rates.legend(ncols=3, fontsize=8, frameon=False)
    rates.xaxis.get_major_locator().set_params(integer=True)
    for axis in (sizes, stages, rates):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
