"""An engine in this process: a torch module whose weights are replaced where they lie."""

from __future__ import annotations

import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deltastore.errors import EngineError
from receiver.engines.base import EngineInfo, Probe
from receiver.engines.gate import GenerationGate
from receiver.engines.weights import CheckpointReader, WeightsDigest, all_finite
from receiver.quantize import Scheme, TensorSpec, make_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from receiver.engines.base import InFlight
    from receiver.engines.gate import Stream

__all__ = ["ServedWeights", "TorchModuleEngine"]

Targets = str | tuple[str, ...]
_NAMED = 3  # offenders named in a message


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Which weights a forward pass ran on: the version, and the digest taken when it was loaded.

    ``version`` is ``None`` for weights that did not come through ``load``; ``digest`` is 32 hexadecimal
    digits, or ``None`` while a load runs and after one that failed. ``caches`` is another number after each load
    that dropped what was computed before.
    """

    version: str | None
    digest: str | None
    caches: int = 0


@dataclass(frozen=True, slots=True)
class _Move:
    """One checkpoint tensor and, for each tensor the scheme makes of it, the module's names it goes to."""

    source: str
    targets: dict[str, tuple[str, ...]]


class TorchModuleEngine:
    """Keeps a module's weights at a version, in the module's own precision.

    A load copies into the existing parameters and persistent buffers, so their addresses, and CUDA graphs
    over them, stay valid. Names that share storage (``lm_head`` tied to ``embed_tokens``) count as one: a
    checkpoint may carry any or all of them, and those it carries must be equal.

    ``mapping`` gives, for a checkpoint tensor, the module's name or names for it (``()``: not wanted here);
    a tensor absent from it goes by its own name. What a scheme adds to a weight follows it: with
    ``{"a.weight": "b.weight"}``, ``a.weight_scale_inv`` goes to ``b.weight_scale_inv``. ``probe`` runs a
    fixed prompt and returns its logits, ``[…, length, vocabulary]``. ``drop_caches`` is called
    after every load, whatever its outcome, unless that keeps them. ``pause_timeout`` is in seconds.

    After a load that failed the engine holds no version, and ``resume`` is refused until a load succeeds.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        scheme: str | Scheme = "bf16",
        mapping: Mapping[str, Targets] | None = None,
        probe: Callable[[], torch.Tensor] | None = None,
        drop_caches: Callable[[], None] | None = None,
        pause_timeout: float | None = 60.0,
    ) -> None:
        self._scheme = make_scheme(scheme) if isinstance(scheme, str) else scheme
        self._mapping = dict(mapping or {})
        self._probe = probe
        self._drop_caches = drop_caches
        self._pause_timeout = pause_timeout
        self._gate = GenerationGate()
        self._incarnation = uuid.uuid4().hex
        self._first_name, self._weights = _distinct_weights(module)
        self._digest = WeightsDigest(self._weights)
        self._work = threading.Lock()  # one load, confirm or resume at a time
        self._broken = False
        self._served = ServedWeights(None, self._digest())

    @property
    def probes_paused(self) -> bool:
        """A probe needs no gate."""
        return True

    def info(self) -> EngineInfo:
        """Tell the incarnation, the version last loaded and whether generation is held."""
        return EngineInfo(self._incarnation, self._served.version, self._gate.held)

    @property
    def served(self) -> ServedWeights:
        """The weights as of the last load; inside ``forward`` this is what the pass runs on."""
        return self._served

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """Hold one request, from its first forward pass to its last; waits while paused, or while others end."""
        with self._gate.stream() as stream:
            yield stream

    @contextmanager
    def forward(self, stream: Stream | None = None) -> Iterator[ServedWeights]:
        """Hold one forward pass: weights do not change inside, and are those yielded. Waits while paused.

        Raises ``StreamAborted`` once a pause has ended the stream that the pass belongs to.
        """
        with self._gate.forward(stream):
            yield self._served

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Keep new forward passes out and wait until none runs; ``wait`` has the streams end first."""
        drain = self._pause_timeout if timeout is None else timeout
        self._gate.pause(in_flight, drain=drain, timeout=self._pause_timeout)

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Replace the weights by those of ``checkpoint``; every header is checked before anything changes."""
        with self._work:
            if not self._gate.held:
                raise EngineError("the engine is not paused", hint="pause() before load().")
            self._replace(checkpoint, version, keep_kv=keep_kv)

    def prime(self, checkpoint: Path) -> None:
        """Load the weights a fresh engine starts with; it then serves them under no version."""
        self.pause()
        with self._work:
            self._replace(checkpoint, None, keep_kv=False)
        self.resume()

    def confirm(self, version: str) -> None:
        """Check that ``version`` is held, that it is finite, and that no byte changed since it was loaded."""
        with self._work:
            if self._broken or self._served.version != version:
                held = self._served.version
                raise EngineError(
                    f"the engine holds {held or 'no version'}, not {version}",
                    key=version,
                    hint="loading the version again.",
                )
            for name, tensor in self._weights.items():
                if not all_finite(tensor):
                    raise self._sick(f"weight {name} holds NaN or infinity at version {version}", name)
            if self._digest() != self._served.digest:
                raise self._sick(f"the weights changed since version {version} was loaded", version)

    def probe(self) -> Probe | None:
        """Run the fixed prompt: the likeliest token after each of its beginnings, and its log-probability."""
        with self._work:
            if self._probe is None:
                return None
            version = self._served.version or "its first weights"
            try:
                with torch.inference_mode():
                    logits = self._probe().float()
                    best = torch.log_softmax(logits.reshape(-1, logits.shape[-1]), dim=-1).max(dim=-1)
            except (RuntimeError, IndexError) as error:
                raise self._sick(f"the probe failed at {version}: {error}", version) from error
            return Probe(tuple(best.values.tolist()), tuple(best.indices.tolist()))

    def resume(self) -> None:
        """Let forward passes through again; refused after a load that failed."""
        with self._work:
            if self._broken:
                raise EngineError(
                    "the last load failed, so the engine stays paused",
                    hint="loading this version again, or the one before.",
                )
            self._gate.resume()

    def close(self) -> None:
        """Do nothing: the module belongs to the caller."""

    def stop(self) -> None:
        """Turn forward passes away for good, those that wait for a resume too; for shutting down."""
        self._gate.close()

    def weights_digest(self) -> str:
        """Return xxh3-128 over the bytes of all weights in name order as they are now, in hexadecimal."""
        return self._digest()

    def _replace(self, checkpoint: Path, version: str | None, *, keep_kv: bool) -> None:
        self._broken = True
        caches = self._served.caches + (not keep_kv)
        self._served = ServedWeights(None, None, caches)
        try:
            with CheckpointReader(checkpoint) as reader, torch.no_grad():
                moves = self._plan(reader)
                for move in moves:
                    self._apply(move, reader.tensor(move.source))
            self._served = ServedWeights(version, self._digest(), caches)
            self._broken = False
        except (RuntimeError, MemoryError) as error:
            raise self._sick(f"loading {checkpoint} failed half-way: {error}", str(checkpoint)) from error
        finally:
            if self._drop_caches is not None and not keep_kv:
                self._drop_caches()

    def _apply(self, move: _Move, tensor: torch.Tensor) -> None:
        for output, value in self._scheme.quantize(move.source, tensor).items():
            for target in move.targets[output]:
                self._weights[target].copy_(value)

    def _plan(self, reader: CheckpointReader) -> list[_Move]:
        """Match checkpoint and module; refuse every disagreement at once, before any of it matters."""
        moves: list[_Move] = []
        unknown: list[str] = []
        wrong: list[str] = []
        sources: dict[str, list[str]] = {}
        for name, spec in sorted(reader.specs.items()):
            targets: dict[str, tuple[str, ...]] = {}
            for output, made in self._scheme.layout(name, spec).items():
                wanted = self._targets(name, output)
                unknown += [name for target in wanted if target not in self._first_name]
                targets[output] = tuple(self._first_name[t] for t in wanted if t in self._first_name)
                for target in targets[output]:
                    sources.setdefault(target, []).append(name)
                    have = _spec(self._weights[target])
                    if have != made:
                        wrong.append(f"{name} gives {made} where the engine has {have}")
            moves.append(_Move(name, targets))
        missing = sorted(set(self._weights) - set(sources))
        self._refuse({"unknown": unknown, "missing": missing, "different": wrong})
        for tied in sources.values():
            _check_tied(reader, tied)
        return moves

    def _targets(self, name: str, output: str) -> tuple[str, ...]:
        given = self._mapping.get(output, self._mapping.get(name, output))
        names = (given,) if isinstance(given, str) else given
        if output in self._mapping or name not in self._mapping:
            return names
        suffix = output.removeprefix(name.removesuffix(".weight"))
        return tuple(target.removesuffix(".weight") + suffix for target in names)

    def _refuse(self, problems: Mapping[str, list[str]]) -> None:
        parts = []
        for kind, names in problems.items():
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                parts.append(f"{kind}: {', '.join(names[:_NAMED])}{more}")
        if parts:
            first = next(names[0] for names in problems.values() if names)
            raise EngineError(
                f"the checkpoint does not fit the engine ({'; '.join(parts)}); nothing was changed",
                key=first.split(" ", 1)[0],
                hint="the engine's mapping and scheme, or the checkpoint this model was built from.",
            )

    def _sick(self, message: str, key: str) -> EngineError:
        return EngineError(message, key=key, hint="loading again, or going back to the version before.")


def _distinct_weights(module: torch.nn.Module) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Map every state name to the first name of its storage; and those first names to their tensors."""
    by_place: dict[tuple[object, ...], str] = {}
    first_name: dict[str, str] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        if not tensor.is_contiguous():
            raise EngineError(f"weight {name} is not contiguous", key=name, hint=".contiguous() on it.")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape)
        # Empty tensors have no place of their own.
        first = by_place.setdefault(place, name) if tensor.numel() else name
        first_name[name] = first
        weights[first] = tensor.detach()
    return first_name, weights


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def _check_tied(reader: CheckpointReader, names: list[str]) -> None:
    """Refuse a checkpoint whose tied tensors differ: one of them would win, and nobody would know which."""
    for other in names[1:]:
        first, second = reader.tensor(names[0]), reader.tensor(other)
        if not torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8)):
            raise EngineError(
                f"tensors {names[0]} and {other} are one in the engine, and differ in the checkpoint",
                key=other,
                hint="publishing both from one tensor, or an engine that does not tie them.",
            )
