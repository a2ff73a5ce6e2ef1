"""A stream, a trainer and receivers in this process, and an engine that fails on request."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager

import training

import receiver.daemon
from deltastore import Writer
from deltastore.errors import EngineError
from receiver.daemon import Receiver
from receiver.engines.base import EngineInfo
from receiver.options import Options
from receiver.status import Status


class ScriptedEngine:
    """An engine that reads what it loads, fails as told, and knows what it must never be asked to do."""

    def __init__(self):
        self._incarnations = itertools.count()
        self.calls = []
        self.failures = {}
        self.hooks = {}
        self.refused = set()
        self.probed = None
        self.loaded = None
        self.served = []
        self.dead = False
        self.restart()

    def restart(self):
        """Start afresh: another incarnation, at no version, running."""
        self.incarnation, self.version, self.paused, self.broken = f"i{next(self._incarnations)}", None, False, False

    def _call(self, name):
        self.calls.append(name)
        if hook := self.hooks.pop(name, None):
            hook()
        if self.dead:
            raise EngineError("nothing answers")
        if self.failures.get(name, 0):
            self.failures[name] -= 1
            raise EngineError(f"{name} failed", key=name)

    def info(self):
        self._call("info")
        return EngineInfo(self.incarnation, self.version, self.paused)

    probes_paused = True

    @property
    def number(self):
        """The version's number out of its label."""
        return self.version and self.version.rpartition("/")[2]

    def pause(self, in_flight="wait", *, timeout=None):
        self._call("pause")
        self.paused = True

    def load(self, checkpoint, *, version, keep_kv=False):
        self._call("load")
        if not self.paused:
            raise EngineError("not paused")
        self.version, self.broken = None, True
        if (number := version.rpartition("/")[2]) in self.refused:
            raise EngineError(f"no {number}")
        self.loaded = training.load(checkpoint)
        self.version, self.broken = version, False

    def confirm(self, version):
        self._call("confirm")
        if self.broken or self.version != version:
            raise EngineError("another version")

    def probe(self):
        self._call("probe")
        return self.probed() if self.probed else None

    def resume(self):
        self._call("resume")
        assert not self.broken, "resumed on weights that were not loaded"
        self.paused = False
        self.served.append(self.number)

    def close(self):
        self.calls.append("close")


def put_behind_receivers(engine, monkeypatch):
    """Have every receiver that is made from now on get this engine, whatever its options name; returns it."""
    monkeypatch.setattr(receiver.daemon, "make_engine", lambda *_, **__: engine)
    return engine


class Run:
    """A stream, a trainer, and receivers."""

    def __init__(self, root):
        self.root = root
        self.url = root / "store"
        self.live = root / "host" / "live"
        self.snapshots = [training.small_snapshot(0)]
        self.base = training.save(root / "base", self.snapshots[0])

    def publish(self, count=1):
        with Writer(self.url, base=None if (self.url / "manifests").exists() else self.base) as writer:
            for _ in range(count):
                self.snapshots.append(training.small_snapshot(len(self.snapshots)))
                writer.publish(self.snapshots[-1]).result()

    def receiver(self, **options):
        settings = {"store": str(self.url), "checkpoint": self.live, "poll": 0.02, **options}
        made = Receiver(Options(**settings), Status(store=settings["store"], checkpoint=str(self.live), target="x"))
        made.status = made._status
        return made

    @contextmanager
    def running(self, **options):
        made = self.receiver(**options)
        failure = []

        def run():
            try:
                made.run()
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        made.failure, made.thread = failure, thread
        try:
            yield made
        finally:
            made.stop()
            thread.join(20)
            assert not thread.is_alive()


def ready_at(made, version):
    training.until(lambda: made.failure or (made.status.ready and made.status.serving == version), what=f"{version}")
    assert made.failure == []
    assert made.status.version == version
