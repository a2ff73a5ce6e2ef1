"""A client that streams a completion, for tests of engines under load."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CompletionStream", "complete"]

_SECONDS = 300.0  # a machine that others keep busy


def complete(url: str, prompt: Sequence[int], count: int, *, model: str = "m") -> tuple[list[int], list[float]]:
    """Ask a server for a greedy completion; return its tokens and their log-probabilities."""
    answer = httpx.post(f"{url}/v1/completions", json=_body(prompt, count, model), timeout=_SECONDS, trust_env=False)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class CompletionStream:
    """A greedy completion that is read by a thread of its own, token by token.

    ``tokens`` and ``logprobs`` grow meanwhile. ``finish_reason`` is the server's, or ``broken`` where the connection
    broke before it gave one. ``more`` goes into the request as it is.
    """

    def __init__(
        self,
        url: str,
        prompt: Sequence[int],
        *,
        most_tokens: int,
        model: str = "m",
        more: Mapping[str, object] | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self._changed = threading.Condition()
        self._url = url
        self._json = _body(prompt, most_tokens, model) | {"stream": True} | dict(more or {})
        self._thread = threading.Thread(target=self._read, name="completion", daemon=True)
        self._thread.start()

    def reach(self, count: int, *, timeout: float = _SECONDS) -> bool:
        """Wait until so many tokens are here, or it has ended; tell whether they are."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.tokens) >= count or self.finish_reason is not None, timeout)
            return len(self.tokens) >= count

    def outcome(self, *, timeout: float = _SECONDS) -> str | None:
        """Wait for the end; return the finish reason, or ``None`` when the time is over."""
        self._thread.join(timeout)
        return self.finish_reason

    def _read(self) -> None:
        reason = "broken"
        try:
            with (
                httpx.Client(trust_env=False, timeout=_SECONDS) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=self._json) as answer,
            ):
                for line in answer.iter_lines():
                    told = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                    for choice in told.get("choices") or ():  # neither an error nor the usage has one
                        reason = self._take(choice) or reason
        except httpx.HTTPError:
            pass
        with self._changed:
            self.finish_reason = reason
            self._changed.notify_all()

    def _take(self, choice: dict[str, Any]) -> str | None:
        with self._changed:
            self.tokens += choice.get("token_ids") or []
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            self._changed.notify_all()
        reason: str | None = choice["finish_reason"]
        return reason


def _body(prompt: Sequence[int], count: int, model: str) -> dict[str, object]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
