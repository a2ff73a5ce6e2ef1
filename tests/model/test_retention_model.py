"""Every interleaving of a few writers, makers of anchors, taggers, forgetters, collectors, readers in a small world.

A plain model of docs/format.md, sections 7 and 9 to 11, walked breadth first. A step is one request to the store; a
process may stop for ever after any of its steps, which needs no step of its own: every state is judged. A rule left
out must be found out: ``without`` names one, and the walk ends in a state that breaks a promise.
"""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

import pytest

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"


class Record(NamedTuple):
    """A retention record; its number is its place in ``World.records``, counted from 1."""

    until: int
    kept: frozenset
    deltas: frozenset
    routes: frozenset


class Route(NamedTuple):
    """An anchor: its name, the version it leads to, and the number of the newest record that its maker had read."""

    name: str
    version: int
    retention: int


class Tag(NamedTuple):
    """A tag's content: its version, the way, and who wrote it.

    ``sure``: the way of which some setter said that it stays, having read the record again; ``None``: no one did yet.
    """

    version: int
    way: frozenset
    writer: int
    sure: frozenset | None


class World(NamedTuple):
    """The store, and where each process stands: ``(step, what it remembers)``."""

    manifests: tuple  # of each version, the attempt that it names
    objects: frozenset  # ("delta", version, attempt) and ("route", name)
    routes: frozenset  # finished ones
    closed: frozenset  # names of abandoned ones
    records: tuple
    tags: tuple  # (name, Tag), sorted
    places: tuple


COSTS = {"base": 10, "delta": 2}
ANCHOR_COST = 5


def keeps(record, version):
    return record is None or version > record.until or version in record.kept


def keeps_thing(record, number, thing):
    """Whether a record, tags aside, keeps what a way is made of: a version's own parts, or a route."""
    if record is None:
        return True
    if isinstance(thing, Route):
        return thing.version > record.until or thing.retention >= number or thing.name in record.routes
    return thing > record.until or thing in record.deltas


def newest_record(world):
    return (world.records[-1] if world.records else None), len(world.records)


def cheapest_way(version, routes, allowed):
    """Return the things that lead to a version from nothing, or ``None``."""
    ways = []
    for start in (0, *sorted(routes)):
        first = start.version if isinstance(start, Route) else 0
        if first <= version:
            way = frozenset([start, *range(first + 1, version + 1)])
            if all(allowed(thing) for thing in way):
                cost = ANCHOR_COST if isinstance(start, Route) else COSTS["base"]
                ways.append((cost + COSTS["delta"] * (version - first), len(ways), way))
    return min(ways)[2] if ways else None


def stored_at(world, thing):
    """Return the object of a thing."""
    return ("route", thing.name) if isinstance(thing, Route) else ("delta", thing, world.manifests[thing])


def move(world, index, step, memory=None, **changes):
    """Return the world after one step of a process."""
    places = list(world.places)
    places[index] = (step, memory)
    return world._replace(places=tuple(places), **changes)


END = "end"


class Writer:
    """Commits the next version as its own attempt; it may have slept for a week between any two steps."""

    def __init__(self, attempt, version):
        self.attempt, self.version = attempt, version

    def steps(self, world, index, without):
        step, _ = world.places[index]
        if step == 0:
            yield move(world, index, 1, objects=world.objects | {("delta", self.version, self.attempt)})
        elif step == 1:
            if len(world.manifests) == self.version:
                yield move(world, index, END, manifests=(*world.manifests, self.attempt))
            else:
                yield move(world, index, END)


class Maker:
    """Makes an anchor of a version."""

    def __init__(self, name, version):
        self.name, self.version = name, version

    def steps(self, world, index, without):
        step, number = world.places[index]
        record, newest = newest_record(world)
        if step == 0:
            yield move(world, index, 1 if keeps(record, self.version) else END, newest)
        elif step == 1:
            yield move(world, index, 2, number, objects=world.objects | {("route", self.name)})
        elif step == 2:
            if self.name in world.closed:
                yield move(world, index, END)
            else:
                yield move(world, index, END, routes=world.routes | {Route(self.name, self.version, number)})


class Forgetter:
    """Writes a record that keeps the newest versions, and what is tagged when it looks."""

    def __init__(self, keep_last, *, keep_tagged=False):
        self.keep_last, self.keep_tagged = keep_last, keep_tagged

    def steps(self, world, index, without):
        step, memory = world.places[index]
        if step == 0:
            yield move(world, index, 1, len(world.records))
        elif step == 1:
            chosen = self.choose(world, memory, without)
            if chosen is not None:
                yield move(world, index, 2, (memory, chosen))
            else:  # what it has read is no longer there: only a later record can have let it go
                yield move(world, index, 0 if len(world.records) > memory else "lost")
        elif step == 2:
            number, chosen = memory
            if len(world.records) == number or "recomputing" in without:
                yield move(world, index, END, records=(*world.records, chosen))
            else:
                yield move(world, index, 0)

    def choose(self, world, number, without):
        record = world.records[number - 1] if number else None
        newest = len(world.manifests) - 1
        wanted = set(range(max(0, newest + 1 - self.keep_last), newest + 1))
        if "keeping-the-newest" in without:
            wanted = {newest - 1}
        if self.keep_tagged:
            wanted |= {tag.version for _, tag in world.tags}
        kept = frozenset(version for version in wanted if keeps(record, version))
        way = frozenset()
        for version in sorted(kept):
            found = cheapest_way(
                version,
                world.routes,
                lambda thing: (
                    keeps_thing(record, number, thing) or ("dropped-routes" in without and isinstance(thing, Route))
                ),
            )
            if found is None:
                return None
            way |= found
        routes = frozenset(thing.name for thing in way if isinstance(thing, Route))
        return Record(newest, kept, frozenset(thing for thing in way if not isinstance(thing, Route)), routes)


class Collector:
    """Removes what rules 1 to 4 allow, one object a step."""

    def steps(self, world, index, without):
        step, memory = world.places[index]
        if step == 0:
            seen = world.tags if "record-before-tags" in without else newest_record(world)
            yield move(world, index, 1, seen)
        elif step == 1:
            if "record-before-tags" in without:
                (record, number), tags = newest_record(world), memory
            else:
                (record, number), tags = memory, world.tags
            if "reading-tags" in without:
                tags = ()
            yield move(world, index, 2, (record, number, tags))
        elif step == 2:
            yield move(world, index, 3, self.doomed(world, *memory, without))
        elif step == 3 and memory:
            yield self.remove(world, index, memory, without)

    def remove(self, world, index, doomed, without):
        (thing, reason), *rest = doomed
        if reason == "unfinished" and "closing" not in without:
            if any(route.name == thing[1] for route in world.routes):
                return move(world, index, 3, tuple(rest))  # it was finished meanwhile
            return move(world, index, 3, ((thing, "abandoned"), *rest), closed=world.closed | {thing[1]})
        if reason == "record":
            routes = frozenset(route for route in world.routes if route.name != thing[1])
            return move(world, index, 3, tuple(rest), routes=routes)
        return move(world, index, 3, tuple(rest), objects=world.objects - {thing})

    def doomed(self, world, record, number, tags, without):
        """Return what may go, in order: (object, why)."""
        spared = frozenset().union(*(self.spared(world, tag, without) for _, tag in tags))
        reasons = [(thing, self.reason(world, record, number, spared, without, *thing[1:]))
                   for thing in sorted(world.objects) if thing[0] == "delta"]  # fmt: skip
        finished = {route.name: route for route in world.routes}
        for name in sorted({thing[1] for thing in world.objects if thing[0] == "route"} | set(finished)):
            if name not in finished:
                reasons.append((("route", name), "abandoned" if name in world.closed else "unfinished"))
            elif not keeps_thing(record, number, finished[name]) and finished[name] not in spared:
                reasons += [(("route", name), "dropped"), (("route", name), "record")]
        return tuple((thing, reason) for thing, reason in reasons if reason is not None)

    def spared(self, world, tag, without):
        """Return what a tag keeps: what it says, or, wrongly, what seems best to this collector now."""
        if "ways-in-tags" not in without:
            return tag.way
        whole = lambda thing: stored_at(world, thing) in world.objects  # noqa: E731 - a name for it
        return cheapest_way(tag.version, world.routes, whole) or frozenset()

    def reason(self, world, record, number, spared, without, version, attempt):
        """Say why the parts of an attempt at a version may go, or ``None``."""
        if version >= len(world.manifests):
            return "orphan" if "manifests-first" in without else None
        if world.manifests[version] != attempt:
            return "superseded"
        return None if keeps_thing(record, number, version) or version in spared else "forgotten"


class Tagger:
    """Sets a tag; one that names the version already keeps its way until the new one is sure."""

    def __init__(self, name, version):
        self.name, self.version = name, version

    def steps(self, world, index, without):
        step, memory = world.places[index]
        record, number = newest_record(world)
        tags = dict(world.tags)
        there = tags.get(self.name)
        others = [tag for name, tag in world.tags if tag.version == self.version and name != self.name]
        by_tags = "tags-aside" in without and bool(others)
        if step == 0:
            if keeps(record, self.version) or by_tags:
                things = frozenset().union(*(tag.way for tag in others)) if by_tags else frozenset()
                way = cheapest_way(
                    self.version, world.routes, lambda thing: keeps_thing(record, number, thing) or thing in things
                )
                yield move(world, index, 1, (way, there if there and there.version == self.version else None))
            else:
                yield move(world, index, END)
        elif step == 1:
            way, known = memory
            sure = known.sure if known is not None and known == there else None
            both = way if known is None or "joining" in without else way | known.way
            tags[self.name] = Tag(self.version, both, index, way if "reading-again" in without else sure)
            step = END if "reading-again" in without else 2
            yield move(world, index, step, (way, known is None), tags=tuple(sorted(tags.items(), key=str)))
        elif step == 2:
            way, fresh = memory
            mine = there is not None and there.writer == index
            fine = keeps(record, self.version) and all(keeps_thing(record, number, thing) for thing in way)
            if fine or by_tags:
                if mine:
                    tags[self.name] = Tag(self.version, way, index, way)
                yield move(world, index, END, None, tags=tuple(sorted(tags.items(), key=str)))
            elif keeps(record, self.version):
                yield move(world, index, 0)  # kept by another way than a moment ago
            else:
                if mine and fresh:
                    del tags[self.name]
                yield move(world, index, END, tags=tuple(sorted(tags.items(), key=str)))


class Untagger:
    """Deletes a tag."""

    def __init__(self, name):
        self.name = name

    def steps(self, world, index, without):
        step, _ = world.places[index]
        if step == 0 and any(name == self.name for name, _ in world.tags):
            yield move(world, index, END, tags=tuple(pair for pair in world.tags if pair[0] != self.name))


class Reader:
    """Builds a version from nothing, an object a step."""

    def __init__(self, version):
        self.version = version

    def steps(self, world, index, without):
        step, memory = world.places[index]
        if step == 0:
            yield self.look(world, index, None)
        elif step == 1:
            yield self.plan(world, index, *memory)
        elif step == 2:
            (first, *rest), plan, standing = memory
            if stored_at(world, first) not in world.objects:
                yield self.look(world, index, (plan, standing))
            elif rest:
                yield move(world, index, 2, (tuple(rest), plan, standing))
            else:
                yield move(world, index, "bytes")

    def look(self, world, index, before):
        """Read the newest record, and the tags if it does not keep the version."""
        record, number = newest_record(world)
        tags = () if keeps(record, self.version) else world.tags
        if not keeps(record, self.version) and all(tag.version != self.version for _, tag in tags):
            return move(world, index, "forgotten")
        return move(world, index, 1, ((record, number, tags), before))

    def plan(self, world, index, standing, before):
        """List the routes, and plan; a plan that cannot be made, or failed, is given up if nothing has changed."""
        record, number, tags = standing
        spared = frozenset().union(*(tag.way for _, tag in tags))
        way = cheapest_way(
            self.version, world.routes, lambda thing: keeps_thing(record, number, thing) or thing in spared
        )
        if (way, standing) == before:
            # The only way is not whole. Where a tag alone keeps the version, it was set too late.
            return move(world, index, "lost" if keeps(record, self.version) else "forgotten")
        if way is None:
            return self.look(world, index, (None, standing))
        return move(world, index, 2, (tuple(sorted(way, key=str)), way, standing))


def broken(world):
    """Return the promise that a world breaks, or ``None``."""
    record, number = newest_record(world)

    def whole(thing):
        return stored_at(world, thing) in world.objects

    for version in range(len(world.manifests)):
        if keeps_thing(record, number, version) and not whole(version):
            return f"the parts of version {version} are gone"
        if keeps(record, version):
            way = cheapest_way(version, world.routes, lambda thing: keeps_thing(record, number, thing) and whole(thing))
            if way is None:
                return f"version {version} is kept and cannot be built"
    for name, tag in world.tags:
        if tag.sure and not all(whole(thing) for thing in tag.sure):
            return f"version {tag.version} is tagged {name} and cannot be built"
        if tag.sure and any(isinstance(thing, Route) and thing not in world.routes for thing in tag.sure):
            return f"the route that the tag {name} needs is gone"
    if any(step == "lost" for step, _ in world.places):
        return "a reader is lost"
    return None


def walk(processes, *, versions=3, routes=(), without=()):
    """Visit every state; returns how many there are, and the first broken promise."""
    start = World(
        manifests=tuple("w" for _ in range(versions)),
        objects=frozenset(("delta", version, "w") for version in range(versions))
        | frozenset(("route", route.name) for route in routes),
        routes=frozenset(routes),
        closed=frozenset(),
        records=(),
        tags=(),
        places=tuple((0, None) for _ in processes),
    )
    seen, queue = {start}, deque([start])
    while queue:
        world = queue.popleft()
        promise = broken(world)
        if promise is not None:
            return len(seen), promise
        for index, process in enumerate(processes):
            for after in process.steps(world, index, without):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)
    return len(seen), None


EARLY, LATE = Route("early", 1, 0), Route("late", 2, 0)


def scene(routes, *processes):
    return {"routes": routes, "processes": processes}


SCENES = {
    "writers": scene([LATE], Writer("x", 3), Writer("y", 3), Forgetter(1), Collector(), Collector()),
    "forgetters": scene([EARLY, LATE], Forgetter(2), Forgetter(1), Collector(), Writer("x", 3), Reader(1)),
    "makers": scene([LATE], Maker("made", 1), Forgetter(2), Forgetter(1), Collector(), Reader(1)),
    "late makers": scene([LATE], Maker("made", 1), Forgetter(2), Forgetter(2), Collector(), Reader(1)),
    "unfinished": scene([], Maker("made", 2), Forgetter(1), Collector(), Collector()),
    "tags": scene([LATE], Tagger("t", 1), Forgetter(1), Collector(), Reader(1), Untagger("t")),
    "two tags": scene([LATE], Tagger("t", 1), Tagger("u", 1), Untagger("t"), Forgetter(1), Collector()),
    "tags and makers": scene([LATE], Tagger("t", 1), Maker("made", 1), Forgetter(1), Collector(), Collector()),
    "a tag set again": scene([LATE], Tagger("t", 1), Tagger("t", 1), Maker("made", 1), Forgetter(1), Collector()),
    "moved tags": scene(
        [EARLY, LATE], Tagger("t", 1), Tagger("t", 0), Forgetter(2, keep_tagged=True), Forgetter(1), Collector()
    ),
}

LARGE = {
    "everything": scene(
        [LATE], Writer("x", 3), Maker("made", 1), Tagger("t", 1), Forgetter(2), Forgetter(1), Collector(), Reader(1)
    ),
    "many tags": scene(
        [LATE], Tagger("t", 1), Tagger("u", 1), Untagger("u"), Maker("made", 1), Forgetter(1), Collector(), Collector()
    ),
    "many records": scene(
        [EARLY, LATE],
        *(Forgetter(2), Forgetter(1), Forgetter(1, keep_tagged=True), Tagger("t", 1), Maker("made", 1), Collector()),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_no_interleaving_breaks_a_promise(scene):
    states, promise = walk(**SCENES[scene])
    assert promise is None
    assert states > 500


@pytest.mark.skipif(not THOROUGH, reason="minutes: DELTASTORE_THOROUGH=1")
@pytest.mark.parametrize("scene", LARGE)
def test_no_interleaving_of_many_breaks_a_promise(scene):
    assert walk(**LARGE[scene])[1] is None


RULES = [
    ("reading-again", "tags", "tagged"),  # a tagger that does not read the record again
    ("reading-tags", "tags", "tagged"),  # a collector that looks at no tags
    ("record-before-tags", "tags", "tagged"),  # … or looks at them before the record
    ("ways-in-tags", "tags and makers", "tagged"),  # … or works out by itself what a tag needs
    ("tags-aside", "two tags", "tagged"),  # a tag set on a version that only another tag keeps
    ("joining", "a tag set again", "tagged"),  # a tag set again that drops its old way at once
    ("recomputing", "forgetters", "kept"),  # a record that lost, sent again as the next one
    ("dropped-routes", "late makers", "kept"),  # a record that relies on a route that was dropped
    ("keeping-the-newest", "writers", "kept"),  # a record that does not keep the version it reaches to
    ("manifests-first", "writers", "gone"),  # parts removed before their version's manifest exists
    ("closing", "unfinished", "kept"),  # parts of an unfinished route removed while it can still be finished
]


@pytest.mark.parametrize(("rule", "scene", "promise"), RULES)
def test_every_rule_is_needed(rule, scene, promise):
    _, found = walk(**SCENES[scene], without={rule})
    assert found is not None
    assert promise in found
