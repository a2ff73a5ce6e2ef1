"""The adapter for an engine that is driven by programs of the operator: a hook for each step.

A hook is a program and its arguments; no shell is ever between. An argument that is ``{checkpoint}``, ``{version}``,
``{in_flight}``, ``{drain_seconds}`` or ``{keep_kv}``, and nothing else, is replaced by what it names; the same is in
the environment as ``ENGINE_CHECKPOINT`` and so on. Exit code 0 says that it is done. What a hook writes to standard
error is shown where it failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from deltastore.errors import DrainTimeout, EngineError, UsageError
from receiver.engines.base import EngineInfo, Probe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from receiver.engines.base import InFlight

__all__ = ["NOT_DRAINED", "CommandEngine", "CommandOptions"]

NOT_DRAINED: Final = 75
"""Exit code of a pause hook whose requests did not end in time, and that holds nothing."""

_MOST_OUTPUT = 1 << 20  # bytes that are read of it
_SHOWN = 300  # characters of an error
_AFTER_DRAIN = 10.0  # seconds a pause hook has beyond the drain, to say that it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """The hooks, and how long each may take, in seconds; then it and its process group are killed.

    ``pause``, ``load`` and ``resume`` are needed. ``info`` prints ``{"incarnation", "version", "paused"}``; without it
    the adapter remembers what it did, and sees no engine restart. ``confirm`` fails unless the engine holds the
    version. ``probe`` prints ``{"logprobs", "tokens"}``, and works while paused where ``probes_paused`` says so.
    """

    pause: tuple[str, ...] | None = None
    load: tuple[str, ...] | None = None
    confirm: tuple[str, ...] | None = None
    resume: tuple[str, ...] | None = None
    info: tuple[str, ...] | None = None
    probe: tuple[str, ...] | None = None
    probes_paused: bool = False
    timeout: float = 60.0
    pause_timeout: float = 120.0
    load_timeout: float = 900.0


class CommandEngine:
    """Runs the hooks. A load that failed is remembered: nothing is confirmed or resumed until one succeeds.

    Raises ``UsageError`` without the hooks that are needed.
    """

    def __init__(self, options: CommandOptions) -> None:
        for name in ("pause", "load", "resume"):
            if getattr(options, name) is None:
                raise UsageError(
                    f"engine command needs a hook for {name}",
                    key=name,
                    hint=f"--engine-option {name}='/usr/local/bin/engine-{name} {{version}}'.",
                )
        self._options = options
        self._lock = threading.Lock()
        self._known = EngineInfo(uuid.uuid4().hex, None, paused=False)
        self._broken = False

    @property
    def probes_paused(self) -> bool:
        """As the operator says."""
        return self._options.probes_paused

    def info(self) -> EngineInfo:
        """Ask the hook, or tell what was done so far."""
        if self._options.info is None:
            return self._known
        told = self._object("info", self._options.info, {})
        incarnation, version, paused = (told.get(key) for key in ("incarnation", "version", "paused"))
        if not isinstance(incarnation, str) or not isinstance(paused, bool) or not isinstance(version, str | None):
            raise self._error("info", "it printed no incarnation, version and paused")
        return EngineInfo(incarnation, None if self._broken else version, paused)

    def pause(self, in_flight: InFlight = "wait", *, timeout: float | None = None) -> None:
        """Run the hook; exit code 75 says that requests did not end in time, and that nothing is held."""
        values = {"in_flight": in_flight, "drain_seconds": "" if timeout is None else f"{timeout:g}"}
        limit = self._options.pause_timeout if timeout is None else timeout + _AFTER_DRAIN
        code, _ = self._run("pause", self._options.pause, values, limit, accepted=(0, NOT_DRAINED))
        if code == NOT_DRAINED:
            raise DrainTimeout(
                "the pause hook says that requests still run",
                key="pause",
                hint="a longer drain timeout, or --in-flight abort or keep.",
            )
        self._remember(paused=True)

    def load(self, checkpoint: Path, *, version: str, keep_kv: bool = False) -> None:
        """Run the hook; ``keep_kv`` is ``yes`` or ``no``, and dropping caches is the hook's work too."""
        if not self.info().paused:
            raise self._error("load", "the engine is not paused", hint="pause() before load().")
        self._broken = True
        self._remember(version=None)
        values = {
            "checkpoint": str(checkpoint.absolute()),
            "version": version,
            "keep_kv": "yes" if keep_kv else "no",
        }
        self._run("load", self._options.load, values, self._options.load_timeout)
        self._remember(version=version)
        self._broken = False

    def confirm(self, version: str) -> None:
        """Compare with what the engine says that it holds, and run the hook where there is one."""
        held = self.info().version
        if held != version:
            raise self._error("confirm", f"the engine holds {held or 'no version'}, not {version}")
        if self._options.confirm is not None:
            self._run("confirm", self._options.confirm, {"version": version}, self._options.timeout)

    def probe(self) -> Probe | None:
        """Run the hook, where there is one."""
        if self._options.probe is None:
            return None
        told = self._object("probe", self._options.probe, {})
        try:
            logprobs = tuple(float("nan") if value is None else float(value) for value in told["logprobs"])
            return Probe(logprobs, tuple(int(token) for token in told.get("tokens") or ()))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._error("probe", "it printed no logprobs") from error

    def resume(self) -> None:
        """Run the hook, unless the last load failed."""
        if self._broken:
            raise self._error(
                "resume", "the last load failed, so the engine stays paused", hint="load a version first."
            )
        self._run("resume", self._options.resume, {}, self._options.timeout)
        self._remember(paused=False)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _remember(self, **what: Any) -> None:
        with self._lock:
            known = self._known
            self._known = EngineInfo(
                known.incarnation, what.get("version", known.version), paused=what.get("paused", known.paused)
            )

    def _object(self, name: str, hook: tuple[str, ...], values: Mapping[str, str]) -> Mapping[str, Any]:
        _, output = self._run(name, hook, values, self._options.timeout)
        try:
            told = json.loads(output)
        except (ValueError, RecursionError) as error:
            raise self._error(name, "it printed something that is not JSON") from error
        if not isinstance(told, dict):
            raise self._error(name, "it printed something that is no object")
        return told

    def _run(
        self,
        name: str,
        hook: tuple[str, ...] | None,
        values: Mapping[str, str],
        seconds: float,
        *,
        accepted: tuple[int, ...] = (0,),
    ) -> tuple[int, str]:
        """Run a hook to its end; return its exit code and what it printed."""
        arguments = [values.get(part[1:-1], part) if part[:1] + part[-1:] == "{}" else part for part in hook or ()]
        environment = os.environ | {f"ENGINE_{key.upper()}": value for key, value in values.items()}
        try:
            # Files, not pipes: a process that the hook leaves behind would hold a pipe open.
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
                code = _wait(arguments, environment, output, errors, seconds)
                printed, told = _read(output), _read(errors)
        except (OSError, ValueError) as error:  # ValueError: an argument that the system cannot take
            raise self._error(name, f"it cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise self._error(
                name,
                f"it did not end within {seconds:g} s and was killed",
                hint="a longer timeout, if it is only slow.",
            ) from error
        if code not in accepted:
            said = told.strip().splitlines()
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise self._error(name, f"{why}{f': {said[-1][:_SHOWN]}' if said else ''}")
        return code, printed

    def _error(self, hook: str, why: str, *, hint: str | None = None) -> EngineError:
        return EngineError(f"engine hook {hook}: {why}", key=hook, hint=hint or "Run the hook by hand to see more.")


def _wait(
    arguments: list[str], environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes], seconds: float
) -> int:
    """Start a program in a process group of its own; whatever ends the wait early ends the group."""
    process = subprocess.Popen(  # noqa: S603 - the operator's program, and no shell
        arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")
