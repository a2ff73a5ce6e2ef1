"""One tree of errors: each says what is wrong, about which object, and what to do.

Every error carries ``kind`` (a stable word for scripts), ``key`` (the object, file or tensor it is about)
and ``hint`` (a sentence that says what to do). ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "BaseMismatch",
    "CheckpointError",
    "CommitInDoubt",
    "CorruptObject",
    "DamagedSlot",
    "DeltastoreError",
    "DiskFull",
    "DrainTimeout",
    "EngineError",
    "ObjectExists",
    "ObjectNotFound",
    "PublishError",
    "SelfTestFailed",
    "SignatureMismatch",
    "SlotError",
    "StorageError",
    "StoreNotFound",
    "StreamExists",
    "StreamMismatch",
    "UnsupportedFormat",
    "UsageError",
    "VersionConflict",
    "VersionForgotten",
    "VersionNotFound",
    "WriterFenced",
]


class DeltastoreError(Exception):
    """The root of the tree: a sentence, the object it is about, and what to do."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    #: The hint where none is given: what helps against most errors of a kind.
    advice: ClassVar[str | None] = None

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.hint = self.advice if hint is None else hint

    def __str__(self) -> str:
        return self.message


class UsageError(DeltastoreError):
    """The call or command line asks for something that makes no sense."""

    kind = "usage"
    exit_code = 2


class StorageError(DeltastoreError):
    """The backend failed: refused, timed out, no permission. Nothing is known about the object.

    ``transient`` says whether the same call may well succeed a moment later (a busy server, a lost
    connection) or needs someone to change something first (a permission, an option, a full disk).
    """

    kind = "storage"
    transient: bool = True

    def __init__(
        self,
        message: str,
        *,
        transient: bool | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        if transient is not None:
            self.transient = transient


class AccessDenied(StorageError):
    """The store refuses who we are: credentials that are wrong, have expired, or may not do this.

    Not transient: asking again at once does not help. What runs for long keeps what it has and asks again now and
    then, so that it goes on by itself once the credentials are renewed.
    """

    kind = "access-denied"
    transient = False


class ObjectNotFound(StorageError):
    """There is no object under this key."""

    kind = "object-not-found"
    exit_code = 10
    transient = False


class ObjectExists(StorageError):
    """An exclusive creation found an object under the key (perhaps our own: read it back)."""

    kind = "object-exists"
    exit_code = 11
    transient = False


class DiskFull(StorageError):
    """A local disk has no room for what has to be written."""

    kind = "disk-full"
    transient = False


class StoreNotFound(DeltastoreError):
    """The URL holds no store."""

    kind = "store-not-found"
    exit_code = 10


class VersionNotFound(DeltastoreError):
    """The stream has no such version."""

    kind = "version-not-found"
    exit_code = 10


class VersionForgotten(DeltastoreError):
    """The stream had this version, and a retention record has let it go: its manifest is all that is left."""

    kind = "version-forgotten"
    exit_code = 10


class StreamExists(DeltastoreError):
    """The URL already holds a stream."""

    kind = "stream-exists"
    exit_code = 11


class VersionConflict(DeltastoreError):
    """Another writer committed this version first. Nothing of ours was changed."""

    kind = "version-conflict"
    exit_code = 11


class WriterFenced(DeltastoreError):
    """This writer lost to another one and publishes nothing until it is reopened."""

    kind = "writer-fenced"
    exit_code = 11


class CommitInDoubt(DeltastoreError):
    """A manifest was sent and its fate could not be read back; the next publish settles it first."""

    kind = "commit-in-doubt"


class BaseMismatch(DeltastoreError):
    """The local weights are not those the stream starts from. ``tensors`` names the first that differ."""

    kind = "base-mismatch"
    exit_code = 12

    def __init__(
        self,
        message: str,
        *,
        tensors: tuple[str, ...] = (),
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.tensors = tensors


class StreamMismatch(DeltastoreError):
    """The store holds another stream than the one the local state belongs to."""

    kind = "stream-mismatch"
    exit_code = 12


class SignatureMismatch(DeltastoreError):
    """A record without a valid signature by a key that is trusted: this is not the stream that the keys belong to."""

    kind = "signature-mismatch"
    exit_code = 12


class CorruptObject(DeltastoreError):
    """An object or file is damaged: wrong size, wrong hash, or not in the format."""

    kind = "corrupt-object"
    exit_code = 3
    advice = "`deltastore check STORE --read-data` names all that is damaged; restore it from a backup."


class DamagedSlot(CorruptObject):
    """The receiver's live slot does not hold the bytes that were recorded whole: `receiver repair` mends it."""

    advice = "Mend it with `receiver repair`."


class UnsupportedFormat(DeltastoreError):
    """An object of a format version, or with a required feature, that this release does not know."""

    kind = "unsupported-format"


class CheckpointError(DeltastoreError):
    """A checkpoint directory cannot be used: missing, torn, unreadable, or not in the format."""

    kind = "checkpoint"
    advice = "Give a whole checkpoint: its index and every file that this names. Copy or save it again if it is torn."


class PublishError(DeltastoreError):
    """The tensors given are not those of the stream. ``tensors`` names the offenders."""

    kind = "publish"

    def __init__(
        self,
        message: str,
        *,
        tensors: tuple[str, ...] = (),
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.tensors = tensors


class SlotError(DeltastoreError):
    """The receiver's local slots cannot be used: held by another daemon, damaged, or not ours."""

    kind = "slot"


class EngineError(DeltastoreError):
    """The inference engine refused, failed, or did not confirm what it was told to load."""

    kind = "engine"


class DrainTimeout(EngineError):
    """Requests that ran when the pause began had not ended by its deadline; generation was not held."""

    kind = "drain-timeout"


class SelfTestFailed(EngineError):
    """The engine gave other or broken results after it reloaded the very version that it was at."""

    kind = "self-test"
