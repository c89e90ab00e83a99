"""A module shows torch.compile plain tensors, and a program is never left with those of a former weight."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import set_module_tensor_to_device
from covering import by_default
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import TracingContext
from transformers.pytorch_utils import Conv1D
from weights import random_weight

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.tensor.traced_modules import TracedModule

FORMS = ("int8", "int4", "uint4", "float8_e4m3", "codebook4", "coded")


class Experts(nn.Module):
    """Experts in one parameter, as Transformers keeps them, beside a float one."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(random_weight(2, 32, 64, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x, expert) for expert in self.up_proj.unbind()]).sum(0) + self.shift


class Net(nn.Module):
    """A table, its tied head, layers with and without a bias, a Conv1D and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 64), nn.Linear(64, 16, bias=False)
        self.first, self.second, self.conv = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), Conv1D(64, 64)
        self.experts = Experts()
        self.bfloat16()
        self.head.weight = self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.conv(self.second(self.first(self.table(indices)).relu()))
        return torch.cat([self.head(x), self.experts(x)], dim=-1)


INDICES = torch.tensor([[1, 2, 15]])


def net(form: str = "int8", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Net().requires_grad_(False).eval()
    up_proj = QuantizedTensor.quantize(model.experts.up_proj, Int8())
    quantize_(model, TrainWeightsConfig(form, include_embeddings=True))
    model.experts.up_proj = nn.Parameter(up_proj, requires_grad=False)
    return model


class Programs:
    """A backend of torch.compile that counts its programs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        self.inputs = inputs
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def guards(model: nn.Module) -> str:
    """Return the guards of the programs of a model's own forward."""
    entries = _debug_get_cache_entry_list(type(model).forward.__code__)
    return "\n".join(str(entry.guard_manager) for entry in entries)


@pytest.mark.parametrize("form", by_default(("int8",), FORMS))
def test_a_program_has_only_plain_tensors_and_guards_no_subclass(form: str) -> None:
    model, programs = net(form), Programs()
    compiled = torch.compile(model, fullgraph=True, backend=programs)
    with torch.no_grad():
        assert torch.equal(compiled(INDICES), model(INDICES))
    assert {type(each) for each in programs.inputs} <= {Tensor, nn.Parameter}
    text = guards(model)
    assert "_traced_weight_0" in text
    assert not re.search(r"QuantizedTensor|__tensor_flatten__|_parameters\['weight'\]", text)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function:UserWarning")
@pytest.mark.parametrize("form", by_default(("int4",), FORMS))
def test_all_inputs_but_x_stay_where_they_are_and_are_not_copied_into_a_cuda_graph(form: str) -> None:
    model, moving = net(form), list[int]()

    def collect(program: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        metadata = TracingContext.get().fw_metadata
        assert metadata is not None
        moving.extend(set(range(len(inputs))) - set(metadata.static_input_indices))
        return program.forward

    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=collect))(INDICES)
    assert len(moving) == 1


@pytest.mark.parametrize("form", by_default(("int4",), FORMS))
def test_a_compiled_gradient_is_that_of_the_model(form: str) -> None:
    model = net(form)
    compiled = torch.compile(model.first, fullgraph=True, backend="aot_eager")
    x = random_weight(5, 64, dtype=torch.bfloat16)
    grads = []
    for module in (compiled, model.first):
        leaf = x.clone().requires_grad_()
        module(leaf).float().square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def other_weights(model: Net) -> dict[str, Tensor]:
    return net(seed=1).state_dict()


def exchange_scale(model: Any) -> None:
    model.first.weight.scale = model.first.weight.scale * 2


def exchange_data(model: Net) -> None:
    model.first.weight.data = net(seed=1).first.weight.data


def exchange_parameter(model: Net) -> None:
    model.first.weight = net(seed=1).first.weight


def write_behind_the_module(model: Any) -> None:
    model.first._parameters["weight"] = net(seed=1).first.weight


def assign_a_state_dict(model: Net) -> None:
    model.load_state_dict(other_weights(model), assign=True)
    model.head.weight = model.table.weight


def copy_a_state_dict(model: Net) -> None:
    model.load_state_dict(other_weights(model))


def swap_by_a_state_dict(model: Net) -> None:
    # PyTorch swaps no tensor that a program refers to, so not the float ones.
    quantized = {name: value for name, value in other_weights(model).items() if isinstance(value, QuantizedTensor)}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(quantized, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def move_with_accelerate(model: Net) -> None:
    set_module_tensor_to_device(model.first, "weight", "cpu", value=net(seed=1).first.weight)


def move_there_and_back(model: Net) -> None:
    model.to(torch.float16).to(torch.bfloat16)


def cast_the_tied_table_alone(model: Net) -> None:
    weight = net(seed=1).table.weight
    model.table._apply(lambda value: weight.clone() if value.shape == weight.shape else value)


def exchange_bias(model: Net) -> None:
    model.first.bias = nn.Parameter(torch.full_like(model.first.bias, 3), requires_grad=False)


EXCHANGES = (
    *(exchange_scale, exchange_data, exchange_parameter, write_behind_the_module, assign_a_state_dict),
    *(copy_a_state_dict, swap_by_a_state_dict, move_with_accelerate, move_there_and_back, exchange_bias),
    cast_the_tied_table_alone,
)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_a_program_serves_exchanged_weights_and_is_not_compiled_again(exchange: Callable[[Net], None]) -> None:
    model, programs = net(), Programs()
    compiled = torch.compile(model, fullgraph=True, backend=programs)
    with torch.no_grad():
        before = compiled(INDICES)
        exchange(model)
        after = compiled(INDICES)
        assert torch.equal(after, model(INDICES))
    assert exchange is move_there_and_back or not torch.equal(after, before)
    assert programs.count == 1


def test_other_parameters_for_one_call_are_seen() -> None:
    model, other = net(), dict(net(seed=1).named_parameters())
    compiled: Any = torch.compile(model, fullgraph=True, backend=Programs())
    with torch.no_grad():
        before = compiled(INDICES)
        called = torch.func.functional_call(compiled, {f"_orig_mod.{name}": p for name, p in other.items()}, INDICES)
        assert torch.equal(called, net(seed=1)(INDICES))
        assert torch.equal(compiled(INDICES), before)


def test_a_float_weight_and_a_quantized_one_take_turns() -> None:
    model = net()
    own_class, quantized = nn.Linear, model.first.weight
    compiled = torch.compile(model, fullgraph=True, backend=Programs())
    with torch.no_grad():
        compiled(INDICES)
        for weight in (nn.Parameter(quantized.dequantize()), quantized, None, quantized):
            model.first.weight = weight
            assert isinstance(model.first, TracedModule) == (weight is quantized)
            assert (type(model.first) is own_class) == (weight is not quantized)
            if weight is not None:
                assert torch.equal(compiled(INDICES), model(INDICES))
        del model.first.weight
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
            _ = model.first.weight
        model.first.weight = torch.ones(1)
        assert torch.equal(model.first.weight, torch.ones(1))


def test_dequantized_modules_have_their_own_classes() -> None:
    model = net()
    assert {type(module).__name__ for module in model.modules()} == {"Net", "Embedding", "Linear", "Conv1D", "Experts"}
    assert sum(isinstance(module, TracedModule) for module in model.modules()) == 6
    dequantize_(model)
    assert {type(module) for module in model.modules()} == {Net, nn.Embedding, nn.Linear, Conv1D, Experts}
    assert not any("_traced_" in name for module in model.modules() for name in vars(module))


def through_file(module: Any) -> Any:
    stream = io.BytesIO()
    torch.save(module, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "file": through_file,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_shows_weights_of_its_own(way: str) -> None:
    model = net()
    copied = COPIES[way](model)
    assert isinstance(copied.first, TracedModule)
    assert copied.head.weight is copied.table.weight
    exchange_scale(copied)
    compiled = torch.compile(copied, fullgraph=True, backend=Programs())
    with torch.no_grad():
        assert torch.equal(compiled(INDICES), copied(INDICES))
        assert not torch.equal(copied(INDICES), model(INDICES))


def test_a_replica_of_data_parallel_takes_plain_attributes() -> None:
    replica: Any = net().first._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.ones(64, 64), None
    assert torch.equal(replica(torch.ones(1, 64)), torch.full((1, 64), 64.0))


def test_a_parametrization_of_a_float_parameter_stays_right() -> None:
    layer = net().first
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())
    compiled = torch.compile(layer, backend=Programs())
    x = random_weight(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
        layer.weight = net(seed=1).first.weight
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_adapters_train_and_merge_under_a_compiler(dynamic: bool) -> None:
    model: Any = get_peft_model(
        nn.Sequential(net().first, nn.ReLU(), net().second), LoraConfig(target_modules=["0", "2"])
    )
    nn.init.normal_(model.base_model.model[0].lora_B["default"].weight)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (2, 5):
        x = random_weight(rows, 64, dtype=torch.bfloat16)
        grads = []
        for module in (compiled, model):
            model.zero_grad()
            module(x).float().square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    with pytest.warns(UserWarning, match="rounded to int8 again"):
        model.merge_adapter()
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_a_class_attribute_of_the_same_name_stays() -> None:
    class Own(nn.Module):
        @property
        def weight(self) -> Any:
            return self._parameters["weight"]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    layer = Own()
    layer._parameters["weight"] = None
    weight = QuantizedTensor.quantize(random_weight(32, 64), Int4(32))
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    x = random_weight(2, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend=Programs())(x), layer(x))
