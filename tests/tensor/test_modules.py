"""Any nn.Module, without Transformers' loading: quantize, save, load into a skeleton, dequantize, move, measure."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D
from weights import QUANTIZABLE, same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, get_model_size_in_bytes, quantize_
from hf_trainweights.errors import ConfigError, QuantizationError, UnsupportedError
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.testing.values import assert_close_product

INT4 = TrainWeightsConfig("int4", group_size=32)
CONFIGS = {name: TrainWeightsConfig(name, include_embeddings=True) for name in QUANTIZABLE}


class Net(nn.Module):
    """An embedding tied to the head, two layers, one of them used twice, a Conv1D, a norm, a buffer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.first = nn.Linear(width, width)
        self.again = self.first
        self.conv = Conv1D(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(width))

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.first(self.embed(indices)) + self.offset
        return self.head(self.norm(self.conv(self.again(hidden).relu())))


INDICES = torch.tensor([[1, 2, 3], [4, 5, 15]])


def net(seed: int = 0, dtype: torch.dtype = torch.float32, make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype).eval()


def quantized(config: TrainWeightsConfig = CONFIGS["int4"], **options: Any) -> nn.Module:
    module = net(**options)
    quantize_(module, config)
    return module


def skeleton(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return make().eval()


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def allocations(function: Callable[[], object]) -> list[int]:
    """Return the bytes of every block of memory that PyTorch allocates while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    sizes, events = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            sizes.append(event.extra_fields.alloc_size)
    return [size for size in sizes if size > 0]


# Quantize


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTIZABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantized_module_computes_what_its_dequantized_copy_does(form: str, dtype: torch.dtype) -> None:
    module = quantized(CONFIGS[form], dtype=dtype)
    dense = copy.deepcopy(module)
    dequantize_(dense)
    assert not any(isinstance(weight, QuantizedTensor) for weight in dense.parameters())
    # The values that the codes stand for: some CPUs multiply them without rounding them to bfloat16.
    exact = copy.deepcopy(dense).double()
    for name, weight in module.named_parameters():
        if isinstance(weight, QuantizedTensor):
            exact.get_parameter(name).data = weight.dequantize(torch.float64)
    FALLBACKS.clear()
    with torch.no_grad():
        assert_close_product(module(INDICES), dense(INDICES), exact(INDICES))
        assert not torch.equal(module(INDICES), net(dtype=dtype)(INDICES))
    assert not FALLBACKS


def test_what_is_quantized_is_what_the_summary_says(caplog: pytest.LogCaptureFixture) -> None:
    module = net()
    with caplog.at_level(logging.INFO, "hf_trainweights"):
        summary = quantize_(module, INT4)
    assert {choice.name for choice in summary.quantized} == {"first.weight", "conv.weight"}
    assert {name for name, weight in module.named_parameters() if isinstance(weight, QuantizedTensor)} == {
        "first.weight",
        "conv.weight",
    }
    assert caplog.messages[-1:] == [str(summary)]
    assert caplog.messages[-1].startswith("quantized: 2 int4 g32; left alone: 1 embedding (include_embeddings=True")


def test_a_weight_with_two_names_in_one_module_stays_one() -> None:
    module = nn.Module()
    module.num_experts = 2
    module.up_proj = module.down_proj = nn.Parameter(torch.randn(2, 64, 64))
    quantize_(module, INT4)
    assert type(module.up_proj) is QuantizedTensor
    assert module.down_proj is module.up_proj


def test_tied_weights_and_shared_modules_stay_so() -> None:
    module = quantized()
    assert type(module.embed.weight) is QuantizedTensor
    assert module.head.weight is module.embed.weight
    assert module.again is module.first
    dequantize_(module)
    assert type(module.embed.weight) is nn.Parameter
    assert module.head.weight is module.embed.weight


def test_the_state_dict_keeps_the_keys_of_the_float_module() -> None:
    assert list(quantized().state_dict()) == list(net().state_dict())
    assert [name for name, _ in quantized().named_parameters()] == [name for name, _ in net().named_parameters()]


def test_parameters_stay_parameters_and_frozen() -> None:
    module = quantized()
    for name, weight in module.named_parameters():
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad == (not isinstance(weight, QuantizedTensor)), name
    with pytest.warns(UserWarning, match="takes no gradient"):
        module.train().requires_grad_(True)
    module(INDICES).sum().backward()
    assert module.norm.weight.grad is not None
    assert module.first.weight.grad is None


def test_quantized_weights_that_a_configuration_leaves_alone_stay_as_they_are() -> None:
    module = net()
    quantize_(module.first, TrainWeightsConfig("int8"))
    before, config = module.first.weight, TrainWeightsConfig("int4", group_size=32, modules_to_not_convert=["first"])
    summary = quantize_(module, config)
    assert module.first.weight is before
    assert type(module.conv.weight) is QuantizedTensor
    assert str(summary).startswith("quantized: 1 int8 (left as saved), 1 int4 g32; left alone: ")
    assert quantize_(module, config) == summary


def test_hooks_buffers_and_other_parameters_are_untouched() -> None:
    module = net()
    seen: list[str] = []
    module.first.register_forward_hook(lambda *_: seen.append("hook"))
    kept = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if "weight" not in name}
    quantize_(module, INT4)
    module(INDICES)
    assert seen == ["hook", "hook"]
    assert all(module.state_dict(keep_vars=True)[name] is tensor for name, tensor in kept.items())


@pytest.mark.parametrize("name", ["first", "conv"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_named_and_leaves_the_module_untouched(name: str, value: float) -> None:
    module = net()
    with torch.no_grad():
        module.get_submodule(name).weight[3, 5] = value
    before = list(module.named_parameters())
    with pytest.raises(QuantizationError, match=rf"{name}\.weight: expected finite values, found NaN or Inf"):
        quantize_(module, INT4)
    assert all(weight is module.get_parameter(name) for name, weight in before)
    assert "QuantizedTensor" not in str(list(module.parameters()))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_finite_weights_are_quantized_however_large_their_sum(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype))
    nn.init.constant_(module[0].weight, torch.finfo(dtype).max / 2)
    quantize_(module, TrainWeightsConfig("int8"))
    assert isinstance(module[0].weight, QuantizedTensor)


def test_a_module_on_meta_is_refused_and_left_alone() -> None:
    module = skeleton()
    with pytest.raises(QuantizationError, match=r"first\.weight: expected a weight with values, found one on the meta"):
        quantize_(module, INT4)
    assert not any(isinstance(weight, QuantizedTensor) for weight in module.parameters())


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (nn.Sequential(nn.LayerNorm(8), nn.ReLU()), INT4),
        (nn.Sequential(), INT4),
        (nn.LSTM(64, 64), INT4),
        (nn.Embedding(4, 64), INT4),
        (nn.Linear(64, 64), TrainWeightsConfig("int4", overrides={"re:.*": None})),
        (nn.Sequential(nn.Linear(64, 64)), TrainWeightsConfig("int4", modules_to_not_convert=["0"])),
    ],
    ids=["no weights", "nothing", "LSTM", "embedding", "override", "modules_to_not_convert"],
)
def test_nothing_to_quantize_is_an_error(module: nn.Module, config: TrainWeightsConfig) -> None:
    with pytest.raises(ConfigError, match=r"model: expected at least one weight to quantize to int4 .* left alone: "):
        quantize_(module, config)
    with pytest.raises(ValueError, match=r"check modules_to_not_convert and overrides"):
        quantize_(module, config)


def test_float_weights_are_released_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    floats = weakref.WeakSet(module.parameters())
    alive: list[int] = []
    quantize = QuantizedTensor.quantize

    def recorded(*args: Any) -> QuantizedTensor:
        alive.append(len(floats))
        return quantize(*args)

    monkeypatch.setattr(QuantizedTensor, "quantize", recorded)
    quantize_(module, INT4)
    assert alive == list(range(8, 0, -1))
    assert not floats


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_module_quantized_in_any_mode_infers_in_every_other(mode: Callable[[], Any]) -> None:
    module = net()
    with mode():
        quantize_(module, CONFIGS["int4"])
        expected = module(INDICES).clone()
    for other in (torch.inference_mode, torch.no_grad):
        with other():
            assert torch.equal(module(INDICES), expected)
            assert torch.equal(copy.deepcopy(module)(INDICES), expected)
    if mode is not torch.inference_mode:  # PyTorch saves nothing that was made in that mode for backward.
        assert torch.equal(module(INDICES), expected)


# Layers that use their weights in their own way


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, norm_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("padded", [False, True])
def test_attention_layers_equal_their_dequantized_copies(name: str, padded: bool) -> None:
    module = quantized(INT4, make=ATTENTION[name])
    dense = copy.deepcopy(module)
    dequantize_(dense)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    valid = torch.ones(2, 5, dtype=torch.bool) if mask is None else ~mask
    with torch.no_grad():
        # In eval mode the dense layer takes one fused op, whose rounding is its own; the quantized layer never does.
        torch.testing.assert_close(
            module(x, src_key_padding_mask=mask)[valid], dense(x, src_key_padding_mask=mask)[valid]
        )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = dense(x, src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(module(x, src_key_padding_mask=mask), expected)
    with torch.enable_grad():
        torch.testing.assert_close(module.train(False)(x.clone().requires_grad_()), dense(x.clone().requires_grad_()))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_equals_its_dequantized_copy(batch_first: bool, need_weights: bool) -> None:
    module = quantized(INT4, make=lambda: nn.MultiheadAttention(64, 4, batch_first=batch_first))
    assert type(module.out_proj.weight) is QuantizedTensor
    dense = copy.deepcopy(module)
    dequantize_(dense)
    x = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.testing.assert_close(
        module(x, x, x, need_weights=need_weights)[0], dense(x, x, x, need_weights=need_weights)[0]
    )


# Save and load


LOADS: dict[str, Callable[[Path], Any]] = {
    "path": torch.load,
    "string": lambda path: torch.load(str(path)),
    "file": lambda path: torch.load(path.open("rb")),
    "bytes": lambda path: torch.load(io.BytesIO(path.read_bytes())),
    "mmap": lambda path: torch.load(path, mmap=True),
    "weights_only": lambda path: torch.load(path, weights_only=True),
    "on cpu": lambda path: torch.load(path, map_location="cpu"),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", QUANTIZABLE)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_state_dict_is_loaded_into_a_skeleton(form: str, load: str, zipped: bool, tmp_path: Path) -> None:
    module, path = quantized(CONFIGS[form], dtype=torch.bfloat16), tmp_path / "model.pt"
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=zipped)
    if load == "mmap" and not zipped:
        with pytest.raises(RuntimeError, match="mmap can only be used with files saved with"):
            LOADS[load](path)
        return
    loaded = skeleton()
    assert str(loaded.load_state_dict(LOADS[load](path), assign=True)) == "<All keys matched successfully>"
    for name, weight in module.named_parameters():
        found = loaded.get_parameter(name)
        assert isinstance(found, nn.Parameter)
        assert type(found) is type(weight)
        assert not found.is_meta
        assert found.dtype == weight.dtype
        assert same_stored(found, weight) if isinstance(weight, QuantizedTensor) else torch.equal(found, weight)
    with torch.no_grad():
        assert torch.equal(loaded(INDICES), module(INDICES))
    assert repr(loaded) == repr(module)


def test_the_main_flow_with_two_layers_of_1024(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(2)))

    module = net(make=make, dtype=torch.bfloat16)
    assert get_model_size_in_bytes(module) / 2**20 == 4.0
    quantize_(module, TrainWeightsConfig("int4", group_size=128))
    assert 1.03 < get_model_size_in_bytes(module) / 2**20 < 1.07
    torch.save(module.state_dict(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < get_model_size_in_bytes(module) + 4096
    loaded = skeleton(make)

    def load(**options: Any) -> None:
        loaded.load_state_dict(torch.load(tmp_path / "model.pt", **options), assign=True)

    # No block is as large as one float weight. What is allocated is the file's content, once.
    sizes = allocations(load)
    assert max(sizes) == 1024 * 1024 // 2
    assert sum(sizes) < get_model_size_in_bytes(module) + 4096
    assert max(allocations(lambda: loaded[0].weight.dequantize())) == 1024 * 1024 * 2
    # A mapped file is one block of the file's size.
    file_bytes = (tmp_path / "model.pt").stat().st_size
    assert sum(allocations(functools.partial(load, mmap=True))) < file_bytes + 4096
    assert get_model_size_in_bytes(loaded) == get_model_size_in_bytes(module)
    x = torch.ones(3, 1024, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded(x), module(x))


@pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("make", [net, skeleton], ids=["float", "meta"])
def test_without_assign_a_float_module_refuses_and_names_it(make: Callable[[], nn.Module]) -> None:
    target = make()
    state_dict = torch.load(io.BytesIO(saved(quantized().state_dict())))
    with pytest.raises(RuntimeError, match=r'(?s)parameter named "first\.weight".*assign=True.*named "conv\.weight"'):
        target.load_state_dict(state_dict)
    assert not any(isinstance(weight, QuantizedTensor) for weight in target.parameters())


def test_without_assign_a_quantized_module_of_the_same_formats_loads_in_place() -> None:
    source, target = quantized(), quantized(seed=1)
    addresses = [weight.data_ptr() for weight in target.parameters()]
    assert str(target.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
    assert [weight.data_ptr() for weight in target.parameters()] == addresses
    assert torch.equal(target(INDICES), source(INDICES))
    with torch.no_grad():
        source.load_state_dict(quantized(seed=2).state_dict())
    assert not torch.equal(target(INDICES), source(INDICES))


def test_without_assign_other_formats_and_float_weights_are_refused() -> None:
    target = quantized()
    before = target(INDICES)
    for source in (net(), quantized(CONFIGS["int8"]), quantized(dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r'(?s)named "first\.weight".*assign=True'):
            target.load_state_dict({"first.weight": source.state_dict()["first.weight"]}, strict=False)
    assert torch.equal(target(INDICES), before)


def test_float_weights_replace_quantized_ones_with_assign() -> None:
    target = quantized()
    target.load_state_dict(net().state_dict(), assign=True)
    assert not any(isinstance(weight, QuantizedTensor) for weight in target.parameters())
    assert torch.equal(target(INDICES), net()(INDICES))
    assert "int4" not in repr(target)


def test_a_whole_module_is_pickled_with_what_it_says_of_itself() -> None:
    module = quantized()
    loaded = torch.load(io.BytesIO(saved(module)), weights_only=False)
    assert torch.equal(loaded(INDICES), module(INDICES))
    assert repr(loaded) == repr(module)
    assert loaded.head.weight is loaded.embed.weight
    with pytest.raises(UnsupportedError, match=r"torch\.jit"):
        torch.jit.script(loaded)


def test_a_deep_copy_is_independent_and_describes_itself() -> None:
    module = quantized()
    copied = copy.deepcopy(module)
    assert copied.head.weight is copied.embed.weight
    assert repr(copied) == repr(module)
    before = module(INDICES)
    copied.load_state_dict(quantized(seed=1).state_dict())
    assert torch.equal(module(INDICES), before)
    dequantize_(copied)
    assert "int4" in repr(module)
    assert "int4" not in repr(copied)


# Dequantize


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16], ids=str)
def test_dequantize_gives_plain_parameters(dtype: torch.dtype | None) -> None:
    module = quantized(dtype=torch.bfloat16)
    expected = {n: w.dequantize(dtype) for n, w in module.named_parameters() if isinstance(w, QuantizedTensor)}
    untouched = module.norm.weight
    dequantize_(module, dtype)
    for name, weight in expected.items():
        actual = module.get_parameter(name)
        assert type(actual) is nn.Parameter
        assert actual.is_contiguous()
        assert actual.dtype == (dtype or torch.bfloat16)
        assert torch.equal(actual, weight)
    assert module.norm.weight is untouched
    assert all("extra_repr" not in vars(each) for each in module.modules())
    assert all("__prepare_scriptable__" not in vars(each) for each in module.modules())


def test_dequantize_of_a_float_module_changes_nothing() -> None:
    module = net()
    before = list(module.parameters())
    dequantize_(module, torch.float16)
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_dequantize_and_quantize_again_is_exact() -> None:
    # The largest code of a row is 127 times its scale, so the second scale is the first.
    module = quantized(CONFIGS["int8"])
    before = {name: weight.qdata.clone() for name, weight in module.named_parameters() if hasattr(weight, "qdata")}
    dequantize_(module)
    quantize_(module, CONFIGS["int8"])
    assert before
    assert all(torch.equal(module.get_parameter(name).qdata, codes) for name, codes in before.items())


# What it says of itself


def test_print_names_the_formats_beside_the_layers_own_words() -> None:
    module = quantized(TrainWeightsConfig("int4", group_size=32, overrides={"first": "int8"}))
    assert "(first): Linear(in_features=128, out_features=128, bias=True, weight=int8)" in repr(module)
    assert "(head): Linear(in_features=128, out_features=16, bias=False)" in repr(module)


def test_a_module_is_gone_with_its_last_name_and_no_garbage_is_left_of_it() -> None:
    module = quantized()
    with torch.no_grad():
        module(INDICES)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    assert all(repr(each) == repr(module) for each in copies)
    gc.collect()
    gc.disable()
    try:
        weights = [weakref.ref(weight) for each in (module, *copies) for weight in each.parameters()]
        del module, copies
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()


def test_an_extra_repr_of_the_users_own_is_left_alone() -> None:
    module = net()
    module.first.extra_repr = lambda: "mine"
    quantize_(module, INT4)
    assert "(first): Linear(mine)" in repr(module)
    dequantize_(module)
    assert "(first): Linear(mine)" in repr(module)


def test_a_module_with_two_quantized_weights_names_both_until_the_last_is_gone() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 2
            self.up = nn.Parameter(torch.ones(2, 64, 64))
            self.down = nn.Parameter(torch.ones(2, 64, 64))

    module = Experts()
    quantize_(module, INT4)
    assert repr(module) == "Experts(up=int4 g32, down=int4 g32)"
    module.up = nn.Parameter(torch.ones(2, 64, 64))
    assert repr(module) == "Experts(down=int4 g32)"
    module.down = nn.Parameter(torch.ones(2, 64, 64))
    assert repr(module) == "Experts()"
    assert "__prepare_scriptable__" not in vars(module)


# Sizes


def test_sizes_count_what_is_held() -> None:
    linear, head = 128 * 128, 16 * 128
    rest = 4 * (128 + 128 + 2 * 128 + 128)
    assert get_model_size_in_bytes(net()) == 4 * (2 * linear + head) + rest
    scales = 2 * 128 + 16
    assert get_model_size_in_bytes(quantized(CONFIGS["int8"])) == 2 * linear + head + 4 * scales + rest
    assert get_model_size_in_bytes(quantized(CONFIGS["int4"])) == linear + head // 2 + 4 * scales + rest


def test_sizes_count_shared_memory_once() -> None:
    module, base = nn.Module(), torch.zeros(8, 4)
    module.register_buffer("whole", base)
    module.register_buffer("same", base)
    module.register_buffer("view", base.view(-1))
    module.register_buffer("part", base[2:])
    assert get_model_size_in_bytes(module) == 8 * 4 * 4
    weight = quantized(INT4, make=lambda: nn.Linear(64, 64, bias=False)).weight
    module.first, module.second = nn.Parameter(weight), nn.Parameter(weight.mT)
    assert get_model_size_in_bytes(module) == 8 * 4 * 4 + 64 * 32 + 64 * 2 * 4


def test_sizes_count_the_memory_that_a_part_keeps_alive() -> None:
    module = nn.Module()
    module.register_buffer("part", torch.zeros(1000)[:1])
    module.register_buffer("repeated", torch.zeros(1).expand(1000))
    module.register_buffer("empty", torch.zeros(0))
    assert get_model_size_in_bytes(module) == 4000 + 4
    assert get_model_size_in_bytes(nn.Module()) == 0


def test_sizes_of_sparse_tensors_are_refused() -> None:
    module = nn.Module()
    module.register_buffer("sparse", torch.eye(4).to_sparse())
    with pytest.raises(NotImplementedError, match="Cannot access storage"):
        get_model_size_in_bytes(module)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), quantized])
def test_sizes_on_meta_are_those_to_come(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert get_model_size_in_bytes(copy.deepcopy(module).to("meta")) == get_model_size_in_bytes(module)


def test_sizes_of_a_loaded_state_dict_are_those_of_the_module(tmp_path: Path) -> None:
    module = quantized()
    torch.save(module.state_dict(), tmp_path / "model.pt")
    for mmap in (False, True):
        loaded = skeleton()
        loaded.load_state_dict(torch.load(tmp_path / "model.pt", mmap=mmap), assign=True)
        assert get_model_size_in_bytes(loaded) == get_model_size_in_bytes(module)


# Devices and dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_module_changes_its_dtype_and_keeps_its_codes(dtype: torch.dtype) -> None:
    module = quantized()
    scale = module.first.weight.scale.clone()
    module.to(dtype)
    assert isinstance(module.first.weight, nn.Parameter)
    assert type(module.first.weight) is QuantizedTensor
    assert module.first.weight.dtype == module.norm.weight.dtype == dtype
    assert torch.equal(module.first.weight.scale, scale)
    assert module.head.weight is module.embed.weight
    assert module(INDICES).dtype == dtype
    module.to(torch.float32)
    assert torch.equal(module.first.weight.dequantize(), quantized().first.weight.dequantize())


def test_an_integer_dtype_is_refused() -> None:
    module = quantized()
    with pytest.raises(UnsupportedError, match=r"data: expected an op that leaves the quantized weight"):
        module.first.type(torch.int32)


def test_a_module_on_meta_stays_quantized_and_is_loaded_from_there() -> None:
    module = quantized()
    with torch.no_grad():  # PyTorch moves no parameter that a graph still holds.
        expected, state_dict = module(INDICES), copy.deepcopy(module.state_dict())
    module.to("meta")
    assert type(module.first.weight) is QuantizedTensor
    assert module.first.weight.qdata.is_meta
    module.to_empty(device="cpu")
    assert type(module.first.weight) is QuantizedTensor
    module.load_state_dict(state_dict)
    assert torch.equal(module(INDICES), expected)


def test_cpu_offload_is_bit_identical() -> None:
    module = quantized()
    expected = module(INDICES)
    offloaded = cpu_offload(copy.deepcopy(module), execution_device="cpu")
    assert offloaded.first.weight.is_meta
    assert type(offloaded.first.weight) is QuantizedTensor
    for _ in range(2):
        assert torch.equal(offloaded(INDICES), expected)
        assert offloaded.first.weight.is_meta


ROOT_BUFFER = pytest.mark.filterwarnings("ignore:The following device_map keys do not match:UserWarning")


@ROOT_BUFFER
def test_dispatch_with_hooks_keeps_ties_and_values() -> None:
    module = quantized()
    expected = module(INDICES)
    device_map = dict.fromkeys(("embed", "first", "again", "conv", "norm", "head", "offset"), "cpu")
    dispatched = dispatch_model(copy.deepcopy(module), device_map, main_device="cpu", force_hooks=True)
    assert torch.equal(dispatched(INDICES), expected)
    assert dispatched.head.weight is dispatched.embed.weight
    assert dispatched.first.weight is not dispatched.conv.weight


@ROOT_BUFFER
def test_dispatch_over_two_devices_gives_every_module_its_own_weights() -> None:
    # "meta" stands for the second device: what lies on "cpu" is offloaded from there and computed on "meta".
    module = quantized()
    meta, cpu = ("embed", "conv", "head", "offset"), ("first", "again", "norm")
    device_map = dict.fromkeys(meta, "meta") | dict.fromkeys(cpu, "cpu")
    dispatched = dispatch_model(copy.deepcopy(module), device_map, main_device="meta")
    for name, weight in module.named_parameters():
        assert dispatched.get_parameter(name).is_meta
        assert type(dispatched.get_parameter(name)) is type(weight)
        assert dispatched.get_parameter(name).shape == weight.shape
    assert dispatched(INDICES.to("meta")).shape == module(INDICES).shape
    offloaded = dispatched.first._hf_hook.weights_map["weight"]
    assert same_stored(offloaded.detach(), module.first.weight.detach())


def test_disk_offload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"numpy: expected a plain tensor, .* Call dequantize\(\) first"):
        disk_offload(quantized(), tmp_path)


def test_accelerate_fills_a_skeleton_with_quantized_weights() -> None:
    module = quantized()
    with init_empty_weights():
        empty = Net().eval()
    for name, weight in module.state_dict().items():
        set_module_tensor_to_device(empty, name, "cpu", value=weight)
    assert isinstance(empty.first.weight, nn.Parameter)
    assert type(empty.first.weight) is QuantizedTensor
    assert torch.equal(empty(INDICES), module(INDICES))


# TorchScript


def assigned() -> nn.Module:
    module = skeleton(lambda: nn.Sequential(nn.Linear(64, 8), nn.ReLU()))
    module.load_state_dict(quantized(INT4, make=lambda: nn.Sequential(nn.Linear(64, 8))).state_dict(), assign=True)
    return module


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "quantized": lambda: quantized(INT4, make=lambda: nn.Sequential(nn.Linear(64, 8), nn.ReLU())),
    "loaded": assigned,
    "copied": lambda: copy.deepcopy(assigned()),
    "unpickled": lambda: torch.load(io.BytesIO(saved(assigned())), weights_only=False),
    "moved": lambda: assigned().to(torch.bfloat16).to(torch.float32),
    "one layer": lambda: assigned()[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 64))])
def test_torchscript_is_refused_and_names_dequantize(name: str, compile_: Callable[[nn.Module], Any]) -> None:
    module = REFUSED[name]()
    expected = module(torch.ones(2, 64))
    with pytest.raises(UnsupportedError, match=r"torch\.jit: .* Call model\.dequantize\(\) or hf_trainweights\.dequan"):
        compile_(module)
    assert torch.equal(module(torch.ones(2, 64)), expected)


@pytest.mark.parametrize("compile_", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 64))])
def test_torchscript_takes_a_dequantized_module(compile_: Callable[[nn.Module], Any]) -> None:
    module = assigned().eval()
    dequantize_(module)
    compiled, buffer = compile_(module), io.BytesIO()
    torch.jit.save(torch.jit.freeze(compiled), buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(torch.ones(2, 64)), module(torch.ones(2, 64)))


class Unused(nn.Module):
    """A quantized weight that no traced op sees."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = assigned()

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def scripted_then_assigned() -> Any:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 8), nn.ReLU()))
    scripted.load_state_dict(assigned().state_dict(), assign=True)
    return scripted


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch 2.8 loads a tensor without memory and crashes on use")
@pytest.mark.parametrize("make", [scripted_then_assigned, lambda: torch.jit.trace(Unused(), torch.ones(2, 64))])
def test_what_torchscript_never_asks_about_cannot_be_loaded(make: Callable[[], Any]) -> None:
    # Nothing of ours is called here, so the save cannot be refused; but no garbage can be loaded from it.
    buffer = io.BytesIO()
    torch.jit.save(make(), buffer)
    buffer.seek(0)
    with pytest.raises(RuntimeError, match="require a storage of at least"):
        torch.jit.load(buffer)


# Models of Transformers, without from_pretrained


def tiny_llama(tie: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_transformers_model_is_quantized_in_place(tie: bool, include: bool) -> None:
    model = net(make=lambda: tiny_llama(tie))
    quantize_(model, TrainWeightsConfig("int4", group_size=32, include_embeddings=include))
    assert isinstance(model.lm_head.weight, QuantizedTensor) == include
    assert isinstance(model.model.embed_tokens.weight, QuantizedTensor) == include
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    dense = copy.deepcopy(model)
    dequantize_(dense)
    with torch.no_grad():
        torch.testing.assert_close(model(INDICES).logits, dense(INDICES).logits)
