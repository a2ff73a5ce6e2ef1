"""Working behind others: a nice value and an I/O priority for the threads that patch, and for no others.

Linux keeps both for each thread, and a thread hands them on to those that it starts. So the work runs in a thread of
its own: whoever asked for it stays as quick as before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Priority"]

_T = TypeVar("_T")

#: The number of the system call ``ioprio_set``, for which the C library has no function.
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS: Final = 1
_IO_CLASS_SHIFT: Final = 13
_IO_BEST_EFFORT: Final = 2
_IO_IDLE: Final = 3
_IO: Final = re.compile(r"idle|best-effort:[0-7]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """``nice``: 0 to 19; ``io``: ``idle``, or ``best-effort:0`` to ``best-effort:7``; ``None``: as the process has it.

    Raises ``UsageError`` for other values, and where the system has no such priorities for threads.
    """

    nice: int | None = None
    io: str | None = None

    def __post_init__(self) -> None:
        if self.nice is not None and not 0 <= self.nice <= 19:
            raise UsageError(f"{self.nice} is no nice value.", hint="Give 0 to 19.")
        if self.io is not None and not _IO.fullmatch(self.io):
            raise UsageError(f"{self.io!r} is no I/O priority.", hint="Give idle, or best-effort:0 to best-effort:7.")
        if (self.nice is not None or self.io is not None) and sys.platform != "linux":
            raise UsageError("Threads have priorities of their own on Linux only.", hint="Leave out --nice.")
        if self.io is not None and platform.machine() not in _IOPRIO_SET:
            raise UsageError(
                f"How to set an I/O priority is not known for {platform.machine()}.",
                hint="Leave out --io-priority, and start the receiver with `ionice`.",
            )

    def run(self, work: Callable[[], _T], *, leave: Callable[[], object]) -> _T:
        """Do ``work``, behind others if that is wished for. When this call is interrupted, ``leave`` is to end it."""
        if self.nice is None and self.io is None:
            return work()

        def behind() -> _T:
            self.apply()
            return work()

        with ThreadPoolExecutor(1, thread_name_prefix="behind") as pool:
            future = pool.submit(behind)
            try:
                wait([future])
            except BaseException:
                leave()
                raise
            return future.result()

    def apply(self) -> None:
        """Set the priorities of the calling thread, and of those that it starts from now on."""
        thread = threading.get_native_id()
        try:
            if self.nice is not None:
                # Never back up: that takes a privilege.
                os.setpriority(os.PRIO_PROCESS, thread, max(self.nice, os.getpriority(os.PRIO_PROCESS, thread)))
            if self.io is not None:
                _set_io_priority(self.io)
        except OSError as error:
            raise UsageError(
                f"The priority cannot be set: {error.strerror}.", hint="Leave out --nice and --io-priority."
            ) from error


def _set_io_priority(io: str) -> None:
    name, _, level = io.partition(":")
    io_class = _IO_IDLE if name == "idle" else _IO_BEST_EFFORT
    system = ctypes.CDLL(None, use_errno=True)
    number = _IOPRIO_SET[platform.machine()]
    if system.syscall(number, _IOPRIO_WHO_PROCESS, 0, io_class << _IO_CLASS_SHIFT | int(level or 0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
