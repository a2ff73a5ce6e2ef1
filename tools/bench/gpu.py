"""``python -m tools.bench gpu``: comparing on a CUDA device, what crosses the bus, and the pinned path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import device
from .report import Column, Report, Section, Target, percent, rate, text

if TYPE_CHECKING:
    from .settings import Settings

__all__ = ["run"]

_LIMITS = (Column("limit", "what", text), Column("GB/s", "gbps", rate))
_DENSITIES = (
    Column("changed", "density", percent),
    Column("extract GB/s", "extract_gb_s", rate),
    Column("over the bus", "bus_share", percent),
    Column("pinned GB/s", "pinned_gb_s", rate),
    Column("encode, compared there GB/s", "encode_on_device_gb_s", rate),
    Column("encode, pinned GB/s", "encode_pinned_gb_s", rate),
    Column("encode on the host GB/s", "encode_on_host_gb_s", rate),
)


def run(settings: Settings) -> Report:
    """Measure on the first CUDA device; without one, say so."""
    figures = device.run(settings.quick)
    if not figures["available"]:
        return Report("gpu", notes=("No CUDA device here: nothing was measured.",))
    limits = [{"what": name.removesuffix("_gb_s"), "gbps": value} for name, value in figures["limits"].items()]
    densities = figures["densities"]
    # Both inputs are read, so the device's read bandwidth counts twice.
    share = 2 * densities[1]["extract_gb_s"] / figures["limits"]["device_read_gb_s"]
    return Report(
        "gpu",
        (
            Section("limits", f"{figures['device']}: limits", _LIMITS, limits),
            Section("gpu", f"{figures['device']}: bf16, {figures['bytes'] >> 20} MiB", _DENSITIES, densities),
        ),
        [Target("extraction / two-stream read of the device", 0.5, share)],
    )
