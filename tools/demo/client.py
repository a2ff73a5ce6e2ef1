"""A client that never stops asking: one stream of tokens after another, each kept with its time and its proof."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Client", "TokenSeen"]

_PROMPT = "def restore(self, version):\n"


@dataclass(frozen=True, slots=True)
class TokenSeen:
    """A token as it arrived: when (monotonic seconds), and under which version.

    ``before`` and ``after`` are the weights' digests on both sides of its forward pass.
    """

    at: float
    version: str | None
    before: str
    after: str


class Client:
    """Streams from the engine in a thread of its own until the block ends."""

    def __init__(self, url: str) -> None:
        self.tokens: list[TokenSeen] = []
        self.failure: str | None = None
        self._url = url
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="client")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        seed = 0
        try:
            with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
                while not self._stopping:
                    seed += 1
                    self._stream(http, seed)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self._fail(f"the stream broke: {error!r}")

    def _stream(self, http: httpx.Client, seed: int) -> None:
        request = {"prompt": _PROMPT, "max_tokens": 200, "temperature": 0.8, "seed": seed}
        with http.stream("POST", "/generate", json=request) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                token = json.loads(line)
                if "error" in token:
                    raise ValueError(token["error"]["message"])
                if "spans" in token:  # the last line
                    return
                seen = TokenSeen(time.monotonic(), token["version"], token["digest_before"], token["digest_after"])
                with self._changed:
                    self.tokens.append(seen)
                    self._changed.notify_all()
                if self._stopping:
                    return

    def _fail(self, what: str) -> None:
        with self._changed:
            self.failure = what
            self._changed.notify_all()

    def wait_for(self, wanted: str, *, count: int, timeout: float) -> None:
        """Block until ``count`` tokens were generated under a version, given by its label."""
        deadline = time.monotonic() + timeout
        position = seen = 0
        with self._changed:
            while seen < count:
                for token in self.tokens[position:]:
                    seen += token.version == wanted
                position = len(self.tokens)
                if self.failure is not None:
                    raise RuntimeError(self.failure)
                if seen < count and not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"only {seen} of {count} tokens of {wanted} came in {timeout:g} s")

    def rate(self, start: float, end: float) -> float:
        """Return the tokens a second that arrived between two moments."""
        count = sum(start <= token.at < end for token in self.tokens)
        return count / (end - start) if end > start else 0.0
