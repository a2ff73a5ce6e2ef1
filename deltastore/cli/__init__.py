"""The `deltastore` command: one file a verb."""

from __future__ import annotations

import sys

from .app import LazyGroup, run

__all__ = ["main"]

_VERBS = {
    "init": "Make a stream from a base checkpoint, or from a version of another stream.",
    "publish": "Publish a checkpoint directory as the next version.",
    "log": "List the versions.",
    "show": "Show one version.",
    "plan": "Show the cheapest route to a version.",
    "restore": "Build a version as a checkpoint directory.",
    "check": "Check a store for damage.",
    "diff": "Show what changed between two versions.",
    "stats": "Show what a store holds.",
    "tag": "Give a version a name that keeps it.",
    "tags": "List the tags.",
    "forget": "Let old versions go.",
    "gc": "Remove what nothing needs any more.",
    "anchor": "Store a version whole, so that new receivers start there.",
    "compact": "Add skip deltas, anchors and log segments for those far behind.",
    "fleet": "Show what each receiver last said of itself.",
    "probe": "Try whether a place keeps what a store needs.",
    "keygen": "Make a key that signs a stream.",
}


def main() -> None:
    """Run the command line and exit with its code."""
    group = LazyGroup(
        "deltastore",
        package="deltastore.cli",
        verbs=_VERBS,
        help="Byte-exact weight deltas through shared storage. "
        "STORE is a path or URL; VERSION is a number, latest or tag:NAME.",
    )
    sys.exit(run(group))
