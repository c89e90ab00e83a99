"""The tensor itself: what it shows, how it is built, copied and pickled, and what it refuses."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import logging
import operator
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_module_tensor_to_device
from covering import by_default
from fresh_process import run_fresh
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from weights import FORMS, KINDS, LAYOUTS, quantized_weight, random_weight, same_bytes, same_stored, weight_of

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError, UnsupportedError
from hf_trainweights.formats import FORMATS
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.tensor import dispatch
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.tensor.quantized_tensor import rebuild_quantized_tensor

every_form = pytest.mark.parametrize("form", FORMS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def parameter(form: str = "int8", layout: str = "matrix") -> nn.Parameter:
    return nn.Parameter(quantized_weight(form, layout), requires_grad=False)


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


# What it shows


@pytest.mark.slow
@every_form
def test_shows_what_the_float_weight_shows(form: str) -> None:
    for layout in LAYOUTS:
        shape, _ = LAYOUTS[layout]
        weight = quantized_weight(form, layout, torch.bfloat16)
        dense = weight.dequantize()
        assert type(dense) is Tensor
        assert weight.shape == dense.shape == shape
        assert weight.dtype == dense.dtype == torch.bfloat16
        assert weight.stride() == dense.stride()
        assert weight.is_contiguous() == dense.is_contiguous()
        assert (weight.device, weight.layout, weight.numel()) == (dense.device, dense.layout, dense.numel())
        assert weight.is_floating_point()


@pytest.mark.slow
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.is_import_only])
def test_quantize_stores_what_the_format_makes_of_the_weight(form: str) -> None:
    for dtype in FLOAT_DTYPES:
        for layout in LAYOUTS:
            shape, transposed = LAYOUTS[layout]
            weight = random_weight(*shape, dtype=dtype)
            stored = weight.mT if transposed else weight
            quantized = QuantizedTensor.quantize(weight, FORMS[form], transposed)
            expected = FORMS[form].quantize(stored)
            assert all(same_bytes(tensor, expected[name]) for name, tensor in quantized.tensors.items())
            dense = FORMS[form].dequantize(expected, stored.shape, dtype)
            assert torch.equal(quantized.dequantize(), dense.mT if transposed else dense)


def test_quantize_neither_changes_nor_keeps_the_weight() -> None:
    weight = random_weight(6, 128).requires_grad_()
    before = weight.detach().clone()
    quantized = QuantizedTensor.quantize(weight, FORMS["int8"])
    codes = quantized.qdata.clone()
    assert torch.equal(weight, before)
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(quantized.qdata, codes)
    assert not quantized.requires_grad


def test_quantize_takes_the_fallback_where_the_shape_does_not_fit() -> None:
    weight = QuantizedTensor.quantize(random_weight(4, 100), FORMS["int4"])
    assert weight.format == FORMS["int8"]
    assert weight.shape == (4, 100)


@pytest.mark.slow
@every_form
def test_empty_and_tiny_weights_survive(form: str) -> None:
    for shape in ((0, 128), (4, 0), (0, 0), (2, 0, 128), (1, 1)):
        weight = weight_of(FORMS[form].fallback(shape), shape)
        assert weight.dequantize().shape == shape
        assert pickle.loads(pickle.dumps(weight)).shape == shape
        assert (torch.ones(2, shape[-1]) @ weight.mT).shape == (*shape[:-2], 2, shape[-2])


def test_quantize_names_the_weight_it_cannot_quantize() -> None:
    with pytest.raises(QuantizationError, match=r"layers\.0\.q_proj: expected finite values"):
        QuantizedTensor.quantize(torch.full((4, 8), torch.nan), FORMS["int8"], name="layers.0.q_proj")


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, torch.float64], ids=str)
def test_dequantize_returns_a_new_tensor_of_the_dtype_asked_for(dtype: torch.dtype) -> None:
    weight = quantized_weight()
    assert weight.dequantize(dtype).dtype == dtype
    weight.dequantize(dtype).zero_()
    assert weight.dequantize(dtype).abs().sum() > 0


def test_repr_and_the_key_of_compiled_code_tell_weights_apart() -> None:
    weights = [
        quantized_weight(),
        quantized_weight("int8_g32"),
        quantized_weight("int4"),
        quantized_weight(layout="experts"),
        quantized_weight(layout="matrix_transposed"),
        quantized_weight(dtype=torch.bfloat16),
    ]
    assert len({repr(weight) for weight in weights}) == len(weights)
    assert len({weight._stable_hash_for_caching() for weight in weights}) == len(weights)
    assert repr(weights[2]) == "QuantizedTensor(int4 g128, shape=(6, 128), dtype=torch.float32, device=cpu)"


def test_stored_bytes_are_those_of_the_stored_tensors() -> None:
    weight = quantized_weight("int4_g32", dtype=torch.bfloat16)
    assert weight.stored_bytes == 6 * 128 // 2 + 6 * 4 * 2


# How it is built


def test_the_constructor_keeps_the_tensors_it_is_given() -> None:
    weight = quantized_weight()
    built = QuantizedTensor(weight.tensors, weight.format, weight.stored_shape, torch.float16)
    assert built.qdata is weight.qdata
    assert built.scale is weight.scale
    assert built.dtype == torch.float16


@pytest.mark.parametrize(
    "change",
    [
        {"scale": None},
        {"qdata": torch.zeros(6, 127, dtype=torch.int8)},
        {"qdata": torch.zeros(6, 128, dtype=torch.uint8)},
        {"scale": torch.zeros(6)},
        {"scale": torch.zeros(6, 1, dtype=torch.int32)},
    ],
    ids=["missing", "shape", "dtype", "scale shape", "scale dtype"],
)
def test_the_constructor_refuses_tensors_that_do_not_fit(change: dict[str, Tensor | None]) -> None:
    weight = quantized_weight()
    tensors = {name: tensor for name, tensor in (weight.tensors | change).items() if tensor is not None}
    with pytest.raises(CorruptFileError, match=r"weight: expected (qdata|scale) to be torch\.\w+ of shape \(6, "):
        QuantizedTensor(tensors, weight.format, weight.stored_shape, torch.float32)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_class_wraps_a_ready_weight_as_accelerate_does_on_a_move(requires_grad: bool) -> None:
    weight = parameter("int4")
    moved = type(weight)(weight.detach(), requires_grad=requires_grad)
    assert isinstance(moved, nn.Parameter)
    assert type(moved) is QuantizedTensor
    assert not moved.requires_grad
    assert moved.qdata is weight.qdata
    assert same_stored(moved, weight)


def test_the_class_wraps_a_float_weight_as_a_plain_parameter() -> None:
    dense = random_weight(4, 8)
    wrapped = QuantizedTensor(dense, requires_grad=True)
    assert type(wrapped) is nn.Parameter
    assert wrapped.requires_grad
    assert wrapped.data_ptr() == dense.data_ptr()


@pytest.mark.slow
@every_form
def test_flattening_round_trips(form: str) -> None:
    for layout in LAYOUTS:
        weight = quantized_weight(form, layout, torch.float16)
        names, metadata = weight.__tensor_flatten__()
        assert is_traceable_wrapper_subclass(weight)
        inner = {name: getattr(weight, name) for name in names}
        assert all(type(tensor) is Tensor for tensor in inner.values())
        assert hash(metadata) == hash(weight.detach().__tensor_flatten__()[1])
        rebuilt = QuantizedTensor.__tensor_unflatten__(inner, metadata, weight.size(), weight.stride())
        assert same_stored(rebuilt, weight)
        assert all(getattr(rebuilt, name) is tensor for name, tensor in inner.items())


# Parameters, gradients, assignment


def test_no_way_of_making_a_parameter_lets_it_take_a_gradient() -> None:
    weight = quantized_weight()
    assert not nn.Parameter(weight).requires_grad
    assert not nn.Parameter(weight, requires_grad=True).requires_grad
    assert weight.requires_grad_(True) is weight
    assert not weight.requires_grad
    layer = nn.Linear(128, 6)
    layer.weight = nn.Parameter(weight)
    with pytest.warns(UserWarning, match=r"stays frozen.*modules_to_not_convert"):
        layer.requires_grad_(True)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad


def test_requires_grad_may_be_set_to_false_only() -> None:
    weight = parameter()
    weight.requires_grad = False
    with pytest.raises(UnsupportedError, match=r"requires_grad: expected False .* Train an adapter"):
        weight.requires_grad = True
    assert not weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_data_can_be_replaced_by_another_quantized_weight(dtype: torch.dtype) -> None:
    weight, other = parameter(), quantized_weight("int4", seed=1).to(dtype)
    weight.data = other
    assert isinstance(weight, nn.Parameter)
    assert same_stored(weight, other)
    assert weight.qdata is other.qdata
    assert weight.__tensor_flatten__() == other.__tensor_flatten__()  # a compiler rebuilds it from that
    weight.data = weight.data.to(torch.float32)
    assert torch.equal(weight.dequantize(), other.dequantize(torch.float32))


def test_data_cannot_be_replaced_by_a_float_weight() -> None:
    weight = parameter()
    before = weight.dequantize()
    with pytest.raises(UnsupportedError, match=r"data: expected an op that leaves the quantized weight as it is"):
        weight.data = torch.zeros(6, 128)
    assert torch.equal(weight, before)


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "__setitem__": lambda w: w.__setitem__(0, 1.0),
    "mul_": lambda w: w.mul_(2),
    "add_": lambda w: w.__iadd__(torch.ones(6, 128)),
    "addmm_": lambda w: w.addmm_(torch.ones(6, 2), torch.ones(2, 128)),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(1),
    "normal_": lambda w: nn.init.normal_(w),
    "uniform_": lambda w: nn.init.kaiming_uniform_(w),
    "clamp_": lambda w: w.clamp_(0),
    "set_": lambda w: w.set_(torch.ones(1)),
    "resize_": lambda w: w.resize_(1),
    "index_put_": lambda w: w.index_put_((torch.tensor([0]),), torch.ones(128)),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones(6, 128, dtype=torch.bool), 0.0),
    "embedding_renorm_": lambda w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
    "add.out": lambda w: torch.add(torch.ones(6, 128), 1, out=w),
    "_foreach_mul_": lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("wrap", [lambda w: w, nn.Parameter], ids=["tensor", "parameter"])
def test_in_place_ops_raise_by_name_and_change_nothing(name: str, wrap: Callable[[Tensor], Tensor]) -> None:
    weight = wrap(quantized_weight())
    before = weight.dequantize()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=rf"{name}.*: expected an op that leaves the quantized"):
        IN_PLACE[name](weight)
    assert torch.equal(weight.dequantize(), before)


def test_a_quantized_weight_may_be_read_by_an_in_place_op_on_another() -> None:
    weight, dense = quantized_weight(), torch.ones(6, 128)
    dense += weight
    assert torch.equal(dense, 1 + weight.dequantize())


# Addresses


def test_data_ptr_is_that_of_the_stored_weight() -> None:
    first, second = parameter(), parameter()
    assert first.data_ptr() == first.detach().data_ptr() == first.t().data_ptr() == first.data.data_ptr()
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() != first.clone().data_ptr()
    assert first.data_ptr() not in {first.qdata.data_ptr()}
    assert first.data_ptr() != 0
    assert {first.data_ptr(): 1, 0: 2}[first.detach().data_ptr()] == 1


def test_accelerate_finds_the_tied_weights_and_no_others() -> None:
    # With data_ptr() == 0 for every weight, each would be replaced by the first that was moved.
    first, tied, other = nn.Linear(128, 6), nn.Linear(128, 6), nn.Linear(128, 6)
    first.weight = tied.weight = parameter()
    other.weight = nn.Parameter(quantized_weight(seed=1))
    values, tied_params_map = [layer.weight for layer in (first, tied, other)], {first.weight.data_ptr(): {}}
    for layer, value in zip((first, tied, other), values, strict=True):
        set_module_tensor_to_device(layer, "weight", "meta")
        set_module_tensor_to_device(layer, "weight", "cpu", value=value, tied_params_map=tied_params_map)
    assert tied.weight is first.weight
    assert same_stored(first.weight, values[0])
    assert same_stored(other.weight, values[2])


READERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save": lambda module, path: safetensors.torch.save(module.state_dict()),
    "save_file": lambda module, path: safetensors.torch.save_file(module.state_dict(), path / "file"),
    "save_model": lambda module, path: safetensors.torch.save_model(module, str(path / "file")),
    "huggingface_hub": lambda module, path: save_torch_state_dict(module.state_dict(), path),
    "accelerate": lambda module, path: Accelerator(cpu=True).save_model(module, path),
    "ctypes": lambda module, path: ctypes.cast(module.weight.data_ptr(), ctypes.POINTER(ctypes.c_ubyte)),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_of_raw_memory_fail_and_name_what_to_do(name: str, tmp_path: Path) -> None:
    # As a float32 weight this would be read 4 times as far as its codes go.
    layer = nn.Linear(128, 6)
    layer.weight = parameter()
    error = ctypes.ArgumentError if name == "ctypes" else UnsupportedError
    with pytest.raises(
        error, match=r"data_ptr: expected a plain tensor, .* hf_trainweights\.save_file, .*dequantize\(\)"
    ):
        READERS[name](layer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_accelerate_saves_and_loads_a_state_by_pickle(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(128, 6), nn.Linear(6, 6))
    layers[0].weight = parameter()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(layers)
    before = copy.deepcopy(layers)
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    with torch.no_grad():
        layers[1].weight.add_(1)
    accelerator.load_state(str(tmp_path))
    assert same_stored(layers[0].weight, before[0].weight)
    assert torch.equal(layers[1].weight, before[1].weight)


def test_an_identity_is_no_number() -> None:
    first, second = parameter().data_ptr(), parameter().data_ptr()
    for use in (int, operator.index, lambda p: p + 4, lambda p: p < second, lambda p: sorted([p, second])):
        with pytest.raises(UnsupportedError, match=r"data_ptr: expected a plain tensor"):
            use(first)


@pytest.mark.parametrize("read", [lambda w: w.numpy(), lambda w: w.numpy(force=True), np.asarray])
def test_numpy_is_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(UnsupportedError, match=r"numpy: expected a plain tensor, .* Call dequantize\(\) first"):
        read(quantized_weight())


def test_shared_memory_holds_the_stored_tensors() -> None:
    layer = nn.Linear(128, 6)
    layer.weight = parameter()
    before = layer.weight.dequantize()
    layer.share_memory()
    assert all(tensor.is_shared() for tensor in layer.weight.tensors.values())
    assert torch.equal(layer.weight, before)


# Copies and pickles


@pytest.mark.slow
@pytest.mark.parametrize("form", by_default(KINDS, FORMS))
def test_pickling_round_trips(form: str) -> None:
    for layout in LAYOUTS:
        float16 = quantized_weight(form, layout, torch.float16)
        weights = (float16, nn.Parameter(float16), parameter(form, layout), float16.to(torch.float64))
        for weight, protocol in itertools.product(weights, range(2, pickle.HIGHEST_PROTOCOL + 1)):
            loaded = pickle.loads(pickle.dumps(weight, protocol))
            assert type(loaded) is QuantizedTensor
            assert isinstance(loaded, nn.Parameter) == isinstance(weight, nn.Parameter)
            assert not loaded.requires_grad
            assert same_stored(loaded, weight)
            assert loaded.scale.dtype == weight.scale.dtype


def globals_of(data: bytes) -> set[str]:
    """Return the dotted names that a pickle imports."""
    strings: list[str] = []
    found = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
        elif "UNICODE" in opcode.name:
            strings.append(argument)
    return found


def test_a_file_names_no_class_of_ours_and_one_function() -> None:
    weight = parameter("int4")
    weight._is_hf_initialized = True
    with zipfile.ZipFile(io.BytesIO(saved({"weight": weight, "detached": weight.detach()}))) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        data = archive.read(name)
    ours = {name for name in globals_of(data) if not name.startswith(("torch.", "collections."))}
    assert ours == {"hf_trainweights.rebuild_quantized_tensor"}
    assert b"_is_hf_initialized" not in data


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight))])
def test_copies_are_parameters_where_the_original_is(make: Callable[[Tensor], Tensor]) -> None:
    assert isinstance(make(parameter()), nn.Parameter)
    assert not isinstance(make(quantized_weight()), nn.Parameter)


def test_copy_shares_and_deepcopy_does_not() -> None:
    weight = parameter("int4")
    assert copy.copy(weight).qdata is weight.qdata
    copied = copy.deepcopy(weight)
    assert same_stored(copied, weight)
    assert all(tensor.data_ptr() != weight.tensors[name].data_ptr() for name, tensor in copied.tensors.items())


def test_deepcopy_keeps_tied_weights_tied() -> None:
    weight = parameter()
    first, second = copy.deepcopy([weight, weight])
    assert first is second
    assert first is not weight
    memo: dict[int, Any] = {}
    assert weight.__deepcopy__(memo) is weight.__deepcopy__(memo)


def test_a_saved_weight_stays_tied_in_memory() -> None:
    weight = parameter()
    loaded = torch.load(io.BytesIO(saved({"first": weight.detach(), "second": weight.detach()})))
    assert loaded["first"].qdata.data_ptr() == loaded["second"].qdata.data_ptr()


def test_loading_on_meta_gives_a_quantized_weight_on_meta() -> None:
    loaded = torch.load(io.BytesIO(saved(parameter("int4"))), map_location="meta")
    assert type(loaded) is QuantizedTensor
    assert loaded.is_meta
    assert all(tensor.is_meta for tensor in loaded.tensors.values())


class Impostor(Tensor):
    """A tensor of another class, which a file must not bring in."""


def rebuild_arguments(**changes: Any) -> tuple[Any, ...]:
    weight = quantized_weight("int4")
    arguments = {
        "tensors": weight.tensors,
        "config": weight.format.get_config(),
        "shape": weight.stored_shape,
        "dtype": torch.float32,
        "transposed": False,
        "is_parameter": True,
    }
    return tuple((arguments | changes).values())


def test_rebuild_takes_what_reduce_gives() -> None:
    weight = parameter("int4", "experts_transposed")
    function, arguments = weight.__reduce_ex__(2)
    assert function is rebuild_quantized_tensor
    assert same_stored(function(*arguments), weight)
    assert same_stored(rebuild_quantized_tensor(*rebuild_arguments()), quantized_weight("int4"))


CORRUPT = {
    "tensors are a list": {"tensors": []},
    "tensors are no tensors": {"tensors": {"qdata": 1, "scale": 2}},
    "tensors are missing": {"tensors": {}},
    "another class": {"tensors": {"qdata": torch.zeros(6, 16).as_subclass(Impostor), "scale": torch.zeros(6, 1)}},
    "a quantized tensor inside": {"tensors": {"qdata": quantized_weight(), "scale": torch.zeros(6, 1)}},
    "config is a string": {"config": "int4"},
    "shape is a list": {"shape": [6, 128]},
    "shape is a vector": {"shape": (128,)},
    "shape is negative": {"shape": (-6, -128)},
    "shape is not whole": {"shape": (6.0, 128.0)},
    "shape is true": {"shape": (True, 128)},
    "shape is another": {"shape": (6, 256)},
    "shape is huge": {"shape": (1 << 40, 1 << 20)},
    "dtype is an integer": {"dtype": torch.int8},
    "dtype is a string": {"dtype": "float32"},
}


@pytest.mark.parametrize("name", CORRUPT)
def test_rebuild_refuses_what_no_weight_is_made_of(name: str) -> None:
    with pytest.raises(CorruptFileError, match=r"[Tt]he file is damaged"):
        rebuild_quantized_tensor(*rebuild_arguments(**CORRUPT[name]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "int3"}, r"format: expected one of int8, int4, .*, found 'int3'"),
        ({}, r"format: expected one of int8, int4, .*, found None"),
        ({"format": "int4", "group_size": 48}, r"group_size: expected one of 32, 64, 128 for int4, found 48"),
        ({"format": "int4", "bits": 3}, r"format int4: expected group_size, column_scale, column_order, found bits"),
    ],
)
def test_rebuild_refuses_an_unknown_format(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebuild_quantized_tensor(*rebuild_arguments(config=config))


# TorchScript


def uses_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def test_tracing_names_dequantize() -> None:
    weight = quantized_weight()
    with pytest.raises(UnsupportedError, match=r"torch\.jit: .* Call model\.dequantize\(\)"):
        torch.jit.trace(lambda x: F.linear(x, weight), torch.ones(2, 128))
    with pytest.raises(UnsupportedError, match=r"torch\.jit: .* Call model\.dequantize\(\)"):
        torch.jit.trace(uses_weight, (torch.ones(2, 128), weight))
    assert not F.linear(torch.ones(2, 128), weight).isnan().any()


def test_a_scripted_function_takes_a_quantized_weight() -> None:
    scripted, weight, x = torch.jit.script(uses_weight), quantized_weight(), random_weight(2, 128, seed=1)
    assert torch.equal(scripted(x, weight), F.linear(x, weight))


# Fallbacks


def test_an_op_without_a_handler_is_dequantized_and_counted() -> None:
    weight = quantized_weight("int4")
    FALLBACKS.clear()
    assert torch.equal(weight.sum(), weight.dequantize().sum())
    assert torch.equal(torch.cat([weight, weight]), torch.cat([weight.dequantize()] * 2))
    assert torch.equal(weight.sum(), weight.dequantize().sum())
    assert FALLBACKS == {"aten.sum.default": 2, "aten.cat.default": 1}


def test_fallbacks_are_logged_only_on_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = quantized_weight()
    with caplog.at_level(logging.WARNING, "hf_trainweights"):
        weight.sum()
        assert not caplog.records
        monkeypatch.setattr(dispatch, "_LOG_FALLBACKS", True)
        FALLBACKS.clear()
        weight.sum()
    assert caplog.messages == ["aten.sum.default has no handler for quantized weights: dequantized (1)"]


FRESH_PROCESS = """
import sys, torch
program, weights = sys.argv[1:]
try:
    torch.load(weights)
except Exception as error:
    print("weights:", type(error).__name__, "rebuild_quantized_tensor" in str(error))
exported = torch.export.load(program)
print("imported by the program:", "hf_trainweights" in sys.modules)
weight = torch.load(weights)["weight"]
print("equal:", torch.allclose(exported.module()(torch.ones(2, 128)), torch.ones(2, 128) @ weight.dequantize().t()))
weight.sum()
"""


@pytest.mark.slow
def test_a_fresh_process_needs_our_import_and_reads_its_environment(tmp_path: Path) -> None:
    layer = nn.Linear(128, 6, bias=False)
    layer.weight = parameter("int4")
    torch.export.save(torch.export.export(layer, (torch.ones(2, 128),)), tmp_path / "layer.pt2")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    files = tmp_path / "layer.pt2", tmp_path / "layer.pt"
    result = run_fresh(FRESH_PROCESS, *files, environment={"TRAINWEIGHTS_LOG_FALLBACK": "1"})
    assert result.stdout.splitlines() == [
        "weights: UnpicklingError True",
        "imported by the program: True",
        "equal: True",
    ]
    assert "aten.sum.default has no handler for quantized weights: dequantized (1)" in result.stderr


def test_data_ptr_tells_its_alignment() -> None:
    weight = QuantizedTensor.quantize(torch.ones(64, 64), FORMATS["int8"]())
    assert weight.data_ptr() % 16 == weight.qdata.data_ptr() % 16
