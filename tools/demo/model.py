"""A small causal language model over bytes, in the shape and with the names of a Llama checkpoint.

The same modules train (float32 master weights) and serve (bf16, or float8 blocks with scales for the linear
layers).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from receiver.quantize.fp8_block import BLOCK, expand_scale

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["BOS", "TIED", "CausalLM", "Fp8Linear", "KVCache", "ModelConfig", "load_config", "save_checkpoint"]

BOS = 256
"""The token before every text; bytes are tokens 0 to 255."""

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Names that are another's tensor: in a state dict, not in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes; the defaults give 5.5 million parameters, every linear side a multiple of 128."""

    vocab_size: int = 260
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Fp8Linear(nn.Module):
    """A linear layer without bias: float8_e4m3fn ``weight [out, in]``, float32 ``weight_scale_inv`` a block.

    The weight is expanded to bf16 in every forward pass, so what is served is what is stored.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
        grid = (-(-out_features // BLOCK), -(-in_features // BLOCK))
        self.weight_scale_inv = nn.Parameter(torch.ones(grid), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map bf16 ``[..., in]`` to bf16 ``[..., out]``."""
        return functional.linear(hidden, self._expanded())

    def _expanded(self) -> torch.Tensor:
        # The conversion torch has for float8 runs element by element. Sign and 7 bits moved to where bf16
        # has them make a number whose exponent is 120 too small (subnormals too); putting that right goes
        # into the scale, in float32 and exactly (for scales below 256, weights below 100 000), and one
        # rounding ends it.
        codes = self.weight.view(torch.int8).to(torch.int16)  # extends the sign, which the mask then keeps
        small = ((codes << 4) & -0x7810).view(torch.bfloat16).to(torch.float32)
        scale = self.weight_scale_inv * 2.0**120
        rows, columns = small.shape
        if rows % BLOCK or columns % BLOCK:
            return (small * expand_scale(scale, (rows, columns))).to(torch.bfloat16)
        blocks = small.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return (blocks * scale[:, None, :, None]).to(torch.bfloat16).view(rows, columns)


def _linear(in_features: int, out_features: int, *, scheme: str) -> nn.Module:
    if scheme == "fp8_block":
        return Fp8Linear(in_features, out_features)
    return nn.Linear(in_features, out_features, bias=False)


class RMSNorm(nn.Module):
    """Scales to unit root mean square in float32, whatever the precision outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis; shape and dtype stay."""
        return functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class KVCache:
    """Keys and values of one sequence: ``[layers, 1, kv heads, max length, head dim]`` each."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, config.max_position_embeddings)
        self.keys = torch.zeros((*shape, config.head_dim), dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, kv heads, new, head dim]`` behind ``length``; return all so far. ``length`` stays."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal attention with rotary positions; key and value heads may be fewer than query heads."""

    def __init__(self, config: ModelConfig, layer: int, *, scheme: str) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.shared = config.num_attention_heads != config.num_key_value_heads
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = _linear(config.hidden_size, queries, scheme=scheme)
        self.k_proj = _linear(config.hidden_size, keys, scheme=scheme)
        self.v_proj = _linear(config.hidden_size, keys, scheme=scheme)
        self.o_proj = _linear(queries, config.hidden_size, scheme=scheme)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], cache: KVCache | None
    ) -> torch.Tensor:
        """Map ``[batch, length, hidden]`` to the same."""
        batch, length, _ = hidden.shape
        split = (batch, length, -1, self.head_dim)
        query = _rotate(self.q_proj(hidden).view(split).transpose(1, 2), rotary)
        key = _rotate(self.k_proj(hidden).view(split).transpose(1, 2), rotary)
        value = self.v_proj(hidden).view(split).transpose(1, 2)
        if cache is not None:
            key, value = cache.append(self.layer, key, value)
        # One new position sees all that are there; several new ones come only at the start of a context.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1, enable_gqa=self.shared)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotary
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


class MLP(nn.Module):
    """The gated feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, *, scheme: str) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size, scheme=scheme)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size, scheme=scheme)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size, scheme=scheme)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., hidden]`` to the same."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, layer: int, *, scheme: str) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, scheme=scheme)
        self.mlp = MLP(config, scheme=scheme)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], cache: KVCache | None
    ) -> torch.Tensor:
        """Map ``[batch, length, hidden]`` to the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, cache)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm: everything under ``model.`` in the checkpoint."""

    def __init__(self, config: ModelConfig, *, scheme: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, scheme=scheme) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """The whole model, its output layer tied to the embedding. Float32 until ``for_serving`` builds it."""

    def __init__(self, config: ModelConfig, *, scheme: str = "bf16") -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, scheme=scheme)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings), config.rope_theta**-half)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        # Recomputed from the configuration, so not among the weights.
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin(), persistent=False)

    @classmethod
    def for_serving(cls, config: ModelConfig, *, scheme: str) -> CausalLM:
        """Build the variant to serve: bf16, linear layers in float8 under ``fp8_block``; values undefined."""
        model = cls(config, scheme=scheme).requires_grad_(requires_grad=False)
        for name, parameter in model.named_parameters():
            if parameter.dtype is torch.float32 and not name.endswith(".weight_scale_inv"):
                parameter.data = parameter.data.to(torch.bfloat16)
        return model.eval()

    def forward(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Map token ids ``[batch, length]`` to float32 logits ``[batch, length, vocab]``.

        With a cache, ``tokens`` are those that follow what it holds; batch is 1.
        """
        start = 0 if cache is None else cache.length
        hidden = self.model.embed_tokens(tokens)
        span = slice(start, start + tokens.shape[1])
        rotary = (self.cos[span].to(hidden.dtype), self.sin[span].to(hidden.dtype))
        for layer in self.model.layers:
            hidden = layer(hidden, rotary, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
            hidden = hidden[:, -1:]  # only the next token is asked for
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden))
        return logits.to(torch.float32)

    def initialise(self, seed: int) -> CausalLM:
        """Draw all matrices from a normal distribution of deviation 0.02, from ``seed`` alone."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
        return self


def load_config(checkpoint: Path) -> ModelConfig:
    """Read the sizes from a checkpoint directory's ``config.json``."""
    given = json.loads((checkpoint / "config.json").read_bytes())
    return ModelConfig(**{field.name: given[field.name] for field in fields(ModelConfig)})


def save_checkpoint(
    directory: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, shards: int = 2
) -> None:
    """Write a Hugging Face directory: bf16 shards of about one size, their index, and the JSON files.

    ``tensors`` is a snapshot; the tied output layer in it is left out, as ``tie_word_embeddings`` says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in TIED}
    total = sum(tensor.nbytes for tensor in kept.values())
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    written = 0
    for name, tensor in kept.items():
        files[min(written * shards // max(total, 1), shards - 1)][name] = tensor
        written += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(content, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", _hf_config(config))
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS, "do_sample": True})
    tokenizer = {"tokenizer_class": "ByteTokenizer", "bos_token": "<s>", "model_max_length": 1024}
    _write_json(directory / "tokenizer_config.json", tokenizer)


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return asdict(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": config.head_dim,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": None,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
