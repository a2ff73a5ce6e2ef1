"""Commands as processes of their own, without an interpreter's start for each.

One process imports everything and compiles the kernels; each command is a fork of it, so that a signal a few
milliseconds later meets the command at work, and not the imports.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (negative: the signal that killed it), what it printed, seconds it took."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        """Standard output, parsed."""
        return json.loads(self.out)

    def ok(self) -> Outcome:
        """Fail unless it ended well."""
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


class Command:
    """One forked command."""

    def __init__(self, server: ForkServer, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._server = server
        self._out, self._err = out, err
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._handle: int | None = os.pidfd_open(pid)
        self._outcome: Outcome | None = None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end at most so long; tells whether it came."""
        if self._handle is not None and select.select([self._handle], [], [], max(seconds, 0))[0]:
            self._ended = time.perf_counter()
            os.close(self._handle)
            self._handle = None
        return self._handle is None

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)

    def end(self, seconds: float = 60.0) -> Outcome:
        """Wait for the end, and return how it came."""
        if self._outcome is None:
            in_time = self.ends_within(seconds)
            if not in_time:
                self.send(signal.SIGKILL)
                self.ends_within(seconds)
            code = self._server.reap(self.pid)
            out, err = self._out.read_text(), self.err
            assert self._ended is not None
            self._outcome = Outcome(code, out, err, self._ended - self._started)
            assert in_time, f"the command did not end within {seconds} s: {err}"
        return self._outcome

    @property
    def err(self) -> str:
        """What it has printed on standard error so far."""
        return self._err.read_text()


class ForkServer:
    """Starts commands; use ``fork_server``."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._count = 0
        self._running: list[Command] = []

    def _ask(self, request: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Command:
        """Start ``deltastore …``, ``receiver …`` or ``trainer …``."""
        self._count += 1
        out, err = (self._directory / f"{self._count}.{name}" for name in ("out", "err"))
        for path in (out, err):
            path.touch()
        request = {
            "words": [str(word) for word in words],
            "env": dict(env or {}),
            "cwd": str(cwd or self._directory),
            "out": str(out),
            "err": str(err),
        }
        command = Command(self, self._ask(request), out, err)
        self._running.append(command)
        return command

    def run(self, *words: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Outcome:
        """Run a command to its end."""
        return self.start(*words, env=env, cwd=cwd).end()

    def reap(self, pid: int) -> int:
        """Return the exit code of a command that has ended."""
        return int(self._ask({"reap": pid}))

    def end_all(self) -> None:
        """Kill what a test left running."""
        for command in self._running:
            if command._outcome is None:
                command.send(signal.SIGKILL)
                command.end()
        self._running.clear()


@contextmanager
def fork_server(directory: Path) -> Iterator[ForkServer]:
    """Run a fork server until the block ends."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    server = ForkServer(process, directory)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield server
        server.end_all()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _warm_up() -> None:
    """Import what commands import when they need it, and have every kernel compiled."""
    from importlib import import_module  # noqa: PLC0415 - the test's side does without

    import numpy as np  # noqa: PLC0415

    from deltastore.codec.applying import ChunkDecoder  # noqa: PLC0415
    from deltastore.codec.chunk import ChunkEncoder  # noqa: PLC0415
    from deltastore.codec.taking import warm_up_taking  # noqa: PLC0415
    from deltastore.digest import hasher  # noqa: PLC0415

    for name in ("init", "publish", "log", "show", "plan", "restore", "check", "anchor", "compact", "keygen", "fleet"):
        import_module(f"deltastore.cli.{name}")
    for name in ("run", "once", "status", "pin", "pause_following", "resume_following", "cache", "verify", "repair"):
        import_module(f"receiver.cli.{name}")
    for name in (
        "deltastore.fork",
        "deltastore.writer",
        "deltastore.fsck",
        "deltastore.compact",
        "receiver.config",
        "receiver.daemon",
        "receiver.status",
        "receiver.cache_server",
    ):
        import_module(name)
    for name in (
        "trainer",
        "uvicorn",
        "starlette.applications",
        "starlette.routing",
        "httpx",
        "receiver.engines.torch_server",
    ):
        import_module(name)
    warm_up_taking((1, 2, 4, 8))
    encoder, decoder, random = ChunkEncoder(), ChunkDecoder(), np.random.default_rng(0)
    for width in (1, 2, 4, 8):
        old = random.integers(0, 256, 4096, np.uint8)
        sparse, dense, full = old.copy(), old.copy(), random.integers(0, 256, 4096, np.uint8)
        sparse[8] ^= 1
        dense[::width] ^= 1
        for new in (sparse, dense, full):
            change = encoder.change(old, new, width=width)
            assert change is not None
            out = old.copy()
            decoder.apply(out, change.encoding, change.changed, memoryview(change.payload), width=width)
            assert (out == new).all()
    for name in ("xxh3-128", "blake3"):
        hasher(name).digest(b"warm")


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _serve() -> tuple[list[str], dict[str, str]] | None:
    """Answer requests; returns in a fork with what it is to run, and ``None`` at the end of input."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            _answer(json.dumps(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if pid:
            _answer(json.dumps(pid))
            continue
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and so by what it starts
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(request["out"], flags, 0o644), 1)
        os.dup2(os.open(request["err"], flags, 0o644), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        return request["words"], request["env"]
    return None


def _main() -> None:
    _warm_up()
    _answer("ready")
    work = _serve()
    if work is None:
        return
    words, environment = work
    os.environ.update(environment)
    sys.argv = words
    tempfile.gettempdir()  # leaves a file behind when it is interrupted, which is the standard library's own affair
    if "SIGNAL_AT_CHANGE" in os.environ:
        _signal_at_change(*(int(number) for number in os.environ["SIGNAL_AT_CHANGE"].split("@")))
    if "COUNT_WRITES" in os.environ:
        _count_writes(os.environ["COUNT_WRITES"])
    if "LOG_READS" in os.environ:
        _log_reads(os.environ["LOG_READS"])
    code = 1
    try:
        _command(words[0])()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    # The end of an interpreter without taking down every module, which takes longer than most commands do.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def signal_at_change(signal_number: int, change: int) -> dict[str, str]:
    """Return an environment that has a command send itself a signal instead of its n-th change on disk.

    That is: just before it; a signal that does not kill at once is handled when the change has been made.
    """
    return {"SIGNAL_AT_CHANGE": f"{int(signal_number)}@{change}"}


def _signal_at_change(signal_number: int, change: int) -> None:
    names = ("replace", "rename", "unlink", "symlink", "mkdir", "rmdir", "fsync", "pwrite", "posix_fallocate", "link")
    count = 0

    def count_down() -> None:
        nonlocal count
        count += 1
        if count == change + 1:
            os.kill(os.getpid(), signal_number)

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            count_down()
            return call(*arguments, **options)

        return changed

    for name in names:
        setattr(os, name, wrapped(getattr(os, name)))
    import receiver.slots  # noqa: PLC0415 - only here

    receiver.slots._exchange = wrapped(receiver.slots._exchange)


def count_writes(path: Path) -> dict[str, str]:
    """Return an environment that has a command add a line to a file for each write at an offset: its bytes."""
    return {"COUNT_WRITES": str(path)}


def _count_writes(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    pwrite = os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        os.write(log, b"%d\n" % memoryview(data).nbytes)  # before it: a kill may come between the two
        return pwrite(descriptor, data, offset)

    os.pwrite = counted


def log_reads(path: Path) -> dict[str, str]:
    """Return an environment that has a command write down the key of each object that it reads from a local store."""
    return {"LOG_READS": str(path)}


def _log_reads(path: str) -> None:
    from deltastore.storage.local import LocalBackend  # noqa: PLC0415 - only here

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def logged(call: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: LocalBackend, key: str, *arguments: Any, **options: Any) -> Any:
            os.write(log, f"{key}\n".encode())
            return call(self, key, *arguments, **options)

        return read

    for name in ("read", "read_range"):
        setattr(LocalBackend, name, logged(getattr(LocalBackend, name)))


def _command(program: str) -> Callable[[], None]:
    from trainer import main as trainer  # noqa: PLC0415

    from deltastore.cli import main as deltastore  # noqa: PLC0415 - the test's side does without
    from receiver.cli import main as receiver  # noqa: PLC0415

    return {"deltastore": deltastore, "receiver": receiver, "trainer": trainer}[program]


if __name__ == "__main__":
    _main()
