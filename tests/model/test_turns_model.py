"""Every interleaving of a fleet's turns: never more holders at once than there may be.

The ledger of docs/format.md, section 15.1, with the records of 15.2, walked breadth first. A step is one request;
what is created lands at once, never, or later; who looked may sleep for any time before it creates, until its number
has been cleaned away; who holds a turn may vanish, and come back. ``without`` leaves a rule out.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest

KEPT = 1


class World(NamedTuple):
    """Records (their holders; ``None``: cleaned away), receivers (where, and what they read), a create on its way."""

    records: tuple
    receivers: tuple
    flying: tuple | None


def land(world, number, holders, without):
    """Create a record; who did cleans up. Tells whether it was created, too."""
    records = list(world.records)
    if number <= len(records):
        if records[number - 1] is not None and "exclusive" not in without:
            return world, False
        records[number - 1] = holders
    else:
        records.append(holders)
    records = [None if at < number - KEPT else record for at, record in enumerate(records, 1)]
    return world._replace(records=tuple(records)), True


def steps(world, most, longest, without):
    if world.flying is not None:
        yield land(world._replace(flying=None), *world.flying, without)[0]
    for index, (at, memory) in enumerate(world.receivers):

        def becomes(at, memory=None, world=world, index=index):
            receivers = list(world.receivers)
            receivers[index] = (at, memory)
            return world._replace(receivers=tuple(receivers))

        newest = (len(world.records), world.records[-1] if world.records else frozenset())
        if at in ("serves", "takes", "gives"):
            yield becomes({"serves": "taking", "takes": "taking", "gives": "giving"}[at], newest)
        elif at == "paused":
            yield becomes("gives")  # it serves again
            yield becomes("serves")  # its daemon died; a new one finds what there is
        else:
            yield from decide(world, index, at, memory, becomes, most, longest, without)


def decide(world, index, at, memory, becomes, most, longest, without):
    number, holders = memory
    if at == "taking" and index in holders:
        yield becomes("paused")
        return
    if (at == "giving" and index not in holders) or (at == "taking" and len(holders) >= most):
        yield becomes("serves")
        if at == "taking" and "no expiry" in without:
            yield from send(world, becomes, "takes", number + 1, frozenset({index}), longest, without)
        return
    after = holders | {index} if at == "taking" else holders - {index}
    then = "takes" if at == "taking" else "gives"
    yield from send(world, becomes, then, number + 1, after, longest, without)


def send(world, becomes, then, number, holders, longest, without):
    if number > longest:
        return
    if world.flying is None:
        yield becomes(then)._replace(flying=(number, holders))
    landed, created = land(becomes(then), number, holders, without)
    if created and then == "takes" and "looking again" in without:
        index = next(
            at for at, (old, new) in enumerate(zip(world.receivers, landed.receivers, strict=True)) if old != new
        )
        receivers = list(landed.receivers)
        receivers[index] = ("paused", None)
        landed = landed._replace(receivers=tuple(receivers))
    yield landed


def walk(receivers, most, longest, without=()):
    start = World((), (("serves", None),) * receivers, None)
    seen, queue = {start}, deque([start])
    while queue:
        for after in steps(queue.popleft(), most, longest, without):
            if after not in seen:
                if sum(at == "paused" for at, _ in after.receivers) > most:
                    return len(seen), after
                seen.add(after)
                queue.append(after)
    return len(seen), None


@pytest.mark.parametrize(
    ("receivers", "most", "longest", "states"), [(2, 1, 6, 10_716), (3, 1, 4, 66_482), (3, 2, 3, 83_081)]
)
def test_never_more_are_paused_than_may_be(receivers, most, longest, states):
    found, broken = walk(receivers, most, longest)
    assert broken is None
    assert found == states


@pytest.mark.parametrize("rule", ["exclusive", "looking again", "no expiry"])
def test_every_rule_is_needed(rule):
    assert walk(2, 1, 6, {rule})[1] is not None
