"""Real engines of a tiny model, several in this process."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED
from tools.demo.serving import build


class Engines:
    """Engines in this process; knows at every moment which of them generate, and with what, and which are paused."""

    def __init__(self, base, names):
        self.lock, self.generating, self.seen = threading.Lock(), {}, []
        self.paused, self.most_paused, self.hooks = set(), 0, {}
        self.made = {name: self.make(name, base) for name in names}

    @contextmanager
    def served(self):
        """Serve all of them from threads; yields their addresses."""
        with ExitStack() as stack:
            yield {name: stack.enter_context(serve_in_thread(engine.app)) for name, engine in self.made.items()}

    def make(self, name, base):
        model = build(base, "bf16")
        engine = TorchModuleEngine(model.module, mapping=TIED, probe=model.probe)
        engine.prime(base)
        engine.app = EngineApp(engine, model, streams=2)
        pause, resume = engine.pause, engine.resume

        def paused(*given, **options):
            pause(*given, **options)
            with self.lock:
                self.generating[name] = None
                self.paused.add(name)
                self.most_paused = max(self.most_paused, len(self.paused))
            self.hooks.get(name, lambda: None)()

        def resumed():
            with self.lock:
                self.generating[name] = engine.info().version
                versions = set(self.generating.values()) - {None}
                self.seen.append(versions)
                self.paused.discard(name)
            resume()

        engine.pause, engine.resume = paused, resumed
        return engine
