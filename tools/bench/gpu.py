"""``python -m tools.bench gpu``: finding what changed on the device, and what then has to cross the bus.

The floor is measured with torch alone: reading two arrays side by side on the device, moving whole tensors through
pinned memory, and moving only what changed. ``deltastore.device``, where there is one, is measured against it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from .pairs import as_tensors
from .report import Column, Report, Section, Target, rate, size, text
from .synthetic import make_pair
from .timing import gigabytes, medians

if TYPE_CHECKING:
    from collections.abc import Callable

    from .report import Row
    from .settings import Settings

__all__ = ["run"]

_DEVICE_MODULE = "deltastore.device"
_COLUMNS = (
    Column("what", "what", text),
    Column("GB/s of weights", "gbps", rate),
    Column("bytes over the bus", "bus_bytes", size),
)


def run(settings: Settings) -> Report:
    """Measure on the first CUDA device; without one, say so."""
    if not torch.cuda.is_available():
        return Report("gpu", notes=("No CUDA device here: nothing was measured.",))
    pair = make_pair("bf16", 0.015, settings.model_bytes(512, 64))
    old, new = (
        torch.cat([tensor.flatten() for tensor in as_tensors(pair.schema, side).values()]).cuda().view(torch.int16)
        for side in (pair.old, pair.new)
    )
    rows = _floor(old, new, settings)
    targets = []
    if importlib.util.find_spec(_DEVICE_MODULE) is not None:
        ours = _extraction(importlib.import_module(_DEVICE_MODULE), old, new, settings)
        rows.append(ours)
        targets.append(Target("extraction / two-stream read of the device", 0.5, ours["gbps"] / rows[0]["gbps"]))
    title = f"{torch.cuda.get_device_name()}: bf16, {pair.changed():.2%} changed, {pair.nbytes >> 20} MiB"
    return Report("gpu", (Section("gpu", title, _COLUMNS, rows),), targets)


def _floor(old: torch.Tensor, new: torch.Tensor, settings: Settings) -> list[Row]:
    pinned = torch.empty(new.shape, dtype=new.dtype, pin_memory=True)
    changed = int((old != new).sum())

    def take_changed() -> None:
        places = (old != new).nonzero().flatten()
        places.to(torch.int32).cpu()
        new[places].cpu()

    return [
        _row("compare (torch.equal)", lambda: torch.equal(old, old), old.nbytes, 0, settings),
        _row("whole tensors, pinned", lambda: pinned.copy_(new, non_blocking=True), old.nbytes, old.nbytes, settings),
        _row("changed only, torch", take_changed, old.nbytes, 6 * changed, settings),
    ]


def _extraction(device: Any, old: torch.Tensor, new: torch.Tensor, settings: Settings) -> Row:
    """Measure this project's extraction: ``device.extract(old, new)`` returns what crossed the bus, as CPU tensors."""
    crossed = sum(tensor.nbytes for tensor in device.extract(old, new))
    return _row("changed only, ours", lambda: device.extract(old, new), old.nbytes, crossed, settings)


def _row(what: str, function: Callable[[], object], nbytes: int, bus_bytes: int, settings: Settings) -> Row:
    def complete() -> None:
        function()
        torch.cuda.synchronize()

    elapsed = medians({what: complete}, rounds=settings.rounds)[what]
    return {"what": what, "gbps": gigabytes(nbytes, elapsed), "bus_bytes": bus_bytes}
