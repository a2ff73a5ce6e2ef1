"""What ends `run` and `once` from outside: signals, which never break off an activation."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from receiver.daemon import Receiver

__all__ = ["INTERRUPTED", "ended_by_signals"]

INTERRUPTED = 130
#: A request that hangs, or a disk, has so many seconds to let go after a signal.
_GRACE_SECONDS = 7.0


@contextmanager
def ended_by_signals(receiver: Receiver, code: Callable[[list[int]], int]) -> Iterator[list[int]]:
    """Have a receiver stop at SIGTERM, SIGINT, or SIGHUP unless that is ignored; yields the signals that came.

    ``code`` says by them what the process ends with, should it not end by itself: the live slot bears that at any
    instant, an engine does not.
    """
    seen: list[int] = []
    asked: SimpleQueue[None] = SimpleQueue()  # an Event's lock would not bear a signal's handler
    ended = threading.Event()

    def stop(number: int, _frame: object) -> None:
        seen.append(number)
        receiver.stop()
        asked.put(None)

    def see_to_the_end() -> None:
        from receiver.logs import tell  # noqa: PLC0415 - heavy, and --help does without

        asked.get()
        if not ended.wait(_GRACE_SECONDS):
            receiver.hold_activations()
            tell("abandoned", "Stopped; something that hangs was not waited for.", level=logging.WARNING)
            logging.shutdown()
            os._exit(code(seen))

    threading.Thread(target=see_to_the_end, name="end", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # which nohup sees to
            signal.signal(number, stop)
    yield seen
    ended.set()  # not after an exception: a thread that hangs keeps the interpreter from ending by itself
