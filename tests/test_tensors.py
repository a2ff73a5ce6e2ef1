from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import safetensors_file
from safetensors.torch import save
from torch._subclasses.fake_tensor import FakeTensorMode

from deltastore.checkpoint import open_checkpoint
from deltastore.container import parse_header
from deltastore.errors import PublishError
from deltastore.snapshot import Schema, TensorSpec
from deltastore.tensors import (
    HostBytes,
    TensorInput,
    checkpoint_tensors,
    is_tied_alias,
    is_tied_partner,
    named_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY = Schema([])

TORCH_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
if hasattr(torch, "float8_e8m0fnu"):
    TORCH_DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"

NUMPY_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def taken(value: Any, name: str = "w") -> TensorInput:
    """Take one tensor; a stream that knows it takes the same bytes, over a shorter way."""
    (found,) = named_tensors({name: value}, EMPTY)
    (known,) = named_tensors({name: value}, Schema([found.spec]))
    assert known.spec == found.spec
    assert content(known) == content(found)
    return found


def content(tensor: TensorInput) -> bytes:
    """Return all bytes, and check that every range of them is the same range."""
    size = tensor.spec.nbytes
    whole = tensor.bytes(0, size)
    assert whole.dtype == np.uint8
    assert whole.shape == (size,)
    data = whole.tobytes()
    for start, end in ((0, 1), (size // 3, size // 2), (1, size), (size - 1, size), (size, size)):
        if 0 <= start <= end <= size:
            assert np.asarray(tensor.bytes(start, end)).tobytes() == data[start:end]
    return data


def as_the_library_saves(value: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = save({"w": value.detach().resolve_conj().resolve_neg().contiguous().clone()})
    (placed,) = parse_header(data, key="w").tensors
    return placed.spec.dtype, placed.spec.shape, data[placed.start : placed.end]


def assert_taken_as_saved(value: torch.Tensor) -> None:
    found = taken(value)
    assert (found.spec.dtype, found.spec.shape, content(found)) == as_the_library_saves(value)


def bits_of(dtype: torch.dtype, count: int = 48) -> torch.Tensor:
    """Return every kind of bit pattern as a dtype: NaNs and negative zeros too, but only 0 and 1 as booleans."""
    raw = torch.from_numpy(np.random.default_rng(5).integers(0, 256, count * dtype.itemsize, np.uint8))
    raw[-dtype.itemsize :] = 0xFF
    raw[-1] = 0x80
    return (raw % 2).view(dtype) if dtype == torch.bool else raw.view(dtype)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_tensors_of_every_dtype_are_taken_bit_for_bit(dtype: torch.dtype) -> None:
    value = bits_of(dtype).reshape(4, 3, 4)
    found = taken(value)
    assert (found.spec.dtype, found.spec.shape) == (TORCH_DTYPES[dtype], (4, 3, 4))
    assert content(found) == value.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_scalars_and_empty_tensors_of_every_dtype_are_taken(dtype: torch.dtype) -> None:
    scalar = bits_of(dtype)[1].clone()
    found = taken(scalar)
    assert (found.spec.dtype, found.spec.shape) == (TORCH_DTYPES[dtype], ())
    assert content(found) == scalar.reshape(1).view(torch.uint8).numpy().tobytes()
    for shape in ((0,), (3, 0, 2)):
        found = taken(torch.empty(shape, dtype=dtype))
        assert (found.spec.dtype, found.spec.shape) == (TORCH_DTYPES[dtype], shape)
        assert content(found) == b""


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_layouts_in_memory_do_not_matter_for_any_dtype(dtype: torch.dtype) -> None:
    value = bits_of(dtype, 96).reshape(8, 12)
    raw = value.view(torch.uint8).reshape(8, 12, dtype.itemsize).numpy()
    layouts = {
        "transposed": (value.t(), raw.transpose(1, 0, 2)),
        "offset": (value[3:], raw[3:]),
        "columns": (value[:, 2:7], raw[:, 2:7]),
        "strided": (value[::2, ::3], raw[::2, ::3]),
        "expanded": (value[:1].expand(5, 12), np.broadcast_to(raw[:1], (5, *raw.shape[1:]))),
        "flat": (value.flatten()[5:], raw.reshape(-1, dtype.itemsize)[5:]),
    }
    for name, (view, expected) in layouts.items():
        found = taken(view)
        assert found.spec.shape == tuple(view.shape), name
        assert content(found) == np.ascontiguousarray(expected).tobytes(), name


def test_channels_last_is_taken_in_row_major_order() -> None:
    value = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    assert content(taken(value.to(memory_format=torch.channels_last))) == value.numpy().tobytes()


def test_conjugated_and_negated_views_are_taken_as_their_values() -> None:
    value = torch.complex(torch.arange(6.0), torch.arange(6.0) + 0.5).reshape(2, 3)
    for view in (value.conj(), value.conj().t(), value.mH, value.conj()[1:], value.conj().imag, value.imag, value.real):
        assert_taken_as_saved(view)
    negated = torch._neg_view(torch.arange(6.0))
    assert negated.is_neg()
    assert content(taken(negated)) == (-np.arange(6, dtype="<f4")).tobytes()
    assert content(taken(value.conj())) == value.numpy().conj().tobytes()
    assert content(taken(value.conj().imag)) == np.ascontiguousarray(-value.numpy().imag).tobytes()


def test_parameters_are_taken_without_their_gradients() -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    found = {tensor.spec.name: tensor for tensor in named_tensors(layer.named_parameters(), EMPTY)}
    assert sorted(found) == ["bias", "weight"]
    assert content(found["weight"]) == layer.weight.detach().view(torch.uint8).numpy().tobytes()
    assert_taken_as_saved(layer.weight)
    assert_taken_as_saved(layer.weight.t())
    result = layer.weight * 2  # has a graph behind it
    assert_taken_as_saved(result)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="This torch has no float4.")
def test_float4_counts_pairs_in_torch_and_single_values_in_the_stream() -> None:
    raw = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    found = taken(raw.view(torch.float4_e2m1fn_x2))
    assert (found.spec.dtype, found.spec.shape, found.spec.nbytes) == ("F4", (2, 3, 8), 24)
    assert content(found) == raw.numpy().tobytes()


def test_contiguous_memory_is_viewed_and_not_copied() -> None:
    value = torch.zeros(8, dtype=torch.float32)
    found = taken(value)
    value[0] = 1.0
    assert content(found) == value.numpy().tobytes()
    array = np.zeros(8, np.float32)
    found = taken(array)
    array[0] = 1.0
    assert content(found) == array.tobytes()


def test_plain_memory_of_a_known_tensor_is_viewed_where_it_lies_and_lives_as_long_as_the_view() -> None:
    value = torch.arange(100, dtype=torch.float32)[10:60]
    expected = value.numpy().tobytes()
    (found,) = named_tensors({"w": value}, Schema([TensorSpec("w", "F32", (50,))]))
    assert isinstance(found.bytes, HostBytes)
    view = found.bytes(8, 200)
    assert (view.ctypes.data, view.flags.writeable) == (value.data_ptr() + 8, False)
    del value, found
    gc.collect()
    assert view.tobytes() == expected[8:200]


@pytest.mark.parametrize("loss", ["freed", "replaced"])
def test_memory_that_is_lost_before_it_is_read_is_a_publish_error(loss: str) -> None:
    value = torch.zeros(50)
    (found,) = named_tensors({"w": value}, Schema([TensorSpec("w", "F32", (50,))]))
    if loss == "freed":
        value.untyped_storage().resize_(0)
    else:
        value.set_(torch.ones(50))
    with pytest.raises(PublishError, match="freed or replaced") as raised:
        found.bytes(0, 200)
    assert raised.value.tensors == ("w",)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_arrays_of_every_dtype_and_layout_are_taken_bit_for_bit(name: str) -> None:
    raw = np.random.default_rng(6).integers(0, 256, 48 * np.dtype(name).itemsize, np.uint8)
    value = (raw % 2 if name == "bool" else raw).view(name).reshape(6, 8)
    for view in (value, value.T, value[2:], value[::2, 1::3], np.asfortranarray(value), value[3, 3:4].reshape(())):
        found = taken(view)
        assert (found.spec.dtype, found.spec.shape) == (NUMPY_DTYPES[name], view.shape)
        assert content(found) == view.tobytes()
    found = taken(np.empty((0, 4), name))
    assert (found.spec.dtype, found.spec.shape, content(found)) == (NUMPY_DTYPES[name], (0, 4), b"")


@given(
    st.sampled_from(sorted(NUMPY_DTYPES)),
    st.lists(st.integers(0, 4), min_size=0, max_size=4),
    st.data(),
)
def test_any_permuted_numpy_view_is_taken_in_row_major_order(name: str, shape: list[int], data: st.DataObject) -> None:
    value = np.arange(int(np.prod(shape))).astype(name).reshape(shape)
    view = value.transpose(data.draw(st.permutations(range(len(shape)))))
    assert content(taken(view)) == view.tobytes()


def test_a_scalar_of_numpy_is_taken_with_the_shape_of_none() -> None:
    assert taken(np.array(1.5, np.float32)).spec.shape == ()


@pytest.mark.parametrize("dtype", [">f4", ">u2", ">i8", ">c8", ">f8"])
def test_big_endian_arrays_are_refused(dtype: str) -> None:
    for shape in ((3,), (), (0,)):
        with pytest.raises(PublishError, match="big-endian") as caught:
            taken(np.zeros(shape, dtype))
        assert caught.value.tensors == ("w",)
    assert content(taken(np.zeros(3, ">u1"))) == bytes(3)


class Sharded:
    """Looks like a DTensor: a tensor that this rank holds only a part of."""

    dtype, shape = torch.float32, (4,)

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("Gathering is a collective; it is not started behind the trainer's back.")

    def detach(self) -> Sharded:
        raise AssertionError

    def data_ptr(self) -> int:
        raise AssertionError


REFUSED = {
    "sharded": Sharded(),
    "none": None,
    "number": 1.0,
    "list": [1.0, 2.0],
    "bytes": b"1234",
    "numpy scalar": np.float32(1.0),
    "dtype": torch.float32,
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "complex128": torch.zeros(3, dtype=torch.complex128),
    "numpy complex128": np.zeros(3, np.complex128),
    "numpy longdouble": np.zeros(3, np.longdouble),
    "numpy objects": np.array([None, "x"], dtype=object),
    "numpy strings": np.array(["x", "yy"]),
    "numpy bytes": np.array([b"x"]),
    "numpy dates": np.array(["2026-01-01"], "datetime64[D]"),
    "numpy records": np.zeros(3, [("a", "f4"), ("b", "i4")]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_tensor_of_a_known_dtype_is_refused_by_name(kind: str) -> None:
    with pytest.raises(PublishError) as caught:
        taken(REFUSED[kind], "layers.0.weight")
    assert caught.value.tensors == ("layers.0.weight",)
    assert "layers.0.weight" in str(caught.value)


def test_a_sharded_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(PublishError, match="sharded") as caught:
        taken(Sharded())
    assert "full_tensor" in (caught.value.hint or "")


def test_quantized_tensors_are_refused() -> None:
    try:
        value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    except (RuntimeError, UserWarning, DeprecationWarning):
        pytest.skip("This torch quantizes no more.")
    with pytest.raises(PublishError):
        taken(value)


def shrunk(value: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor whose storage was cut to so many bytes; its shape stays, as in sharded training (FSDP)."""
    value.untyped_storage().resize_(size)
    return value


def escaped(transform: Any, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a function sees under one of torch's transforms."""
    seen: list[torch.Tensor] = []
    transform(lambda given: (seen.append(given), given)[1])(value)
    return seen[0]


WITHOUT_BYTES: dict[str, Callable[[], Any]] = {
    "freed": lambda: shrunk(torch.ones(10), 0),
    "freed parameter": lambda: shrunk(torch.nn.Parameter(torch.ones(10)), 0),
    "half freed": lambda: shrunk(torch.ones(10), 20),
    "freed but for an offset": lambda: shrunk(torch.ones(20)[10:], 40),
    "freed, with strides": lambda: shrunk(torch.ones(10, 10)[:, 0], 36),
    "freed, transposed": lambda: shrunk(torch.ones(2, 5).t(), 0),
    "freed, complex": lambda: shrunk(torch.ones(10, dtype=torch.complex64), 0),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(10)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(10)),
    "zeros of automatic differentiation": lambda: torch._efficientzerotensor((10,)),
    "not initialized": torch.nn.parameter.UninitializedParameter,
    "batched": lambda: escaped(torch.func.vmap, torch.ones(3, 10)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WITHOUT_BYTES)
def test_a_tensor_whose_bytes_cannot_be_had_is_refused_by_name(kind: str) -> None:
    for name in ("expected", "unknown"):
        with pytest.raises(PublishError, match=name) as caught:
            list(named_tensors({name: WITHOUT_BYTES[kind]()}, Schema([TensorSpec("expected", "F32", (10,))])))
        assert caught.value.tensors == (name,)


# Names.

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.w", "vision.module.conv.weight"]
SCHEMA = Schema(TensorSpec(name, "F32", (1,)) for name in NAMES)
ONE = np.zeros(1, np.float32)


def renamed(name: str) -> str:
    (found,) = named_tensors([(name, ONE)], SCHEMA)
    return found.spec.name


@pytest.mark.parametrize(
    "prefix",
    ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module.", "module.module."],
)
@pytest.mark.parametrize("name", NAMES[:2])
def test_wrappers_prefixes_are_taken_off(prefix: str, name: str) -> None:
    assert renamed(prefix + name) == name


def test_wrappers_within_a_name_are_taken_out() -> None:
    inner = "model.layers.0._checkpoint_wrapped_module.mlp._fsdp_wrapped_module.w"
    assert renamed(inner) == "model.layers.0.mlp.w"
    assert renamed(f"_orig_mod.{inner}") == "model.layers.0.mlp.w"


def test_a_component_that_the_stream_has_stays() -> None:
    assert renamed("vision.module.conv.weight") == "vision.module.conv.weight"


def test_a_name_that_the_stream_does_not_have_stays_as_it_was() -> None:
    assert renamed("module.model.layers.1.mlp.w") == "module.model.layers.1.mlp.w"
    assert renamed("module_model.layers.0.mlp.w") == "module_model.layers.0.mlp.w"
    assert renamed("model.layers.0.mlp.w_orig_mod") == "model.layers.0.mlp.w_orig_mod"


def test_a_tied_alias_loses_its_wrappers_though_the_stream_does_not_have_it() -> None:
    assert renamed("module.lm_head.weight") == "lm_head.weight"
    assert renamed("_orig_mod.lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight", "embed_out.weight", "decoder.weight"])
def test_output_heads_are_tied_aliases(name: str) -> None:
    assert is_tied_alias(name)
    assert not is_tied_partner(name)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight", "word_embeddings.weight"])
def test_input_embeddings_are_tied_partners(name: str) -> None:
    assert is_tied_partner(name)
    assert not is_tied_alias(name)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.w", "lm_head.bias", "xlm_head.weight", "lm_head.weight.scale", "embed.bias", "weight"]
)
def test_other_names_are_neither(name: str) -> None:
    assert not is_tied_alias(name)
    assert not is_tied_partner(name)


def test_pairs_and_mappings_are_taken_one_at_a_time_and_in_order() -> None:
    asked = []

    def pairs() -> Any:
        for name in ("b", "a"):
            asked.append(name)
            yield name, ONE

    tensors = named_tensors(pairs(), EMPTY)
    assert asked == []
    assert next(tensors).spec.name == "b"
    assert asked == ["b"]
    assert [tensor.spec.name for tensor in tensors] == ["a"]
    assert [tensor.spec.name for tensor in named_tensors({"y": ONE, "x": ONE}, EMPTY)] == ["x", "y"]  # a schema's order


def test_the_tensors_of_a_checkpoint_are_its_own(tmp_path: Any) -> None:
    tensors = {"a": ("BF16", (3,), b"abcdef"), "f": ("F4", (2, 2), b"xy"), "e": ("F32", (0,), b"")}
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(tensors))
    found = {tensor.spec.name: tensor for tensor in checkpoint_tensors(open_checkpoint(tmp_path))}
    assert sorted(found) == sorted(tensors)
    for name, (dtype, shape, data) in tensors.items():
        assert (found[name].spec.dtype, found[name].spec.shape) == (dtype, shape)
        assert content(found[name]) == data


def test_a_name_that_the_format_cannot_hold_is_a_publish_error_that_names_it() -> None:
    schema = Schema([TensorSpec("w", "F32", (1,))])
    with pytest.raises(PublishError) as caught:
        list(named_tensors({"a\nb": np.zeros(1, np.float32)}, schema))
    assert caught.value.tensors == ("a\nb",)


@pytest.mark.parametrize("given", [None, 7, [("w",)], ["w"], [("w", ONE, ONE)], [None]])
def test_what_is_no_pairs_at_all_is_a_publish_error(given: object) -> None:
    with pytest.raises(PublishError):
        list(named_tensors(given, EMPTY))  # type: ignore[arg-type]
