"""The two hash functions of the format, behind one small type.

xxh3-128 finds every accident at memory speed; blake3 also resists an adversary and is what signing needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import ndarray

    from .storage.base import Buffer

__all__ = ["DEFAULT_HASH", "HASHES", "Hasher", "hasher"]

DEFAULT_HASH = "xxh3-128"


@dataclass(frozen=True, slots=True)
class Hasher:
    """One hash function: its name in the format, its digest's length in bytes, and the function.

    ``digest`` takes any contiguous buffer.
    """

    name: str
    size: int
    digest: Callable[[Any], bytes]

    def text(self, digest: bytes) -> str:
        """Return a digest as records spell it: ``name:lower-case hex``."""
        return f"{self.name}:{digest.hex()}"

    def of(self, data: Buffer | ndarray) -> str:
        """Hash ``data`` and return the digest as records spell it."""
        return self.text(self.digest(data))


def _xxh3() -> Hasher:
    from xxhash import xxh3_128_digest  # noqa: PLC0415 - only the hash in use is imported

    return Hasher("xxh3-128", 16, xxh3_128_digest)


def _blake3() -> Hasher:
    from blake3 import blake3  # noqa: PLC0415 - only the hash in use is imported

    def digest(data: Any) -> bytes:
        return bytes(blake3(data).digest())

    return Hasher("blake3", 32, digest)


HASHES: dict[str, Callable[[], Hasher]] = {"xxh3-128": _xxh3, "blake3": _blake3}


def hasher(name: str) -> Hasher:
    """Return the hash function called ``name``; raises ``UnsupportedFormat`` for an unknown one."""
    try:
        make = HASHES[name]
    except KeyError:
        raise UnsupportedFormat(f"The hash {name!r} is not known.", hint=f"Use one of {', '.join(HASHES)}.") from None
    return make()
