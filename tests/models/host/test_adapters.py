"""PEFT over quantized weights: adapters that start from the weight, merge into it, or train a copy of it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from fork_server import exit_code_of_fork
from peft import (
    EvaConfig,
    HRAConfig,
    IA3Config,
    LoftQConfig,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptEncoderConfig,
    get_base_model_state_dict,
    get_peft_model,
    initialize_lora_eva_weights,
    set_base_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from weights import same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.errors import QuantizationError, UnsupportedError
from hf_trainweights.models.host.adapters import meet_adapters

# PEFT uses names that Transformers is about to change.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

FORMATS = {
    "int8": TrainWeightsConfig("int8"),
    "int8_activations": TrainWeightsConfig("int8", activations="int8"),
    "int4": TrainWeightsConfig("int4", group_size=32),
    "float8_e4m3": TrainWeightsConfig("float8_e4m3"),
}
TARGETS = ["q_proj", "down_proj"]
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=TARGETS),
    "dora": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "loha": LoHaConfig(r=4, target_modules=TARGETS),
    "hra": HRAConfig(r=4, target_modules=TARGETS),
    "experts": LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]),
    "gpt2": LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
}
ROUNDED = pytest.mark.filterwarnings("ignore:.*quantized weights were changed and rounded:UserWarning")


def quantized(name: str = "llama", config: TrainWeightsConfig = FORMATS["int8"], **options: Any) -> PreTrainedModel:
    model = ARCHITECTURES[name].build(**options).eval()
    quantize_(model, copy.copy(config))
    return model


def with_adapter(model: nn.Module, config: PeftConfig, adapter: str = "default") -> PeftModel:
    """Return a model with an adapter that has an effect; most start without one."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, copy.deepcopy(config), adapter_name=adapter).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return adapted


def with_float_base(model: PeftModel) -> PeftModel:
    twin = copy.deepcopy(model)
    dequantize_(twin)
    return twin


def weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    """Return the quantized weights by the names that they have without adapters."""
    return {
        name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", ""): weight
        for name, weight in model.named_parameters()
        if isinstance(weight, QuantizedTensor)
    }


def codes(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {name: weight.clone() for name, weight in weights(model).items()}  # type: ignore[misc]


def assert_same(actual: dict[str, QuantizedTensor], expected: dict[str, QuantizedTensor]) -> None:
    assert actual.keys() == expected.keys() != set()
    assert [name for name, weight in actual.items() if not same_stored(weight, expected[name])] == []


def inputs_of(model: nn.Module, name: str = "llama") -> Tensor:
    return outputs(model, ARCHITECTURES[name].make_inputs())[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]),
        PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=64, task_type="CAUSAL_LM"),
    ],
)
def test_adapters_that_were_there_before_stay_in_float_and_train(adapter: PeftConfig) -> None:
    model = get_peft_model(ARCHITECTURES["llama"].build(), adapter)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    quantize_(model, TrainWeightsConfig("int8", include_embeddings=True, overrides={"re:.*": "int8"}))
    assert isinstance(model.get_base_model().model.layers[0].self_attn.k_proj.weight, QuantizedTensor)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)


# ---- merging


@pytest.mark.slow
@pytest.mark.covering(1)
@ROUNDED
@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merging_gives_the_merged_float_weight_quantized_alike(
    adapter: str, form: TrainWeightsConfig, safe_merge: bool
) -> None:
    name = {"experts": "qwen3_moe", "gpt2": "gpt2"}.get(adapter, "llama")
    model = with_adapter(quantized(name, form), ADAPTERS[adapter])
    before = codes(model)
    wanted = dict(with_float_base(model).merge_and_unload(safe_merge=safe_merge).named_parameters())
    merged = model.merge_and_unload(safe_merge=safe_merge)
    changed = 0
    for key, weight in weights(merged).items():
        values = wanted[key].detach()
        if torch.equal(values, before[key].dequantize()):
            assert same_stored(weight, before[key])
            continue
        changed += 1
        old = before[key]
        fresh = QuantizedTensor.quantize(values, old.format, old.transposed)
        # Rows that the adapter left alone keep their codes, which another rounding need not find again.
        rows = (values == old.dequantize()).all(dim=-2 if old.transposed else -1, keepdim=True)
        assert torch.equal(weight.dequantize(), torch.where(rows, values, fresh.dequantize()))
        assert (weight.format, weight.transposed, weight.dtype) == (old.format, old.transposed, old.dtype)
    assert changed
    assert changed < len(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_computes_what_the_adapter_did_and_is_saved_like_any_other(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    base = quantized(dtype=dtype)
    plain = inputs_of(base)
    model = with_adapter(base, ADAPTERS["lora"])
    expected = inputs_of(model)
    with pytest.warns(UserWarning, match=r"4 quantized weights were changed and rounded to int8 again"):
        merged = model.merge_and_unload()
    assert (inputs_of(merged) - expected).norm() < 0.2 * (expected - plain).norm()
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(weights(again), weights(merged))
    if dtype == torch.float32:  # the tests' 16-bit model has its rotary frequencies in 16 bits, a loaded one does not
        assert torch.equal(inputs_of(again), inputs_of(merged))


def test_rounding_is_said_once_for_each_call_and_dequantizing_first_avoids_it() -> None:
    model = with_adapter(quantized(), ADAPTERS["lora"])
    expected, twin = inputs_of(model), with_float_base(model)
    calls = [model.merge_adapter, model.unmerge_adapter, lambda: model.merge_adapter(safe_merge=True)]
    for call in (*calls, model.unmerge_adapter, model.merge_and_unload):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert len(caught) == 1
        assert "The relative error of rounding is 0.00" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = twin.merge_and_unload()
    torch.testing.assert_close(inputs_of(merged), expected, rtol=1e-4, atol=1e-4)


@ROUNDED
def test_unmerging_takes_the_adapter_out_again_up_to_rounding() -> None:
    base = quantized()
    plain, before = inputs_of(base), {name: weight.dequantize() for name, weight in weights(base).items()}
    steps = {name: weight.scale for name, weight in codes(base).items()}
    model = with_adapter(base, ADAPTERS["lora"])
    effect = (inputs_of(model) - plain).norm()
    model.merge_adapter()
    model.unmerge_adapter()
    for name, weight in weights(model).items():
        # Twice half a step, and the second scale is another one.
        assert ((weight.dequantize() - before[name]).abs() <= 1.5 * steps[name] + 1e-6).all()
    with model.disable_adapter():
        assert (inputs_of(model) - plain).norm() < 0.1 * effect


@ROUNDED
@pytest.mark.filterwarnings("ignore:Already following adapters were merged:UserWarning")
def test_several_adapters_are_merged_one_by_one_or_together() -> None:
    model = with_adapter(quantized(), ADAPTERS["lora"], "first")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    before = codes(model)
    model.set_adapter("second")
    expected = inputs_of(model)
    model.merge_adapter(["second"])
    changed = [name for name, weight in weights(model).items() if not same_stored(weight, before[name])]
    assert changed == [name for name in before if "up_proj" in name]
    assert (inputs_of(model) - expected).norm() < 0.02 * expected.norm()
    model.merge_adapter(["first"])
    assert all(layer.merged_adapters for layer in model.modules() if hasattr(layer, "merged_adapters"))


@pytest.mark.parametrize("safe_merge", [False, True])
def test_an_adapter_with_nan_is_not_merged_and_the_model_stays_as_it_was(safe_merge: bool) -> None:
    model = with_adapter(quantized(), ADAPTERS["lora"])
    before = codes(model)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name)[0] = torch.nan
    with pytest.raises((ValueError, QuantizationError), match="NaN"):
        model.merge_adapter(safe_merge=safe_merge)
    assert_same(weights(model), before)
    assert not any(layer.merged_adapters for layer in model.modules() if hasattr(layer, "merged_adapters"))


@ROUNDED
@pytest.mark.filterwarnings("ignore:Model .*`tie_word_embeddings=True`:UserWarning")
def test_tied_embeddings_stay_tied_when_an_adapter_is_merged_into_them() -> None:
    base = quantized("llama_tied", TrainWeightsConfig("int8", include_embeddings=True))
    model = with_adapter(base, LoraConfig(r=4, target_modules=["embed_tokens"]))
    before = codes(model)
    merged = model.merge_and_unload()
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert not same_stored(merged.get_input_embeddings().weight, before["model.embed_tokens.weight"])


@ROUNDED
def test_plain_modules_are_adapted_and_merged_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig("int8"))
    model, inputs = with_adapter(module, LoraConfig(r=4, target_modules=["0", "2"])), torch.randn(2, 64)
    expected = model(inputs)
    merged = model.merge_and_unload()
    assert all(isinstance(merged[index].weight, QuantizedTensor) for index in (0, 2))
    torch.testing.assert_close(merged(inputs), expected, rtol=0, atol=0.02)


# ---- adapters that start from the weight

INITIAL = ["pissa", "pissa_niter_4", "olora", "orthogonal", "mica", "corda"]


@pytest.mark.slow
@ROUNDED
@pytest.mark.filterwarnings("ignore:.*Using default CorDA config:UserWarning")
@pytest.mark.parametrize("initial", INITIAL)
def test_an_adapter_starts_from_the_dequantized_weight(initial: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=initial)  # type: ignore[arg-type]
    base, float_base = quantized(), quantized()
    float_base.dequantize()
    plain = inputs_of(base)
    if initial == "corda":
        # What `preprocess_corda` of PEFT leaves on each layer; for that it needs a package that is not installed.
        for each in (base, float_base):
            for layer in (block.self_attn.q_proj for block in each.model.layers):
                U, S, Vh = torch.linalg.svd(layer.weight.dequantize())
                layer.eigens = SimpleNamespace(U_WC=U[:, :4], S_WC=S[:4], V_WC=Vh[:4].T)
    torch.manual_seed(0)
    expected = dict(get_peft_model(float_base, copy.deepcopy(config)).named_parameters())
    torch.manual_seed(0)
    model = get_peft_model(base, copy.deepcopy(config)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(parameter, expected[name], msg=lambda text, name=name: f"{name}: {text}")
        elif "q_proj" in name:
            step = parameter.scale  # type: ignore[attr-defined]
            error = (parameter.dequantize() - expected[name]).abs()  # type: ignore[attr-defined]
            assert (error <= 0.51 * step + 1e-6).all()
    assert (inputs_of(model) - plain).norm() < 0.02 * plain.norm()


@pytest.mark.slow
def test_an_adapter_that_starts_from_the_weight_is_saved_and_loaded_onto_the_same_base(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 quantized weights were changed") as caught:
        model = get_peft_model(quantized(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"))
    assert len([each for each in caught if each.category is UserWarning]) == 1
    model.eval().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="2 quantized weights were changed"):
        again = PeftModel.from_pretrained(quantized(), tmp_path).eval()
    assert torch.equal(inputs_of(again), inputs_of(model))


def test_an_adapter_of_random_values_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("dequantized")

    base = quantized()
    monkeypatch.setattr(QuantizedTensor, "dequantize", refuse)
    get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS))


# ---- parts of the base that are trained in full


@pytest.mark.slow
@pytest.mark.parametrize("part", ["lm_head", "up_proj", "mlp", "embed_tokens"])
def test_a_quantized_module_to_save_trains_as_a_float_copy(part: str, tmp_path: Path) -> None:
    everything = TrainWeightsConfig("int8", include_embeddings=True)
    base = quantized(config=everything)
    before, plain = codes(base), inputs_of(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[part]))
    copies = {name: p for name, p in model.named_parameters() if "modules_to_save" in name}
    assert copies
    assert all(type(p) is nn.Parameter and p.requires_grad for p in copies.values())
    assert (inputs_of(model.eval()) - plain).norm() < 1e-2 * plain.norm()
    with torch.no_grad():
        for parameter in copies.values():
            parameter.mul_(1.5)
    assert_same(weights(model), before)
    expected = inputs_of(model)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(quantized(config=everything), tmp_path / "adapter").eval()
    assert torch.equal(inputs_of(again), expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(inputs_of(merged), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(inputs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), inputs_of(merged))


@pytest.mark.slow
@ROUNDED
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_trained_tokens_change_their_rows_alone(name: str) -> None:
    base = quantized(name, TrainWeightsConfig("int8", include_embeddings=True))
    before = codes(base)["model.embed_tokens.weight"]
    model = with_adapter(base, LoraConfig(r=4, target_modules=["up_proj"], trainable_token_indices=[3, 5]))
    inputs = ARCHITECTURES[name].make_inputs()
    model(**{**inputs, "input_ids": inputs["input_ids"] * 0 + 3}, labels=inputs["input_ids"]).loss.backward()
    [delta] = [p for key, p in model.named_parameters() if "trainable_tokens_delta" in key][:1]
    assert delta.grad is not None
    assert delta.grad.abs().sum() > 0
    merged = model.merge_and_unload().get_input_embeddings().weight
    kept = [row for row in range(before.shape[0]) if row not in (3, 5)]
    assert same_stored(merged[kept], before[kept])
    assert not same_stored(merged[[3, 5]], before[[3, 5]])


# ---- other things that are done with adapters


@pytest.mark.slow
def test_an_adapter_is_swapped_for_another_in_place(tmp_path: Path) -> None:
    base = quantized()
    expected = {}
    for seed in (1, 2):
        model = with_adapter(quantized(), ADAPTERS["lora"])
        with torch.no_grad():
            [p.mul_(seed) for p in model.parameters() if p.requires_grad]
        model.save_pretrained(tmp_path / str(seed))
        expected[seed] = inputs_of(model)
    model, before = PeftModel.from_pretrained(base, tmp_path / "1").eval(), codes(base)
    assert torch.equal(inputs_of(model), expected[1])
    hotswap_adapter(model, tmp_path / "2", adapter_name="default")
    assert torch.equal(inputs_of(model), expected[2])
    assert_same(weights(model), before)


def merge_into_a_float_module() -> None:
    from peft.tuners import lora

    update, merge = lora.LoraLayer.update_layer, lora.Linear.merge
    get_peft_model(nn.Sequential(nn.Linear(64, 64)), LoraConfig(target_modules=["0"])).merge_and_unload()
    assert (lora.LoraLayer.update_layer, lora.Linear.merge) == (update, merge)


@pytest.mark.slow
def test_peft_stays_as_it_is_without_quantized_weights() -> None:
    # A process in which nothing has been quantized yet.
    assert exit_code_of_fork(merge_into_a_float_module) == 0


def test_modules_of_the_same_names_that_are_not_of_peft_are_left_alone() -> None:
    layer = nn.Linear(64, 64)
    quantize_(layer, TrainWeightsConfig("int8"))
    for name in ("model", "base_layer", "original_module"):
        owner = nn.Module()
        methods = dict(vars(type(owner)))
        meet_adapters(owner, name, layer)
        assert dict(vars(type(owner))) == methods


def test_peft_has_every_name_that_is_wrapped() -> None:
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    assert all(hasattr(Linear, name) for name in ("update_layer", "merge", "unmerge"))
    assert issubclass(Linear, BaseTunerLayer)
    names = ("inject_adapter", "merge_adapter", "unmerge_adapter", "merge_and_unload")
    assert all(hasattr(BaseTuner, name) for name in names)
    assert hasattr(AuxiliaryTrainingWrapper, "update")


# ---- adapters of single parameters, and those that start from data or from the float weight

PARAMETER = LoraConfig(r=4, target_modules=[], target_parameters=["mlp.gate_proj.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_an_adapter_of_a_parameter_computes_beside_graphs_of_earlier_forwards(form: TrainWeightsConfig) -> None:
    base = quantized(config=form)
    plain = inputs_of(base)  # holds its graph, and the graph the weights
    owner, before = base.model.layers[0].mlp.gate_proj, codes(base)
    parameter = owner.weight
    model = with_adapter(base, PARAMETER)
    with torch.enable_grad():
        graphs = [model(**ARCHITECTURES["llama"].make_inputs()).logits for _ in range(2)]
    with model.disable_adapter():
        assert torch.equal(inputs_of(model), plain)
    assert torch.equal(graphs[0], graphs[1])
    expected = inputs_of(with_float_base(model))
    limit = 0.2 if form.activations else 0.02  # compiled products round activations of every size
    assert (inputs_of(model) - expected).norm() < limit * (expected - plain).norm()
    assert owner.weight is parameter
    assert_same(weights(model), before)


@pytest.mark.slow
def test_an_adapter_of_a_parameter_trains() -> None:
    model = with_adapter(quantized(), PARAMETER)
    losses = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    inputs = ARCHITECTURES["llama"].make_inputs()
    for _ in range(4):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_eva_starts_from_the_activations() -> None:
    inputs = ARCHITECTURES["llama"].make_inputs()
    adapters = []
    for base in (quantized(), quantized()):
        if adapters:
            dequantize_(base)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="eva", eva_config=EvaConfig())
        model = get_peft_model(base, config, low_cpu_mem_usage=True).eval()
        initialize_lora_eva_weights(model, [inputs] * 4, show_progress_bar=False)
        adapters.append({name: p.detach() for name, p in model.named_parameters() if "lora_A" in name})
    ours, expected = adapters
    assert ours.keys() == expected.keys() != set()
    for name, matrix in ours.items():
        assert matrix.count_nonzero()
        # A singular vector may point either way.
        assert ((matrix * expected[name]).sum(dim=1).abs() > 0.99).all(), name


def test_loftq_is_refused_and_says_what_starts_from_a_quantized_weight() -> None:
    base = quantized()
    before = codes(base)
    with pytest.raises(UnsupportedError, match=r'expected float weights.*"pissa", "olora" or "eva"'):
        get_peft_model(
            base, LoraConfig(target_modules=["q_proj"], init_lora_weights="loftq", loftq_config=LoftQConfig())
        )
    assert [n for n, w in codes(base).items() if not same_stored(w, before[n])] == []


CONFIGS: dict[str, LoraConfig] = {
    "default": LoraConfig(r=4, target_modules=["0"]),
    "loftq": LoraConfig(r=4, target_modules=["0"], init_lora_weights="loftq", loftq_config=LoftQConfig(loftq_bits=4)),
    "pissa": LoraConfig(r=4, target_modules=["0"], init_lora_weights="pissa"),
    "modules_to_save": LoraConfig(r=4, target_modules=["0"], modules_to_save=["1"]),
    "parameter": LoraConfig(r=4, target_modules=[], target_parameters=["0.weight"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_float_model_runs_the_functions_of_peft_beside_a_quantized_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    for config in (CONFIGS["default"], CONFIGS["modules_to_save"], CONFIGS["parameter"]):
        met = net()
        quantize_(met, TrainWeightsConfig("int8"))
        get_peft_model(met, config)

    def refuse(*_: object) -> Any:
        raise AssertionError("a float model met a function for quantized weights")

    for own in ("in_float", "rounding_said_once", "quantized_names", "_refuse_loftq", "_ignores_weight"):
        monkeypatch.setattr(f"hf_trainweights.models.host.adapters.{own}", refuse)
    # PEFT's own would ask for bitsandbytes here.
    monkeypatch.setattr("peft.tuners.lora.LoraLayer.loftq_init", lambda *_: None)
    model = get_peft_model(net(), CONFIGS[name])
    with torch.no_grad():
        expected = model(torch.ones(1, 64))
        model.merge_adapter()
        model.unmerge_adapter()
        assert torch.allclose(model.merge_and_unload()(torch.ones(1, 64)), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_the_state_dict_of_the_base_is_taken_out_and_put_back(config: TrainWeightsConfig) -> None:
    base, other = quantized(config=config), quantized(config=config)
    for weight in other.parameters():
        if isinstance(weight, QuantizedTensor):
            weight.qdata.bitwise_not_() if not weight.qdata.is_floating_point() else weight.qdata.zero_()
    before, wanted = copy.deepcopy(base.state_dict()), other.state_dict()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS))
    assert same_state(get_base_model_state_dict(model), before)
    assert not same_state(wanted, before)
    set_base_model_state_dict(model, wanted)
    assert same_state(get_base_model_state_dict(model), wanted)


def test_a_float_state_dict_for_a_quantized_base_is_refused_with_the_way() -> None:
    model = get_peft_model(quantized(), LoraConfig(r=4, target_modules=TARGETS))
    with pytest.raises(RuntimeError, match="quantize the source in this format first"):
        set_base_model_state_dict(model, ARCHITECTURES["llama"].build().state_dict())


def same_state(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def same(first: Tensor, second: Tensor) -> bool:
        if isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor):
            return same_stored(first, second)
        return torch.equal(first, second)

    return state.keys() == other.keys() and all(same(state[name], other[name]) for name in state)
