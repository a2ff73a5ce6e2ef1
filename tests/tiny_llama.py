"""A tiny random Llama checkpoint that vLLM serves, and later versions of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 4096
END = 2  # the token that ends an answer, and that the model never says by itself
_HIDDEN = 256
_LAYERS = 4
_HEADS = 8
_KEY_HEADS = 4
_INTERMEDIATE = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KEY_HEADS,
    "head_dim": _HIDDEN // _HEADS,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": END,
}


def random_state(seed: int) -> dict[str, torch.Tensor]:
    """Weights with which neighbouring tokens differ, so that greedy decoding goes on without repeating at once."""
    random = torch.Generator().manual_seed(seed)
    head = _HIDDEN // _HEADS
    linear = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KEY_HEADS * head, _HIDDEN),
        "self_attn.v_proj": (_KEY_HEADS * head, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, _HIDDEN), "lm_head.weight": (VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linear.items()}
    state = {name: torch.randn(shape, generator=random) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    state["model.embed_tokens.weight"] *= _HIDDEN**0.5
    state["lm_head.weight"][END] = 0.0  # the likeliest of so many others is far above that
    norms = [f"model.layers.{layer}.{kind}" for layer in range(_LAYERS) for kind in _NORMS] + ["model.norm"]
    state |= {f"{name}.weight": torch.ones(_HIDDEN) for name in norms}
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


_NORMS = ("input_layernorm", "post_attention_layernorm")


def next_state(state: dict[str, torch.Tensor], seed: int, *, share: float = 0.02) -> dict[str, torch.Tensor]:
    """What an optimizer step leaves: a share of all elements moved a little."""
    random = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in state.items():
        moved = torch.rand(tensor.shape, generator=random) < share
        after[name] = torch.where(moved, tensor.float() * 1.25 + 0.02, tensor.float()).to(tensor.dtype)
    return after


_ROW = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_CONFIG = CONFIG | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROW, "input_activations": _TOKEN}},
        "ignore": ["lm_head"],
    }
}


def int8_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with linear layers in int8 and a scale for each row, as compressed-tensors has them."""
    made = {}
    for name, tensor in state.items():
        if "_proj." in name:
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
            made[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            made[f"{name}_scale"] = scale
        else:
            made[name] = tensor
    return made


def write_checkpoint(path: Path, state: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Path:
    """Write a directory as the Hugging Face hub has them, tokenizer included: token 7 is the word ``t7``."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{number}": number for number in range(3, VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint directory of one file."""
    return load_file(path / "model.safetensors")
