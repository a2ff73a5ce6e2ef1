"""An engine behind a gateway: the gate shuts before it is paused and opens once its weights are confirmed.

While the gate is shut no request from outside reaches the engine, and no token made meanwhile reaches a client. So the
engine itself may be resumed for a probe: seen from outside generation is still held.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx
import msgspec

from deltastore.errors import DrainTimeout, EngineError, UsageError
from deltastore.tokens import read_token
from receiver.config import shown_url
from receiver.engines.base import EngineInfo
from receiver.engines.http_client import whole_answer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from receiver.engines.base import Engine, InFlight, Probe

__all__ = ["GateClient", "GatedEngine", "behind_gateway"]

_log = logging.getLogger("receiver")

#: With ``wait`` and no ``timeout``; the rest of those that were aborted; more than settling takes.
_DRAIN_SECONDS: Final = 60.0
_ABORT_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 15.0
#: A gateway that restarts is waited for.
_PATIENCE_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Gate:
    """What a gateway says of its gate."""

    shut: bool
    version: str | None
    in_flight: int
    doubts: int
    watching: bool


class _Told(msgspec.Struct):
    message: str
    hint: str | None = None


class _Refusal(msgspec.Struct):
    error: _Told


class GateClient:
    """Tells a gateway's gate to shut, settle and open. What goes wrong is an ``EngineError``."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        patience: float = _PATIENCE_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self.url = shown_url(self._url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(trust_env=False, headers=headers, transport=transport)
        self._patience = patience

    def state(self, *, patient: bool = True) -> _Gate:
        """Ask how the gate stands."""
        return self._call("GET", "/gate", patient=patient)

    def shut(self, *, deadline: float = 0.0, cut: bool = False) -> _Gate:
        """Shut it, and wait so long for the requests that run; with ``cut`` the rest of them is given up then."""
        return self._call("POST", "/gate/shut", {"deadline": deadline, "cut": cut}, seconds=deadline)

    def settle(self, version: str) -> None:
        """Keep back what arrives from now on, as made by ``version``; the engine is held."""
        self._call("POST", "/gate/settle", {"version": version})

    def open(self, version: str, *, doubts: int) -> None:
        """Open it for ``version``, unless the gateway has lost the engine since it said ``doubts``."""
        self._call("POST", "/gate/open", {"version": version, "doubts": doubts})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float = 0.0,
        patient: bool = True,
    ) -> _Gate:
        until = time.monotonic() + (self._patience if patient else 0.0)
        while True:
            try:
                limit = _ANSWER_SECONDS + seconds
                answer = whole_answer(self._client, method, self._url + path, seconds=limit, json=body, timeout=limit)
                return self._read(answer, path)
            except httpx.TransportError as error:
                # Saying any of it once more changes nothing.
                if time.monotonic() > until or isinstance(error, httpx.TimeoutException):
                    raise self._error(f"no answer to {path}: {error}") from error
                time.sleep(_AGAIN_SECONDS)
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, ValueError, RuntimeError) as error:
                raise self._error(f"{path} failed: {error}") from error

    def _read(self, answer: httpx.Response, path: str) -> _Gate:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise self._error(f"{path} needs a token", hint="RECEIVER_TOKEN has to be the gateway's.")
        if answer.status_code == httpx.codes.OK:
            return msgspec.json.decode(answer.content, type=_Gate)
        error = msgspec.json.decode(answer.content, type=_Refusal).error
        raise self._error(f"{path} was refused: {error.message}", hint=error.hint)

    def _error(self, why: str, *, hint: str | None = None) -> EngineError:
        return EngineError(
            f"gateway {self.url}: {why}",
            key=self.url,
            hint=hint or "See its log, and whether --gateway-url is its control address.",
        )


class GatedEngine:
    """An engine as one sees it through a gateway, which is told of each pause."""

    def __init__(self, engine: Engine, gate: GateClient) -> None:
        self._engine = engine
        self._gate = gate
        self._lock = threading.Lock()
        self._busy = False  # from a pause to its resume the gate is not opened by a look at the engine
        self._serving: tuple[str, str] | None = None  # incarnation and label that the gate was opened for
        self._loaded: str | None = None
        self._failed: str | None = None  # what a load left unfinished: nothing is known of the weights
        self._awake = False  # the engine itself may generate, for a probe
        self._in_flight: InFlight = "wait"
        self._doubts = 0

    @property
    def probes_paused(self) -> bool:
        """Behind the gate it may be probed at any time."""
        return True

    def info(self) -> EngineInfo:
        """Ask the engine; it counts as paused while the gate is shut.

        A gate that is shut although nothing has changed (the gateway restarted, or lost sight of the engine) is opened.
        """
        # The gate before the engine: an engine that restarts after it answered raises the doubts.
        gate = self._gate.state(patient=False)
        info = self._engine.info()
        with self._lock:
            if self._busy:
                return info  # what the engine itself is, for whoever is about to load it
            same = self._serving is not None and self._serving == (info.incarnation, info.version)
            shut = gate.shut
            if shut and same and not info.paused:
                with suppress(EngineError):
                    self._gate.open(str(info.version), doubts=gate.doubts)
                    shut = False
            elif not shut and gate.version != info.version:
                self._gate.shut()
                shut = True
        return EngineInfo(info.incarnation, info.version, paused=info.paused or shut)

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Shut the gate, see to the requests that run, and pause the engine."""
        with self._lock:
            self._busy = True
        self._in_flight = in_flight
        try:
            self._shut_and_pause(in_flight, timeout)
        except BaseException:
            with self._lock:
                self._busy = False
            raise
        self._awake = False

    def _shut_and_pause(self, in_flight: InFlight, timeout: float | None) -> None:
        until = time.monotonic() + (_DRAIN_SECONDS if timeout is None else timeout)
        gate = self._gate.shut(deadline=max(0.0, until - time.monotonic()) if in_flight == "wait" else 0.0)
        self._doubts = gate.doubts
        if in_flight == "wait" and gate.in_flight:
            self._reopen(gate)
            raise DrainTimeout(
                f"{gate.in_flight} requests have not ended in time",
                key=self._gate.url,
                hint="a longer --drain-deadline, or another --in-flight.",
            )
        left = None if timeout is None else max(0.001, until - time.monotonic())
        try:
            self._engine.pause(in_flight, timeout=left)
        except DrainTimeout:
            self._reopen(gate)
            raise
        if in_flight == "abort":
            # Those that had not reached the engine when it aborted the others.
            self._gate.shut(deadline=_ABORT_SECONDS, cut=True)

    def _reopen(self, gate: _Gate) -> None:
        """Undo a shutting: the weights are those that the gate was open for."""
        if gate.version is not None:
            with suppress(EngineError):  # the next look at the engine opens it
                self._gate.open(gate.version, doubts=gate.doubts)

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Load into the engine, which is paused again first if it was awake."""
        with self._lock:
            if not self._busy:
                raise EngineError("nothing is loaded without a pause", key=self._gate.url, hint="pause first.")
            self._serving = None
        self._sleep()
        self._doubts = self._gate.state().doubts
        self._loaded, self._failed = None, version
        self._engine.load(checkpoint, version=version, keep_kv=keep_kv)
        self._loaded, self._failed = version, None

    def confirm(self, version: str) -> None:
        """Have the engine confirm it."""
        self._engine.confirm(version)

    def probe(self) -> Probe | None:
        """Run the fixed prompt on the engine itself, behind the shut gate if there is an activation.

        ``None`` where the engine was found paused by somebody else, and cannot be probed so.
        """
        if self._engine.probes_paused:
            return self._engine.probe()
        if not self._busy:
            return None if self._engine.info().paused else self._engine.probe()
        self._wake()
        try:
            return self._engine.probe()
        finally:
            self._sleep()

    def resume(self) -> None:
        """Have the engine go on, and open the gate for the weights that it has.

        After a pause that failed the weights are as they were, and a look at the engine opens the gate.
        """
        if not self._busy:
            self._engine.resume()
            return
        if self._failed is not None:
            raise EngineError(f"the load of {self._failed} failed", key=self._failed, hint="loading again.")
        self._wake()
        info = self._engine.info()
        if info.version is None or info.paused or info.version != (self._loaded or info.version):
            raise EngineError(
                "the engine was resumed, and does not serve what it was loaded with", hint="loading again."
            )
        with self._lock:
            self._serving = (info.incarnation, info.version)
            self._busy = False
            try:
                self._gate.open(info.version, doubts=self._doubts)
            except EngineError as error:
                # It stays shut, and counts as paused, until a look at the engine shows that it is still the same.
                _log.warning("The gate was not opened: %s", error)

    def first_tokens(self) -> float | None:
        """Ask an engine that can tell how many seconds after the last resume it gave a token."""
        told: float | None = getattr(self._engine, "first_tokens", lambda: None)()
        return told

    def close(self) -> None:
        """Close the connections; engine and gateway go on."""
        self._engine.close()
        self._gate.close()

    def _wake(self) -> None:
        """Let the engine generate behind the gate: what it makes from now on is kept back."""
        if self._loaded is not None:
            self._gate.settle(self._loaded)
        self._awake = True
        self._engine.resume()

    def _sleep(self) -> None:
        if self._awake:
            self._engine.pause("keep" if self._in_flight == "keep" else "abort")
            self._awake = False


def behind_gateway(engine: Engine, url: str | None) -> Engine:
    """Return the engine as its gateway's control address ``url`` shows it; as it is where there is none.

    The gateway's token is in ``RECEIVER_TOKEN``. Raises ``UsageError``.
    """
    if url is None:
        return engine
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"gateway URL {shown_url(url)!r} is not HTTP",
            key=shown_url(url),
            hint="--gateway-url http://127.0.0.1:9331.",
        )
    return GatedEngine(engine, GateClient(url, token=read_token("RECEIVER_TOKEN")))
