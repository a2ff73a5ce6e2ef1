"""What a client's request says of the weights: it is taken out before the engine sees the request. Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from deltastore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ANY_VERSION", "RequestBody", "Wanted"]

_SALT_BYTES: Final = 16
_LABEL: Final = re.compile(r"(?:([!-~]{1,200})/)?(\d{1,15})")


@dataclass(frozen=True, slots=True)
class _Bound:
    """A version's number, of one stream or (``None``) of whichever is served."""

    stream: str | None
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The versions that a request may be answered by."""

    at_least: _Bound | None = None
    exactly: _Bound | None = None

    def __bool__(self) -> bool:
        return self.at_least is not None or self.exactly is not None

    def allows(self, label: str) -> bool:
        """Tell whether weights of this label may answer. Versions of another stream never may."""
        if not self:
            return True
        found = _LABEL.fullmatch(label)
        if found is None:
            return False
        stream, number = found[1], int(found[2])
        for bound in (self.at_least, self.exactly):
            if bound is not None and bound.stream not in (None, stream):
                return False
        at_least = self.at_least is None or number >= self.at_least.number
        return at_least and (self.exactly is None or number == self.exactly.number)


ANY_VERSION: Final = Wanted()


class RequestBody:
    """A request's bytes. They stay as they are, but for a member of its JSON object that is taken out or put in."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._changed = False
        try:
            self._members: dict[str, msgspec.Raw] | None = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._members = None  # whatever it is, the engine has to make sense of it

    def take_wanted(self, headers: Mapping[str, str]) -> Wanted:
        """Take out what it says of versions; where the body says nothing the headers do. Raises ``UsageError``."""
        return Wanted(
            at_least=self._take("min_version", headers.get("x-min-version")),
            exactly=self._take("exact_version", headers.get("x-exact-version")),
        )

    def _take(self, name: str, header: str | None) -> _Bound | None:
        value: object = header
        if self._members is not None and name in self._members:
            self._changed = True
            try:
                value = msgspec.json.decode(self._members.pop(name))
            except (msgspec.DecodeError, RecursionError):
                value = False
        return None if value is None else _bound(name, value)

    def salt(self, label: str) -> None:
        """Have the engine keep what it caches for this label apart, and apart from what the client keeps apart.

        The salt is a digest: vLLM takes 128 characters at most, and no ``/``, which is in every label.
        """
        if self._members is None:
            return
        try:
            own = msgspec.json.decode(self._members.get("cache_salt", msgspec.Raw(b"null")), type=str | None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # the engine refuses it
        if own == "":
            return  # this one too
        salt = hashlib.blake2b(msgspec.json.encode([label, own]), digest_size=_SALT_BYTES).hexdigest()
        self._members["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
        self._changed = True

    def encode(self) -> bytes:
        """Return what the engine gets."""
        if self._members is None or not self._changed:
            return self._content
        members = (msgspec.json.encode(name) + b":" + bytes(value) for name, value in self._members.items())
        return b"{" + b",".join(members) + b"}"


def _bound(name: str, value: object) -> _Bound:
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    found = _LABEL.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{name} is no version: {value!r:.80}.", key=name, hint="A number, or STREAM/NUMBER.")
    return _Bound(found[1], int(found[2]))
