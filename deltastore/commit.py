"""Publish a manifest exactly once, lost answers included.

A commit is one exclusive creation of a small object. Its answer may be lost, and a client library that
sends a lost request again is told that the key is taken, by itself. So no answer but success is believed:
the object is read back and compared. ``data`` must carry a random commit id, which makes identical bytes
ours and nobody else's.

Found ours, the version is committed. Found another's, it is not, for ever. Found nothing, the request may
still be on its way: until that is settled, only the identical bytes may be sent under this key.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from deltastore.errors import (
    CommitInDoubt,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UsageError,
    VersionConflict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.base import Backend

__all__ = ["RESENDS", "commit", "settle"]

RESENDS: Final = 3
"""How often the identical bytes are sent again while the key is found absent."""

_FIRST_PAUSE: Final = 0.1


def commit(
    backend: Backend,
    key: str,
    data: bytes,
    *,
    limit: int,
    resends: int = RESENDS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Create ``key`` with ``data``; on return it is committed and durable.

    ``limit`` is the size that a reader of this kind of object accepts. Raises ``VersionConflict`` when
    another's bytes are there, with nothing of ours changed, and ``CommitInDoubt`` when it cannot be said:
    then ``settle`` with the same key and bytes goes on from here, and nothing else may be sent under the
    key. An interruption (Ctrl-C) leaves a commit that has begun in the same doubt.
    """
    _check(key, data, limit)
    failure = _send(backend, key, data)
    if failure is not None:
        _settle(backend, key, data, failure, limit=limit, resends=resends, sleep=sleep)


def settle(
    backend: Backend,
    key: str,
    data: bytes,
    *,
    limit: int,
    resends: int = RESENDS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Find out about a commit in doubt, and complete it where the key is still free.

    Ends as ``commit`` does, and may be called any number of times. Reads before it sends.
    """
    _check(key, data, limit)
    _settle(backend, key, data, None, limit=limit, resends=resends, sleep=sleep)


def _settle(
    backend: Backend,
    key: str,
    data: bytes,
    failure: StorageError | None,
    *,
    limit: int,
    resends: int,
    sleep: Callable[[float], None],
) -> None:
    """Read back and send in turn, after a ``failure`` to create or none known, until it is settled."""
    for sent in range(resends + 1):
        if _is_committed(backend, key, data, limit):
            return
        if sent == resends or (failure is not None and not _may_pass(failure)):
            break
        if sent:
            sleep(random.uniform(0.5, 1.0) * _FIRST_PAUSE * 2**sent)  # noqa: S311 - not a secret
        failure = _send(backend, key, data)
        if failure is None:
            return
    reason = f": {failure}" if failure is not None else ""
    raise _doubt(key, f"{key} was sent and is not there{reason}", failure) from failure


def _check(key: str, data: bytes, limit: int) -> None:
    # An object over the limit would be committed and then refused by every reader, ourselves included.
    if len(data) > limit:
        raise UsageError(f"{key} would have {len(data)} bytes, more than the {limit} allowed", key=key)


def _send(backend: Backend, key: str, data: bytes) -> StorageError | None:
    """Create the object once; return the reason not to be sure of it."""
    try:
        backend.create(key, data)
    except StorageError as error:
        return error
    return None


def _is_committed(backend: Backend, key: str, data: bytes, limit: int) -> bool:
    """Read back: whether ours is there, or nothing. Another's is a conflict, an error a doubt."""
    found: bytes | None
    try:
        found = backend.read(key, limit=limit)
    except ObjectNotFound:
        return False
    except CorruptObject:
        # Larger than any object of this kind may be, so certainly not what we sent.
        found = None
    except StorageError as error:
        raise _doubt(key, f"{key} was sent and cannot be read back: {error}", error) from error
    if found != data:
        raise VersionConflict(
            f"another writer committed {key} first",
            key=key,
            hint="reopen the stream and publish again on top of what is there now",
        )
    return True


def _may_pass(failure: StorageError) -> bool:
    """Whether sending again may help. A key found taken and then free belongs to an object on its way."""
    return failure.transient or isinstance(failure, ObjectExists)


def _doubt(key: str, message: str, cause: StorageError | None) -> CommitInDoubt:
    hint = "publish again: the next publish settles this one first"
    if cause is not None and cause.hint is not None:
        hint = f"{cause.hint}; {hint}"
    return CommitInDoubt(message, key=key, hint=hint)
