"""Ed25519 keys and signatures of records (docs/format.md, section 13).

Needs the package ``cryptography`` (the extra ``signing``), which is imported where a key is used and nowhere else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SignatureMismatch, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from .record import RecordKind

__all__ = ["SIGNED", "Signer", "Verifier", "generate_key", "load_public_key", "load_public_keys"]

#: The required feature of every manifest of a signed stream.
SIGNED = "signed"

_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}\Z")
_SIGNATURE = re.compile(rb"ed25519:([0-9a-f]{64}):([0-9a-f]{128})\n\Z")
_MAX_KEY_FILE = 64 << 10


def _message(kind: RecordKind, line: bytes) -> bytes:
    """Return what is signed: the kind goes before the line, so that no record can pass for one of another kind."""
    return b"deltastore/%b/1\0%b" % (kind.encode(), line)


class Signer:
    """A private key that signs records. ``public_key`` is its other half, 64 hexadecimal digits."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key = private_key.public_key().public_bytes_raw().hex()

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        """Read a private key from a file: PEM (PKCS #8) without a password, or its 32 bytes as 64 hexadecimal digits.

        Raises ``UsageError`` when it holds none.
        """
        ed25519, serialization = _cryptography()
        data = _read_key_file(Path(path))
        text = data.decode("ascii", "replace").strip()
        try:
            if _HEX_KEY.match(text):
                return cls(ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))
            key = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError) as error:  # a key with a password is a TypeError
            raise _no_key(path, "private") from error
        except _unsupported() as error:
            raise _no_key(path, "private") from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise _no_key(path, "private")
        return cls(key)

    def sign(self, kind: RecordKind, line: bytes) -> bytes:
        """Return a record's third line, without its newline."""
        signature = self._private_key.sign(_message(kind, line))
        return f"ed25519:{self.public_key}:{signature.hex()}".encode()


class Verifier:
    """The public keys whose signatures are taken."""

    def __init__(self, keys: Iterable[str]) -> None:
        ed25519, _ = _cryptography()
        self._keys = {key: ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in keys}

    def check(self, kind: RecordKind, line: bytes, signature: bytes, *, key: str) -> None:
        """Raise ``SignatureMismatch`` naming ``key`` unless ``signature``, a third line, is one of these keys'."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - see the module's docstring

        found = _SIGNATURE.match(signature)
        public_key = self._keys.get(found[1].decode()) if found else None
        if found is None or public_key is None:
            whose = f"is signed by {found[1].decode()}, which is not trusted" if found else "has no proper signature"
            raise SignatureMismatch(
                f"{key} {whose}.", key=key, hint="Trust that key if it is yours; else restore the store from a backup."
            )
        try:
            public_key.verify(bytes.fromhex(found[2].decode()), _message(kind, line))
        except InvalidSignature as error:
            raise SignatureMismatch(
                f"{key} has a signature that is not its own.",
                key=key,
                hint="It was changed by somebody without the key; restore it from a backup.",
            ) from error


def generate_key(path: str | Path) -> str:
    """Make a new private key in a new file that only its owner may read (PEM); returns the public key.

    Raises ``UsageError`` when the file is there.
    """
    ed25519, serialization = _cryptography()
    private_key = ed25519.Ed25519PrivateKey.generate()
    data = private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already.", key=str(path), hint="Give the name of a new file.") from error
    except OSError as error:
        raise UsageError(
            f"The key {path} cannot be written: {error.strerror}.", key=str(path), hint="Give a place that is writable."
        ) from error
    return Signer(private_key).public_key


def load_public_key(key: str | Path) -> str:
    """Return a public key as 64 lower-case hexadecimal digits.

    ``key`` is just that, or a file that holds it, or one with a public or private key in PEM. Raises ``UsageError``.
    """
    if _HEX_KEY.match(str(key)):
        return str(key).lower()
    ed25519, serialization = _cryptography()
    data = _read_key_file(Path(key))
    text = data.decode("ascii", "replace").strip()
    if _HEX_KEY.match(text):
        return text.lower()
    if "PRIVATE KEY" in text:
        return Signer.load(key).public_key
    try:
        public_key = serialization.load_pem_public_key(data)
    except (ValueError, _unsupported()) as error:
        raise _no_key(key, "public") from error
    if not isinstance(public_key, ed25519.Ed25519PublicKey):
        raise _no_key(key, "public")
    return str(public_key.public_bytes_raw().hex())


def load_public_keys(keys: Iterable[str | Path]) -> frozenset[str]:
    """Return several public keys, at least one: to trust an empty list would look like safety and be none."""
    loaded = frozenset(load_public_key(key) for key in keys)
    if not loaded:
        raise UsageError("There are no trusted keys.", hint="Give at least one, or None to trust whatever is there.")
    return loaded


def _read_key_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_KEY_FILE)
    except OSError as error:
        raise UsageError(
            f"The key {path} cannot be read: {error.strerror}.",
            key=str(path),
            hint="Give a file that `deltastore keygen` made, or a public key as 64 hexadecimal digits.",
        ) from error


def _no_key(path: str | Path, what: str) -> UsageError:
    return UsageError(
        f"{path} holds no {what} Ed25519 key (in PEM without a password, or as 64 hexadecimal digits).",
        key=str(path),
        hint="Make one with `deltastore keygen`.",
    )


def _cryptography() -> tuple[ModuleType, ModuleType]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - see the module's docstring
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            "Signatures need the package cryptography.", hint="Install it: pip install 'deltastore[signing]'."
        ) from error
    return ed25519, serialization


def _unsupported() -> type[Exception]:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - see the module's docstring

    return UnsupportedAlgorithm
