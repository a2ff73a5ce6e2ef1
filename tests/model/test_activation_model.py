"""Every interleaving of an activation with failures: of calls, of the engine, of the daemon, and a group that says no.

The daemon's part is ``receiver.activation.advance`` itself; the engine, the slots and the round are a plain model,
walked breadth first. Each failure takes one of a few: a call that fails with its effect or without (one that hung to
its timeout: engines work calls off in order, so by the next answer it has had its effect or never will), a call that
says that it is done when it is not, a load that leaves a mixture, an engine that dies (and is started again, on its own
weights, under no label, running), a daemon that is killed between any two steps (and started again with nothing but the
link and the slots), a coordinator that says no or is out of reach. A rule left out must be found out: ``without``
names one.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import pytest

from receiver.activation import PREPARED, UNKNOWN, Case, Policy, Progress, advance

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
POLICY = Policy(in_flight="wait", at_deadline="give-up", tries=2)
IDLE = Progress("idle", "rest")


class Engine(NamedTuple):
    """``weights``: start (its own), old, new, mixed, or bad (whole, and of no use).

    ``confirmed`` and ``probed`` are what really was found of these weights in this incarnation.
    """

    up: bool
    incarnation: int
    weights: str
    label: str | None
    paused: bool
    confirmed: bool
    probed: bool


class Daemon(NamedTuple):
    """``ready`` is the incarnation and label that it goes by, ``incarnation`` the one of this activation.

    ``losses`` counts activations of the new version in which the engine was lost after a load began.
    """

    progress: Progress
    incarnation: int | None
    ready: tuple | None
    refused: bool
    loading: bool = False
    losses: int = 0


class World(NamedTuple):
    engine: Engine
    daemon: Daemon | None
    link: str  # the live slot
    round: str | None  # what a group has decided on the new version: yes, no
    failures: int  # that may still come
    broken: str | None  # what only shows in a step


def fresh(incarnation):
    return Engine(True, incarnation, "start", None, False, False, False)


class Scene(NamedTuple):
    """``bad``: the versions that this engine can load and not run. ``deadly``: it dies of the new one.

    That one also takes its time to start: until the daemon has seen that it is gone.
    """

    probes_paused: bool
    bad: frozenset
    group: bool
    without: str | None
    deadly: bool = False

    def steps(self, world):
        """Give each next world, and whether it takes a failure to get there."""
        engine, daemon = world.engine, world.daemon
        if world.failures:
            less = world._replace(failures=world.failures - 1)
            if engine.up:
                yield less._replace(engine=engine._replace(up=False)), True
            if daemon is not None:
                yield less._replace(daemon=None), True
        slow = self.deadly and daemon is not None and daemon.progress.step != "rest"
        if not engine.up and not slow:
            yield world._replace(engine=fresh(engine.incarnation + 1)), False
        if daemon is None:
            yield world._replace(daemon=self.started(world)), False
        elif daemon.progress.step == "rest":
            yield self.passes(world), False
        else:
            for event, changes, fails in self.events(world):
                if not fails:
                    yield self.on(world._replace(**changes), event), False
                elif world.failures:
                    yield self.on(world._replace(failures=world.failures - 1, **changes), event), True

    # The daemon

    def started(self, world):
        engine = world.engine
        trusts = self.without == "own-confirmation" and engine.up and not engine.paused and engine.label == world.link
        return Daemon(IDLE, None, (engine.incarnation, engine.label) if trusts else None, False)

    def passes(self, world):
        """One pass: the slot that is wanted is made live, and the engine is looked at."""
        engine, daemon = world.engine, world.daemon
        link = "old" if daemon.refused else "new"
        world = world._replace(link=link)
        if self.without == "polling" and daemon.ready is not None and daemon.ready[1] == link:
            return world
        if not engine.up:
            return world._replace(daemon=daemon._replace(progress=IDLE, ready=None))
        known = not engine.paused and daemon.ready == (engine.incarnation, engine.label)
        if known and engine.label == link:
            return world
        progress = PREPARED if known else UNKNOWN
        if self.without == "reloading-the-paused" and engine.paused and engine.label == link:
            progress = Progress("resuming", "resume", probed=True)
            daemon = daemon._replace(incarnation=engine.incarnation)
        return world._replace(daemon=daemon._replace(progress=progress, ready=daemon.ready if known else None))

    def goal(self, world):
        """Return the version that the activation puts in: after a refusal the old one is the wanted one."""
        return world.link if world.daemon.progress.goal == "wanted" else "old"

    def case(self, world):
        return Case(fallback=not world.daemon.refused, probes_paused=self.probes_paused)

    def on(self, world, event):
        """Let an event happen to the daemon."""
        daemon = world.daemon
        before = daemon.progress
        after = self.crooked(before, event, self.case(world))
        ready = None if after.state == "paused" else daemon.ready
        refused, link = daemon.refused, world.link
        loading, losses = daemon.loading or after.step == "load", daemon.losses
        if after.step == "rest":
            if after.outcome in ("activated", "rolled-back"):
                ready = (daemon.incarnation, link if after.goal == "wanted" else "old")
            if after.outcome == "rolled-back":
                link, refused = "old", True
            if after.outcome == "lost":
                ready = None
                losses += loading and link == "new" and self.without != "counting-losses"
                if losses == POLICY.tries:
                    link, refused, losses = "old", True, 0
            after, loading = Progress(after.state, "rest", outcome=after.outcome), False
        return world._replace(
            link=link,
            daemon=daemon._replace(progress=after, ready=ready, refused=refused, loading=loading, losses=losses),
        )

    def crooked(self, before, event, case):
        """Advance, but for the rule that is left out."""
        after = moved(before, event, case)
        return CROOKED[self.without](before, event, after) if self.without in CROOKED else after

    # What a step may come to: (event, changes to the world, whether that is a failure)

    def events(self, world):
        step = world.daemon.progress.step
        if step in ("ask", "settle", "report"):
            yield from getattr(self, step)(world)
        elif not world.engine.up:
            yield "gone" if step == "look" else "failed", {}, False
        else:
            yield from getattr(self, "resume" if step == "release" else step)(world)

    def look(self, world):
        yield "gone", {}, True
        engine, daemon = world.engine, world.daemon
        if daemon.progress.state == "prepared":
            daemon = daemon._replace(incarnation=engine.incarnation)
        elif engine.incarnation != daemon.incarnation:
            yield "other", {"daemon": daemon._replace(incarnation=engine.incarnation)}, False
            return
        elif self.expects_the_goal(daemon.progress) and engine.label != self.goal(world):
            yield "other", {}, False
            return
        yield "held" if engine.paused else "running", {"daemon": daemon}, False

    @staticmethod
    def expects_the_goal(progress):
        return progress.state == "resuming" and progress.outcome is None

    def ask(self, world):
        new = self.goal(world) == "new"
        if not new or world.round != "no":
            yield "done", {}, False
        if self.group and new:
            yield "failed", {}, True
            yield "refused", {"round": world.round or "no"}, world.round is None
            if world.round == "yes":
                return

    def settle(self, world):
        new = self.goal(world) == "new"
        if not self.group or not new:
            yield "done", {}, False
            return
        yield "failed", {}, True
        if world.round != "no":
            yield "done", {"round": "yes"}, False
        if world.round != "yes":
            yield "refused", {"round": "no"}, world.round is None

    def report(self, world):
        told = {"round": world.round or "no"} if self.group and self.goal(world) == "new" else {}
        yield "refused", told, False

    def pause(self, world):
        engine = world.engine
        paused = {"engine": engine._replace(paused=True)}
        yield "done", paused, False
        yield "done", {}, True
        yield "failed", {}, True
        yield "failed", paused, True
        if not engine.paused and world.daemon.progress.in_flight == "wait":
            yield "timed-out", {}, True

    def load(self, world):
        engine, goal = world.engine, self.goal(world)
        if not engine.paused:
            yield "failed", {}, False  # every adapter refuses that
            return
        if self.deadly and goal == "new":
            yield "failed", {"engine": engine._replace(up=False)}, False
            return
        held = engine._replace(weights="bad" if goal in self.bad else goal, label=goal, confirmed=False, probed=False)
        mixed = held._replace(weights="mixed", label=None)
        yield "done", {"engine": held}, False
        yield "done", {"engine": mixed}, True
        yield "failed", {}, True
        yield "failed", {"engine": held}, True
        yield "failed", {"engine": mixed}, True

    def confirm(self, world):
        engine = world.engine
        yield "failed", {}, True
        if engine.label == self.goal(world):
            yield "done", {"engine": engine._replace(confirmed=True)}, False
        else:
            yield "failed", {}, False

    def probe(self, world):
        engine = world.engine
        yield "failed", {}, True
        if engine.weights == "bad":
            yield "failed", {}, False
        else:
            yield "done", {"engine": engine._replace(probed=True)}, False

    def resume(self, world):
        engine = world.engine
        off = self.group and engine.weights == "new" and world.round == "no" and engine.paused
        broken = "generation goes on with what the group let go" if off else None
        running = {"engine": engine._replace(paused=False), "broken": broken}
        yield "done", running, False
        yield "done", {}, True
        yield "failed", {}, True
        yield "failed", running, True


@cache
def moved(progress, event, case):
    return advance(progress, event, policy=POLICY, case=case)


def canonical(world):
    """Call the engine's incarnation 0 and every other one -1: no more is ever asked of them."""
    engine, daemon = world.engine, world.daemon
    if daemon is not None:
        since = lambda incarnation: 0 if incarnation == engine.incarnation else -1  # noqa: E731 - a name for it
        ready = daemon.ready and (since(daemon.ready[0]), daemon.ready[1])
        daemon = daemon._replace(incarnation=since(daemon.incarnation), ready=ready)
    return world._replace(engine=engine._replace(incarnation=0), daemon=daemon)


def unconfirmed(before, event, after, *, goals=("wanted", "fallback")):
    loaded = (before.step, event) == ("load", "done") and before.goal in goals
    return replace(after, state="resuming", step="settle") if loaded else after


def unprobed(before, event, after):
    if after.step != "probe":
        return after
    return replace(after, state="resuming", step="settle" if before.step == "confirm" else "look", probed=True)


def unseen(before, event, after):
    if (after.state, after.step) != ("paused", "look"):
        return after
    if after.tries == POLICY.tries:
        return replace(after, step="report")
    return replace(after, state="loading", step="load", unknown=True)


def trusted(before, event, after):
    resumed = (before.step, event) == ("resume", "done")
    return Progress("serving", "rest", before.goal, outcome="activated") if resumed else after


def released(before, event, after):
    failed = before.step == "pause" and event in ("failed", "timed-out")
    return replace(before, state="resuming", step="release", outcome="failed") if failed else after


def left(before, event, after):
    return Progress("idle", "rest", outcome="refused") if (before.step, event) == ("ask", "refused") else after


def let_go(before, event, after):
    latched = after.state == "latched"
    return replace(before, state="resuming", step="resume", outcome=None, tries=0) if latched else after


def running_on(before, event, after):
    failed = (before.state, before.step, event) == ("resuming", "probe", "failed")
    return Progress("latched", "rest", outcome="latched") if failed else after


def disobedient(before, event, after):
    return replace(before, step="resume") if (before.step, event) == ("settle", "refused") else after


#: What the machine does instead, when it is without a rule.
CROOKED = {
    "confirming": unconfirmed,
    "confirming-the-old": partial(unconfirmed, goals=("fallback",)),
    "probing": unprobed,
    "looking-before-the-load": unseen,
    "looking-after-the-resume": trusted,
    "releasing-only-the-known": released,
    "going-back-when-refused": left,
    "latching": let_go,
    "pausing-again": running_on,
    "obeying-the-group": disobedient,
}


def breaches(world, scene):
    """Give the promises that a world breaks."""
    engine, daemon = world.engine, world.daemon
    if world.broken:
        yield world.broken
    ready = daemon is not None and daemon.ready is not None and daemon.ready[0] == engine.incarnation
    if engine.up and not engine.paused and engine.weights != "start":
        if not engine.confirmed or engine.weights not in (engine.label, "bad"):
            yield "generation runs on weights that were not confirmed"
        # An engine that cannot probe while it is held runs on such weights until its probe has failed, and, if the
        # daemon is killed just then, until there is one again.
        if not engine.probed and (scene.probes_paused or ready):
            yield "generation runs on weights that were not probed"
    good = not engine.paused and engine.confirmed and engine.probed
    if ready and engine.up and daemon.progress.step == "rest" and not (good and engine.label == daemon.ready[1]):
        yield "ready with something else than what was confirmed"
    latched = daemon is not None and daemon.progress.state == "latched"
    if latched and engine.up and daemon.incarnation == engine.incarnation and not engine.paused:
        yield "latched, and generation runs"


def ended(world):
    """Tell whether the engine serves the wanted or the old version, or is latched."""
    engine, daemon = world.engine, world.daemon
    if daemon is None or daemon.progress.step != "rest" or not engine.up:
        return False
    if daemon.progress.state == "latched":
        return engine.paused
    return not engine.paused and engine.confirmed and engine.weights in ("old", "new") and engine.probed


def walk(scene, *, failures):
    """Visit every state; returns how many there are, and the first broken promise."""
    engine = Engine(True, 0, "old", "old", False, True, True)
    start = World(engine, Daemon(IDLE, None, (0, "old"), False), "old", None, failures, None)
    before = {start: []}  # each state, and those that lead to it without a failure
    queue = deque([start])
    while queue:
        world = queue.popleft()
        if (promise := next(breaches(world, scene), None)) is not None:
            return len(before), promise
        leads_on = False
        for reached, fails in scene.steps(world):
            after = canonical(reached)
            leads_on = leads_on or not fails
            if after not in before:
                before[after] = []
                queue.append(after)
            if not fails:
                before[after].append(world)
        if not leads_on:
            return len(before), "nothing leads on"
    good = {world for world in before if ended(world)}
    queue = deque(good)
    while queue:
        for world in before[queue.popleft()]:
            if world not in good:
                good.add(world)
                queue.append(world)
    return len(before), None if len(good) == len(before) else "it never comes to an end, though failures cease"


NONE, NEW, BOTH = frozenset(), frozenset({"new"}), frozenset({"new", "old"})

SCENES = {
    (probes_paused, bad, group): Scene(probes_paused, bad, group, None)
    for probes_paused in (True, False)
    for bad in (NONE, NEW, BOTH)
    for group in (False, True)
}
SCENES["deadly"] = Scene(True, NONE, False, None, deadly=True)


def name(scene):
    if isinstance(scene, str):
        return scene
    return f"{'probed' if scene[0] else 'probed after'}, bad: {', '.join(sorted(scene[1])) or 'none'}, " + (
        "group" if scene[2] else "alone"
    )


#: How many there are with three failures. Other numbers mean that the machine, or the model, is another one.
STATES = dict(
    zip(SCENES, [3590, 8499, 5620, 8355, 5145, 7725, 5164, 11484, 8373, 14069, 8033, 14654, 2257], strict=True)
)


@pytest.mark.parametrize("scene", SCENES, ids=name)
def test_no_interleaving_breaks_a_promise(scene):
    states, promise = walk(SCENES[scene], failures=4 if THOROUGH else 3)
    assert promise is None
    if not THOROUGH:
        assert states == STATES[scene]


RULES = [
    ("confirming", (True, NONE, False), "not confirmed"),  # what the engine says of a load is not believed
    ("confirming-the-old", (True, NONE, False), "not confirmed"),  # nor on the way back
    ("probing", (True, NEW, False), "not probed"),  # a version that is whole can still be of no use
    ("probing", (False, NEW, False), "not probed"),  # … also where it is probed after the resume
    ("looking-before-the-load", (True, NONE, False), "latched, and"),  # the engine may have restarted since its pause
    ("looking-after-the-resume", (True, NONE, False), "else than"),  # … and since it confirmed
    ("releasing-only-the-known", (True, NONE, False), "not confirmed"),  # a pause is taken back if nothing was loaded
    ("going-back-when-refused", (True, NONE, True), "never comes"),  # a round that is off leaves nobody paused
    ("latching", (True, BOTH, False), "not probed"),  # with no version left it stays shut
    ("pausing-again", (False, NEW, False), "latched, and"),  # what ran until its probe failed is held
    ("obeying-the-group", (True, NONE, True), "let go"),  # others may not have loaded it
    ("own-confirmation", (False, NEW, False), "not probed"),  # a daemon believes nothing that it did not see
    ("reloading-the-paused", (True, NONE, False), "not confirmed"),  # what a paused engine holds is not known
    ("counting-losses", "deadly", "never comes"),  # a version that kills its engine is left alone
    ("polling", (True, NONE, False), "never comes"),  # an engine that restarted by itself is loaded again
]


@pytest.mark.parametrize(("rule", "scene", "promise"), RULES)
def test_every_rule_is_needed(rule, scene, promise):
    _, found = walk(SCENES[scene]._replace(without=rule), failures=3)
    assert found is not None
    assert promise in found
