"""What a trainer says of a version, checked before anything is published: its step and its metadata. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from .errors import PublishError
from .manifest import MAX_METADATA_BYTES, MAX_STEP

if TYPE_CHECKING:
    from .manifest import Scalar

__all__ = ["checked_metadata", "checked_step"]


def checked_metadata(metadata: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return metadata as plain scalars; raises ``PublishError`` for what cannot stand in a manifest."""
    if not isinstance(metadata, Mapping):
        raise PublishError(f"The metadata is a {type(metadata).__name__}.", hint="Give a mapping of names to scalars.")
    fields: dict[str, Scalar] = {}
    for name, value in metadata.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not isinstance(plain, (str, int, float, bool, type(None))):
            raise PublishError(
                f"The metadata field {name!r} is a {type(value).__name__}.",
                hint="Metadata fields are strings, numbers, true, false or none.",
            )
        if isinstance(plain, int) and not -(2**63) <= plain < 2**63:
            raise PublishError(f"The metadata field {name!r} is beyond 64 bits.")
        # JSON has no infinities: a loss that went wrong must not stop the run, so they are kept as words.
        fields[name] = str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain
    try:
        size = len(msgspec.json.encode(fields))
    except UnicodeEncodeError as error:
        raise PublishError(f"The metadata has text that is not Unicode: {error}.") from error
    if size > MAX_METADATA_BYTES:
        raise PublishError(f"The metadata is larger than {MAX_METADATA_BYTES} bytes.")
    return fields


def checked_step(step: object) -> int | None:
    """Return a step as a plain integer; raises ``PublishError`` for what is none within 62 bits."""
    plain = step.item() if isinstance(step, np.generic) else step
    if plain is None:
        return None
    if not isinstance(plain, int) or isinstance(plain, bool) or abs(plain) > MAX_STEP:
        raise PublishError(
            f"The step {step!r} is no whole number within 62 bits.", hint="Give the trainer's own count."
        )
    return plain
