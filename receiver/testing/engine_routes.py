"""The endpoints of vLLM (0.32, development mode) and of SGLang, over a stand-in."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from receiver.testing.stand_in import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from receiver.testing.stand_in import Request, StandIn, Token

__all__ = ["Answer", "Call", "Routes"]

_FRESH: Final = "default"


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was made of a server; ``query`` and ``body`` as they came, parsed."""

    method: str
    path: str
    query: dict[str, str]
    body: dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route answers: JSON, text, or events of a stream."""

    content: object = None
    status: int = 200
    events: Iterator[object] | None = None


class Routes:
    """One engine's endpoints; the version string and the start time are the process's."""

    def __init__(self, engine: StandIn, kind: Literal["vllm", "sglang"], *, extension: bool = False) -> None:
        self._engine = engine
        self._extension = extension
        self._version = _FRESH
        self._label: str | None = None  # the extension's
        self._started_at = time.time()
        self._ids = itertools.count()
        common: dict[tuple[str, str], Callable[[Call], Answer]] = {
            ("POST", "/v1/completions"): self._completions,
            ("GET", "/v1/models"): lambda _: Answer({"object": "list", "data": [{"id": "m", "object": "model"}]}),
            ("POST", "/update_weight_version"): self._update_weight_version,
        }
        self._routes = common | (self._vllm() if kind == "vllm" else self._sglang())

    def answer(self, call: Call) -> Answer:
        """Carry a call out. Raises ``Died``."""
        route = self._routes.get((call.method, call.path))
        return route(call) if route is not None else Answer({"detail": "Not Found"}, status=404)

    # vLLM

    def _vllm(self) -> dict[tuple[str, str], Callable[[Call], Answer]]:
        return {
            ("GET", "/health"): lambda _: Answer(""),
            ("GET", "/metrics"): self._metrics,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): lambda _: Answer({"is_paused": self._engine.running != "all"}),
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/reset_mm_cache"): lambda _: Answer(""),
            ("POST", "/reset_encoder_cache"): lambda _: Answer(""),
            ("GET", "/weight_info"): lambda _: Answer({"weight_version": self._version}),
        }

    def _metrics(self, call: Call) -> Answer:
        del call
        return Answer(
            f"process_start_time_seconds {self._started_at!r}\n"
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(self._engine.started)}\n'
        )

    def _pause(self, call: Call) -> Answer:
        mode = call.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return _wrong(f"Input should be 'abort', 'wait' or 'keep', not {mode!r}")
        self._engine.hold("none" if mode == "keep" else "old")
        if mode == "abort":
            self._engine.abort()
        if mode != "keep" and not self._engine.drain():
            return Answer({"status": "paused"})  # it was resumed meanwhile, and the server says this all the same
        if call.query.get("clear_cache", "true") == "true":
            self._engine.requeue()
            self._engine.drop_prefixes()
        return Answer({"status": "paused"})

    def _resume(self, call: Call) -> Answer:
        del call
        self._engine.hold("all")
        return Answer({"status": "resumed"})

    def _collective_rpc(self, call: Call) -> Answer:
        method, arguments = call.body.get("method"), call.body.get("kwargs") or {}
        if method == "reload_weights" and isinstance(arguments, dict):
            return self._rpc(lambda: self._engine.load(Path(arguments["weights_path"])))
        if self._extension and method == "deltastore_load" and isinstance(arguments, dict):
            return self._rpc(lambda: self._load_labelled(Path(arguments["checkpoint"]), arguments["label"]))
        if self._extension and method == "deltastore_label":
            return Answer({"results": [{"label": self._label}]})
        if self._extension and method == "deltastore_probe" and isinstance(arguments, dict):
            return self._rpc(lambda: self._probed(arguments["prompt"]))
        return _failed_rpc(f"'CPUWorker' object has no attribute '{method}'")

    def _rpc(self, work: Callable[[], object]) -> Answer:
        try:
            return Answer({"results": [work()]})
        except LoadFailed as error:
            return _failed_rpc(str(error))

    def _load_labelled(self, checkpoint: Path, label: str) -> dict[str, str]:
        self._label = None
        self._engine.load(checkpoint)
        self._label = label
        return {"label": label}

    def _probed(self, prompt: list[int]) -> dict[str, object]:
        made = self._engine.probe(prompt, len(prompt))
        return {"tokens": [token.token for token in made], "logprobs": [repr(token.logprob) for token in made]}

    def _reset_prefix_cache(self, call: Call) -> Answer:
        if call.query.get("reset_running_requests", "false") == "true":
            self._engine.requeue()
        return Answer({"success": self._engine.drop_prefixes()})

    # SGLang

    def _sglang(self) -> dict[tuple[str, str], Callable[[Call], Answer]]:
        return {
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/get_load"): self._load_of_ranks,
            ("POST", "/generate"): self._generate,
            ("POST", "/pause_generation"): self._pause_generation,
            ("POST", "/continue_generation"): self._continue_generation,
            ("POST", "/update_weights_from_disk"): self._update_weights_from_disk,
            ("GET", "/flush_cache"): self._flush_cache,
            ("POST", "/flush_cache"): self._flush_cache,
        }

    def _model_info(self, call: Call) -> Answer:
        del call
        return Answer({"model_path": "m", "is_generation": True, "weight_version": self._version})

    def _load_of_ranks(self, call: Call) -> Answer:
        del call
        waiting = self._engine.requests - self._engine.started
        return Answer([{"dp_rank": 0, "num_reqs": self._engine.requests, "num_waiting_reqs": waiting}])

    def _pause_generation(self, call: Call) -> Answer:
        mode = call.body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _wrong(f"Invalid mode: {mode!r}.")
        if mode == "abort":
            self._engine.hold("old")
            self._engine.abort()
            self._engine.drain()
        else:
            self._engine.hold("none")
        if mode == "retract":
            self._engine.requeue()
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    def _continue_generation(self, call: Call) -> Answer:
        del call
        self._engine.hold("all")
        return Answer({"message": "Generation continued successfully.", "status": "ok"})

    def _update_weights_from_disk(self, call: Call) -> Answer:
        try:
            self._engine.load(Path(str(call.body.get("model_path"))))
        except LoadFailed as error:
            return Answer({"success": False, "message": f"Failed to update weights: {error}."}, status=400)
        if call.body.get("flush_cache", True) and not self._engine.drop_prefixes():
            self._engine.die()  # the scheduler asserts that it may flush
        if (version := call.body.get("weight_version")) is not None:
            self._version = str(version)
        return Answer({"success": True, "message": "Succeeded to update model weights."})

    def _flush_cache(self, call: Call) -> Answer:
        del call
        return Answer("Cache flushed.\n", status=200 if self._engine.drop_prefixes() else 400)

    def _generate(self, call: Call) -> Answer:
        parameters: Any = call.body.get("sampling_params") or {}
        prompt: Any = call.body.get("input_ids") or []
        request = self._engine.admit(prompt, parameters.get("max_new_tokens", 16))
        made = [*self._engine.generate(request)]
        logprobs = [[_number(token.logprob), token.token, None] for token in made]
        meta = {
            "id": str(next(self._ids)),
            "finish_reason": {"type": "abort" if request.aborted else "length"},
            "weight_version": self._version,
            "output_token_logprobs": logprobs,
        }
        return Answer({"text": "", "output_ids": [token.token for token in made], "meta_info": meta})

    # Both

    def _update_weight_version(self, call: Call) -> Answer:
        self._version = str(call.body.get("new_version"))
        return Answer({"success": True, "new_version": self._version})

    def _completions(self, call: Call) -> Answer:
        asked, count = call.body.get("prompt"), call.body.get("max_tokens", 16)
        if not isinstance(count, int) or not isinstance(asked, (list, str)):
            return _wrong("prompt and max_tokens are of another type")
        prompt = asked if isinstance(asked, list) else [*asked.encode()]
        request = self._engine.admit(prompt, count)
        if call.body.get("stream"):
            return Answer(events=self._events(request))
        made = [*self._engine.generate(request)]
        if not all(math.isfinite(token.logprob) for token in made):
            return _wrong("Out of range float values are not JSON compliant")
        return Answer(self._completion(made, "abort" if request.aborted else "length"))

    def _events(self, request: Request) -> Iterator[object]:
        for token in self._engine.generate(request):
            at_end = len(request.tokens) == request.most_tokens
            yield self._completion([token], "length" if at_end else None)
        if request.aborted:
            yield self._completion([], "abort")
        yield "[DONE]"

    def _completion(self, made: list[Token], reason: str | None) -> dict[str, object]:
        choice = {
            "index": 0,
            "text": "".join(f" t{token.token}" for token in made),
            "logprobs": {"token_logprobs": [_number(token.logprob) for token in made]},
            "finish_reason": reason,
            "token_ids": [token.token for token in made],
        }
        number = next(self._ids)
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}


def _number(value: float) -> float | None:
    """Give a number as these servers write it: what JSON has no word for is null."""
    return value if math.isfinite(value) else None


def _wrong(message: str) -> Answer:
    return Answer({"error": {"message": message, "type": "Bad Request", "param": None, "code": 400}}, status=400)


def _failed_rpc(message: str) -> Answer:
    said = f"Call to collective_rpc method failed: Worker failed with error '{message}'"
    return Answer({"error": {"message": said, "type": "InternalServerError", "param": None, "code": 500}}, status=500)
