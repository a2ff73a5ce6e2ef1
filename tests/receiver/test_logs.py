"""The log: a line an event, for people and for machines."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from receiver.logs import HumanFormatter, JsonFormatter, tell


@pytest.fixture
def lines():
    """Log into lists through both formatters."""
    found = {"human": [], "json": []}

    class Collect(logging.Handler):
        def emit(self, record):
            found["human"].append(HumanFormatter().format(record))
            found["json"].append(JsonFormatter().format(record))

    log, handler = logging.getLogger("receiver"), Collect()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


def test_an_event_is_one_line_with_its_name_and_fields(lines):
    tell("patched", "Version 3 is in place.", version=3, stages={"fetch": 0.5})
    entry = json.loads(lines["json"][0])
    assert re.fullmatch(TIME, entry.pop("time"))
    assert entry == {
        "level": "info",
        "event": "patched",
        "message": "Version 3 is in place.",
        "version": 3,
        "stages": {"fetch": 0.5},
    }
    assert re.fullmatch(rf"{TIME} INFO Version 3 is in place\.", lines["human"][0])


@pytest.mark.parametrize("message", ["two\nlines", "100 % {x} %s", 'quotes "and" \\', "\udcff", "é\u2028x"])
def test_whatever_is_said_stays_on_its_line(lines, message):
    tell("failed", message, level=logging.WARNING, key=message, time="no", event_at=object())
    assert all(len(written[0].splitlines()) == 1 for written in lines.values())
    entry = json.loads(lines["json"][0])
    assert (entry["message"], entry["key"], entry["level"]) == (message, message, "warning")
    assert re.fullmatch(TIME, entry["time"])


def test_what_libraries_say_names_them_and_tracebacks_are_kept(lines):
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("receiver.other").warning("Careful: %d.", 7, exc_info=sys.exc_info())
    entry = json.loads(lines["json"][0])
    assert (entry["event"], entry["logger"], entry["message"]) == ("log", "receiver.other", "Careful: 7.")
    assert "ValueError: why" in entry["traceback"]
    assert "ValueError: why" in lines["human"][0]
