"""What can be wrong with an encoded chunk, as kernels say it: negative numbers, each with a sentence. Pure."""

from __future__ import annotations

__all__ = ["PROBLEMS"]

EARLY, METHOD, FRAME, LEFT_OVER, GAPS, OUTSIDE = -1, -2, -3, -4, -5, -6
CHANGES, ENCODING, BACKWARDS, WIDTH, HEAD, CLASSES, CODES, RANKS = -7, -8, -9, -10, -11, -12, -13, -14

PROBLEMS = {
    EARLY: "it ends too early",
    METHOD: "a stream has a method or a stored length that does not fit",
    FRAME: "a zstd frame is damaged, or does not hold what the chunk needs",
    LEFT_OVER: "bytes are left over",
    GAPS: "its gaps have a length that does not fit the number of changes",
    OUTSIDE: "its gaps lead outside the chunk, or do not fit the number of changes",
    CHANGES: "it claims more changes than it has elements, or none",
    ENCODING: "it has an encoding that does not exist",
    BACKWARDS: "it is a full chunk, which does not lead backwards",
    WIDTH: "it is contextual, but its elements do not have 16 bits",
    HEAD: "its head does not fit the chunk",
    CLASSES: "its table of classes does not fit the chunk",
    CODES: "its positions do not fit their length, or lead outside the chunk",
    RANKS: "its changes do not fit the classes of the chunk's elements",
}
