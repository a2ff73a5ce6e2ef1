"""The `receiver` command: one file a verb."""

from __future__ import annotations

import sys

from deltastore.cli.app import LazyGroup
from deltastore.cli.app import run as run_command

__all__ = ["main"]

_VERBS = {
    "run": "Follow a stream: keep a checkpoint and an engine at the wanted version.",
    "once": "Bring a checkpoint and an engine to the wanted version, then exit.",
    "status": "Ask a running receiver how it is.",
    "pin": "Have a running receiver follow another version.",
    "pause-following": "Have a running receiver stay at what is live.",
    "resume-following": "Have a running receiver follow again.",
    "cache": "Serve a store's parts to a site, each fetched once.",
    "gateway": "Stand before an engine: say which version made which tokens.",
    "verify": "Hash a checkpoint's live slot and compare.",
    "repair": "Mend the damaged chunks of a checkpoint's live slot.",
}


def main() -> None:
    """Run the command line and exit with its code."""
    group = LazyGroup(
        "receiver",
        package="receiver.cli",
        verbs=_VERBS,
        help="Keeps an inference host's checkpoint and engine at a stream's newest weights.",
    )
    sys.exit(run_command(group))
