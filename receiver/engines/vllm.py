"""The adapter for a stock vLLM server (0.32), started with ``VLLM_SERVER_DEV_MODE=1``.

What the server does not do by itself is done here: its version string is set before and after a load, its caches are
dropped after it, and it is made sure that nothing runs in between, whoever paused it and how.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deltastore.errors import DrainTimeout, EngineError
from receiver.engines.base import EngineInfo, Probe
from receiver.engines.http_client import EngineClient, NoAnswer, NotDone, NotThere
from receiver.engines.labels import UNKNOWN, Incarnations, Mark, holds_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import httpx

    from receiver.engines.base import InFlight

__all__ = ["VllmEngine", "VllmOptions"]

_STARTED: Final = "process_start_time_seconds "
_FLUSH_TRIES = 5
_FLUSH_PAUSE = 0.2  # seconds, between tries
_NO_JSON = "not JSON compliant"  # what the server says of NaN in its own answer, with status 400
_LEAST_DRAIN = 0.25  # seconds: an idle server takes some time to say that it is paused
_HINT = "Start vLLM with VLLM_SERVER_DEV_MODE=1, or give another --engine-url."


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How the server is asked. Timeouts are in seconds.

    ``pause_timeout`` is for pauses that wait for no request, and for those that wait for as long as that takes.
    ``extension``: the server was started with the receiver's worker extension. The probe is ``probe_tokens`` greedy
    tokens after ``probe_prompt`` (token ids), from the model that the server calls ``model`` (the first, unless given).
    """

    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    pause_timeout: float = 120.0
    load_timeout: float = 900.0
    probe_timeout: float = 60.0
    extension: bool = False
    model: str | None = None
    probe_prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    probe_tokens: int = 8


class VllmEngine:
    """Speaks to one server.

    All calls but the load may be carried out twice without harm, and are repeated where a kept connection turns out to
    be closed.
    """

    def __init__(
        self, url: str, *, options: VllmOptions | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._options = options or VllmOptions()
        self._http = EngineClient(url, connect_timeout=self._options.connect_timeout, hint=_HINT, transport=transport)
        self._incarnations = Incarnations()
        self._held = False  # by a pause of ours, after which nothing runs

    @property
    def probes_paused(self) -> bool:
        """With the extension, which runs the prompt past the scheduler."""
        return self._options.extension

    def info(self) -> EngineInfo:
        """Ask for the version string, the pause, and when the process started."""
        text, token = self._incarnations.ask(self._version)
        started = self._started()
        return EngineInfo(started or token, Mark.parse(text).label, self._paused())

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Have the scheduler hold new requests, and deal with those that run; caches stay as they are until a load."""
        if in_flight == "wait" and self._version() == UNKNOWN:
            in_flight = "keep"  # what is frozen already must not run to its end on weights that nobody knows
        drain = timeout if in_flight == "wait" else None
        try:
            self._pause(in_flight, self._options.pause_timeout if drain is None else max(drain, _LEAST_DRAIN))
        except NoAnswer as error:
            if drain is None:
                raise
            # The server goes on draining, holds new requests, and calls that paused.
            self._resume()
            raise DrainTimeout(
                f"requests still ran {drain:g} s after the pause began",
                key=error.key,
                hint="a longer drain timeout, or --in-flight abort or keep.",
            ) from error
        self._held = True

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Reload the weights in place, drop every cache unless they are to stay, and set the version string."""
        if not self._paused():
            raise self._http.error("it is not paused", hint="pause() before load().")
        if not self._held:
            # Somebody else paused it, perhaps to drain: then requests run. This freezes what does.
            self._pause("keep", self._options.pause_timeout)
            self._held = True
        self._set_version(UNKNOWN)
        if not holds_weights(checkpoint):
            raise self._http.error(f"{checkpoint} is no checkpoint", hint="a complete one; nothing was loaded.")
        if self._options.extension:
            self._call_workers("deltastore_load", checkpoint=str(checkpoint.absolute()), label=version)
        else:
            self._call_workers("reload_weights", weights_path=str(checkpoint.absolute()))
        if not keep_kv:
            self._drop_caches()
        self._set_version(version)

    def confirm(self, version: str) -> None:
        """Compare the server's version string, and with the extension the label that each worker loaded."""
        held = {self._version()}
        if self._options.extension:
            held |= {str(told.get("label")) for told in self._call_workers("deltastore_label")}
        if held != {version}:
            raise self._http.error(f"it holds {' and '.join(sorted(held))}, not {version}", hint="load it again.")

    def probe(self) -> Probe:
        """Run the fixed prompt, in the workers where they have the extension, as a request where not."""
        if self._options.extension:
            prompt = list(self._options.probe_prompt)
            found = self._call_workers("deltastore_probe", timeout=self._options.probe_timeout, prompt=prompt)
            return next((made for told in found if (made := self._probed(told)).logprobs), Probe(()))
        body = {
            "model": self._model(),
            "prompt": list(self._options.probe_prompt),
            "max_tokens": self._options.probe_tokens,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        try:
            answer = self._http.ask("POST", "/v1/completions", body=body, timeout=self._options.probe_timeout)
        except EngineError as error:
            if _NO_JSON in error.message:
                return Probe((math.nan,))
            raise
        try:
            choice = answer["choices"][0]
            told = {"tokens": choice.get("token_ids"), "logprobs": choice["logprobs"]["token_logprobs"]}
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise self._http.error("/v1/completions answered without log-probabilities") from error
        return self._probed(told)

    def resume(self) -> None:
        """Let generation go on, unless the last load failed."""
        if self._version() == UNKNOWN:
            raise self._http.error("its last load failed, so it stays paused", hint="load a version first.")
        self._resume()

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._http.close()

    # The server's calls

    def _version(self) -> str:
        answer = self._http.ask("GET", "/weight_info", timeout=self._options.request_timeout)
        version = answer.get("weight_version")
        if not isinstance(version, str):
            raise self._http.error("/weight_info answered without weight_version")
        return version

    def _set_version(self, text: str) -> None:
        body = {"new_version": text}
        timeout = self._options.request_timeout
        self._incarnations.change(
            text, lambda: self._http.ask("POST", "/update_weight_version", body=body, timeout=timeout)
        )

    def _paused(self) -> bool:
        paused = self._http.ask("GET", "/is_paused", timeout=self._options.request_timeout).get("is_paused")
        if not isinstance(paused, bool):
            raise self._http.error("/is_paused answered without is_paused")
        return paused

    def _started(self) -> str | None:
        """Return when the process started, as its metrics have it; they may be turned off, or cover several."""
        try:
            metrics = self._http.text("GET", "/metrics", timeout=self._options.request_timeout)
        except NotThere:
            return None
        return next((line for line in metrics.splitlines() if line.startswith(_STARTED)), None)

    def _pause(self, mode: InFlight, timeout: float) -> None:
        query = {"mode": mode, "clear_cache": "false"}
        self._expect("paused", self._http.ask("POST", "/pause", query=query, timeout=timeout))

    def _resume(self) -> None:
        self._held = False
        self._expect("resumed", self._http.ask("POST", "/resume", timeout=self._options.request_timeout))

    def _expect(self, status: str, answer: Mapping[str, Any]) -> None:
        if answer.get("status") != status:
            raise self._http.error(f"it does not say that it is {status}")

    def _call_workers(self, method: str, *, timeout: float | None = None, **arguments: object) -> list[Any]:
        """Have every worker do something; a failure of one fails all, and nothing is ever sent twice."""
        answer = self._http.ask(
            "POST",
            "/collective_rpc",
            body={"method": method, "kwargs": arguments},
            timeout=self._options.load_timeout if timeout is None else timeout,
            repeatable=False,
        )
        results = answer.get("results")
        if not isinstance(results, list) or not results:
            raise self._http.error(f"no worker answered {method}")
        if self._options.extension and not all(isinstance(told, dict) for told in results):
            raise self._http.error(f"a worker answered {method} in another way", hint="the same release on both sides.")
        return results

    def _drop_caches(self) -> None:
        """Drop what was computed with the old weights, in connectors' caches too; frozen requests compute it anew."""
        query = {"reset_running_requests": "true", "reset_external": "true"}
        for tries_left in reversed(range(_FLUSH_TRIES)):
            try:
                self._http.ask("POST", "/reset_prefix_cache", query=query, timeout=self._options.request_timeout)
                break
            except NotDone:
                if not tries_left:
                    raise
                time.sleep(_FLUSH_PAUSE)  # blocks that are being offloaded are let go by themselves
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self._http.text("POST", path, timeout=self._options.request_timeout)

    def _model(self) -> str:
        if self._options.model is not None:
            return self._options.model
        answer = self._http.ask("GET", "/v1/models", timeout=self._options.request_timeout)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._http.error("/v1/models names no model") from error

    def _probed(self, told: Mapping[str, Any]) -> Probe:
        try:
            logprobs = tuple(math.nan if value is None else float(value) for value in told["logprobs"])
            tokens = tuple(int(token) for token in told.get("tokens") or ())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._http.error("the probe was answered in another way") from error
        return Probe(logprobs, tokens)
