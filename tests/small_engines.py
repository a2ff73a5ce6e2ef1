"""Real engines of a tiny model, several in this process, and a stream of its weights."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

import torch

from deltastore import Writer
from receiver.engines.serve import EngineApp, serve_in_thread
from receiver.engines.torch_module import TorchModuleEngine
from tools.demo.model import TIED, CausalLM, ModelConfig, save_checkpoint
from tools.demo.serving import build

TINY = ModelConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
)


def weights(seed):
    return {name: tensor.to(torch.bfloat16) for name, tensor in CausalLM(TINY).initialise(seed).state_dict().items()}


class Stream:
    """A store of the tiny model's weights."""

    def __init__(self, root):
        self.root, self.url, self.base, self.versions = root, root / "store", root / "base", 0
        save_checkpoint(self.base, TINY, weights(0))
        self.publish()

    def publish(self):
        self.versions += 1
        with Writer(self.url, base=self.base if self.versions == 1 else None) as writer:
            writer.publish(weights(self.versions)).result()


def holds(engine, version):
    """Tell whether the module's own weights are exactly those of a version."""
    found, wanted = dict(engine._weights), weights(version)
    return all(torch.equal(found[name], wanted[name]) for name in found if name in wanted)


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
