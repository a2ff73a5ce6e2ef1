from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.errors import EngineError, UsageError
from receiver.quantize import TensorSpec, make_scheme, register_scheme, scheme_names
from receiver.quantize.bf16 import Bf16
from receiver.quantize.fp8_block import FP8_MAX, dequantize_block

NAME = "model.layers.0.mlp.up_proj.weight"


def float8_magnitudes() -> np.ndarray:
    """The 127 finite magnitudes of float8_e4m3fn by their codes 0..126, from the format's definition."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7.0)
    return np.where(exponent > 0, normal, mantissa / 8.0 * 2.0**-6)


def reference_float8(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest float8 by looking both neighbours up; of two as near, the even code."""
    table = float8_magnitudes()
    magnitude = np.minimum(np.abs(values.astype(np.float64)), FP8_MAX)
    above = np.clip(np.searchsorted(table, magnitude), 0, 126)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    choose_up = (up < down) | ((up == down) & (above % 2 == 0))
    code = np.where(choose_up, above, below)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def reference(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize float32 ``[n, k]`` block by block in NumPy: codes ``[n, k]`` and float32 scales."""
    rows, columns = values.shape
    codes = np.zeros(values.shape, np.uint8)
    scales = np.ones((-(-rows // 128), -(-columns // 128)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            ratio = np.abs(values[at]).max() / np.float32(448)
            scales[i, j] = ratio if ratio > 0 else np.float32(1)
            codes[at] = reference_float8((values[at] / scales[i, j]).astype(np.float32))
    return codes, scales


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = make_scheme("fp8_block").quantize(NAME, values)
    assert list(out) == [NAME, NAME + "_scale_inv"]
    return out[NAME], out[NAME + "_scale_inv"]


def assert_equals_reference(values: torch.Tensor) -> None:
    weight, scale = quantized(values)
    codes, scales = reference(values.to(torch.float32).numpy())
    np.testing.assert_array_equal(scale.numpy().view(np.uint32), scales.view(np.uint32))
    np.testing.assert_array_equal(weight.view(torch.uint8).numpy(), codes)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 12),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_every_shape_and_magnitude_equals_the_reference_bit_for_bit(rows, columns, seed, exponent, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, columns), generator=generator) * 2.0**exponent
    # A heavy tail, so that small elements share a block with large ones and reach float8's subnormals.
    values *= torch.exp2(torch.randint(-14, 1, values.shape, generator=generator).to(torch.float32))
    assert_equals_reference(values.to(dtype))


def test_every_bf16_bit_pattern_equals_the_reference():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[torch.isfinite(patterns)]
    # Sorted by magnitude, so that blocks see like with like and subnormal scales get blocks of their own.
    ordered = finite[finite.to(torch.float32).abs().argsort(stable=True)].reshape(-1, 255)
    assert_equals_reference(ordered)
    assert_equals_reference(ordered.T.contiguous())


def test_ties_go_to_even():
    # 448 fixes the scale at 1, so the rest are float8 midpoints.
    values = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]])
    weight, scale = quantized(values)
    assert scale.item() == 1.0
    assert weight.to(torch.float32).tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8]]


def test_a_block_of_zeros_has_scale_one_and_stays_zero():
    values = torch.zeros((130, 260), dtype=torch.bfloat16)
    values[0, 0] = 1.0
    weight, scale = quantized(values)
    assert scale.shape == (2, 3)
    assert scale.flatten()[1:].tolist() == [1.0] * 5
    assert torch.equal(dequantize_block(weight, scale)[1:], torch.zeros((129, 260)))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 200), columns=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_dequantized_values_are_within_half_a_float8_step(rows, columns, seed):
    values = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    weight, scale = quantized(values)
    exact = values.to(torch.float32)
    error = (dequantize_block(weight, scale) - exact).abs()
    steps = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    # Three mantissa bits: 2^-4 of a normal value, half of 2^-9 scales below them; and float32's own rounding.
    assert bool((error <= torch.maximum(exact.abs() * 2**-4, steps * 2**-10) * (1 + 1e-5)).all())


@pytest.mark.parametrize("peak", [3.3895e38, 1e-38, 1e-40, 2.0**-149])
def test_extreme_finite_values_never_become_nan(peak):
    values = torch.full((3, 5), peak, dtype=torch.float32)
    weight, scale = quantized(values)
    assert bool(torch.isfinite(weight.to(torch.float32)).all())
    assert bool((torch.isfinite(scale) & (scale > 0)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    values = torch.zeros((129, 4), dtype=torch.bfloat16)
    values[128, 3] = bad
    with pytest.raises(EngineError, match="NaN or infinity") as caught:
        make_scheme("fp8_block").quantize(NAME, values)
    assert caught.value.key == NAME


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_other_tensors_are_left_alone(name):
    tensor = torch.ones((4, 4), dtype=torch.bfloat16)
    assert make_scheme("fp8_block").quantize(name, tensor)[name] is tensor


@pytest.mark.parametrize(
    "tensor", [torch.ones(4), torch.ones((2, 2, 2)), torch.ones((2, 2), dtype=torch.int32)], ids=str
)
def test_only_floating_matrices_are_quantized(tensor):
    assert make_scheme("fp8_block").quantize(NAME, tensor)[NAME] is tensor


def test_the_patterns_to_keep_can_be_chosen():
    scheme = make_scheme("fp8_block", keep=("*down_proj*",))
    matrix = torch.ones((4, 4), dtype=torch.bfloat16)
    assert len(scheme.quantize("lm_head.weight", matrix)) == 2
    assert len(scheme.quantize("a.down_proj.weight", matrix)) == 1


@given(rows=st.integers(0, 300), columns=st.integers(0, 300), name=st.sampled_from([NAME, "lm_head.weight"]))
@settings(max_examples=30, deadline=None)
def test_the_layout_foretells_what_quantize_returns(rows, columns, name):
    tensor = torch.ones((rows, columns), dtype=torch.bfloat16)
    for scheme in map(make_scheme, ("bf16", "fp8_block")):
        foretold = scheme.layout(name, TensorSpec(tensor.dtype, tuple(tensor.shape)))
        got = scheme.quantize(name, tensor)
        assert foretold == {key: TensorSpec(t.dtype, tuple(t.shape)) for key, t in got.items()}


def test_bf16_leaves_every_precision_as_it_is():
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        tensor = torch.ones((2, 2), dtype=dtype)
        assert make_scheme("bf16").quantize("x.weight", tensor)["x.weight"] is tensor


def test_schemes_are_known_by_name():
    assert {"bf16", "fp8_block"} <= set(scheme_names())
    with pytest.raises(UsageError, match="no quantization scheme") as caught:
        make_scheme("int3")
    assert "fp8_block" in caught.value.hint
    with pytest.raises(UsageError, match="already exists"):
        register_scheme("bf16", Bf16)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, receiver.quantize, receiver.engines\nprint([m for m in ('torch', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
