"""What a soak of a receiver did and met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.cli.records import human_bytes, table

if TYPE_CHECKING:
    from .daemon import Growth, Sample
    from .proxy import Traffic

__all__ = ["POLLS", "ReceiverSoakReport"]

#: The daemon's counter of its polls.
POLLS = "receiver_stage_seconds_count poll"


@dataclass(slots=True)
class ReceiverSoakReport:
    """What was done and met. ``counters``: the daemon's own, of all its lives; ``looks``: checks of what it held."""

    versions: int = 0
    looks: int = 0
    served: int = 0
    tag_moves: int = 0
    outages: int = 0
    damages: int = 0
    restarts: int = 0
    refused_starts: int = 0
    collected: int = 0
    seconds: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)

    def show(self) -> str:
        """Return tables."""
        met = sum(count.requests for kind, count in self.traffic.items() if kind != "none")
        requests = sum(count.requests for count in self.traffic.values())
        counted = [
            (f"{count:,.0f}", what)
            for count, what in [
                (self.versions, "versions published"),
                (self.counters["receiver_patches_total"], "patched"),
                (self.served, "seen served, bit-exact"),
                (self.looks, "looks at what it held, bit-exact"),
                (self.counters[POLLS], "polls"),
                (self.counters["receiver_heartbeats_total sent"], "heartbeats"),
                (requests, "requests on the link"),
                (met, "of them with a fault"),
                (self.counters["receiver_retries_total request"], "requests tried again"),
                (self.counters["receiver_retries_total pass"], "passes tried again"),
                (self.tag_moves, "moves of the tag"),
                (self.outages, "outages of the store"),
                (self.counters["receiver_repairs_total"], f"chunks mended after {self.damages} damages"),
                (self.restarts, "restarts by SIGTERM"),
                (self.refused_starts, "starts ended by a damaged answer"),
                (self.collected, "objects collected"),
            ]
        ]
        grown = [(f"{row.first:,.0f}", f"{row.last:,.0f}", f"+{row.bound:,.0f}", row.what) for row in self.growth]
        return (
            table(("count", "of what"), counted)
            + "\n\n"
            + table(("first", "last", "bound", "of the last life"), grown)
            + f"\n{self.seconds:.0f} s; the last life: {human_bytes(self.growth[0].last)} of anonymous memory"
        )
