"""What a receiver says of itself: a record of its state, and the HTTP server that shows it.

`/healthz` the process is up · `/readyz` the engine serves the wanted version · `/status` JSON · `/metrics` Prometheus ·
`POST /wake` look at the store now.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deltastore.clock import now

from .http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from deltastore.errors import DeltastoreError

    from .activation import Activation
    from .patcher import Patched
    from .repair import Repaired

__all__ = ["Status", "StatusServer"]

_STAGE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Status:
    """The receiver's state. Written by its loop, read by the HTTP server's thread."""

    def __init__(self, *, store: str, checkpoint: str, target: str) -> None:
        self.stream_id: str | None = None
        self.version: int | None = None
        self.serving: int | None = None
        self.error: DeltastoreError | None = None
        self.target: int | None = None
        self._fixed: dict[str, Any] = {
            "store": store,
            "checkpoint": checkpoint,
            "wanted": target,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": now(),
        }
        self._state = "starting"
        self._progress: dict[str, Any] | None = None
        self._stages: dict[str, float] = {}
        self._last: dict[str, Any] = {}
        self._activation: dict[str, Any] | None = None
        self._scrub: dict[str, Any] = {"passed_at": None, "chunk": 0, "chunks": None}
        self._repair: dict[str, Any] | None = None
        self._updated = time.monotonic()
        self.registry = CollectorRegistry()
        self._version_gauge = Gauge("receiver_version", "Version in the live slot.", registry=self.registry)
        self._target_gauge = Gauge("receiver_target_version", "Version wanted.", registry=self.registry)
        self._ready_gauge = Gauge("receiver_ready", "1 while the wanted version is served.", registry=self.registry)
        self._contact_gauge = Gauge(
            "receiver_seconds_since_success", "Seconds since the last pass without an error.", registry=self.registry
        )
        self._fetched = Counter("receiver_fetched_bytes", "Bytes of parts downloaded.", registry=self.registry)
        self._patches = Counter("receiver_patches", "Versions put in place.", registry=self.registry)
        self._failures = Counter("receiver_failures", "Failures by kind.", ["kind"], registry=self.registry)
        self._activations = Counter("receiver_activations", "Activations.", ["outcome"], registry=self.registry)
        self._scrub_gauge = Gauge(
            "receiver_scrub_passed_timestamp_seconds", "When all chunks were last read over.", registry=self.registry
        )
        self._mended = Counter("receiver_mended_chunks", "Damaged chunks mended.", registry=self.registry)
        self._seconds = Histogram(
            "receiver_stage_seconds", "Seconds by stage.", ["stage"], registry=self.registry, buckets=_STAGE_SECONDS
        )

    # What the loop tells

    def enter(self, state: str) -> None:
        """Note what is going on: starting, following, patching, activating."""
        self._state = state
        self._progress = None

    def progress(self, what: str, done: int, total: int) -> None:
        """Note how far the work at hand is, in bytes."""
        self._progress = {"stage": what, "done": done, "total": total}

    def patched(self, patched: Patched) -> None:
        """Note a version put in place."""
        self.version = patched.end
        self._patches.inc()
        self._fetched.inc(patched.fetched_bytes)
        self._last = {"from": patched.start, "to": patched.end, "fetched_bytes": patched.fetched_bytes}
        self._observe(dict(patched.stages))

    def activated(self, activation: Activation) -> None:
        """Note how an activation ended."""
        self._activations.labels(activation.outcome).inc()
        self._activation = {
            "outcome": activation.outcome,
            "version": activation.version,
            "paused_seconds": activation.paused_seconds,
            "at": now(),
        }
        self._observe(dict(activation.stages))

    def scrubbed(self, *, passed_at: str | None, chunk: int, chunks: int) -> None:
        """Note how far the live slot was read over, and when all of it last was."""
        if passed_at is not None and passed_at != self._scrub["passed_at"]:
            self._scrub_gauge.set(datetime.fromisoformat(passed_at.replace("Z", "+00:00")).timestamp())
        self._scrub = {"passed_at": passed_at, "chunk": chunk, "chunks": chunks}

    def repaired(self, repaired: Repaired) -> None:
        """Note what was mended."""
        self._mended.inc(repaired.damaged)
        self._repair = {
            "version": repaired.version,
            "damaged": repaired.damaged,
            "from_other": repaired.from_other,
            "from_store": repaired.from_store,
            "at": now(),
        }

    def _observe(self, stages: dict[str, float]) -> None:
        self._stages = {**self._stages, **stages}
        for name, seconds in stages.items():
            self._seconds.labels(name).observe(seconds)

    def failed(self, error: DeltastoreError) -> None:
        """Note a failure; the receiver is degraded until a pass succeeds."""
        self.error = error
        self._failures.labels(error.kind).inc()
        self._state = "degraded"

    def succeeded(self) -> None:
        """Note a pass without an error."""
        self.error = None
        self._updated = time.monotonic()

    # What others see

    @property
    def ready(self) -> bool:
        """Whether the engine serves the wanted version."""
        return self.target is not None and self.serving == self.target

    def record(self) -> dict[str, Any]:
        """Return everything as the JSON of `/status`."""
        lag = None if self.target is None or self.version is None else self.target - self.version
        error = self.error
        return {
            **self._fixed,
            "stream_id": self.stream_id,
            "state": self._state,
            "ready": self.ready,
            "version": self.version,
            "serving": self.serving,
            "target": self.target,
            "lag": lag,
            "progress": self._progress,
            "stages": self._stages,
            "last_update": self._last,
            "last_activation": self._activation,
            "scrub": self._scrub,
            "last_repair": self._repair,
            "seconds_since_success": time.monotonic() - self._updated,
            "error": None if error is None else {"kind": error.kind, "message": str(error), "hint": error.hint},
        }

    def metrics(self) -> bytes:
        """Return everything in Prometheus' text format."""
        self._version_gauge.set(-1 if self.version is None else self.version)
        self._target_gauge.set(-1 if self.target is None else self.target)
        self._ready_gauge.set(self.ready)
        self._contact_gauge.set(time.monotonic() - self._updated)
        return generate_latest(self.registry)


class StatusServer(HttpServer):
    """Serves a ``Status`` over HTTP from a thread of its own."""

    def __init__(self, status: Status, listen: str, *, token: str | None, wake: Callable[[], None]) -> None:
        super().__init__(listen, token=token, token_name="RECEIVER_TOKEN", name="status")  # noqa: S106 - a name
        self._status = status
        self._wake = wake

    def _app(self) -> ASGIApp:
        from starlette.applications import Starlette  # noqa: PLC0415 - only a daemon serves
        from starlette.responses import JSONResponse, PlainTextResponse  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415

        def endpoint(answer: Callable[[], Response]) -> Callable[[Request], Any]:
            async def endpoint(_request: Request) -> Response:
                return answer()

            return endpoint

        def ready() -> Response:
            return JSONResponse({"ready": self._status.ready}, status_code=200 if self._status.ready else 503)

        def wake() -> Response:
            self._wake()
            return JSONResponse({"woken": True})

        return Starlette(
            routes=[
                Route("/healthz", endpoint(lambda: PlainTextResponse("ok\n"))),
                Route("/readyz", endpoint(ready)),
                Route("/status", endpoint(lambda: JSONResponse(self._status.record()))),
                Route("/metrics", endpoint(lambda: PlainTextResponse(self._status.metrics()))),
                Route("/wake", endpoint(wake), methods=["POST"]),
            ]
        )
