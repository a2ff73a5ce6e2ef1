"""An answer's bytes on their way: passed on as they came, but for the fields that are added. Pure.

Each kind of answer has a writer: ``feed`` takes a piece and the label of the weights that made it and returns what can
be sent now; ``end`` returns the rest; ``broken`` returns it for an answer that was cut short, with the error as its
last part, or ``None`` where that cannot be said and the connection has to be broken off.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from .attribution import Attribution

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EventStream", "JsonObject", "LineStream", "Lines", "PassedOn", "Writer", "writer_for"]

#: A longer line is passed on unread.
_MOST_LINE: Final = 4 << 20
#: And so is a longer object.
_MOST_OBJECT: Final = 64 << 20
_SPACE: Final = b" \t\r\n"
_LINE_END: Final = re.compile(rb"[\r\n]")


class Writer(Protocol):
    """What the answers' kinds have in common."""

    changes: bool
    """Whether bytes are added, so that the engine's Content-Length is not the client's."""

    def feed(self, data: bytes, label: str) -> bytes:
        """Take a piece; return what can be sent."""
        ...

    def end(self) -> bytes:
        """Return what is left of a whole answer."""
        ...

    def broken(self, error: bytes) -> bytes | None:
        """Return what is left of an answer that was cut short; ``error`` is a JSON object."""
        ...


def writer_for(content_type: str, start: str) -> Writer:
    """Return the writer for an answer of this type to a request let in under the version ``start``."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        return EventStream(start)
    if kind in ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"):
        return LineStream(start)
    return JsonObject(start) if kind == "application/json" else PassedOn()


class PassedOn:
    """An answer of a kind that nothing can be added to."""

    changes = False

    def feed(self, data: bytes, label: str) -> bytes:
        """Return it."""
        del label
        return data

    def end(self) -> bytes:
        """There is nothing left."""
        return b""

    def broken(self, error: bytes) -> bytes | None:
        """Nothing can be said."""
        del error
        return None


class Lines:
    """Splits bytes into lines, whatever pieces they come in. A line's label is that of its first byte."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._label = ""
        self._overlong = False

    def feed(self, data: bytes, label: str) -> Iterator[tuple[bytes, str, bool]]:
        """Return each line with its end (a line feed, or a carriage return), its label, and whether it is whole.

        A line that grows too long comes in pieces, none of which is.
        """
        place = 0
        for found in _LINE_END.finditer(data):
            first = self._label if self._partial else label
            yield self.rest() + data[place : found.end()], first, not self._overlong
            self._overlong = False
            place = found.end()
        if place < len(data):
            if not self._partial:
                self._label = label
            self._partial += data[place:]
            if len(self._partial) > _MOST_LINE:
                yield self.rest(), self._label, False
                self._overlong = True

    def rest(self) -> bytes:
        """Take what has no end yet."""
        rest = bytes(self._partial)
        self._partial.clear()
        return rest

    @property
    def label(self) -> str:
        """The label of what has no end yet."""
        return self._label


class EventStream:
    """Server-sent events. What is known of versions is added to each chunk that ends a choice, or tells the usage.

    A stream without such a chunk gets one of its own, without choices, before ``[DONE]`` or at its end. One that ends
    within an event gets none: no client takes what has no end for an event, and what is added would be its end.
    """

    changes = True

    def __init__(self, start: str) -> None:
        self.attribution = Attribution(start)
        self._lines = Lines()
        self._told = False
        self._began_event = False  # something was sent of an event that has no end yet
        self._after_return = False

    def feed(self, data: bytes, label: str) -> bytes:
        """Take a piece; return the whole lines in it, and before it."""
        return b"".join(self._line(*line) for line in self._lines.feed(data, label))

    def end(self) -> bytes:
        """Return the rest."""
        rest = self._lines.rest()
        out = self._line(rest, self._lines.label, True) if rest else b""
        return out if self._told or self._began_event else out + self._own_event()

    def broken(self, error: bytes) -> bytes | None:
        """Return an event with the error, and what is known of versions."""
        self._lines.rest()
        told = b"data: " + _with_fields(error, self.attribution.fields(spans=True)) + b"\n\n"
        return b"\n\n" + told if self._began_event else told

    def _line(self, line: bytes, label: str, whole: bool) -> bytes:
        if not (line == b"\n" and self._after_return):  # which only ends the line before
            self._began_event = line not in (b"\n", b"\r")
        self._after_return = line.endswith(b"\r")
        if not whole or not line.startswith(b"data:"):
            return line
        payload = line[5:].strip(_SPACE)
        if payload == b"[DONE]":
            return line if self._told else self._own_event() + line
        if not self.attribution.count(_parsed(payload), label):
            return line
        self._told = True
        return _with_fields(line, self.attribution.fields(spans=True))

    def _own_event(self) -> bytes:
        self._told = True
        fields = self.attribution.fields(spans=True)
        return b'data: {"object":"weight_version","choices":[],' + fields + b"}\n\n"


class LineStream:
    """JSON lines. What is known of versions is a line of its own at the end."""

    changes = True

    def __init__(self, start: str) -> None:
        self.attribution = Attribution(start)
        self._lines = Lines()
        self._began_line = False

    def feed(self, data: bytes, label: str) -> bytes:
        """Take a piece; return the whole lines in it, and before it."""
        return b"".join(self._line(*line) for line in self._lines.feed(data, label))

    def end(self) -> bytes:
        """Return the rest, and the line about versions."""
        rest = self._lines.rest()
        out = self._line(rest, self._lines.label, True) if rest else b""
        return out + self._separated(b"{" + self.attribution.fields(spans=True) + b"}\n")

    def broken(self, error: bytes) -> bytes | None:
        """Return a line with the error, and what is known of versions."""
        self._lines.rest()
        return self._separated(_with_fields(error, self.attribution.fields(spans=True)) + b"\n")

    def _line(self, line: bytes, label: str, whole: bool) -> bytes:
        if whole:
            self.attribution.count(_parsed(line), label)
        self._began_line = not line.endswith((b"\n", b"\r"))
        return line

    def _separated(self, line: bytes) -> bytes:
        return b"\n" + line if self._began_line else line


class JsonObject:
    """One JSON object: fields are added before its last brace, once it is whole. All else is passed on as it is.

    An object that is cut short may end in a brace, too: nothing but reading it tells.
    """

    changes = True

    def __init__(self, start: str) -> None:
        self.attribution = Attribution(start)
        self._held = bytearray()
        self._unread = False  # it is too long

    def feed(self, data: bytes, label: str) -> bytes:
        """Take a piece; return nothing until the end, unless it grows too long."""
        self.attribution.passed(label)
        self._held += data
        self._unread = self._unread or len(self._held) > _MOST_OBJECT
        return self._rest() if self._unread else b""

    def end(self) -> bytes:
        """Return the object, with the fields."""
        rest = self._rest()
        whole = not self._unread and _is_object(rest)
        return _with_fields(rest, self.attribution.fields(spans=False)) if whole else rest

    def broken(self, error: bytes) -> bytes | None:
        """Half an object cannot be mended."""
        del error
        return None

    def _rest(self) -> bytes:
        rest = bytes(self._held)
        self._held.clear()
        return rest


def _parsed(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_object(text: bytes) -> bool:
    try:
        text.decode()  # which msgspec does not, of a raw member
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _with_fields(text: bytes, fields: bytes) -> bytes:
    """Add members to the object that ends a text."""
    brace = text.rindex(b"}")
    comma = b"" if text[:brace].rstrip(_SPACE).endswith(b"{") else b","
    return text[:brace] + comma + fields + text[brace:]
