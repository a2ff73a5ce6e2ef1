"""``python -m tools.bench.device``: comparing on a CUDA device, what crosses the bus, and the pinned path.

Without a CUDA device it says so in one line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from deltastore.codec.chunk import warm_up
from deltastore.device import Bus, changed_elements
from deltastore.digest import hasher
from deltastore.shadow import Run, Shadow
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec
from deltastore.tensors import DeviceBytes, TensorInput, named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "run"]

_DENSITIES = (0.001, 0.01, 0.02, 0.1)
_RUN_CHUNKS = 4


def run(quick: bool = False, *, device: str = "cuda") -> dict[str, Any]:
    """Measure on a device; ``{"available": False}`` where there is none. Speeds are GB/s of weights, medians.

    ``device``: "cpu" tries the bench itself out, without saying anything of a GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here: nothing measured.", file=sys.stderr)
        return {"available": False}
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    size, rounds = (64 << 20, 3) if quick else (1 << 30, 7)
    warm_up([2])
    densities = [_density(place, size, rounds, density) for density in _DENSITIES]
    return {
        "available": True,
        "device": torch.cuda.get_device_name(place) if device == "cuda" else device,
        "torch": torch.__version__,
        "bytes": size,
        "rounds": rounds,
        "limits": _limits(place, size, rounds),
        "densities": densities,
    }


def _seconds(work: Callable[[], object], place: torch.device, rounds: int) -> float:
    """Return the median time of ``work``, the device's included, after one round that does not count."""
    times = []
    for _ in range(rounds + 1):
        _settle(place)
        started = time.perf_counter()
        work()
        _settle(place)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _limits(place: torch.device, size: int, rounds: int) -> dict[str, float]:
    """Measure what the device and its bus can do at all."""
    one = torch.zeros(size // 8, dtype=torch.int64, device=place)
    other = torch.zeros_like(one)
    pinned = torch.empty(min(size, 256 << 20), dtype=torch.uint8, pin_memory=place.type == "cuda")
    part = one.view(torch.uint8)[: pinned.numel()]
    return {
        "device_read_gb_s": size / _seconds(one.sum, place, rounds) / 1e9,
        "device_copy_gb_s": size / _seconds(lambda: other.copy_(one), place, rounds) / 1e9,
        "bus_to_host_gb_s": pinned.numel() / _seconds(lambda: pinned.copy_(part), place, rounds) / 1e9,
        "bus_to_device_gb_s": pinned.numel() / _seconds(lambda: part.copy_(pinned), place, rounds) / 1e9,
    }


def _density(place: torch.device, size: int, rounds: int, density: float) -> dict[str, float]:
    """Measure all paths for one share of changed bf16 elements."""
    generator = torch.Generator(place).manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (size // 2,), dtype=torch.int16, device=place, generator=generator)
    new = old + (torch.rand(size // 2, device=place, generator=generator) < density).to(torch.int16)
    limit = old.numel() // 4
    found = changed_elements(old, new, limit=limit)
    assert found is not None
    crossed = sum(result.numel() * result.element_size() for result in found)
    changed = found[0].numel()
    del found
    extract = _seconds(lambda: changed_elements(old, new, limit=limit), place, rounds)
    pinned = _seconds(lambda: _bring(new, place), place, rounds)
    encode = _encode(old, new, place, rounds)
    return {
        "density": changed / old.numel(),
        "extract_gb_s": size / extract / 1e9,
        "bus_bytes": crossed,
        "bus_share": crossed / size,
        "pinned_gb_s": size / pinned / 1e9,
        **{name: size / seconds / 1e9 for name, seconds in encode.items()},
    }


def _bring(new: torch.Tensor, place: torch.device) -> None:
    """Bring all chunks over through the two page-locked buffers."""
    content = DeviceBytes(new.view(torch.uint8), None)
    ranges = [(start, start + CHUNK_BYTES) for start in range(0, 2 * new.numel(), CHUNK_BYTES)]
    for _ in Bus(place).chunks(content, ranges):
        pass


def _encode(old: torch.Tensor, new: torch.Tensor, place: torch.device, rounds: int) -> dict[str, float]:
    """Time one thread's whole encoding: with the copy on the device, through the pinned path, and on the CPU."""
    spec = TensorSpec("w", "BF16", (new.numel(),))
    shadow = Shadow(Schema([spec]), hasher("xxh3-128"), level="fast")
    host = shadow._tensors[0]  # noqa: SLF001 - a bench of the inside
    host[:] = old.view(torch.uint8).cpu().numpy()
    on_host = new.view(torch.uint8).cpu().numpy()
    if place.type == "cuda":
        (found,) = named_tensors({"w": new.view(torch.bfloat16)}, shadow.schema)
    else:
        found = TensorInput(spec, DeviceBytes(new.view(torch.uint8), None))
    runs: list[Run] = [(0, found.bytes, first, first + _RUN_CHUNKS) for first in range(0, spec.chunks, _RUN_CHUNKS)]
    plain: list[Run] = [(0, lambda start, end: on_host[start:end], first, end) for _, _, first, end in runs]

    def encode(given: list[Run]) -> None:
        for one in given:
            shadow.encode([one])

    seconds = {"encode_on_device_gb_s": _seconds(lambda: encode(runs), place, rounds)}
    shadow._device_shadow()._share = 0  # noqa: SLF001
    shadow._device_shadow()._held.clear()  # noqa: SLF001
    shadow._device_shadow()._left = dict.fromkeys([place], 0)  # noqa: SLF001
    seconds["encode_pinned_gb_s"] = _seconds(lambda: encode(runs), place, rounds)
    seconds["encode_on_host_gb_s"] = _seconds(lambda: encode(plain), place, rounds)
    return seconds


def main() -> None:
    """Print all figures as JSON, if there are any."""
    figures = run()
    if figures["available"]:
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
