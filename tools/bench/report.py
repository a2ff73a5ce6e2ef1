"""What a bench found: sections of rows, and the figures that were to be reached. As tables for people, or as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deltastore.cli.records import human_bytes, table

from .machine import machine, today

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .settings import Settings

__all__ = ["Column", "Report", "Section", "Target", "percent", "rate", "ratio", "size", "text", "times"]

Row = dict[str, Any]


def text(value: object) -> str:
    """Show a word or a count."""
    return str(value)


def rate(value: float) -> str:
    """Show GB/s."""
    return f"{value:.2f}"


def ratio(value: float | None) -> str:
    """Show a ratio of times or rates."""
    return "-" if value is None else f"{value:.2f} x"


def percent(value: float) -> str:
    """Show a share."""
    return f"{value:.2%}"


def times(value: float) -> str:
    """Show seconds."""
    return f"{value:.3f} s"


def size(value: float) -> str:
    """Show a number of bytes."""
    return human_bytes(value)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its heading, the field of a row that it shows, and how."""

    heading: str
    key: str
    show: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Section:
    """One table. ``name`` is its key in the JSON, whose rows have all fields, shown or not."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: list[Row] = field(default_factory=list)

    def lines(self) -> str:
        """Return the table as text."""
        if not self.rows:
            return f"{self.title}\n  (nothing)"
        cells = [tuple(column.show(row[column.key]) for column in self.columns) for row in self.rows]
        # One empty column at the end: the last one is not right-aligned.
        return f"{self.title}\n" + table(
            (*(column.heading for column in self.columns), ""), [(*row, "") for row in cells]
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that was to be reached: ``at least`` (or at most) ``wanted``, and what was found."""

    figure: str
    wanted: float
    found: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


@dataclass(frozen=True, slots=True)
class Report:
    """All that one bench found."""

    bench: str
    sections: Sequence[Section] = ()
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()

    def record(self, settings: Settings) -> dict[str, Any]:
        """Return the documented JSON object."""
        return {
            "bench": self.bench,
            "date": today(),
            "machine": machine(),
            "settings": {"quick": settings.quick, "rounds": settings.rounds},
            "sections": {section.name: section.rows for section in self.sections},
            "targets": [
                {
                    "figure": target.figure,
                    "wanted": target.wanted,
                    "found": target.found,
                    "at_most": target.at_most,
                    "met": target.met,
                }
                for target in self.targets
            ],
            "notes": list(self.notes),
        }

    def show(self, settings: Settings) -> str:
        """Return everything as plain text."""
        here = machine()
        versions = ", ".join(f"{name} {here[name]}" for name in ("python", "torch", "numpy", "numba", "zstandard"))
        head = (
            f"{self.bench}: {today()}, {here['cpu']}, {here['cores']} cores, {human_bytes(here['memory_bytes'])}; "
            f"{versions}; medians of {settings.rounds}"
        )
        blocks = [head, *(section.lines() for section in self.sections)]
        if self.targets:
            blocks.append(self._targets())
        return "\n\n".join([*blocks, *self.notes])

    def _targets(self) -> str:
        rows = [
            (
                target.figure,
                f"{'<=' if target.at_most else '>='} {target.wanted:.2f}",
                f"{target.found:.2f}",
                "reached" if target.met else "MISSED",
            )
            for target in self.targets
        ]
        return table(("figure", "wanted", "found", ""), rows)
