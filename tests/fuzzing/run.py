"""A run of one decoder after another."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from . import chunks, files, fleet, records
from .damage import Damage
from .decoder import Decoder, TooMuchMemory

DECODERS = (*chunks.DECODERS, *files.DECODERS, *records.DECODERS, *fleet.DECODERS)


@dataclass(slots=True)
class Outcome:
    """What one decoder was fed, and what became of it."""

    name: str
    cases: int = 0
    fed: int = 0
    accepted: int = 0
    seconds: float = 0.0


def fuzz(decoder: Decoder, wanted: int, *, seed: int) -> Outcome:
    """Feed at least ``wanted`` bytes to one decoder; raises on the first case that is not as it must be."""
    outcome = Outcome(decoder.name)
    started = time.perf_counter()
    while outcome.fed < wanted:
        # A seed a case: a failure names the one that it needs.
        number = seed * 10**9 + outcome.cases
        case = decoder.case(Damage(number))
        try:
            try:
                accepted = decoder.attempt(case)
            except TooMuchMemory:
                accepted = decoder.attempt(case)  # the first call of a kernel compiles it
        except Exception as error:
            raise AssertionError(f"{decoder.name}, seed {number}: {error!r} for {case!r}") from error
        outcome.cases += 1
        outcome.fed += decoder.size(case)
        outcome.accepted += accepted
    outcome.seconds = time.perf_counter() - started
    return outcome


def peak_memory() -> int:
    """Return the process's largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
