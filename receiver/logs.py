"""The daemon's log: one line an event, for people or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.errors import DeltastoreError

__all__ = ["FORMATS", "LEVELS", "LogFormat", "seconds_text", "set_up_logs", "tell", "tell_failure"]

LogFormat = Literal["human", "json"]
FORMATS: tuple[LogFormat, ...] = ("human", "json")
LEVELS = ("debug", "info", "warning", "error")

_log = logging.getLogger("receiver")


def tell(event: str, message: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event of the daemon: its name, a sentence for people, and fields for machines."""
    _log.log(level, "%s", message, extra={"event": event, "fields": fields})


def tell_failure(error: DeltastoreError, what_next: str, **fields: object) -> None:
    """Log that something failed, and in a sentence what comes of it."""
    about = {"error_kind": error.kind, "key": error.key, "hint": error.hint}
    tell("failed", f"{error} {what_next}", level=logging.WARNING, **about, **fields)


def seconds_text(stages: Mapping[str, float]) -> str:
    """Return stages and their seconds for people."""
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in stages.items())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class HumanFormatter(logging.Formatter):
    """Time, level, and the sentence."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback if there is one."""
        message = " ".join(record.getMessage().splitlines())
        line = f"{_time(record)} {record.levelname} {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """An object a line: ``time``, ``level``, ``event``, ``message``, and the event's fields.

    What a library logs has the event ``log`` and its ``logger``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the record holds."""
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        if entry["event"] == "log":
            entry["logger"] = record.name
        entry |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in entry}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logs(form: LogFormat, level: str) -> None:
    """Send this process's log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)
