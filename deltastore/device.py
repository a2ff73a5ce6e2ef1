"""Tensors that are not in the CPU's memory: a shadow beside them, so that only changed elements cross the bus.

Imports torch, so it is imported only once such a tensor is published. The comparison finds *where* a tensor changed and
the new values there; everything that is hashed or stored is made on the CPU, out of the host's shadow and those values,
so that a chunk's digest and its difference are always of the same bytes. Where the shadow does not fit into the
device's memory, or more than a quarter of the elements changed, whole chunks come across, one ahead of the encoder.

All work of a thread runs in its own CUDA streams, and is finished when a function here returns. On any other device,
and on the CPU itself, which the tests use, the same code makes plain copies.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .codec import kernels
from .snapshot import CHUNK_BYTES
from .tensors import DeviceBytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from .shadow import Run, Version
    from .snapshot import Schema

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

__all__ = ["Bus", "Changes", "DeviceShadow", "changed_elements"]

#: Shadows take up to this share of what is free on a device when its first tensor comes: the rest is the trainer's.
SHARE = 0.5
#: Where more than one in so many elements changed, a whole chunk is the cheaper cargo, and not sparse anyway.
_WHOLE_SHARE = 4

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_elements(old: torch.Tensor, new: torch.Tensor, *, limit: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the positions (int32, ascending) and new values of the elements that differ; ``None`` if over ``limit``.

    Both one-dimensional integer tensors of the same type and length, below 2^31, on one device; so are the results.
    """
    differs = old != new
    if int(differs.count_nonzero()) > limit:
        return None
    positions = differs.nonzero().reshape(-1)
    return positions.to(torch.int32), new[positions]


class Bus:
    """One thread's way between the CPU and one device: two buffers, page-locked on CUDA, each with its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._slots = (_Slot(device), _Slot(device))

    def computing(self, after: Iterable[Any] = ()) -> AbstractContextManager[object]:
        """Enter the stream that computes, which first waits for the events in ``after``."""
        return self._slots[0].entered(after)

    def finish(self) -> None:
        """Block until all that was computed is done."""
        self._slots[0].finish()

    def fetch(self, *tensors: torch.Tensor) -> list[Bytes]:
        """Bring one or two computed tensors to the CPU, as bytes that the caller may keep."""
        for slot, tensor in zip(self._slots, tensors, strict=False):
            slot.fill(tensor.view(torch.uint8), self._slots[0])
        self.finish()
        return [slot.filled().copy() for slot, _ in zip(self._slots, tensors, strict=False)]

    def chunks(self, content: DeviceBytes, ranges: Sequence[tuple[int, int]]) -> Iterator[Bytes]:
        """Yield byte ranges of a tensor in order; while one is used, the next is on its way.

        Each is valid until the one after it is asked for.
        """
        for number, (start, end) in enumerate(ranges):
            slot = self._slots[number % 2]
            with slot.entered([content.ready]):
                slot.fill(content.flat[start:end], slot)
            if number:
                yield self._slots[(number - 1) % 2].finish()
        if ranges:
            yield self._slots[(len(ranges) - 1) % 2].finish()


class _Slot:
    """A host buffer and a stream that fills it."""

    __slots__ = ("_buffer", "_filled", "_source", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffer = self._filled = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._source: torch.Tensor | None = None

    def entered(self, after: Iterable[Any] = ()) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def fill(self, source: torch.Tensor, by: _Slot) -> None:
        """Start copying ``source`` (uint8) into the buffer, in the stream of ``by``."""
        size = source.numel()
        if self._buffer.numel() < size:
            pinned = self._stream is not None
            room = 1 << (size - 1).bit_length()
            self._buffer = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._filled, self._source = self._buffer[:size], source
        with by.entered():
            self._filled.copy_(source, non_blocking=self._stream is not None)

    def finish(self) -> Bytes:
        """Wait for the stream; return what the buffer then holds."""
        if self._stream is not None:
            self._stream.synchronize()
        return self.filled()

    def filled(self) -> Bytes:
        self._source = None
        content: Bytes = self._filled.numpy()
        return content


@dataclass(frozen=True, slots=True)
class Changes:
    """Where one run changed, counted from its first element (int32, ascending), and the new values there."""

    positions: Array
    values: Array


class DeviceShadow:
    """Copies of a shadow's tensors on the devices where the published tensors are. Used from several threads.

    ``host``: each tensor's last committed bytes, in schema order. A copy is made when its tensor first comes, if it
    fits, and equals the host's from then on: ``follow`` must be told of every chunk before the host's changes.
    """

    def __init__(self, schema: Schema, host: Sequence[Bytes], *, share: float = SHARE) -> None:
        self._schema = schema
        self._host = host
        self._share = share
        self._left: dict[torch.device, int] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._refused: set[tuple[int, torch.device]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()

    # Memory

    def _bus(self, device: torch.device) -> Bus:
        if not hasattr(self._local, "buses"):
            self._local.buses = {}
        buses: dict[torch.device, Bus] = self._local.buses
        if device not in buses:
            buses[device] = Bus(device)
        return buses[device]

    def _copy(self, tensor: int, device: torch.device) -> torch.Tensor | None:
        """Return the device's copy of a tensor, made now if need be; ``None`` where it does not fit."""
        with self._lock:
            held = self._held.get(tensor)
            if held is not None and held.device == device:
                return held
            self._release(tensor)
            if (tensor, device) in self._refused:
                return None
            made = self._make(tensor, device)
            if made is None:
                self._refused.add((tensor, device))
            else:
                self._held[tensor] = made
            return made

    def _make(self, tensor: int, device: torch.device) -> torch.Tensor | None:
        host = self._host[tensor]
        left = self._left.setdefault(device, int(self._share * _free_bytes(device)))
        if host.size > left:
            return None
        bus = self._bus(device)
        try:
            with bus.computing():
                made = torch.empty(host.size, dtype=torch.uint8, device=device)
                made.copy_(torch.from_numpy(host))
            bus.finish()
        except RuntimeError:  # out of memory, in the words of torch
            return None
        self._left[device] = left - host.size
        return made

    def _release(self, tensor: int) -> None:
        held = self._held.pop(tensor, None)
        if held is not None:
            self._left[held.device] += held.numel()

    # Comparing

    def compare(self, runs: Sequence[Run]) -> list[Changes | None]:
        """Compare runs of new bytes with the copies; ``None`` for a run whose bytes must come over whole.

        Runs of one device and element width are compared in one go, so that small tensors cost little each.
        """
        found: list[Changes | None] = [None] * len(runs)
        groups: dict[tuple[torch.device, int], list[int]] = {}
        for number, (tensor, content, _, _) in enumerate(runs):
            if isinstance(content, DeviceBytes) and self._copy(tensor, content.flat.device) is not None:
                width = self._schema.tensors[tensor].width
                groups.setdefault((content.flat.device, width), []).append(number)
        for (device, width), members in groups.items():
            results = self._compare_group(device, width, [runs[number] for number in members])
            for number, changes in zip(members, results, strict=True):
                found[number] = changes
        return found

    def _compare_group(self, device: torch.device, width: int, runs: list[Run]) -> Sequence[Changes | None]:
        bus = self._bus(device)
        sizes = []
        with bus.computing(content.ready for _, content, _, _ in runs if isinstance(content, DeviceBytes)):
            olds, news = [], []
            for tensor, content, first, end in runs:
                start, stop = first * CHUNK_BYTES, self._schema.tensors[tensor].chunk_range(end - 1)[1]
                held = self._copy(tensor, device)
                if held is None or not isinstance(content, DeviceBytes):
                    return [None] * len(runs)
                olds.append(_elements(held[start:stop], width))
                news.append(_elements(content.flat[start:stop], width))
                sizes.append((stop - start) // width)
            old, new = (pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in (olds, news))
            changed = changed_elements(old, new, limit=old.numel() // _WHOLE_SHARE)
            if changed is None:
                bus.finish()
                return [None] * len(runs)
            positions, values = bus.fetch(*changed)
        return _split(positions.view(np.int32), values.view(f"<u{width}"), sizes)

    def versions(self, run: Run, changes: Changes | None, buffer: Bytes) -> Iterator[Version]:
        """Yield a run's chunks, without those that are known not to have changed; ``buffer`` takes one at a time."""
        tensor, content, first, end = run
        spec = self._schema.tensors[tensor]
        ranges = [spec.chunk_range(chunk) for chunk in range(first, end)]
        if changes is None:
            if isinstance(content, DeviceBytes):
                bus = self._bus(content.flat.device)
                for chunk, new in enumerate(bus.chunks(content, ranges), first):
                    yield tensor, chunk, new, None
            return
        starts = np.array([start - ranges[0][0] for start, _ in ranges] + [ranges[-1][1] - ranges[0][0]]) // spec.width
        bounds = np.searchsorted(changes.positions, starts)
        for number, (start, stop) in enumerate(ranges):
            where = slice(int(bounds[number]), int(bounds[number + 1]))
            if where.start < where.stop:
                new = buffer[: stop - start]
                np.copyto(new, self._host[tensor][start:stop])
                positions = changes.positions[where] - np.int32(starts[number])
                new.view(f"<u{spec.width}")[positions] = changes.values[where]
                yield tensor, first + number, new, positions

    # Following

    def follow(self, tensor: int, start: int, new: Bytes) -> None:
        """Make the copy's bytes from ``start`` the ``new`` ones (a whole chunk); the host's are still the old ones.

        A copy that the device fails to change is given up.
        """
        with self._lock:
            held = self._held.get(tensor)
        if held is None:
            return
        old = self._host[tensor][start : start + new.size]
        try:
            self._write(held[start : start + new.size], old, new, self._schema.tensors[tensor].width)
        except RuntimeError:
            with self._lock:
                self._release(tensor)

    def _write(self, target: torch.Tensor, old: Bytes, new: Bytes, width: int) -> None:
        positions = np.empty(new.size // width + 4, np.int32)
        count = kernels.list_changes(_read_only(old, width), _read_only(new, width), positions)
        bus = self._bus(target.device)
        with bus.computing():
            if count * _WHOLE_SHARE * width > new.size:
                target.copy_(torch.from_numpy(new))
            else:
                where = torch.from_numpy(positions[:count]).to(target.device).long()
                values = torch.from_numpy(new.view(f"<u{width}")[positions[:count]].view(np.uint8)).to(target.device)
                target.view(_INTEGERS[width])[where] = values.view(_INTEGERS[width])
        bus.finish()


def _split(positions: Array, values: Array, sizes: Sequence[int]) -> list[Changes]:
    """Give each run of ``sizes`` elements its own changes."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    bounds = np.searchsorted(positions, starts).tolist()
    return [
        Changes(positions[begin:end] - np.int32(start), values[begin:end])
        for start, begin, end in zip(starts[:-1], bounds, bounds[1:], strict=False)
    ]


def _elements(data: torch.Tensor, width: int) -> torch.Tensor:
    """View bytes as integers; a copy where they start at an odd place."""
    if data.storage_offset() % width or data.data_ptr() % width:
        data = data.clone()
    return data.view(_INTEGERS[width])


def _read_only(data: Bytes, width: int) -> Array:
    view: Array = data.view(f"<u{width}")
    view.flags.writeable = False
    return view


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return sys.maxsize
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
