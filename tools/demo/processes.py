"""Processes beside us, as an operator runs them: started, looked at from outside, ended with SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["PATIENCE_SECONDS", "eventually", "process", "text_of"]

PATIENCE_SECONDS = 60.0


def text_of(path: Path) -> str:
    """Return what is in a file, and nothing where there is none yet."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def eventually(look: Callable[[], Any], *, every: float = 0.01) -> Any:
    """Look, every so many seconds, until there is something; what others do is seen by asking, as any operator would.

    Raises ``TimeoutError`` after a minute.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError("nothing came of it in time")
        time.sleep(every)
    return found


@contextmanager
def process(name: str, command: list[str], home: Path) -> Iterator[None]:
    """Run a process beside us, its output in a file; end it with SIGTERM, and insist that it ends well."""
    log = home / f"{name}.log"
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": "."}
        )
    try:
        yield
    except BaseException:
        sys.stderr.write(f"--- {name}\n{text_of(log)[-4000:]}\n")
        raise
    finally:
        running.terminate()
        try:
            code = running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            code = running.wait()
    assert code == 0, f"the {name} ended with {code}:\n{text_of(log)[-4000:]}"
