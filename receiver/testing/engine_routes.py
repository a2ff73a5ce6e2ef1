"""The endpoints of vLLM (0.32, development mode) and of SGLang, over a stand-in."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from receiver.testing.completions import Completions, number
from receiver.testing.engine_calls import Answer, Call, wrong
from receiver.testing.stand_in import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from receiver.testing.stand_in import StandIn, Token

__all__ = ["Routes"]

_FRESH: Final = "default"


class Routes:
    """One engine's endpoints; the version string and the start time are the process's."""

    def __init__(self, engine: StandIn, kind: Literal["vllm", "sglang"], *, extension: bool = False) -> None:
        self._engine = engine
        self._extension = extension
        self._version = _FRESH
        self._label: str | None = None  # the extension's
        self._started_at = time.time()
        completions = Completions(engine, kind, lambda: self._version)
        common: dict[tuple[str, str], Callable[[Call], Answer]] = {
            ("POST", "/v1/completions"): completions.complete,
            ("POST", "/v1/chat/completions"): completions.chat,
            ("GET", "/health"): lambda _: Answer(""),
            ("GET", "/v1/models"): lambda _: Answer({"object": "list", "data": [{"id": "m", "object": "model"}]}),
            ("POST", "/update_weight_version"): self._update_weight_version,
        }
        self._routes = common | (self._vllm() if kind == "vllm" else self._sglang())

    def answer(self, call: Call) -> Answer:
        """Carry a call out. Raises ``Died``."""
        route = self._routes.get((call.method, call.path))
        if route is not None:
            return route(call)
        if call.path in {path for _, path in self._routes}:
            return Answer({"detail": "Method Not Allowed"}, status=405)
        return Answer({"detail": "Not Found"}, status=404)

    # vLLM

    def _vllm(self) -> dict[tuple[str, str], Callable[[Call], Answer]]:
        return {
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
            return wrong(f"Input should be 'abort', 'wait' or 'keep', not {mode!r}")
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
            return wrong(f"Invalid mode: {mode!r}.")
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
        most = parameters.get("max_new_tokens", 16)
        if call.body.get("stream"):
            return Answer(events=self._generated(prompt, most))
        request, name = self._engine.admit(prompt, most), uuid.uuid4().hex
        made = [*self._engine.generate(request)]
        return Answer(self._told(name, made, "abort" if request.aborted else "length"))

    def _generated(self, prompt: Sequence[int], most: int) -> Generator[object, None, None]:
        """Generate in pieces; each tells all that was made so far."""
        request, name = self._engine.admit(prompt, most), uuid.uuid4().hex
        made: list[Token] = []
        for token in self._engine.generate(request):
            made.append(token)
            yield self._told(name, made, "length" if len(made) == request.most_tokens else None)
        if request.aborted:
            yield self._told(name, made, "abort")
        yield "[DONE]"

    def _told(self, name: str, made: Sequence[Token], reason: str | None) -> dict[str, object]:
        meta = {
            "id": name,
            "finish_reason": {"type": reason} if reason is not None else None,
            "weight_version": self._version,
            "completion_tokens": len(made),
            "output_token_logprobs": [[number(token.logprob), token.token, None] for token in made],
        }
        return {"text": "", "output_ids": [token.token for token in made], "meta_info": meta}

    # Both

    def _update_weight_version(self, call: Call) -> Answer:
        self._version = str(call.body.get("new_version"))
        return Answer({"success": True, "new_version": self._version})


def _failed_rpc(message: str) -> Answer:
    said = f"Call to collective_rpc method failed: Worker failed with error '{message}'"
    return Answer({"error": {"message": said, "type": "InternalServerError", "param": None, "code": 500}}, status=500)
