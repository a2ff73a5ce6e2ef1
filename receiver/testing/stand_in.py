"""A stand-in for an inference engine: it schedules, caches and reloads as one does, and its model is a hash.

Every token depends on the bytes of the loaded checkpoint, on all tokens before it, and on the weights under which
each of those was computed. So mixed weights, and caches kept over an update, show in the tokens. Only the time between
two tokens passes in reality; all else happens when it is told to.
"""

from __future__ import annotations

import hashlib
import math
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Died", "LoadFailed", "Request", "StandIn", "Token", "expected_tokens", "read_weights"]

VOCABULARY: Final = 4096
_PIECES = 2  # of each file: a load stopped half-way always leaves a mixture
_OUTPUT = 16  # bytes of a digest

#: What may run: everything; what ran when the pause began; nothing.
Running = Literal["all", "old", "none"]


class LoadFailed(Exception):
    """A checkpoint that could not be loaded."""


class Died(Exception):
    """The engine is gone, and with it everything that ran on it."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token, and the natural logarithm of its probability."""

    token: int
    logprob: float


@dataclass(slots=True, eq=False)
class Request:
    """One sequence that is generated; ``kv`` stands for its keys and values, and is ``None`` when they are dropped.

    Requests with another ``salt`` share no cached prefix with it.
    """

    prompt: tuple[int, ...]
    most_tokens: int
    salt: str | None = None
    tokens: list[int] = field(default_factory=list)
    kv: bytes | None = None
    started: bool = False
    aborted: bool = False


def read_weights(checkpoint: Path) -> tuple[bytes, ...]:
    """Digest a checkpoint's weights, in pieces. Raises ``LoadFailed``."""
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise LoadFailed(f"no weights in {checkpoint}")
    pieces = []
    for file in files:
        content = file.read_bytes()
        half = -(-len(content) // _PIECES)
        pieces += [_digest(content[start : start + half]) for start in range(0, len(content), half)]
    return tuple(pieces)


def expected_tokens(checkpoint: Path, prompt: Sequence[int], count: int) -> list[Token]:
    """Return what a fresh engine on ``checkpoint`` makes of ``prompt``."""
    weights = _digest(*read_weights(checkpoint))
    kv = _prefill(weights, prompt)
    made = []
    for _ in range(count):
        made.append(_token(weights, kv))
        kv = _attend(weights, kv, made[-1].token)
    return made


class StandIn:
    """One engine. Threads may share it; each ``stream`` is generated in the thread that reads it.

    ``seconds_per_token`` passes after each token. With ``sick_after_reload`` a reload says that it succeeded, and every
    log-probability is NaN from then on, as int8 weights that an engine repacked once make them.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        seconds_per_token: float = 0.001,
        sick_after_reload: bool = False,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.fail_next_load = False
        self._weights = read_weights(checkpoint)
        self._seconds_per_token = seconds_per_token
        self._sick_after_reload = sick_after_reload
        self._on_death = on_death
        self._changed = threading.Condition()
        self._tick = threading.Event()
        self._running: Running = "all"
        self._requests: list[Request] = []
        self._prefixes: dict[tuple[str | None, tuple[int, ...]], bytes] = {}
        self._sick = False
        self._doomed = False
        self._dead = False

    @property
    def dead(self) -> bool:
        """Whether it is gone."""
        return self._dead

    @property
    def running(self) -> Running:
        """What may run."""
        return self._running

    @property
    def requests(self) -> int:
        """How many requests are not at their end."""
        return len(self._requests)

    @property
    def started(self) -> int:
        """How many requests run: those that wait for a resume from their first token on do not."""
        return sum(request.started for request in self._requests)

    def stream(self, prompt: Sequence[int], most_tokens: int) -> Iterator[Token]:
        """Generate; ends early where the request was aborted. Raises ``Died``."""
        request = self.admit(prompt, most_tokens)
        yield from self.generate(request)

    def admit(self, prompt: Sequence[int], most_tokens: int, *, salt: str | None = None) -> Request:
        """Take a request in; it runs as far as ``generate`` is read."""
        request = Request(tuple(prompt), most_tokens, salt)
        with self._changed:
            self._requests.append(request)
        return request

    def generate(self, request: Request) -> Iterator[Token]:
        """Generate a request's tokens; it is given up where nobody reads them on. Raises ``Died``."""
        try:
            while len(request.tokens) < request.most_tokens:
                with self._changed:
                    self._changed.wait_for(lambda: self._dead or request.aborted or self._may_run(request))
                    if self._dead:
                        raise Died
                    if request.aborted:
                        return
                    made = self._forward(request)
                yield made
                self._tick.wait(self._seconds_per_token)
        finally:
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Give a request up, or note its end; leaving twice is no error."""
        with self._changed:
            if request in self._requests:
                self._requests.remove(request)
            self._changed.notify_all()

    def hold(self, running: Running) -> None:
        """Say what may run from now on; when this returns no forward pass of anything else does."""
        with self._changed:
            self._running = running
            self._changed.notify_all()

    def abort(self) -> None:
        """End every request."""
        with self._changed:
            for request in self._requests:
                request.aborted = True
            self._changed.notify_all()

    def drain(self) -> bool:
        """Wait until nothing runs any more, or something is let run again; tells which. Raises ``Died``."""
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self._running == "all" or not self.started)
            if self._dead:
                raise Died
            return self._running != "all"

    def requeue(self) -> None:
        """Drop what was computed of every request; it is computed anew when the request goes on."""
        with self._changed:
            for request in self._requests:
                request.kv = None
                request.started = False

    def drop_prefixes(self) -> bool:
        """Forget every cached prefix; refused (``False``) while a request has keys and values."""
        with self._changed:
            if any(request.kv is not None for request in self._requests):
                return False
            self._prefixes.clear()
            return True

    def load(self, checkpoint: Path) -> None:
        """Load the weights piece by piece; whatever runs meanwhile sees a mixture.

        Raises ``LoadFailed`` before anything changed, or, after ``fail_next_load``, half-way: then the next forward
        pass kills the engine.
        """
        weights = read_weights(checkpoint)
        failing, self.fail_next_load = self.fail_next_load, False
        for done in range(1, len(weights) + 1):
            with self._changed:
                self._weights = weights[:done] + self._weights[done:]
                self._doomed = failing
            if failing:
                raise LoadFailed("a tensor has another shape")
            self._tick.wait(self._seconds_per_token)
        self._sick = self._sick_after_reload

    def die(self) -> None:
        """End at once."""
        with self._changed:
            self._dead = True
            self._tick.set()
            self._changed.notify_all()
        self._on_death()

    def probe(self, prompt: Sequence[int], count: int) -> list[Token]:
        """Run a prompt past the scheduler, without any cache; it works while everything is held."""
        with self._changed:
            weights = _digest(*self._weights)
            kv = _prefill(weights, prompt)
            made = []
            for _ in range(count):
                made.append(self._sickened(_token(weights, kv)))
                kv = _attend(weights, kv, made[-1].token)
            return made

    def _may_run(self, request: Request) -> bool:
        return self._running == "all" or (self._running == "old" and request.started)

    def _forward(self, request: Request) -> Token:
        if self._doomed:
            self._dead = True
            self._tick.set()
            self._changed.notify_all()
            threading.Thread(target=self._on_death, daemon=True).start()
            raise Died
        request.started = True
        weights = _digest(*self._weights)
        if request.kv is None:
            request.kv = self._prefixes.get((request.salt, request.prompt)) if not request.tokens else None
            if request.kv is None:
                request.kv = _prefill(weights, [*request.prompt, *request.tokens])
                if not request.tokens:
                    self._prefixes[request.salt, request.prompt] = request.kv
        made = self._sickened(_token(weights, request.kv))
        request.kv = _attend(weights, request.kv, made.token)
        request.tokens.append(made.token)
        return made

    def _sickened(self, token: Token) -> Token:
        return Token(0, math.nan) if self._sick else token


def _digest(*contents: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=_OUTPUT)
    for content in contents:
        found.update(content)
    return found.digest()


def _attend(weights: bytes, kv: bytes, token: int) -> bytes:
    return _digest(kv, weights, token.to_bytes(4, "little"))


def _prefill(weights: bytes, tokens: Sequence[int]) -> bytes:
    kv = b""
    for token in tokens:
        kv = _attend(weights, kv, token)
    return kv


def _token(weights: bytes, kv: bytes) -> Token:
    drawn = int.from_bytes(_digest(weights, kv), "little")
    return Token(drawn % VOCABULARY, -1e-3 - (drawn >> 64) % 10_000 / 1e3)
