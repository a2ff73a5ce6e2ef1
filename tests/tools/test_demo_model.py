from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from receiver.quantize.fp8_block import dequantize_block, quantize_block
from tools.demo.model import TIED, CausalLM, Fp8Linear, KVCache, ModelConfig, load_config, save_checkpoint
from tools.demo.serving import build
from tools.demo.train import Trainer, changed_elements, read_corpus

TINY = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
)
TEXT = b"def f(x):\n    return x + 1\n" * 200


def trainer(**options) -> Trainer:
    return Trainer(TINY, corpus=TEXT, **options)


def reference_logits(weights: dict[str, torch.Tensor], tokens: list[int], config: ModelConfig) -> torch.Tensor:
    """The Llama forward pass position by position, in float64, from the published definition."""

    def norm(x, name):
        return x / torch.sqrt((x * x).mean() + config.rms_norm_eps) * weights[name].double()

    def turned(x, position):
        half = config.head_dim // 2
        angle = position * config.rope_theta ** (-torch.arange(half).double() / half)
        low, high = x[:half], x[half:]
        return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()))

    past: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(config.num_hidden_layers)]
    group = config.num_attention_heads // config.num_key_value_heads
    out = []
    for position, token in enumerate(tokens):
        x = weights["model.embed_tokens.weight"][token].double()
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            y = norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (
                (weights[f"{at}.self_attn.{p}_proj.weight"].double() @ y).view(-1, config.head_dim) for p in "qkv"
            )
            past[layer].append((torch.stack([turned(head, position) for head in k]), v))
            mixed = []
            for head in range(config.num_attention_heads):
                query = turned(q[head], position)
                keys = torch.stack([key[head // group] for key, _ in past[layer]])
                values = torch.stack([value[head // group] for _, value in past[layer]])
                mixed.append(torch.softmax(keys @ query / config.head_dim**0.5, 0) @ values)
            x = x + weights[f"{at}.self_attn.o_proj.weight"].double() @ torch.cat(mixed)
            y = norm(x, f"{at}.post_attention_layernorm.weight")
            gate, up = (weights[f"{at}.mlp.{p}_proj.weight"].double() @ y for p in ("gate", "up"))
            x = x + weights[f"{at}.mlp.down_proj.weight"].double() @ (gate * torch.sigmoid(gate) * up)
        out.append(weights["model.embed_tokens.weight"].double() @ norm(x, "model.norm.weight"))
    return torch.stack(out)


def test_the_forward_pass_is_that_of_a_llama():
    model = CausalLM(TINY).initialise(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that attention is far from uniform
    tokens = [256, 3, 77, 200, 4, 9, 9, 31]
    with torch.no_grad():
        got = model(torch.tensor([tokens]))[0]
    torch.testing.assert_close(got.double(), reference_logits(model.state_dict(), tokens, TINY), rtol=1e-4, atol=1e-4)


def test_a_cache_gives_what_the_whole_context_gives():
    model = CausalLM(TINY).initialise(3)
    tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        cache = KVCache(TINY, torch.float32)
        parts = [model(tokens[:, :7], cache)] + [model(tokens[:, i : i + 1], cache) for i in range(7, 20)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, 6:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (96, 160), (130, 64)])
def test_the_fp8_layer_multiplies_by_exactly_what_is_stored(shape):
    rows, columns = shape
    layer = Fp8Linear(columns, rows)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    weight, scale = quantize_block(values)
    # Every code there is, subnormals and zeros of both signs too.
    codes = torch.arange(256, dtype=torch.uint8)
    weight.view(torch.uint8)[:2].view(-1)[: 2 * 64] = codes[(codes & 0x7F) < 0x7F][:128]
    weight.view(torch.uint8)[2:4].view(-1)[: 2 * 63] = codes[(codes & 0x7F) < 0x7F][128:]
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.weight_scale_inv.copy_(scale)
    assert torch.equal(layer._expanded(), dequantize_block(weight, scale).to(torch.bfloat16))


def test_a_checkpoint_directory_is_one_hugging_face_would_know(tmp_path):
    training = trainer()
    training.save_checkpoint(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    snapshot = training.snapshot()
    assert set(index["weight_map"]) == set(snapshot) - set(TIED)
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(name), snapshot[name])
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert load_config(tmp_path) == TINY
    assert {"generation_config.json", "tokenizer_config.json"} <= {path.name for path in tmp_path.iterdir()}


def test_a_snapshot_has_all_names_and_never_changes():
    training = trainer()
    snapshot = training.snapshot()
    assert set(snapshot) == set(CausalLM(TINY).state_dict())
    assert snapshot["lm_head.weight"] is snapshot["model.embed_tokens.weight"]
    assert {tensor.dtype for tensor in snapshot.values()} == {torch.bfloat16}
    copies = {name: tensor.clone() for name, tensor in snapshot.items()}
    training.pretrain(2, batch=2, length=16)
    assert all(torch.equal(snapshot[name], copies[name]) for name in snapshot)
    changed, total = changed_elements(snapshot, training.snapshot())
    assert 0 < changed <= total == sum(parameter.numel() for parameter in training.model.parameters())


def test_the_same_seed_gives_the_same_weights():
    runs = []
    for seed in (5, 5, 6):
        training = trainer(seed=seed)
        training.pretrain(3, batch=2, length=16)
        training.step(batch=2, length=16)
        runs.append(training.snapshot())
    assert changed_elements(runs[0], runs[1])[0] == 0
    assert changed_elements(runs[0], runs[2])[0] > 0


def test_training_learns_and_small_steps_change_few_elements():
    training = trainer(learning_rate=3e-6)
    losses = []
    training.pretrain(60, batch=4, length=32, learning_rate=1e-2, progress=lambda report: losses.append(report.loss))
    assert losses[-1] < losses[0] / 2
    before = training.snapshot()
    report = training.step(batch=4, length=32)
    changed, total = changed_elements(before, training.snapshot())
    assert report.step == 1
    assert 0.0005 < changed / total < 0.1


def test_a_generation_drops_its_cache_when_the_weights_change(tmp_path):
    save_checkpoint(tmp_path, TINY, trainer().snapshot())
    model = build(tmp_path, "bf16")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    old = model.generate(model.encode("def "), temperature=0.0, seed=0)
    written = [old.step("1").token for _ in range(5)]
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    fresh = model.generate([*model.encode("def "), *written], temperature=0.0, seed=0)
    assert [old.step("2") for _ in range(5)] == [fresh.step("2") for _ in range(5)]


def test_a_generation_goes_on_past_the_longest_context(tmp_path):
    save_checkpoint(tmp_path, TINY, trainer().snapshot())
    model = build(tmp_path, "bf16")
    generation = model.generate(model.encode("x" * 60), temperature=0.0, seed=0)
    assert len([generation.step("1") for _ in range(60)]) == 60


def test_the_corpus_is_this_pythons_library():
    text = read_corpus(100_000)
    assert len(text) == 100_000
    assert b"import" in text
    assert text == read_corpus(100_000)
