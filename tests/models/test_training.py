"""Adapters train on a frozen quantized base, in Trainer and out of it; it is evaluated without them too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from covering import by_default
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import load_sharded_checkpoint

from hf_trainweights import QuantizedTensor, TrainWeightsConfig
from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.tensor.dispatch import FALLBACKS
from hf_trainweights.testing.values import assert_close_product

# PEFT, and here and there a test, uses names that Transformers is about to change.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.slow,
]

CONFIGS = {
    "int8": TrainWeightsConfig("int8"),
    "int4": TrainWeightsConfig("int4", group_size=32),
    "float8_e4m3": TrainWeightsConfig("float8_e4m3"),
}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}
UP = "model.layers.0.mlp.up_proj.weight"


class Counting(Dataset):
    """Rows that count up in steps of one to four."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(12) * (index % 4 + 1) + index) % 96
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def quantized(float_directory: Callable[..., Path]) -> Callable[..., PreTrainedModel]:
    """Return a quantized model, a new one at every call."""

    def quantize(
        name: str = "llama", config: TrainWeightsConfig = CONFIGS["int8"], dtype: torch.dtype = torch.float32
    ) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(float_directory(name, dtype), quantization_config=config)

    return quantize


def with_lora(model: PreTrainedModel, name: str = "llama") -> PeftModel:
    torch.manual_seed(0)
    options = {"fan_in_fan_out": True} if name == "gpt2" else {}
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[name], task_type="CAUSAL_LM", **options))


def disturb(model: nn.Module) -> None:
    """Give every adapter an effect; most start without one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def train(model: nn.Module, directory: Path, resume: Path | None = None, **options: Any) -> list[float]:
    """Return the losses that a Trainer logs, one for each step."""
    arguments = {"max_steps": 8, "save_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "seed": 0, **options}
    trainer = Trainer(
        model,
        TrainingArguments(
            directory, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, **arguments
        ),
        train_dataset=Counting(),
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all that must not change, quantized weights by their stored tensors."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            state |= {f"{name}/{key}": stored.clone() for key, stored in parameter.tensors.items()}
        elif not parameter.requires_grad:
            state[name] = parameter.detach().clone()
    return state


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() != set()
    assert [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])] == []


def first_batch(index: int = 0) -> dict[str, Tensor]:
    return {name: value[None] for name, value in Counting()[index].items()}


# ---- adapters


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", by_default(("gpt2",), TARGETS))
@pytest.mark.parametrize("config", by_default([CONFIGS["int4"]], CONFIGS.values()), ids=CONFIGS)
def test_lora_trains_saves_and_resumes_in_trainer(
    name: str, config: TrainWeightsConfig, quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = with_lora(quantized(name, config), name)
    before, fallbacks = frozen(model), FALLBACKS.copy()
    losses = train(model, tmp_path / "through")
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.5
    assert_same(frozen(model), before)
    assert fallbacks == FALLBACKS, "an op in training has no handler"
    checkpoint = tmp_path / "through" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert not (checkpoint / "model.safetensors").exists()

    resumed = with_lora(quantized(name, config), name)
    assert train(resumed, tmp_path / "resumed", checkpoint) == losses
    assert_same(frozen(resumed), before)
    inputs = ARCHITECTURES[name].make_inputs()
    assert torch.equal(outputs(resumed.eval(), inputs)[0], outputs(model.eval(), inputs)[0])

    reloaded = PeftModel.from_pretrained(quantized(name, config), tmp_path / "through" / "checkpoint-8")
    assert torch.equal(outputs(reloaded, inputs)[0], outputs(model, inputs)[0])


def test_gradients_are_those_of_the_dequantized_model(quantized: Callable[..., PreTrainedModel]) -> None:
    gradients = []
    for name in TARGETS:
        for dequantize in (False, True):
            base = quantized(name, CONFIGS["int4"])
            if dequantize:
                base.dequantize()
                base.requires_grad_(False)
            model = with_lora(base, name)
            disturb(model)
            model(**first_batch()).loss.backward()
            gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        actual, expected = gradients[-2:]
        assert actual.keys() == expected.keys() != set()
        for key, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_kbit_preparation_keeps_the_base_quantized_and_adapters_train(
    checkpointing: bool, dtype: torch.dtype, quantized: Callable[..., PreTrainedModel]
) -> None:
    base = quantized(dtype=dtype)
    before = {key: tensor for key, tensor in frozen(base).items() if "/" in key}
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointing else {}
    prepared = prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing, **options)
    assert_same({key: tensor for key, tensor in frozen(prepared).items() if "/" in key}, before)
    assert isinstance(prepared.get_parameter(UP), nn.Parameter)
    assert not any(parameter.requires_grad for parameter in prepared.parameters())
    # PEFT shows everything in float32; the stored tensors stay as they are.
    assert {parameter.dtype for parameter in prepared.parameters()} == {torch.float32}
    reference = quantized(dtype=dtype).to(torch.float32)
    assert torch.equal(outputs(prepared, first_batch())[1], outputs(reference, first_batch())[1])

    model = with_lora(prepared)
    disturb(model)
    model.train()
    model(**first_batch()).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())


def test_gradient_checkpointing_gives_the_same_gradients(quantized: Callable[..., PreTrainedModel]) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = with_lora(quantized())
        disturb(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        model(**first_batch()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(gradients[1], gradients[0])


def test_lora_on_expert_weights_trains(quantized: Callable[..., PreTrainedModel]) -> None:
    base = quantized("qwen3_moe")
    inputs = ARCHITECTURES["qwen3_moe"].make_inputs()
    expected = outputs(base, inputs)[0]
    plain = copy.deepcopy(base)
    plain.dequantize()
    plain.set_experts_implementation("eager")  # torch._grouped_mm does not take float64
    exact = outputs(plain.double(), inputs)[0]
    before = {key: tensor for key, tensor in frozen(base).items() if "/" in key}
    config = LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0)
    model = get_peft_model(base, config)
    # The adapter adds to the dequantized weight, so its product is another kernel's.
    assert_close_product(expected, outputs(model, inputs)[0], exact)
    disturb(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    after = {
        key.removeprefix("base_model.model.").replace("base_layer.", ""): tensor
        for key, tensor in frozen(model).items()
        if "/" in key
    }
    assert_same(after, before)


@pytest.mark.parametrize("serialization", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
def test_the_model_s_own_adapters_are_saved_alone(
    serialization: dict[str, Any], quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = quantized()
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS["llama"]))
    disturb(model)
    model.save_pretrained(tmp_path, **serialization)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert not names & {"model.safetensors", "pytorch_model.bin"}
    other = quantized()
    other.load_adapter(str(tmp_path))
    inputs = ARCHITECTURES["llama"].make_inputs()
    assert torch.equal(outputs(other, inputs)[0], outputs(model, inputs)[0])


def test_unloading_an_adapter_gives_the_base_back(quantized: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    base = quantized()
    expected = outputs(base, ARCHITECTURES["llama"].make_inputs())[0]
    model = with_lora(base)
    disturb(model)
    unloaded = model.unload()
    unloaded.save_pretrained(tmp_path)
    for each in (unloaded, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert isinstance(each.get_parameter(UP), QuantizedTensor)
        assert torch.equal(outputs(each, ARCHITECTURES["llama"].make_inputs())[0], expected)


# ---- without adapters


def test_a_trainer_evaluates_and_predicts_without_adapters(
    quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = quantized()
    with torch.no_grad():
        expected = torch.stack([model(**first_batch(index)).loss for index in range(16)])
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[], disable_tqdm=True, eval_strategy="no")
    trainer = Trainer(model, arguments)
    assert trainer.evaluate(Counting())["eval_loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    predicted = trainer.predict(Counting())
    assert predicted.predictions.shape == (16, 12, 96)
    assert not model.training


def test_to_train_without_adapters_is_warned_of_unless_someone_chose_what_trains(
    quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"weights of this model stay frozen.*Attach adapters"):
        train(quantized(), tmp_path)
    chosen = quantized()
    chosen.model.requires_grad_(requires_grad=False)
    before = {**frozen(chosen), "lm_head.weight": chosen.lm_head.weight.detach().clone()}
    losses = train(chosen, tmp_path / "head")
    assert sum(losses[-3:]) < sum(losses[:3])
    after = {**frozen(chosen), "lm_head.weight": chosen.lm_head.weight}
    assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == ["lm_head.weight"]


def test_training_mode_of_adapters_or_of_a_float_model_is_not_warned_of(
    quantized: Callable[..., PreTrainedModel],
) -> None:
    assert with_lora(quantized()).train().training
    assert quantized().eval().train(mode=False).training is False
    model = quantized()
    model.dequantize()
    assert model.train().training


def test_the_best_adapter_is_loaded_at_the_end(quantized: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = with_lora(quantized())
    before = frozen(model)
    arguments = TrainingArguments(
        tmp_path,
        max_steps=8,
        eval_steps=2,
        save_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        learning_rate=1e-2,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the last checkpoint is not the best one
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = max(losses, key=losses.__getitem__)
    assert best < 8
    assert str(trainer.state.best_model_checkpoint).endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    assert_same(frozen(model), before)


def test_an_optimizer_gets_no_quantized_weight(quantized: Callable[..., PreTrainedModel]) -> None:
    model = quantized()
    model(**first_batch()).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters() if isinstance(parameter, QuantizedTensor))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {key: tensor for key, tensor in frozen(model).items() if "/" in key}
    optimizer.step()
    assert_same({key: tensor for key, tensor in frozen(model).items() if "/" in key}, before)


# ---- resuming from files whose weights are quantized


SAVES = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "5KB"},
    "sharded_bin": {"safe_serialization": False, "max_shard_size": "5KB"},
}


def other_weights(quantized: Callable[..., PreTrainedModel], config: TrainWeightsConfig) -> PreTrainedModel:
    """Return a model of the same layout as `quantized(config=config)` that computes something else."""
    model = quantized(config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.scale if isinstance(parameter, QuantizedTensor) else parameter).mul_(-0.5)
    return model


def read(directory: Path) -> list[dict[str, Tensor]]:
    """Return what each shard of a checkpoint holds, in the order of their names."""
    files = sorted(path for path in directory.iterdir() if path.suffix in {".safetensors", ".bin"})
    return [load_file(file) if file.suffix == ".safetensors" else torch.load(file) for file in files]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config",
    [*CONFIGS.values(), TrainWeightsConfig("int8", overrides={"re:.*down_proj": "float8_e4m3"})],
    ids=[*CONFIGS, "overrides"],
)
@pytest.mark.parametrize("save", SAVES)
def test_load_state_dict_restores_quantized_weights_shard_by_shard(
    save: str, config: TrainWeightsConfig, quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    source, model = quantized(config=config), other_weights(quantized, config)
    inputs = ARCHITECTURES["llama"].make_inputs()
    expected = outputs(source, inputs)[0]
    assert not torch.equal(outputs(model, inputs)[0], expected)
    source.save_pretrained(tmp_path, **SAVES[save])
    shards = read(tmp_path)
    for shard in shards:
        model.load_state_dict(shard, strict=False)
    if "sharded" in save:
        apart = {name.removesuffix("qdata") for shard in shards for name in shard if name.endswith("_qdata")}
        apart -= {name for shard in shards for name in apart if {f"{name}qdata", f"{name}scale"} <= shard.keys()}
        assert apart, "qdata and scale of no weight are in different shards"
    assert torch.equal(outputs(model, inputs)[0], expected)
    assert isinstance(model.get_parameter(UP), QuantizedTensor)


@pytest.mark.parametrize("safe", by_default((True,), (True, False)))
def test_load_sharded_checkpoint_restores_quantized_weights(
    safe: bool, quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    source, model = quantized(), other_weights(quantized, CONFIGS["int8"])
    source.save_pretrained(tmp_path, max_shard_size="32KB", safe_serialization=safe)
    load_sharded_checkpoint(model, str(tmp_path), strict=False, prefer_safe=safe)
    inputs = ARCHITECTURES["llama"].make_inputs()
    assert torch.equal(outputs(model, inputs)[0], outputs(source, inputs)[0])


def test_load_state_dict_is_strict_about_quantized_weights(
    quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    quantized().save_pretrained(tmp_path)
    [state_dict] = read(tmp_path)
    model = other_weights(quantized, CONFIGS["int8"])
    assert model.load_state_dict(dict(state_dict)) == ([], [])
    scale = UP.replace(".weight", "._weight_scale")
    incomplete = {name: tensor for name, tensor in state_dict.items() if name != scale}
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{UP}"'):
        quantized().load_state_dict(incomplete)
    assert quantized().load_state_dict(incomplete, strict=False).missing_keys == [UP]
    with pytest.raises(CorruptFileError, match=UP):
        quantized().load_state_dict({**state_dict, scale: state_dict[scale][:-1]}, strict=False)
    with pytest.raises(CorruptFileError, match="expected qdata"):
        quantized(config=CONFIGS["int4"]).load_state_dict(dict(state_dict), strict=False)


def test_weights_of_another_format_are_not_dropped_in_silence(
    quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    quantized(config=TrainWeightsConfig("int8", overrides={"re:.*down_proj": "float8_e4m3"})).save_pretrained(tmp_path)
    [state_dict] = read(tmp_path)
    with pytest.raises((TrainWeightsError, RuntimeError), match="down_proj"):
        quantized().load_state_dict(state_dict, strict=False)


def test_a_trainer_resumes_a_partly_quantized_model_from_its_own_checkpoint(
    quantized: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Transformers' own adapters on a quantized base: what Trainer calls on resume is load_state_dict."""
    model = other_weights(quantized, CONFIGS["int8"])
    quantized().save_pretrained(tmp_path)
    trainer = Trainer(with_lora(quantized()), TrainingArguments(tmp_path / "run", use_cpu=True, report_to=[]))
    trainer._load_from_checkpoint(str(tmp_path), model=model)
    inputs = ARCHITECTURES["llama"].make_inputs()
    assert torch.equal(outputs(model, inputs)[0], outputs(quantized(), inputs)[0])
