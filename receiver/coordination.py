"""With whom a receiver coordinates its activations: a group, a fleet, both, or nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import UsageError
from deltastore.heartbeat import is_receiver_id

from .activation import Solo
from .follower import check_target
from .rounds import Group
from .turns import PROBE, Canary, Rolling

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.manifest import Manifest
    from deltastore.reader import Store

    from .activation import Decider, Weights

__all__ = ["Coordinated", "Coordination"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordination:
    """What an operator decides about it; time-outs are in seconds.

    ``size``: members of the group (``None``: the group is only a name to show). ``max_unavailable``: receivers of
    ``fleet`` that may be unavailable at once (``None``: any number). ``promote_by``: ``probe``, or ``tag:NAME``.
    """

    group: str | None = None
    size: int | None = None
    ready_timeout: float = 600.0
    load_timeout: float = 300.0
    fleet: str = "fleet"
    max_unavailable: int | None = None
    canary: str | None = None
    promote_by: str = PROBE

    def check(self) -> None:
        """Raise ``UsageError`` for what makes no sense."""
        if self.size is not None and (self.group is None or not is_receiver_id(self.group)):
            raise UsageError(
                "A group of several members needs a name of letters, digits, dots and dashes.",
                hint="Give --group NAME.",
            )
        if not is_receiver_id(self.fleet) or (self.canary is not None and not is_receiver_id(self.canary)):
            raise UsageError("That is no name of a fleet or receiver.", hint="Use letters, digits, dots, dashes.")
        if self.promote_by != PROBE:
            if not self.promote_by.startswith("tag:"):
                raise UsageError(f"{self.promote_by!r} promotes nothing.", hint="Give probe, or tag:NAME.")
            check_target(self.promote_by)


class Coordinated:
    """A ``Coordinator`` as an operator wants it; before ``begin`` it is one engine alone.

    ``engine``: whether this receiver has one. ``available``: whether that serves now. ``poll`` is in seconds; ``wait``
    waits so long and raises when the receiver is told to stop.
    """

    def __init__(
        self,
        wanted: Coordination,
        *,
        engine: bool,
        poll: float,
        available: Callable[[], bool],
        wait: Callable[[float], object],
    ) -> None:
        wanted.check()
        self._wanted = wanted
        self._engine = engine
        self._poll = poll
        self._available = available
        self._wait = wait
        self._group: Group | None = None
        self._rolling: Rolling | None = None
        self._decider: Decider = Solo()

    def begin(self, store: Store, receiver_id: str) -> None:
        """Join the group, if there is one. Raises ``UsageError`` when it is complete, ``StorageError``."""
        wanted = self._wanted
        if wanted.size is not None and wanted.group is not None:
            self._group = Group(
                store,
                wanted.group,
                size=wanted.size,
                receiver_id=receiver_id,
                engine=self._engine,
                poll=min(self._poll, 1.0),
                ready_timeout=wanted.ready_timeout,
                load_timeout=wanted.load_timeout,
                wait=self._wait,
            )
            self._group.join()
            self._decider = self._group
        if wanted.max_unavailable is not None or wanted.canary is not None:
            self._rolling = Rolling(
                store,
                self._decider,
                fleet=wanted.fleet,
                receiver_id=receiver_id,
                most=wanted.max_unavailable,
                canary=Canary(wanted.canary, wanted.promote_by) if wanted.canary is not None else None,
                available=self._available,
                leads=self._leads,
            )
            self._decider = self._rolling

    @property
    def goes_back(self) -> bool:
        """Whether this receiver loads the version before by itself when one cannot be loaded; a group does together."""
        return self._wanted.size is None

    def wanted(self, target: str, own: Callable[[], Manifest]) -> Manifest | None:
        """Return the version to prepare, ``own`` being what ``target`` says; ``None`` while there is none yet."""

        def promoted() -> Manifest | None:
            return self._rolling.wanted(target, own) if self._rolling is not None else own()

        return self._group.wanted(promoted, order=own) if self._group is not None else promoted()

    def due(self, weights: Weights) -> bool:
        """Tell whether weights have to be activated although the engine serves them: the group does, together."""
        return self._group is not None and self._group.due(weights)

    def concerns(self, weights: Weights) -> bool:
        """Tell whether an activation of these weights may begin now; if not, it is asked again at the next pass."""
        return (self._group is None or self._group.concerns(weights)) and (
            self._rolling is None or self._rolling.concerns(weights)
        )

    def refuses(self, commit_id: str) -> bool:
        """Tell whether the group could not activate this commit."""
        return self._group is not None and self._group.refuses(commit_id)

    def may_pause(self, weights: Weights) -> bool:
        """Ask whom there is to ask; see ``Decider``."""
        return self._decider.may_pause(weights)

    def may_resume(self, weights: Weights, *, loaded: bool) -> bool:
        """Ask whom there is to ask; see ``Decider``."""
        return self._decider.may_resume(weights, loaded=loaded)

    def served(self, weights: Weights) -> None:
        """Tell whom there is to tell; see ``Decider``."""
        self._decider.served(weights)

    def _leads(self) -> bool:
        return self._group is None or self._group.leads
