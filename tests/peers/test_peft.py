"""What PEFT's own suite asks of each of its methods (`tests/test_custom_models.py`), on an int8 base.

The cases are written anew. Deviations, each on purpose:

- PEFT compares merged with unmerged outputs to 1e-4. A merged quantized weight is rounded again, so the bound here is
  the one that rounding to int8 gives: half a step of each weight that changed.
- PEFT's safetensors case writes `model.state_dict()` by `safetensors.torch.save_file`, which takes plain tensors alone.
- Merging into convolutions is left out: nothing of them is quantized.
- LoRA on an `nn.MultiheadAttention` puts merged weights into it for every forward and takes the adapter out again. The
  output projection, the one weight of it that is quantized, is float from the first forward on.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from architectures import ARCHITECTURES, outputs
from covering import by_default
from packaging.version import Version
from peft import PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.models.host.models import cache_argument

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized weights were changed and rounded:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.slow,
]

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
# The name of each method's configuration, and what it takes beside the modules so that it has an effect at once.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"init_lora_weights": False}),
    "rslora": ("LoraConfig", {"init_lora_weights": False, "use_rslora": True}),
    "dora": ("LoraConfig", {"init_lora_weights": False, "use_dora": True}),
    "adalora": ("AdaLoraConfig", {"init_lora_weights": False, "total_step": 10}),
    "ia3": ("IA3Config", {"init_ia3_weights": False, "feedforward_modules": []}),
    "loha": ("LoHaConfig", {"init_weights": False}),
    "lokr": ("LoKrConfig", {"init_weights": False}),
    "oft": ("OFTConfig", {"init_weights": False, "oft_block_size": 8}),
    "boft": ("BOFTConfig", {"init_weights": False, "boft_block_size": 8}),
    "hra": ("HRAConfig", {"init_weights": False}),
    "vera": ("VeraConfig", {"init_weights": False}),
    "vblora": ("VBLoRAConfig", {"vector_length": 16, "num_vectors": 8}),
    "fourierft": ("FourierFTConfig", {"init_weights": False, "n_frequency": 10}),
    "randlora": ("RandLoraConfig", {"init_weights": False}),
    "shira": ("ShiraConfig", {"init_weights": False, "r": 4}),
    "c3a": ("C3AConfig", {"init_weights": False, "block_size": 8}),
    "miss": ("MissConfig", {"init_weights": False, "r": 8}),
    "road": ("RoadConfig", {"init_weights": False, "group_size": 16}),
    "waveft": ("WaveFTConfig", {"init_weights": False, "n_frequency": 10}),
    "delora": ("DeloraConfig", {"init_weights": False}),
    "gralora": ("GraloraConfig", {"init_weights": False, "r": 8, "gralora_k": 2}),
}
every_method = pytest.mark.parametrize(
    "method", by_default(("lora", "dora", "ia3", "loha", "hra", "boft", "vera"), METHODS)
)
PROMPTS = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3}),
}


def config_of(name: str, options: dict[str, Any]) -> PeftConfig:
    if not hasattr(peft, name):
        pytest.skip(f"the installed PEFT has no {name}")
    return getattr(peft, name)(**options)


@pytest.fixture
def base() -> PreTrainedModel:
    model = ARCHITECTURES["llama"].build().eval()
    quantize_(model, TrainWeightsConfig("int8"))
    return model


def adapted(base: PreTrainedModel, method: str) -> Any:
    name, options = METHODS[method]
    torch.manual_seed(0)
    return get_peft_model(base, config_of(name, {**TARGETS, **options})).eval()


def stored(model: nn.Module) -> list[Tensor]:
    weights = (weight for weight in model.parameters() if isinstance(weight, QuantizedTensor))
    return [tensor.clone() for weight in weights for tensor in weight.tensors.values()]


def result(model: nn.Module) -> Tensor:
    return outputs(model, ARCHITECTURES["llama"].make_inputs())[0]  # type: ignore[arg-type]


def steps(model: nn.Module, count: int) -> None:
    """Train a model for a few steps."""
    inputs = ARCHITECTURES["llama"].make_inputs()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(count):
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@every_method
def test_each_method_trains_its_adapter_alone(method: str, base: PreTrainedModel) -> None:
    model = adapted(base, method)
    before, outcome = stored(model), result(model)
    steps(model, 2)
    assert all(map(torch.equal, stored(model), before))
    assert not torch.equal(result(model), outcome)


@pytest.mark.covering(1)
@pytest.mark.parametrize("safe_merge", [False, True])
@every_method
def test_each_method_merges_up_to_half_a_step_of_int8(method: str, safe_merge: bool, base: PreTrainedModel) -> None:
    model = adapted(base, method)
    twin = copy.deepcopy(model)
    dequantize_(twin)
    wanted = dict(twin.merge_and_unload(safe_merge=safe_merge).named_parameters())
    merged = model.merge_and_unload(safe_merge=safe_merge)
    for name, weight in merged.named_parameters():
        if isinstance(weight, QuantizedTensor):
            bound = 0.51 * weight.scale + 1e-6
            assert ((weight.dequantize() - wanted[name]).abs() <= bound).all(), name


@every_method
def test_each_method_unmerges_and_is_disabled(method: str, base: PreTrainedModel) -> None:
    plain, model = result(base), adapted(base, method)
    with_adapter = result(model)
    with model.disable_adapter():
        assert torch.equal(result(model), plain)
    model.merge_adapter()
    assert (result(model) - with_adapter).norm() < 0.03 * with_adapter.norm()
    model.unmerge_adapter()
    assert (result(model) - with_adapter).norm() < 0.03 * with_adapter.norm()
    assert {type(weight) for name, weight in model.named_parameters() if "mlp" in name} == {QuantizedTensor}


@every_method
def test_each_method_is_saved_and_loaded_onto_the_same_base(method: str, base: PreTrainedModel, tmp_path: Any) -> None:
    again, model = copy.deepcopy(base), adapted(base, method)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    assert torch.equal(result(loaded), result(model))


@pytest.mark.parametrize("method", PROMPTS)
def test_each_kind_of_prompt_trains(method: str, base: PreTrainedModel) -> None:
    name, options = PROMPTS[method]
    if method == "prefix tuning" and cache_argument(base) == "cache" and Version(peft.__version__) < Version("0.22"):
        pytest.skip("this PEFT passes the cache under its earlier name")
    model = get_peft_model(base, config_of(name, {"task_type": "CAUSAL_LM", **options}))
    before = stored(model)
    steps(model, 2)
    assert all(map(torch.equal, stored(model), before))


def test_attention_that_merges_in_every_forward_has_a_float_weight_afterwards() -> None:
    torch.manual_seed(0)
    module = nn.Sequential()
    module.add_module("mha", nn.MultiheadAttention(64, 2))
    quantize_(module, TrainWeightsConfig("int8"))
    model: Any = get_peft_model(module, peft.LoraConfig(target_modules=["mha"], init_lora_weights=False))  # type: ignore
    twin, inputs = copy.deepcopy(model), torch.randn(3, 1, 64)
    dequantize_(twin)
    attention, expected = (each.base_model.model.mha(inputs, inputs, inputs)[0] for each in (model, twin))
    torch.testing.assert_close(attention, expected)
    assert not any(isinstance(weight, QuantizedTensor) for weight in model.parameters())
