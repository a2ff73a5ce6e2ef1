"""The delta codec: one chunk's change as bytes, and back.

``codec.chunk`` holds the encoder and the decoder; it is imported where they are used, because numba starts slowly.
"""

from .encoding import LEVELS, DamagedChunk, EncodedChunk, Encoding

__all__ = ["LEVELS", "DamagedChunk", "EncodedChunk", "Encoding"]
