"""What the proxy does to which requests: a script of rules, and chance by a seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from deltastore.errors import UsageError
from deltastore.storage.faults import FaultKind  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Rule", "Script", "read_rules"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of fault, and the requests that it happens to.

    ``method`` (any of several with ``|``) and ``path`` (a text that it contains) choose requests; ``share`` of those
    that fit are hit, ``times`` of them at the most. ``at`` is the byte of the body at which it happens, counted over
    its whole length and drawn by the seed where it is not given. ``seconds`` is how long a stall lasts,
    ``bytes_per_second`` how slow the slow link is.
    """

    kind: FaultKind
    method: str = ""
    path: str = ""
    share: float = 1.0
    times: int | None = None
    at: int | None = None
    seconds: float = 3600.0
    bytes_per_second: float = 1e6

    def fits(self, method: str, path: str) -> bool:
        """Whether a request is one of those that this rule is about."""
        return (not self.method or method in self.method.split("|")) and self.path in path


def read_rules(path: Path) -> list[Rule]:
    """Read a script: a JSON list of rules. Raises ``UsageError``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Rule])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is no script of rules: {error}", hint='write [{"kind": "reset", ...}]') from error


class Script:
    """Deals out rules: the first that fits a request and whose dice fall.

    What happens to the n-th request of one method and path depends on the seed and on nothing else, so that requests
    that come in another order change nothing.
    """

    def __init__(self, rules: Sequence[Rule], *, seed: int) -> None:
        self._rules = tuple(rules)
        self._seed = seed
        self._left: dict[int, int] = {
            number: rule.times for number, rule in enumerate(self._rules) if rule.times is not None
        }
        self._asked: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def draw(self, method: str, path: str) -> tuple[Rule | None, random.Random]:
        """Return what happens to a request, and the dice for how."""
        with self._lock:
            self._asked[method, path] += 1
            dice = random.Random(f"{self._seed} {method} {path} {self._asked[method, path]}")
            for number, rule in enumerate(self._rules):
                if rule.fits(method, path) and dice.random() < rule.share and self._left.get(number, 1) > 0:
                    if number in self._left:
                        self._left[number] -= 1
                    return rule, dice
        return None, dice
