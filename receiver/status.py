"""What a receiver says of itself: a record of its state, and the HTTP server that shows it.

`/healthz` the process is up · `/readyz` the engine serves the wanted version · `/status` JSON · `/metrics` Prometheus ·
`POST /wake` look at the store now · `POST /pin`, `/pause-following`, `/resume-following` what an operator wants.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
import traceback
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from deltastore import __version__
from deltastore.clock import now, seconds_since
from deltastore.errors import DeltastoreError, UsageError
from deltastore.heartbeat import Heartbeat
from deltastore.record import VersionNumber  # noqa: TC001 - msgspec looks it up
from deltastore.shown import json_bytes

from .follower import check_target
from .http_server import HttpServer
from .metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from .activation import Activation, State
    from .control import Control
    from .patcher import Patched
    from .repair import Repaired

__all__ = ["Status", "StatusServer"]

#: What `POST /pin` takes: a few words, and no more.
_MAX_BODY = 1024
#: Seconds that it may take to arrive.
_BODY_SECONDS = 30.0
_CONNECTIONS = 256


class Status:
    """The receiver's state. Written by its loop, read by the HTTP server's thread."""

    def __init__(self, *, store: str, checkpoint: str, target: str) -> None:
        self.stream_id: str | None = None
        self.receiver_id: str | None = None
        self.group: str | None = None
        self.version: int | None = None
        self.serving: int | None = None
        self.error: DeltastoreError | None = None
        self.target: int | None = None
        self.target_created_at: str | None = None
        self.assumed: int | None = None
        self._fixed: dict[str, Any] = {
            "store": store,
            "checkpoint": checkpoint,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": now(),
        }
        self._wanted = target
        self._pinned: str | None = None
        self._paused = False
        self._state = "starting"
        self._progress: dict[str, Any] | None = None
        self._counted: dict[str, int] = {}  # bytes of each stage of the work at hand
        self._counting = threading.Lock()
        self._poll: float | None = None
        self._stages: dict[str, float] = {}
        self._stage_bytes: dict[str, int] = {}
        self._last: dict[str, Any] = {}
        self._activation: dict[str, Any] | None = None
        self.activation: State = "idle"
        self.latched: str | None = None
        self._scrub: dict[str, Any] = {"passed_at": None, "chunk": 0, "chunks": None}
        self._repair: dict[str, Any] | None = None
        self._updated = time.monotonic()
        self._failed_passes = 0
        self._next_try = self._updated
        self._metrics = Metrics()

    # What the loop tells

    def enter(self, state: str) -> None:
        """Note what is going on: starting, following, patching, activating."""
        self._state = state
        self._progress = None
        self._counted = {}

    def controlled(self, control: Control, *, wanted: str) -> None:
        """Note what an operator told, and the target in words that follows from it."""
        self._pinned, self._paused, self._wanted = control.pinned, control.paused, wanted

    def aims(self, version: int, created_at: str | None) -> None:
        """Note the wanted version, and when it was published."""
        self.target, self.target_created_at = version, created_at

    def assumes(self, version: int | None) -> None:
        """Note the version that counts as wanted while the store has not told of any since the start."""
        self.assumed = version

    def polled(self, seconds: float) -> None:
        """Note a look at the store."""
        self._poll = seconds
        self._metrics.seconds.labels("poll").observe(seconds)

    def progress(self, what: str, done: int, total: int) -> None:
        """Note how far the work at hand is, in bytes."""
        self._progress = {"stage": what, "done": done, "total": total}
        with self._counting:  # several threads tell of several stages, in any order
            before = self._counted.get(what, 0)
            self._counted[what] = max(before, done)
            self._metrics.worked(what, max(0, done - before))

    def patched(self, patched: Patched) -> None:
        """Note a version put in place."""
        self.version = patched.end
        self._metrics.patches.inc()
        self._metrics.fetched.inc(patched.fetched_bytes)
        self._last = {"from": patched.start, "to": patched.end, "fetched_bytes": patched.fetched_bytes}
        self._stage_bytes = dict(patched.stage_bytes)
        for stage in ("decode", "verify"):  # of the others it was told on the way
            self._metrics.worked(stage, patched.stage_bytes.get(stage, 0))
        self._observe(patched.stages, before={})

    def activates(self, state: State) -> None:
        """Note how far an activation is."""
        self.activation = state

    def activated(self, activation: Activation, *, nbytes: int) -> None:
        """Note how an activation ended, of a version of so many bytes."""
        self._metrics.activations.labels(activation.outcome).inc()
        probe = activation.probe
        self._activation = {
            "outcome": activation.outcome,
            "version": activation.weights.version if activation.weights else None,
            "label": activation.weights.label if activation.weights else None,
            "paused_seconds": activation.paused_seconds,
            "probe": None if probe is None else {"logprobs": probe.logprobs, "tokens": probe.tokens},
            "at": now(),
        }
        if activation.outcome == "latched":
            self.latched = str(activation.error)
        elif activation.outcome in ("activated", "rolled-back", "lost"):
            self.latched = None
        if "load" in activation.stages:
            self._stage_bytes = {**self._stage_bytes, "load": nbytes}
            self._metrics.worked("load", nbytes)
        self._observe(activation.stages, before=self._stages)

    def latches(self, why: str | None) -> None:
        """Note why the engine stays held although nothing was tried; ``None``: it is not held."""
        self.latched = why
        self.activation = "idle" if why is None else "latched"

    def first_tokens(self, seconds: float) -> None:
        """Note how long after its resume the engine gave a token again."""
        self._observe({"first_tokens": seconds}, before=self._stages)

    def scrubbed(self, *, passed_at: str | None, chunk: int, chunks: int) -> None:
        """Note how far the live slot was read over, and when all of it last was."""
        self._scrub = {"passed_at": passed_at, "chunk": chunk, "chunks": chunks}

    def repaired(self, repaired: Repaired) -> None:
        """Note what was mended."""
        self._metrics.repairs.inc(repaired.damaged)
        self._metrics.fetched.inc(repaired.fetched_bytes)
        self._repair = {
            "version": repaired.version,
            "damaged": repaired.damaged,
            "from_other": repaired.from_other,
            "from_store": repaired.from_store,
            "at": now(),
        }

    def heartbeat(self, arrived: bool) -> None:
        """Note that a heartbeat was sent, or was not."""
        self._metrics.heartbeats.labels("sent" if arrived else "failed").inc()

    def _observe(self, stages: Mapping[str, float], *, before: Mapping[str, float]) -> None:
        self._stages = {**before, **stages}
        for name, seconds in stages.items():
            self._metrics.seconds.labels(name).observe(seconds)

    def failed(self, error: DeltastoreError) -> None:
        """Note a failure; the receiver is degraded until a pass succeeds."""
        _let_go(error)
        self.error = error
        self._metrics.failures.labels(error.kind).inc()
        self._state = "degraded"

    def retries(self, of: Literal["pass", "request"], *, pause: float, failures: int = 0) -> None:
        """Note that a pass, or a request to the store, is tried again after so many seconds."""
        self._metrics.retries.labels(of).inc()
        if of == "pass":
            self._failed_passes, self._next_try = failures, time.monotonic() + pause

    def succeeded(self) -> None:
        """Note a pass without an error."""
        self.error = None
        self._failed_passes = 0
        self._updated = time.monotonic()

    # What others see

    @property
    def ready(self) -> bool:
        """Whether the engine serves the wanted version: the live one, while following is paused.

        Before the store has told which that is, it is what this host last had in place, or a number that was given.
        """
        wanted = self.version if self._paused else self.assumed if self.target is None else self.target
        return wanted is not None and self.serving == wanted

    @property
    def state(self) -> str:
        """What goes on, in a word; ``latched`` while the engine is held because no version could be loaded."""
        return self._state if self.latched is None else "latched"

    @property
    def lag(self) -> int | None:
        """Versions between what is held and what is wanted; negative on the way back."""
        return None if self.target is None or self.version is None else self.target - self.version

    def record(self) -> dict[str, Any]:
        """Return everything as the JSON of `/status`."""
        error, instant = self.error, time.monotonic()
        return {
            **self._fixed,
            "stream_id": self.stream_id,
            "receiver_id": self.receiver_id,
            "group": self.group,
            "state": self.state,
            "activation": self.activation,
            "latched": self.latched,
            "ready": self.ready,
            "version": self.version,
            "serving": self.serving,
            "wanted": self._wanted,
            "pinned": self._pinned,
            "paused": self._paused,
            "target": self.target,
            "target_age": self._target_age,
            "lag": self.lag,
            "progress": self._progress,
            "stages": {**({} if self._poll is None else {"poll": self._poll}), **self._stages},
            "stage_bytes": self._stage_bytes,
            "last_update": self._last,
            "last_activation": self._activation,
            "scrub": self._scrub,
            "last_repair": self._repair,
            "seconds_since_success": instant - self._updated,
            "failed_passes": self._failed_passes,
            "next_try_in": max(0.0, self._next_try - instant) if self._failed_passes else None,
            "error": None if error is None else {"kind": error.kind, "message": str(error), "hint": error.hint},
        }

    def heartbeat_record(self, *, every: float) -> Heartbeat | None:
        """Return what the fleet may see, or ``None`` before there is anything to tell."""
        if self.stream_id is None or self.receiver_id is None:
            return None
        return Heartbeat(
            stream_id=self.stream_id,
            receiver_id=self.receiver_id,
            host=re.sub(r"[^ -~]", "?", self._fixed["host"])[:255] or "?",
            group=self.group,
            version=self.version,
            target=self.target,
            state=self.state,
            pinned=self._pinned,
            paused=self._paused,
            stages=self._stages,
            software=f"deltastore {__version__}",
            every=every,
            sent_at=now(),
        )

    @property
    def _target_age(self) -> float | None:
        return None if self.target_created_at is None else seconds_since(self.target_created_at)

    @property
    def _scrub_passed(self) -> float | None:
        passed_at = self._scrub["passed_at"]
        return None if passed_at is None else datetime.fromisoformat(passed_at.replace("Z", "+00:00")).timestamp()

    def metrics(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return self._metrics.text(
            version=self.version,
            target_version=self.target,
            lag_versions=self.lag,
            target_age_seconds=self._target_age,
            ready=self.ready,
            latched=self.latched is not None,
            pinned=self._pinned is not None,
            paused=self._paused,
            seconds_since_success=time.monotonic() - self._updated,
            scrub_passed_timestamp_seconds=self._scrub_passed,
        )


def _let_go(error: BaseException) -> None:
    """Drop what an error's frames hold: the files of a patch that failed, which may be the room that the next needs."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


class Controlled(Protocol):
    """What the server passes on: ``Receiver`` is one. Those that write raise ``DeltastoreError``."""

    def wake(self) -> None:
        """Look at the store now."""
        ...

    def pin(self, target: str) -> Control:
        """Follow another target."""
        ...

    def pause_following(self) -> Control:
        """Stay at what is live."""
        ...

    def resume_following(self) -> Control:
        """Follow again."""
        ...


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    version: VersionNumber | str


class StatusServer(HttpServer):
    """Serves a ``Status`` over HTTP from a thread of its own, and passes on what operators tell a receiver."""

    def __init__(self, status: Status, listen: str, *, token: str | None, receiver: Controlled) -> None:
        super().__init__(
            listen,
            token=token,
            token_name="RECEIVER_TOKEN",  # noqa: S106 - a name
            name="status",
            most_connections=_CONNECTIONS,
        )
        self._status = status
        self._receiver = receiver

    def _app(self) -> ASGIApp:
        from starlette.applications import Starlette  # noqa: PLC0415 - only a daemon serves
        from starlette.responses import PlainTextResponse, Response  # noqa: PLC0415
        from starlette.routing import Route  # noqa: PLC0415

        def page(path: str, answer: Callable[[], Response]) -> Route:
            async def endpoint(_request: Request) -> Response:
                return answer()

            return Route(path, endpoint)

        def json(value: object, code: int = 200) -> Response:
            return Response(json_bytes(value), code, media_type="application/json")

        def ready() -> Response:
            serves = self._status.ready
            return json({"ready": serves}, 200 if serves else 503)

        def order(path: str, obey: Callable[[bytes], dict[str, Any]]) -> Route:
            async def endpoint(request: Request) -> Response:
                code, answer = await _obey(request, obey)
                return json(answer, code)

            return Route(path, endpoint, methods=["POST"])

        def wake(_body: bytes) -> dict[str, Any]:
            self._receiver.wake()
            return {"woken": True}

        return Starlette(
            routes=[
                page("/healthz", lambda: PlainTextResponse("ok\n")),
                page("/readyz", ready),
                page("/status", lambda: json(self._status.record())),
                page("/metrics", lambda: PlainTextResponse(self._status.metrics())),
                order("/wake", wake),
                order("/pin", lambda body: _told(self._receiver.pin(_pin_target(body)))),
                order("/pause-following", lambda _body: _told(self._receiver.pause_following())),
                order("/resume-following", lambda _body: _told(self._receiver.resume_following())),
            ]
        )


async def _body(request: Request) -> bytes:
    """Return a request's body, or more of it than is taken."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            break
    return body


async def _obey(request: Request, obey: Callable[[bytes], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Carry out an order in a thread of its own, for it may wait for a disk."""
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415 - only a daemon serves
    from starlette.requests import ClientDisconnect  # noqa: PLC0415

    if "origin" in request.headers:  # a browser's: a page from anywhere must not steer the receiver of this host
        return 403, {"error": {"kind": "usage", "message": "Web pages give no orders.", "hint": None}}
    try:
        body = await asyncio.wait_for(_body(request), _BODY_SECONDS)
    except (asyncio.TimeoutError, ClientDisconnect):
        return 408, {"error": {"kind": "usage", "message": "That did not arrive.", "hint": None}}
    if len(body) > _MAX_BODY:
        return 413, {"error": {"kind": "usage", "message": "That is too long.", "hint": None}}
    try:
        return 200, await run_in_threadpool(obey, body)
    except DeltastoreError as error:
        code = 400 if isinstance(error, UsageError) else 503
        return code, {"error": {"kind": error.kind, "message": str(error), "hint": error.hint}}


def _pin_target(body: bytes) -> str:
    try:
        target = str(msgspec.json.decode(body, type=_Pin).version)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"That is no pin: {error}.", hint='Send {"version": N}, {"version": "latest"} or {"version": "tag:NAME"}.'
        ) from error
    check_target(target)
    return target


def _told(control: Control) -> dict[str, Any]:
    return {"pinned": control.pinned, "paused": control.paused}
