"""What an operator decides about one receiver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.errors import UsageError
from deltastore.heartbeat import is_receiver_id, is_word

from .activation import Policy
from .coordination import Coordination
from .follower import check_target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an operator decides. Sizes are in bytes; ``max_bandwidth``, ``scrub_rate`` (0: never) in bytes a second.

    ``poll`` is in seconds, and so is ``heartbeat`` (``None``: no heartbeats are sent). ``self_test``: before
    anything is followed the engine reloads the live version, and must be as before.
    """

    store: str
    checkpoint: Path
    base: Path | None = None
    target: str = "latest"
    poll: float = 1.0
    engine: str = "none"
    engine_url: str | None = None
    gateway_url: str | None = None
    engine_options: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, object] = field(default_factory=dict)
    cache: str | Path | None = None
    cache_bytes: int | None = None
    trusted_keys: tuple[str, ...] | None = None
    workers: int | None = None
    max_bandwidth: int | None = None
    memory_budget: int | None = None
    nice: int | None = None
    io_priority: str | None = None
    durability: str = "version"
    unsafe_file_system: bool = False
    scrub_rate: int = 0
    coordination: Coordination = field(default_factory=Coordination)
    receiver_id: str | None = None
    heartbeat: float | None = None
    policy: Policy = field(default_factory=Policy)
    probe_expect: Path | None = None
    self_test: bool = False

    def check(self) -> None:
        """Raise ``UsageError`` for what cannot be meant."""
        check_target(self.target)
        if self.receiver_id is not None and not is_receiver_id(self.receiver_id):
            raise UsageError(
                f"{self.receiver_id!r} is no id of a receiver.",
                hint="Use letters, digits, dots, dashes: 128 at most.",
            )
        group = self.coordination.group
        if group is not None and not is_word(group):
            raise UsageError(f"{group!r} is no group's name.", hint="Use printable ASCII, at most 255 characters.")
        self.policy.check()
        if self.self_test and self.coordination.size is not None:
            raise UsageError("A member of a group reloads nothing by itself.", hint="Leave --self-test out.")
