"""The adapter for a stock SGLang server.

Nothing is staged: pause, ``update_weights_from_disk``, flush, continue. The server cannot be asked whether it is
paused, and does not say when it started; both are read from the version string that this adapter keeps there.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deltastore.errors import DrainTimeout
from receiver.engines.base import EngineInfo, Probe
from receiver.engines.http_client import EngineClient, NotThere
from receiver.engines.labels import UNKNOWN, Incarnations, Mark, holds_weights

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from receiver.engines.base import InFlight

__all__ = ["SglangEngine", "SglangOptions"]

#: What SGLang calls it. A request that comes between the end of a drain and the pause is retracted, and goes on later.
_MODES: Final = {"wait": "retract", "abort": "abort", "keep": "in_place"}
_POLL_PAUSE = 0.05  # seconds, between looks at a drain
_HINT = "Start SGLang, or give another --engine-url."


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """How the server is asked. Timeouts are in seconds.

    ``pause_timeout`` is for pauses, and how long one waits for running requests unless told otherwise. The probe is
    ``probe_tokens`` greedy tokens after ``probe_prompt`` (token ids).
    """

    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    pause_timeout: float = 120.0
    load_timeout: float = 900.0
    probe_timeout: float = 60.0
    probe_prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    probe_tokens: int = 8


class SglangEngine:
    """Speaks to one server.

    All calls but the load may be carried out twice without harm, and are repeated where a kept connection turns out to
    be closed.
    """

    probes_paused = False
    """A paused server takes requests and answers none."""

    def __init__(
        self, url: str, *, options: SglangOptions | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._options = options or SglangOptions()
        self._http = EngineClient(url, connect_timeout=self._options.connect_timeout, hint=_HINT, transport=transport)
        self._incarnations = Incarnations()

    def info(self) -> EngineInfo:
        """Ask for the version string; all else is in it."""
        text, token = self._incarnations.ask(self._version)
        mark = Mark.parse(text)
        return EngineInfo(token, mark.label, mark.paused)

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Stop generation; with ``wait`` only once nothing runs, which new requests may put off.

        The mark is set first: a server that is believed to be paused is paused again, one that is paused without a mark
        would stay so.
        """
        if in_flight == "wait":
            self._drain(self._options.pause_timeout if timeout is None else timeout)
        self._mark(Mark(Mark.parse(self._version()).weights, paused=True))
        self._stop(_MODES[in_flight])

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Have the server read the checkpoint, flush unless the caches are to stay, and set the version string."""
        if not Mark.parse(self._version()).paused:
            raise self._http.error("it is not paused", hint="pause() before load().")
        # Whoever paused it, and how: nothing runs after this, and without it requests that are paused in their place
        # keep the cache from being flushed.
        self._stop("in_place" if keep_kv else "retract")
        self._mark(Mark(UNKNOWN, paused=True))
        if not holds_weights(checkpoint):
            raise self._http.error(f"{checkpoint} is no checkpoint", hint="a complete one; nothing was loaded.")
        # A flush that is part of the update and fails takes the scheduler down with it, so it is a call of its own.
        body = {"model_path": str(checkpoint.absolute()), "load_format": "auto", "flush_cache": False}
        answer = self._http.ask(
            "POST", "/update_weights_from_disk", body=body, timeout=self._options.load_timeout, repeatable=False
        )
        if "success" not in answer:
            raise self._http.error("/update_weights_from_disk answered without success")
        if not keep_kv:
            self._http.text("POST", "/flush_cache", timeout=self._options.request_timeout)
        self._mark(Mark(version, paused=True))

    def confirm(self, version: str) -> None:
        """Compare the version string, which only a load that succeeded sets."""
        held = Mark.parse(self._version()).weights
        if held != version:
            raise self._http.error(f"it holds {held}, not {version}", hint="load it again.")

    def probe(self) -> Probe:
        """Run the fixed prompt as a request."""
        sampling = {"max_new_tokens": self._options.probe_tokens, "temperature": 0, "ignore_eos": True}
        body = {
            "input_ids": list(self._options.probe_prompt),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        answer = self._http.ask("POST", "/generate", body=body, timeout=self._options.probe_timeout)
        try:
            made = answer["meta_info"]["output_token_logprobs"]
            logprobs = tuple(math.nan if value is None else float(value) for value, *_ in made)
            return Probe(logprobs, tuple(int(token) for _, token, *_ in made))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._http.error("/generate answered without log-probabilities") from error

    def resume(self) -> None:
        """Let generation go on, unless the last load failed."""
        mark = Mark.parse(self._version())
        if mark.weights == UNKNOWN:
            raise self._http.error("its last load failed, so it stays paused", hint="load a version first.")
        self._http.ask("POST", "/continue_generation", body={}, timeout=self._options.request_timeout)
        self._mark(Mark(mark.weights, paused=False))

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._http.close()

    # The server's calls

    def _version(self) -> str:
        answer = self._http.ask("GET", "/get_model_info", timeout=self._options.request_timeout)
        version = answer.get("weight_version")
        if not isinstance(version, str):
            raise self._http.error("/get_model_info answered without weight_version")
        return version

    def _mark(self, mark: Mark) -> None:
        text, timeout = str(mark), self._options.request_timeout
        body = {"new_version": text}
        self._incarnations.change(
            text, lambda: self._http.ask("POST", "/update_weight_version", body=body, timeout=timeout)
        )

    def _stop(self, mode: str) -> None:
        self._http.ask("POST", "/pause_generation", body={"mode": mode}, timeout=self._options.pause_timeout)

    def _drain(self, seconds: float) -> None:
        """Wait until the server has no request; it goes on taking new ones meanwhile."""
        deadline = time.monotonic() + seconds
        if Mark.parse(self._version()).paused:
            return  # nothing that runs could end by itself
        while (requests := self._requests()) > 0:
            if time.monotonic() > deadline:
                raise DrainTimeout(
                    f"{requests} requests still ran after {seconds:g} s",
                    hint="a longer drain timeout, --in-flight abort or keep, or no new requests meanwhile.",
                )
            time.sleep(_POLL_PAUSE)

    def _requests(self) -> int:
        """Return how many requests the server has, running and waiting, over all its ranks."""
        timeout = self._options.request_timeout
        try:
            told: Any = self._http.ask("GET", "/get_load", timeout=timeout)
        except NotThere:
            told = self._http.ask("GET", "/v1/loads", timeout=timeout)
        try:
            ranks = told["answer"] if "answer" in told else told["loads"]
            return sum(
                rank["num_reqs"] if "num_reqs" in rank else rank["num_running_reqs"] + rank["num_waiting_reqs"]
                for rank in ranks
            )
        except (KeyError, TypeError) as error:
            raise self._http.error("its load was answered in another way") from error
