"""The adapter for ``receiver.engines.serve``: an engine in another process of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from deltastore.errors import DrainTimeout, EngineError
from receiver.config import shown_url
from receiver.engines.base import EngineInfo, Probe
from receiver.engines.http_client import whole_answer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from receiver.engines.base import InFlight

__all__ = ["Timeouts", "TorchServerEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long to wait for an answer, in seconds.

    ``pause`` has to exceed the longest forward pass and the server's own pause timeout, and is added to the time that
    running streams are given; ``load`` covers reading the checkpoint and requantizing it, ``confirm`` a look at every
    weight, and a probe.
    """

    connect: float = 5.0
    request: float = 10.0
    pause: float = 75.0
    load: float = 900.0
    confirm: float = 120.0


class TorchServerEngine:
    """Speaks to one server; whatever goes wrong, on the way or there, is an ``EngineError``.

    Nothing is retried: the receiver decides that.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._shown = shown_url(self._url)
        self._timeouts = timeouts or Timeouts()
        # Proxies of the environment are for the outside world, not for the process next door.
        self._client = httpx.Client(trust_env=False, transport=transport)

    @property
    def probes_paused(self) -> bool:
        """The server probes at any time."""
        return True

    def info(self) -> EngineInfo:
        """Ask for the server's incarnation, version and whether it is paused."""
        answer = self._call("GET", "/info", timeout=self._timeouts.request)
        incarnation, version, paused = (answer.get(key) for key in ("incarnation", "version", "paused"))
        well_formed = isinstance(incarnation, str) and isinstance(paused, bool)
        if not well_formed or not (version is None or isinstance(version, str)):
            raise self._error("/info answered without incarnation, version and paused")
        return EngineInfo(str(incarnation), version, bool(paused))

    def first_tokens(self) -> float | None:
        """Ask how long after the last resume the first token came, in seconds; ``None`` before there was one."""
        seconds = self._call("GET", "/info", timeout=self._timeouts.request).get("first_token_seconds")
        return seconds if isinstance(seconds, float) else None

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Have the server hold generation, and wait for its running streams or forward passes."""
        body = {"in_flight": in_flight, "timeout": timeout}
        self._call("POST", "/pause", body, timeout=self._timeouts.pause + (timeout or 0.0))

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Have the server load ``checkpoint``, which it finds under the same path."""
        body = {"checkpoint": str(checkpoint.absolute()), "version": version, "keep_kv": keep_kv}
        self._call("POST", "/load", body, timeout=self._timeouts.load)

    def confirm(self, version: str) -> None:
        """Have the server check that it holds ``version``, whole and able to run."""
        answer = self._call("POST", "/confirm", {"version": version}, timeout=self._timeouts.confirm)
        if answer.get("version") != version:
            raise self._error(f"it confirmed version {answer.get('version')!r} instead of {version!r}")

    def probe(self) -> Probe | None:
        """Have the server run its fixed prompt."""
        answer = self._call("POST", "/probe", timeout=self._timeouts.confirm)
        logprobs, tokens = answer.get("logprobs"), answer.get("tokens")
        if logprobs is None:
            return None
        try:
            return Probe(tuple(float.fromhex(text) for text in logprobs), tuple(int(token) for token in tokens or ()))
        except (TypeError, ValueError, OverflowError) as error:
            raise self._error(f"/probe answered something else than log-probabilities: {error}") from error

    def resume(self) -> None:
        """Have the server go on generating."""
        self._call("POST", "/resume", timeout=self._timeouts.request)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._client.close()

    def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout: float
    ) -> Mapping[str, Any]:
        limits = httpx.Timeout(timeout, connect=self._timeouts.connect)
        try:
            response = whole_answer(self._client, method, self._url + path, seconds=timeout, json=body, timeout=limits)
            answer = response.json()
        except httpx.ConnectError as error:
            hint = "Start it (python -m receiver.engines.serve), or another --engine-url."
            raise self._error(f"nothing answers there: {error}", hint=hint) from error
        except httpx.TimeoutException as error:
            hint = "Ask it for /info; if it is only slow, give a longer timeout."
            raise self._error(f"no answer to {path} within {timeout:g} s", hint=hint) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RuntimeError) as error:
            # RuntimeError is what a closed client raises.
            raise self._error(f"{path} failed: {error}") from error
        if not isinstance(answer, dict):
            raise self._error(f"{path} answered something that is not an object")
        if response.status_code != httpx.codes.OK:
            message = answer.get("message", f"HTTP status {response.status_code}")
            key, told = answer.get("key"), answer.get("hint")
            refusal = self._error(f"{path} was refused: {message}", key=key, hint=told)
            if answer.get("kind") == DrainTimeout.kind:
                raise DrainTimeout(refusal.message, key=refusal.key, hint=refusal.hint)
            raise refusal
        return answer

    def _error(self, why: str, *, key: str | None = None, hint: str | None = None) -> EngineError:
        return EngineError(
            f"engine {self._shown}: {why}",
            key=key or self._shown,
            hint=hint or "See its log, and whether --engine-url is an engine of this kind.",
        )
