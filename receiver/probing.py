"""What a probe's answer has to be: finite, another one for other weights, and as expected where that is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from deltastore.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .activation import Weights
    from .engines import Probe

__all__ = ["LEAST_CHANGE", "Expected", "agree", "check_finite", "differs", "judge", "read_expected"]

#: Below this share of changed elements a probe may well stay as it is.
LEAST_CHANGE = 1e-4
#: In nats: more than kernels, batches and compilation make of the same weights (0.03 was seen), less than others would.
_AGREES_WITHIN = 0.1
_MAX_BYTES = 1 << 24
#: So many positions never agree by chance; above so many nats a model may well be sure of each.
_FEW = 4
_SURE = -1.0


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log-probabilities that a version's probe has to give, each within ``tolerance`` (nats)."""

    logprobs: tuple[float, ...]
    tolerance: float = 0.05


def read_expected(path: Path) -> Mapping[str, Expected]:
    """Read what is expected, by label or version number; raises ``UsageError``."""
    try:
        with path.open("rb") as stream:
            expected = msgspec.json.decode(stream.read(_MAX_BYTES), type=dict[str, Expected])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The expected probes in {path} cannot be used: {error}.",
            key=str(path),
            hint='Give JSON such as {"17": {"logprobs": [-0.5, -1.25], "tolerance": 0.05}}.',
        ) from error
    for name, one in expected.items():
        if not one.logprobs or not one.tolerance >= 0:
            raise UsageError(
                f"{path} expects nothing of {name!r}, or within a negative tolerance.",
                key=str(path),
                hint="Give each version log-probabilities and a tolerance in nats.",
            )
    return expected


def check_finite(probe: Probe, label: str) -> None:
    """Raise ``EngineError`` unless there are log-probabilities, and all of them are finite."""
    broken = [value for value in probe.logprobs if not math.isfinite(value)]
    if broken or not probe.logprobs:
        told = f"{len(broken)} of {len(probe.logprobs)} log-probabilities that are not finite" if broken else "none"
        raise EngineError(
            f"the probe gives {told} at {label}",
            key=label,
            hint="a fresh start of the engine on that version: if that is right, it cannot reload this model.",
        )


def _check_varied(probe: Probe, label: str) -> None:
    """Raise ``EngineError`` where every token is as likely as the next one at every position: no model says that.

    Weights whose scales were lost give it, or NaN, depending on what lies in memory. Certainty is no such case.
    """
    values = set(probe.logprobs)
    if len(probe.logprobs) >= _FEW and len(values) == 1 and max(values) < _SURE:
        raise EngineError(
            f"the probe gives the same log-probability {max(values):.4f} at each of its positions at {label}",
            key=label,
            hint="a fresh start of the engine on that version: if that is right, it cannot reload this model.",
        )


def agree(one: Probe, other: Probe) -> bool:
    """Tell whether two probes may well be of the same weights; after another token they tell nothing any more."""
    if len(one.logprobs) != len(other.logprobs):
        return False
    for position, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if not abs(a - b) <= _AGREES_WITHIN:
            return False
        if one.tokens and other.tokens and one.tokens[position] != other.tokens[position]:
            break
    return True


def differs(one: Probe, other: Probe) -> bool:
    """Tell whether two probes differ in anything at all."""
    return one.logprobs != other.logprobs or one.tokens != other.tokens


def judge(
    probe: Probe, weights: Weights, *, before: Probe | None, changed: float | None, expected: Mapping[str, Expected]
) -> str | None:
    """Raise ``EngineError`` for a probe that the weights cannot have given; returns what is odd about it, if anything.

    ``before`` is the probe of the version served before, ``changed`` the share of the elements in which the two
    versions differ (``None``: not known).
    """
    check_finite(probe, weights.label)
    wanted = expected.get(weights.label) or expected.get(str(weights.version))
    if wanted is not None:
        _compare(probe, weights.label, wanted)
    else:
        _check_varied(probe, weights.label)
    if before is None or differs(probe, before):
        return None
    told = f"the probe at {weights.label} is exactly what it was before"
    if changed is not None and changed >= LEAST_CHANGE:
        raise EngineError(
            f"{told}, though {changed:.3%} of the elements changed",
            key=weights.label,
            hint="a look whether the engine read the checkpoint at all: its log, and which directory it sees there.",
        )
    return f"{told}; " + ("it is not known how much changed" if changed is None else "hardly anything changed")


def _compare(probe: Probe, label: str, wanted: Expected) -> None:
    given = probe.logprobs
    off = max((abs(a - b) for a, b in zip(given, wanted.logprobs, strict=False)), default=0.0)
    if len(given) < len(wanted.logprobs) or not off <= wanted.tolerance:
        raise EngineError(
            f"the probe at {label} is not as expected: {len(given)} log-probabilities, up to {off:.3g} away from the "
            f"{len(wanted.logprobs)} expected, where {wanted.tolerance:g} is allowed",
            key=label,
            hint="a fresh start of the engine on that version, or other values in --probe-expect.",
        )
