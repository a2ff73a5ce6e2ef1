"""Every interleaving of a group's members, walked breadth first, over the very functions that the receiver runs.

A step is one look at the store with what a member does about it. Whatever is created may land at once, never, or at
any later moment; daemons and engines may die after any step, loads fail, and anybody may find at any look that it
waited too long. A rule left out must be found out: ``without`` names one, and the walk ends in a state that breaks a
promise. (docs/format.md, section 15.4)
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

import pytest

from receiver.rounds import Part, Round, after_load, before_pause, following, is_over, proposal

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
OLD, NEW = "old", "new"


class Member(NamedTuple):
    """A receiver with its engine. ``at``: idle, asked (may it pause?), loading, told (may it resume?).

    ``weights``: what is in the engine; ``None`` after it died or a load failed. ``live``: its checkpoint.
    """

    at: str
    wants: str | None
    round: int
    loaded: bool
    weights: str | None
    runs: bool
    live: str
    left: int = 0  # a round that it wrongly believes to be over


class Store:
    """All states that the rounds of a store can be in, by number: a world that carries a number is quickly compared."""

    def __init__(self):
        self.states, self.numbers, self.landed = [], {}, {}

    def number(self, rounds):
        if rounds not in self.numbers:
            self.numbers[rounds] = len(self.states)
            self.states.append(rounds)
        return self.numbers[rounds]


STORE = Store()


class World(NamedTuple):
    """The store, the members, and one create that is still on its way."""

    store: int
    members: tuple
    flying: tuple | None

    @property
    def rounds(self):
        return STORE.states[self.store]


def start(size, *, served=OLD):
    """Return a group that serves OLD, or one that has served nothing yet."""
    member = Member("idle", None, 0, False, served, served is not None, OLD)
    return World(STORE.number((Round(1, served),)), (member,) * size, None)


class Rules:
    """What the world allows, and which rules are left out."""

    def __init__(
        self,
        size,
        *,
        rounds=2,
        without=(),
        early=False,
        failures=True,
        never_loads=frozenset(),
        fly=("go", "outcome"),
        only="",
    ):
        self.ids = frozenset(map(str, range(size)))
        self.rounds, self.without, self.early = rounds, frozenset(without), early
        self.failures, self.never_loads, self.fly, self.only = failures, never_loads, fly, only

    # The store

    def land(self, world, thing):
        """Create something, exclusively."""
        key = (world.store, thing, self.without & {"exclusive go", "exclusive outcome"})
        if key not in STORE.landed:
            STORE.landed[key] = STORE.number(tuple(self.landed(list(world.rounds), *thing)))
        return world._replace(store=STORE.landed[key])

    def landed(self, rounds, number, kind, value):
        if kind == "wanted" and number == len(rounds) + 1:
            rounds.append(following(rounds[-1]) if is_over(rounds[-1]) else Round(number, *value[1:]))
        if number > len(rounds):
            return rounds
        known = rounds[number - 1]
        if kind == "wanted" and known.wanted is None:
            known = replace(known, wanted=value[0])
        elif kind in ("ready", "loaded", "not_loaded"):
            if kind == "ready" or value not in known.loaded | known.not_loaded:
                known = replace(known, **{kind: getattr(known, kind) | {value}})
        elif kind in ("go", "outcome") and (getattr(known, kind) is None or f"exclusive {kind}" in self.without):
            known = replace(known, **{kind: value})
        rounds[number - 1] = known
        return rounds

    def send(self, world, thing):
        yield self.land(world, thing)
        if self.failures and world.flying is None and thing[1] in self.fly:
            yield world._replace(flying=thing)

    def present(self, world, member):
        known = world.rounds[-1]
        if is_over(known) or (member.left == known.number and "obeying" in self.without):
            return following(known if is_over(known) else replace(known, go=False))
        return known

    # The members

    def steps(self, world):
        for index, member in enumerate(world.members):
            yield from self.member_steps(world, index, member)
        if world.flying is not None:
            yield self.land(world._replace(flying=None), world.flying)

    def member_steps(self, world, index, member):
        def becomes(**changes):
            members = list(world.members)
            members[index] = member._replace(**changes)
            return world._replace(members=tuple(members))

        part = Part(str(index), index == 0, self.ids)
        yield from getattr(self, member.at)(world, member, part, becomes)
        if self.failures:
            if member.at != "idle":
                yield becomes(at="idle", wants=None, round=0, loaded=False, left=0)
            if member.weights is not None:
                yield becomes(weights=None, runs=False)

    def idle(self, world, member, part, becomes):
        """A pass of the daemon: which version, prepare it, ask to activate it."""
        known = self.present(world, member)
        if known.wanted is None:
            held = known.failed is not None
            for target in (NEW, known.served) if part.leads else (None,):
                if held or target != known.served:
                    choice = proposal(known, target, leads=part.leads)
                    if "going back" in self.without and held and part.leads:
                        choice = NEW
                    if choice is not None and known.number <= self.rounds:
                        yield from self.send(world, (known.number, "wanted", (choice, known.served, known.failed)))
        choice = known.wanted or known.served
        if choice is not None and choice != member.live:
            yield becomes(live=choice)
        elif member.weights != member.live or not member.runs or known.wanted == member.live:
            yield becomes(at="asked", wants=member.live)

    def asked(self, world, member, part, becomes):
        known = self.present(world, member)
        for late in (False, True) if self.failures else (False,):
            step = before_pause(known, self.part(part, "all ready"), member.wants, late=late)
            if step == "leave":
                yield becomes(at="idle", wants=None)
            elif step == "pause":
                yield becomes(at="loading", runs=False, round=known.number)
            elif step == "begin" and known.number <= self.rounds:
                yield from self.send(world, (known.number, "wanted", (member.wants, known.served, known.failed)))
            elif step == "report":
                yield from self.send(world, (known.number, "ready", part.me))
            elif step == "commit":
                yield from self.send(world, (known.number, "go", True))
            elif step == "abort":
                if "obeying" in self.without:
                    world = becomes(at="idle", wants=None, left=known.number)
                yield from self.send(world, (known.number, "go", False))

    def part(self, part, rule):
        if rule in self.without and part.leads:
            return replace(part, members=frozenset(sorted(self.ids)[:-1]))
        return part

    def loading(self, world, member, part, becomes):
        if (part.me, member.wants) not in self.never_loads:
            yield becomes(at="told", loaded=True, weights=member.wants)
        if self.failures or (part.me, member.wants) in self.never_loads:
            yield becomes(at="told", loaded=False, weights=None)

    def told(self, world, member, part, becomes):
        known = world.rounds[member.round - 1]
        # An engine that died meanwhile is another incarnation: its daemon sees that before it resumes.
        loaded = member.loaded and member.weights == member.wants
        if "own load" in self.without:
            loaded = known.outcome is True or loaded
        for late in (False, True) if self.failures else (False,):
            step = after_load(known, self.part(part, "all loaded"), loaded=loaded, late=late)
            everybody = self.ids <= known.loaded
            if "outcome" in self.without and step not in ("report", "go-on", "hold") and everybody and not late:
                step = "go-on"
            if step == "go-on":
                yield becomes(at="idle", wants=None, round=0, loaded=False, runs=True)
            elif step == "hold":
                yield from self.held(known, becomes)
            elif step == "report":
                yield from self.send(world, (known.number, "loaded" if loaded else "not_loaded", part.me))
            elif step == "next" and {"outcome", "obeying the outcome"} & self.without:
                # By its own clock it is over: the old weights, and, where all is up to deadlines, on with them.
                alone = "outcome" in self.without
                yield becomes(at="idle", wants=None, round=0, loaded=False, weights=OLD, live=OLD, runs=alone)
            elif step in ("resume", "next"):
                yield from self.send(world, (known.number, "outcome", step == "resume"))

    def held(self, known, becomes):
        yield becomes(at="idle", wants=None, round=0, loaded=False)
        if self.early and known.served is not None:
            yield becomes(at="idle", wants=None, round=0, loaded=False, weights=known.served)


def broken(world):
    """Return the promise that a state breaks."""
    running = {member.weights for member in world.members if member.runs}
    if None in running:
        return "generation on weights that nobody confirmed"
    if len(running) > 1:
        return "two versions generate at once"
    for member in world.members:
        going_on = member.at == "loading" and world.rounds[member.round - 1].outcome is None
        if going_on and any(other.live != member.wants for other in world.members):
            return "a member loads while another one's checkpoint is not ready"
    return None


def resumed_wrongly(before, after):
    """Return the promise that a step breaks: somebody resumed."""
    for old, new in zip(before.members, after.members, strict=True):
        resumes = new.runs and not old.runs
        if resumes and any(other.weights not in (new.weights, None) for other in after.members):
            return "a member resumed while another one has other weights"
    return None


def is_quiet(world):
    """Whether all serve one version, and nobody has anything to do."""
    known = world.rounds[-1]
    return (
        all(member.at == "idle" and member.runs for member in world.members)
        and len({member.weights for member in world.members}) == 1
        and (is_over(known) or known.wanted is None)
    )


def canonical(world):
    """Return the same world with the followers (all but the leader, 0) in a fixed order: they are all alike."""
    if len(world.members) < 3:
        return world
    return min((permuted(world, order) for order in permutations(range(1, len(world.members)))), key=hash)


def permuted(world, order):
    """Return the world with another order of its followers."""
    order = (0, *order)
    places = {str(old): str(new) for new, old in enumerate(order)}
    key = (world.store, order)
    if key not in STORE.landed:
        names = ("ready", "loaded", "not_loaded")
        renamed = (
            replace(known, **{name: frozenset(places[one] for one in getattr(known, name)) for name in names})
            for known in world.rounds
        )
        STORE.landed[key] = STORE.number(tuple(renamed))
    flying = world.flying
    if flying is not None and isinstance(flying[2], str) and flying[1] != "wanted":
        flying = (*flying[:2], places[flying[2]])
    return World(STORE.landed[key], tuple(world.members[old] for old in order), flying)


def walk(rules, begin):
    """Visit every state; returns all of them, and the first broken promise."""
    seen, queue = {begin}, deque([begin])
    while queue:
        world = queue.popleft()
        for stepped in rules.steps(world):
            after = canonical(stepped)
            promise = resumed_wrongly(world, stepped)
            if after not in seen:
                promise = promise or broken(after)
                seen.add(after)
                queue.append(after)
            if promise is not None and rules.only in promise:
                return seen, promise
    return seen, None


def ends(rules, world, known):
    """Whether a state without further failures comes to rest, all serving one version. ``known``: those that do."""
    path = []
    for _ in range(400):
        if world in known or is_quiet(world):
            known.update(path)
            return True
        path.append(world)
        world = settle(rules, world)
        if world is None:
            return False
    return False


def settle(rules, world):
    """Return the state after a round of steps, each member one, without failures; late only if nothing else helps."""
    if world.flying is not None:
        return rules.land(world._replace(flying=None), world.flying)
    before = world
    for index in range(len(world.members)):
        world = next(iter(rules.member_steps(world, index, world.members[index])), world)
    return world if world != before else None


ALL = ("wanted", "ready", "loaded", "not_loaded", "go", "outcome")

#: What there is, what is allowed to happen, and how many states that makes.
CASTS = {
    "two, and any create comes late": (start(2), {"size": 2, "rounds": 1, "fly": ALL}, 48_796),
    "two, and a round after the first": (start(2), {"size": 2, "rounds": 2, "fly": ()}, 88_371),
    "two that have served nothing yet": (start(2, served=None), {"size": 2, "rounds": 1}, 11_514),
    "three": (start(3), {"size": 3, "rounds": 1, "fly": ()}, 83_856),
}
LARGE = {
    "three, and decisions come late": (start(3), {"size": 3, "rounds": 1}, 340_780),
}


def judge(begin, given, count):
    states, promise = walk(Rules(**given), begin)
    assert promise is None
    calm = Rules(given["size"], rounds=99, failures=False)
    known = set()
    for world in states:
        assert ends(calm, world, known), world
    assert count in (None, len(states))
    return len(states)


@pytest.mark.parametrize("cast", CASTS)
def test_no_interleaving_breaks_a_promise_and_all_end_serving_one_version(cast):
    assert judge(*CASTS[cast]) > 3000


@pytest.mark.skipif(not THOROUGH, reason="many minutes: DELTASTORE_THOROUGH=1")
@pytest.mark.parametrize("cast", LARGE)
def test_no_interleaving_of_many_breaks_a_promise(cast):
    assert judge(*LARGE[cast]) > 100_000


RULES = [
    ("all ready", "not ready"),  # a go before all are ready
    ("exclusive go", "not ready"),  # a go that replaces another
    ("obeying", "not ready"),  # who waited too long calls it off, and does not look whether it is
    ("all loaded", "other weights"),  # an outcome before all have loaded
    ("exclusive outcome", "other weights"),  # an outcome that replaces another
    ("obeying the outcome", "not ready"),  # who waited too long loads back, and does not look
    ("outcome", "not ready"),  # no outcome: who sees that all loaded goes on, who waited too long goes back
    ("own load", "other weights"),  # resuming on the word of an engine that has died since
    ("no load without a go", "other weights"),  # held, and loading the old weights before the next round says so
]

GENERATION = "two versions generate at once"


def test_resuming_when_all_have_loaded_with_deadlines_and_without_an_outcome_ends_with_two_versions_at_once():
    """Docs and others' code suggest it: who sees that all have loaded goes on, who waited too long goes back."""
    rules = Rules(2, rounds=1, without={"outcome"}, fly=(), only=GENERATION)
    states, found = walk(rules, start(2))
    assert found == GENERATION
    assert len(states) < 20_000


@pytest.mark.parametrize(("rule", "promise"), RULES)
def test_every_rule_is_needed(rule, promise):
    early = {"exclusive outcome", "no load without a go"} & {rule}
    _, found = walk(Rules(2, rounds=2, without={rule}, early=early, fly=("go", "outcome")), start(2))
    assert found is not None
    assert promise in found


@pytest.mark.parametrize("without", [(), ("going back",)])
def test_a_version_that_one_member_cannot_load_leads_back_only_by_the_rule_that_it_does(without):
    """While all are held, and the old version has not failed, nothing else is tried."""
    calm = Rules(2, rounds=99, failures=False, never_loads={("1", NEW)}, without=without)
    world = settle_with(calm, start(2), target=NEW)
    assert ends(calm, world, set()) is not bool(without)


def settle_with(rules, world, *, target):
    """Return the world in which the leader has begun a round."""
    return rules.land(world, (1, "wanted", (target, OLD, None)))
