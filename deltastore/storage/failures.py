"""What went wrong in a cloud library, told in our errors.

The libraries are recognised by the names of their exceptions, so that none is imported for its types. obstore tells
status and code of an answer only in its message, so there they are read from it.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Final

from deltastore.errors import AccessDenied, CorruptObject, ObjectExists, ObjectNotFound, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["is_absence", "is_empty_range", "too_large", "too_short", "translate"]

_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})

_ABSENT: Final = frozenset(
    {"builtins.FileNotFoundError", "azure.core.exceptions.ResourceNotFoundError"},
)
_EXISTS: Final = frozenset(
    {
        "builtins.FileExistsError",
        "azure.core.exceptions.ResourceExistsError",
        "obstore.exceptions.AlreadyExistsError",
    }
)
_DENIED: Final = frozenset(
    {
        "builtins.PermissionError",
        "azure.core.exceptions.ClientAuthenticationError",
        "botocore.exceptions.NoCredentialsError",
        "botocore.exceptions.PartialCredentialsError",
        "google.auth.exceptions.DefaultCredentialsError",
        "google.auth.exceptions.RefreshError",
        "obstore.exceptions.PermissionDeniedError",
        "obstore.exceptions.UnauthenticatedError",
    }
)
# S3 answers 400 to these, and they are about who asks all the same.
_DENIED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})

# The network or the server, as opposed to the request.
_PASSING: Final = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "asyncio.exceptions.IncompleteReadError",
        "asyncio.exceptions.TimeoutError",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
        "builtins.ConnectionError",
        "builtins.TimeoutError",
        "google.auth.exceptions.TransportError",
        "http.client.IncompleteRead",
    }
)
# What arrived is not what was sent: the request was damaged on its way.
_PASSING_CODES: Final = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})
_PASSING_STATUS: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_PASSING_ERRNO: Final = frozenset({errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT})

_OBSTORE: Final = "obstore.exceptions."
_OBSTORE_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_OBSTORE_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_OBSTORE_MESSAGE: Final = re.compile(r"<Message>([^<]+)</Message>")
# An answer that broke off, a connection that was not made, and one that timed out all read so.
_OBSTORE_NETWORK: Final = re.compile(r"HTTP error:|error decoding response|Error getting (?:list|put) response body")
_OBSTORE_DETAILS: Final = "\n\nDebug source:"


def too_large(key: str, limit: int) -> CorruptObject:
    """Return the error for an object of more than ``limit`` bytes."""
    return CorruptObject(
        f"{key} has more than the {limit} bytes that it may have", key=key, hint="run `deltastore check` on the store"
    )


def too_short(key: str, end: int) -> CorruptObject:
    """Return the error for an object that has no ``end`` bytes."""
    return CorruptObject(
        f"{key} ends before byte {end}, which it should have", key=key, hint="run `deltastore check` on the store"
    )


def is_absence(error: Exception) -> bool:
    """Whether the error says that the object is not there (and not that its whole bucket is missing)."""
    return bool(_kinds(error) & _ABSENT) and _code(error) not in _NO_BUCKET


def is_empty_range(error: Exception) -> bool:
    """Whether the error says that an object has no byte of the range asked for."""
    return _status(error) == 416


def translate(error: Exception, verb: str, key: str | None, *, url: str, clean: Callable[[str], str]) -> StorageError:
    """Return our error for a library's; ``clean`` takes credentials out of the library's message."""
    name = key or url
    kinds = _kinds(error)
    if _code(error) in _NO_BUCKET:
        return _no_bucket(verb, key, url)
    if kinds & _ABSENT and verb == "read":
        return ObjectNotFound(f"there is no object {name}", key=key)
    if verb == "create" and (kinds & _EXISTS or _status(error) == 412):
        return ObjectExists(f"{name} exists already", key=key)
    message = f"could not {verb} {name}: {clean(_shown(error))}"
    if kinds & _DENIED or _status(error) in {401, 403} or _code(error) in _DENIED_CODES:
        hint = "renew the credentials, or check what they may do in this bucket"
        return AccessDenied(message, key=key, hint=hint)
    if _is_passing(error):
        hint = f"check that {url} can be reached from here, then repeat"
        return StorageError(message, transient=True, key=key, hint=hint)
    hint = "check the URL and the storage options"
    return StorageError(message, transient=False, key=key, hint=hint)


def _no_bucket(verb: str, key: str | None, url: str) -> StorageError:
    message = f"could not {verb} {key or url}: the bucket of {url} does not exist"
    hint = "create the bucket, or check the spelling of the URL and the endpoint"
    if verb == "read":
        return ObjectNotFound(message, key=key, hint=hint)
    return StorageError(message, transient=False, key=key, hint=hint)


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    # By their kind first: some errors of the connection carry a made-up status.
    if any(_kinds(link) & _PASSING for link in _chain(error)) or _code(error) in _PASSING_CODES:
        return True
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS
    if _is_obstore(error):
        return _OBSTORE_NETWORK.search(_text(error)) is not None
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNO


def _kinds(error: BaseException) -> set[str]:
    """Return the full names of the error's class and of those it derives from."""
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def _is_obstore(error: BaseException) -> bool:
    """Whether obstore raised it: under its own name, or as a built-in error with its details."""
    return any(kind.startswith(_OBSTORE) for kind in _kinds(error)) or _OBSTORE_DETAILS in str(error)


def _text(error: BaseException) -> str:
    """Return the library's message without the dump of its internals."""
    return str(error).partition(_OBSTORE_DETAILS)[0] or type(error).__name__


def _shown(error: BaseException) -> str:
    """Return what a person is told: the server's own words, where there are any in the message."""
    text = _text(error)
    found = _OBSTORE_MESSAGE.search(text) if _is_obstore(error) else None
    return found[1] if found else text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: the libraries wrap the answer that they got from the server."""
    current: BaseException | None = error
    for _ in range(4):
        if current is None:
            return
        yield current
        current = current.__cause__


def _status(error: Exception) -> int | None:
    """Return the HTTP status behind an error, where one is known."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            status = getattr(link, name, None)
            if isinstance(status, int):
                return status
        if _is_obstore(link):
            found = _OBSTORE_STATUS.search(_text(link))
            return int(found[1]) if found else None
    return None


def _code(error: Exception) -> str | None:
    """Return the word that the server has for what went wrong, where one is known."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        code = code or getattr(link, "error_code", None)
        if code is not None:
            return str(getattr(code, "value", code))
        if _is_obstore(link):
            found = _OBSTORE_CODE.search(_text(link))
            return found[1] if found else None
    return None
