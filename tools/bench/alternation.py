"""A chain of versions: a writer that publishes two snapshots in turn, a whole delta every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore import Writer

from .pairs import as_tensors, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.publication import Published

    from .pairs import Pair

__all__ = ["Alternation", "publish_chain"]


class Alternation:
    """A writer that publishes the new snapshot and the old one in turn: a whole delta every time."""

    def __init__(self, writer: Writer, pair: Pair) -> None:
        self.writer = writer
        self._states = as_tensors(pair.schema, pair.new), as_tensors(pair.schema, pair.old)
        self._published: list[Published] = []

    def publish(self) -> Published:
        """Publish the snapshot that the last one was not, and wait for its commit."""
        state = self._states[len(self._published) % 2]
        self._published.append(self.writer.publish(state).result())
        return self._published[-1]

    @property
    def last(self) -> Published:
        """What was published last."""
        return self._published[-1]


def publish_chain(home: Path, pair: Pair, versions: int) -> Path:
    """Publish ``versions`` versions, the new snapshot and the old one in turn; returns the store's directory.

    The base stays in ``home / "checkpoint"``, where a receiver adopts it.
    """
    base = write_checkpoint(home / "checkpoint", pair.schema, pair.old)
    with Writer(home / "store", base=base, upload_base=False, spool=home) as writer:
        chain = Alternation(writer, pair)
        for _ in range(versions):
            chain.publish()
    return home / "store"
