from __future__ import annotations

import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from training import until

from deltastore.errors import DrainTimeout, EngineError
from receiver.engines.gate import GenerationGate, StreamAborted
from receiver.engines.torch_module import ServedWeights, TorchModuleEngine
from receiver.engines.weights import INDEX, WeightsDigest, all_finite
from receiver.quantize import make_scheme
from tools.demo.model import TIED
from tools.demo.serving import build


class Layers(nn.Module):
    """Two linear layers and a norm; the second may share the first's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.register_buffer("bias", torch.zeros(3))
        if tied:
            self.down.weight = self.up.weight


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    matrix = torch.full((4, 4), value, dtype=torch.bfloat16)
    return {"up.weight": matrix, "down.weight": matrix + 1, "bias": torch.full((3,), value)}


def saved(path, content):
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, path / "model.safetensors")
    return path


def activate(engine, checkpoint, version="1"):
    engine.pause()
    engine.load(checkpoint, version=version)
    engine.confirm(version)
    engine.resume()


def test_a_load_copies_every_byte_and_keeps_every_address(tmp_path):
    module = Layers()
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    activate(TorchModuleEngine(module), saved(tmp_path / "a", tensors(3.0)))
    for name, tensor in module.state_dict().items():
        assert tensor.data_ptr() == before[name]
        assert torch.equal(tensor, tensors(3.0)[name])


def test_an_fp8_engine_holds_exactly_what_the_scheme_makes(tiny_checkpoints):
    engines = []
    for checkpoint in tiny_checkpoints:
        model = build(checkpoint, "fp8_block")
        engines.append(TorchModuleEngine(model.module, scheme="fp8_block", mapping=TIED, probe=model.probe))
        engines[-1].prime(checkpoint)
    patched, fresh = engines
    assert patched.weights_digest() != fresh.weights_digest()
    activate(patched, tiny_checkpoints[1])
    assert patched.weights_digest() == fresh.weights_digest() == patched.served.digest
    assert fresh.info().version is None
    state = patched._weights
    assert state["model.layers.0.mlp.up_proj.weight"].dtype is torch.float8_e4m3fn
    assert state["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 1)


CHANGES = {
    "missing": ({"up.weight": None}, "missing: up.weight"),
    "unknown": ({"more.weight": torch.ones(2)}, "unknown: more.weight"),
    "shape": ({"up.weight": torch.ones((4, 5), dtype=torch.bfloat16)}, r"up.weight gives bfloat16\[4, 5\]"),
    "dtype": ({"bias": torch.ones(3, dtype=torch.bfloat16)}, r"the engine has float32\[3\]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(tmp_path, change):
    replaced, message = CHANGES[change]
    content = {name: tensor for name, tensor in (tensors(5.0) | replaced).items() if tensor is not None}
    engine = TorchModuleEngine(Layers())
    before = engine.weights_digest()
    engine.pause()
    with pytest.raises(EngineError, match=message) as caught:
        engine.load(saved(tmp_path / "a", content), version="1")
    assert caught.value.key == next(iter(replaced))
    assert engine.weights_digest() == before
    assert engine.info().version is None


def test_values_that_cannot_be_quantized_shut_the_engine_until_a_good_load(tmp_path):
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, made in make_scheme("fp8_block").quantize("a.weight", torch.ones(2, 2)).items():
                self.register_buffer(name.replace(".", "_"), made)

    # A mapping of the weight takes its scales along.
    mapping = {"a.weight": "a_weight", "a.weight_scale_inv": "a_weight_scale_inv"}
    engine = TorchModuleEngine(Quantized(), scheme="fp8_block", mapping=mapping)
    engine.pause()
    bad = saved(tmp_path / "bad", {"a.weight": torch.tensor([[1.0, float("nan")], [1.0, 1.0]])})
    with pytest.raises(EngineError, match=r"a.weight holds NaN"):
        engine.load(bad, version="1")
    assert engine.served == ServedWeights(None, None, caches=1)
    with pytest.raises(EngineError, match="stays paused"):
        engine.resume()
    activate(engine, saved(tmp_path / "good", {"a.weight": torch.ones(2, 2)}), "2")


def test_scales_follow_their_weight_through_the_mapping():
    engine = TorchModuleEngine(Layers(), mapping={"a.weight": ("b.weight", "c.weight"), "d.weight": ()})
    assert engine._targets("a.weight", "a.weight") == ("b.weight", "c.weight")
    assert engine._targets("a.weight", "a.weight_scale_inv") == ("b.weight_scale_inv", "c.weight_scale_inv")
    assert engine._targets("d.weight", "d.weight_scale_inv") == ()
    assert engine._targets("e.weight", "e.weight") == ("e.weight",)


def test_a_tensor_mapped_to_nothing_is_not_wanted(tmp_path):
    engine = TorchModuleEngine(Layers(), mapping={"inv_freq": ()})
    activate(engine, saved(tmp_path / "a", tensors() | {"inv_freq": torch.ones(2)}))


@pytest.mark.parametrize("carried", [("up",), ("down",), ("up", "down")])
def test_of_tied_tensors_a_checkpoint_may_carry_any(tmp_path, carried):
    module = Layers(tied=True)
    content = {"bias": torch.zeros(3)} | {f"{name}.weight": tensors()["up.weight"] for name in carried}
    activate(TorchModuleEngine(module), saved(tmp_path / "a", content))
    assert torch.equal(module.down.weight, tensors()["up.weight"])


def test_tied_tensors_that_differ_are_refused(tmp_path):
    engine = TorchModuleEngine(Layers(tied=True))
    before = engine.weights_digest()
    engine.pause()
    with pytest.raises(EngineError, match=r"down.weight and up.weight|up.weight and down.weight"):
        engine.load(saved(tmp_path / "a", tensors()), version="1")
    assert engine.weights_digest() == before


def test_weights_that_are_not_finite_are_not_confirmed(tmp_path):
    engine = TorchModuleEngine(Layers())
    engine.pause()
    engine.load(saved(tmp_path / "a", tensors() | {"bias": torch.tensor([1.0, float("inf"), 1.0])}), version="1")
    with pytest.raises(EngineError, match="bias holds NaN or infinity"):
        engine.confirm("1")


def test_a_byte_that_changed_after_the_load_is_not_confirmed(tmp_path):
    module = Layers()
    engine = TorchModuleEngine(module)
    activate(engine, saved(tmp_path / "a", tensors()))
    with torch.no_grad():
        module.up.weight[0, 0] = 7
    with pytest.raises(EngineError, match="weights changed"):
        engine.confirm("1")


def failing_probe() -> torch.Tensor:
    raise RuntimeError("mat1 and mat2")


def test_a_probe_is_the_likeliest_token_after_each_beginning_and_tells_what_is_not_finite(tmp_path):
    logits = torch.tensor([[[0.0, 2.0], [3.0, 0.0]]])
    engine = TorchModuleEngine(Layers(), probe=lambda: logits)
    probe = engine.probe()
    assert probe.tokens == (1, 0)
    assert probe.logprobs == pytest.approx([-math.log1p(math.exp(-2)), -math.log1p(math.exp(-3))], abs=1e-6)
    engine.pause()  # it needs no open gate
    logits[0, 1, 1] = float("nan")
    assert [math.isfinite(value) for value in engine.probe().logprobs] == [True, False]
    assert TorchModuleEngine(Layers()).probe() is None
    with pytest.raises(EngineError, match="probe failed"):
        TorchModuleEngine(Layers(), probe=failing_probe).probe()


def test_caches_are_dropped_at_every_load(tmp_path):
    dropped = []
    engine = TorchModuleEngine(Layers(), drop_caches=lambda: dropped.append(1))
    activate(engine, saved(tmp_path / "a", tensors()))
    engine.pause()
    with pytest.raises(EngineError):
        engine.load(tmp_path / "none", version="2")
    assert len(dropped) == 2


def break_index(root, weight_map):
    (root / INDEX).write_text(json.dumps({"weight_map": weight_map}))


DAMAGE = {
    "truncated": lambda root: (root / "model.safetensors").write_bytes((root / "model.safetensors").read_bytes()[:-1]),
    "two files": lambda root: shutil.copy(root / "model.safetensors", root / "other.safetensors"),
    "index is no JSON": lambda root: (root / INDEX).write_text("{"),
    "index is a list": lambda root: (root / INDEX).write_text("[]"),
    "index leads out": lambda root: break_index(root, {"up.weight": "../model.safetensors"}),
    "index names no file": lambda root: break_index(root, {"up.weight": "gone.safetensors"}),
    "index lists more": lambda root: break_index(root, {"ghost.weight": "model.safetensors"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_refused_by_its_name(tmp_path, damage):
    root = saved(tmp_path / "a", tensors())
    DAMAGE[damage](root)
    engine = TorchModuleEngine(Layers())
    engine.pause()
    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        engine.load(root, version="1")
    assert caught.value.key == str(root)
    assert "receiver verify" in caught.value.hint


def test_a_link_is_followed(tmp_path):
    saved(tmp_path / "slot0", tensors(2.0))
    (tmp_path / "live").symlink_to("slot0")
    module = Layers()
    activate(TorchModuleEngine(module), tmp_path / "live")
    assert torch.equal(module.up.weight, tensors(2.0)["up.weight"])


def test_the_digest_is_of_the_bytes_in_name_order():
    one, two = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.int8)
    digest = WeightsDigest({"b": one, "a": two})
    assert digest() == WeightsDigest({"a": two.clone(), "b": one.clone()})()
    first = digest()
    one[0, 0] = 9
    assert digest() != first
    one.data = torch.arange(6.0).reshape(2, 3)  # another storage: the digest has to follow
    assert digest() == first
    assert len(first) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_of_the_small_types_is_told_finite_or_not(dtype):
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = torch.isfinite(values.to(torch.float32))
        assert [all_finite(value.reshape(1)) for value in values] == finite.tolist()
    assert all_finite(torch.zeros(3).to(dtype))
    assert not all_finite(torch.tensor([0.0, float("nan")]).to(dtype))
    assert all_finite(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block"])
def test_no_token_is_ever_of_mixed_weights(tiny_checkpoints, scheme):
    """Two threads generate while a third pauses and loads fifty times: each token is of one version."""
    model = build(tiny_checkpoints[0], scheme)
    engine = TorchModuleEngine(model.module, scheme=scheme, mapping=TIED, probe=model.probe)
    engine.prime(tiny_checkpoints[0])
    digests = {None: engine.weights_digest()}
    seen = []
    done, token = threading.Event(), threading.Event()

    def generate(seed):
        generation = model.generate(model.encode("def "), temperature=1.0, seed=seed)
        while not done.is_set():
            with engine.forward() as weights:
                before = engine.weights_digest()
                generation.step(weights.caches)
                seen.append((weights.version, weights.digest, before, engine.weights_digest()))
            token.set()

    with ThreadPoolExecutor(2) as pool:
        generating = [pool.submit(generate, seed) for seed in (1, 2)]
        try:
            for version in range(1, 51):
                engine.pause()
                engine.load(tiny_checkpoints[version % 2], version=str(version))
                engine.confirm(str(version))
                digests[str(version)] = engine.weights_digest()
                token.clear()
                engine.resume()
                assert token.wait(30)  # of this version: none was under way
        finally:
            engine.resume()
            done.set()
        for future in generating:
            future.result(timeout=30)
    assert len({digests["1"], digests["2"]}) == 2
    assert {version for version, *_ in seen} >= {str(version) for version in range(1, 51)}
    assert all(told == before == after == digests[version] for version, told, before, after in seen)


def enter(gate, entered):
    with gate.forward():
        entered.set()


def test_a_pause_waits_for_the_running_pass_and_holds_the_next():
    gate = GenerationGate()
    waiting = threading.Semaphore(0)
    wait_for = gate._changed.wait_for

    def signal_and_wait(*arguments):
        waiting.release()
        return wait_for(*arguments)

    with ThreadPoolExecutor(2) as pool:
        with gate.forward():
            gate._changed.wait_for = signal_and_wait
            pausing = pool.submit(gate.pause)
            assert waiting.acquire(timeout=5)
            assert not gate.held
            entered = threading.Event()
            second = pool.submit(enter, gate, entered)
            assert waiting.acquire(timeout=5)
            assert not pausing.done()
        pausing.result(timeout=5)
        assert gate.held
        assert not entered.is_set()
        gate.resume()
        second.result(timeout=5)


def test_a_pause_that_takes_too_long_holds_nothing():
    gate = GenerationGate()
    with gate.forward():
        with pytest.raises(EngineError, match="1 forward passes have not ended"):
            gate.pause(timeout=0.01)
        with gate.forward():
            pass
    gate.pause(timeout=0.01)
    assert gate.held


def test_stopping_turns_away_those_that_wait():
    engine = TorchModuleEngine(Layers())
    engine.pause()

    def forward():
        with engine.forward():
            raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(forward)
        engine.stop()
        with pytest.raises(EngineError, match="shutting down"):
            waiting.result(timeout=5)


def stream(gate, step, ended):
    """Generate until told to end; returns what ended it."""
    try:
        with gate.stream() as one:
            while not ended.is_set():
                with gate.forward(one):
                    step.release()
    except StreamAborted:
        return "aborted"
    return "ended"


class Streams:
    """Two streams on a gate, and a pause in a thread of its own."""

    def __init__(self, pool):
        self.gate, self.ended, self.step = GenerationGate(), threading.Event(), threading.Semaphore(0)
        self.pool = pool
        self.running = [self.start(), self.start()]
        until(lambda: len(self.gate._streams) == 2)

    def start(self):
        return self.pool.submit(stream, self.gate, self.step, self.ended)


@pytest.fixture
def streams():
    with ThreadPoolExecutor(5) as pool:
        made = Streams(pool)
        yield made
        made.ended.set()
        made.gate.resume()


def test_a_waiting_pause_lets_streams_end_and_holds_new_ones(streams):
    pausing = streams.pool.submit(streams.gate.pause, "wait", drain=20)
    until(lambda: streams.gate._draining)
    late = streams.start()
    assert not streams.gate.held
    streams.ended.set()
    assert [one.result(5) for one in streams.running] == ["ended", "ended"]
    pausing.result(5)
    assert streams.gate.held
    assert not late.done()
    streams.gate.resume()
    assert late.result(5) == "ended"


def test_a_drain_that_takes_too_long_holds_nothing_and_another_pause_ends_it(streams):
    with pytest.raises(DrainTimeout, match="2 streams have not ended"):
        streams.gate.pause("wait", drain=0.01)
    late = streams.start()  # let in again
    until(lambda: len(streams.gate._streams) == 3)
    pausing = streams.pool.submit(streams.gate.pause, "wait", drain=20)
    until(lambda: streams.gate._draining)
    streams.gate.pause("abort")
    pausing.result(5)
    assert [one.result(5) for one in (*streams.running, late)] == ["aborted"] * 3
    assert streams.gate.held


def test_frozen_streams_go_on_or_are_ended_by_another_pause(streams):
    streams.gate.pause("keep")
    streams.gate.pause("wait", drain=0.01)  # nothing runs: they are frozen already
    assert not any(one.done() for one in streams.running)
    streams.gate.resume()
    for _ in range(4):
        assert streams.step.acquire(timeout=5)
    streams.gate.pause("keep")
    streams.gate.pause("abort")
    assert [one.result(5) for one in streams.running] == ["aborted", "aborted"]


def test_caches_are_kept_only_where_that_is_asked_for(tmp_path):
    dropped = []
    engine = TorchModuleEngine(Layers(), drop_caches=lambda: dropped.append(1))
    checkpoint = saved(tmp_path / "a", tensors())
    seen = []
    for keep_kv in (False, True, False):
        engine.pause()
        engine.load(checkpoint, version="1", keep_kv=keep_kv)
        engine.resume()
        seen.append(engine.served.caches)
    assert (seen, dropped) == ([1, 1, 2], [1, 1])
