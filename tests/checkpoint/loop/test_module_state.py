import hashlib

import pytest
import torch
from torch import nn

from hf_trainweights import QuantizedTensor
from hf_trainweights.checkpoint.loop.module_state import load_module_state, module_state, state_sha256, unwrapped_name
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.tensor.modules import as_parameter


class Halves(torch.Tensor):
    """A float tensor kept as whole and broken parts, with only what torch requires of such a class."""

    @staticmethod
    def __new__(cls, whole, broken):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)

    def __init__(self, whole, broken):
        self.whole = whole
        self.broken = broken

    def __tensor_flatten__(self):
        return ["whole", "broken"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].whole, args[0].broken)
        raise NotImplementedError(function)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Opaque(torch.Tensor):
    pass


def quantized(seed=0):
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(4, 3)
    nn.init.ones_(module.bias)
    whole = torch.randint(-9, 9, (3, 4), generator=generator, dtype=torch.int8)
    module.weight = nn.Parameter(Halves(whole, torch.rand(3, 4, generator=generator)), requires_grad=False)
    return module


def test_a_plain_modules_state_is_its_state_dict():
    module = nn.BatchNorm1d(3)
    state = module_state(module)
    assert list(state) == list(module.state_dict())
    assert state["weight"].data_ptr() == module.weight.data_ptr()
    assert state._metadata == module.state_dict()._metadata


def test_tied_weights_stay_one_memory_under_two_names():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    state = module_state(module)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_a_subclass_is_stored_as_its_inner_tensors_and_comes_back():
    source, target = quantized(0), quantized(1)
    state = module_state(source)
    assert {name: type(tensor) for name, tensor in state["weight"].items()} == dict.fromkeys(
        ["whole", "broken"], torch.Tensor
    )
    load_module_state(target, state)
    assert torch.equal(target.weight.whole, source.weight.whole)
    assert torch.equal(target.weight.broken, source.weight.broken)
    assert target.weight.whole.data_ptr() != source.weight.whole.data_ptr()


def test_a_subclass_that_cannot_be_taken_apart_is_named():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Opaque), requires_grad=False)
    with pytest.raises(ConfigError, match=r"weight.*__tensor_flatten__.*Opaque"):
        module_state(module)


def changed(state, name, value):
    return {**state, name: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {name: state[name] for name in ["bias"]}, "missing .*weight"),
        (lambda state: changed(state, "other", torch.ones(1)), "unexpected .*other"),
        (lambda state: changed(state, "bias", torch.ones(9)), "the same shapes"),
        (lambda state: changed(state, "weight", {"whole": state["weight"]["whole"]}), "inner tensors"),
        (lambda state: changed(state, "weight", {**state["weight"], "whole": torch.ones(3, 4)}), r"weight\.whole"),
        (
            lambda state: changed(state, "weight", {**state["weight"], "broken": {"x": torch.ones(1)}}),
            r"weight\.broken",
        ),
    ],
)
def test_a_state_of_another_module_is_refused(change, message):
    module = quantized()
    with pytest.raises(CorruptFileError, match=message):
        load_module_state(module, change(module_state(module)))


def test_a_dict_where_the_module_has_a_plain_weight_is_refused():
    with pytest.raises(CorruptFileError, match="inner tensors"):
        load_module_state(nn.Linear(4, 3), module_state(quantized()))


@pytest.mark.parametrize(
    "name",
    [
        "0._orig_mod.w",
        "_fsdp_wrapped_module.0._fsdp_wrapped_module.w",
        "0._checkpoint_wrapped_module._orig_mod.w",
        "0.w",
    ],
)
def test_names_leave_out_wrappers_around_modules(name):
    assert unwrapped_name(name) == "0.w"


def test_a_state_goes_from_a_module_to_a_wrapped_one_and_back():
    plain, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Sequential())
    wrapped[0].add_module("_checkpoint_wrapped_module", nn.Linear(2, 2))
    load_module_state(wrapped, module_state(plain))
    assert wrapped[0]._checkpoint_wrapped_module.weight.equal(plain[0].weight)
    load_module_state(plain, module_state(wrapped))


def test_extra_state_comes_back_whatever_it_is():
    class WithExtra(nn.Module):
        value = None

        def get_extra_state(self):
            return {"nested": [1, 2]}

        def set_extra_state(self, state):
            self.value = state

    module = WithExtra()
    load_module_state(module, module_state(module))
    assert module.value == {"nested": [1, 2]}


def test_the_hash_covers_names_dtypes_shapes_and_bytes():
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.bfloat16)}
    others = [
        {"A": state["a"], "b": state["b"]},
        {"a": state["a"].view(3, 2), "b": state["b"]},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"a": -state["a"], "b": state["b"]},
        {"a": state["a"], "b": state["b"].half()},
        {"a": state["a"]},
        {"a": state["a"], "b": {"x": state["b"]}},
    ]
    hashes = {state_sha256(each) for each in (state, *others)}
    assert len(hashes) == 1 + len(others)


def test_the_hash_is_blind_to_order_strides_and_ties():
    tensor = torch.arange(6.0).view(2, 3)
    state = {"a": tensor, "b": tensor}
    assert state_sha256(state) == state_sha256({"b": tensor.clone(), "a": tensor.t().contiguous().t()})


def test_the_hash_sees_one_bit_of_an_inner_tensor():
    module = quantized()
    before = state_sha256(module_state(module))
    module.weight.broken.view(torch.int32)[1, 1] ^= 1
    assert state_sha256(module_state(module)) != before


def test_the_hash_is_that_of_headers_and_little_endian_bytes():
    state = {"w": torch.arange(4, dtype=torch.bfloat16).view(2, 2), "n": torch.tensor(3)}
    content = b'[["n"], "torch.int64", [], 8]\n' + (3).to_bytes(8, "little")
    content += b'[["w"], "torch.bfloat16", [2, 2], 8]\n' + bytes.fromhex("0000 803f 0040 4040")
    assert state_sha256(state) == hashlib.sha256(content).hexdigest()


def test_a_quantized_weight_is_stored_and_loaded_by_its_tensors():
    def layer(seed):
        weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        module = nn.Linear(64, 128, bias=False)
        module.weight = as_parameter(QuantizedTensor.quantize(weight, Int4(32)))
        return module

    first, second = layer(0), layer(1)
    state = module_state(first)
    assert state["weight"].keys() == {"qdata", "scale"}
    assert all(torch.equal(state["weight"][name], tensor) for name, tensor in first.weight.tensors.items())
    load_module_state(second, state)
    assert state_sha256(module_state(second)) == state_sha256(state)
