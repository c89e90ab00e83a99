"""The float weights of a quantized model that train are resumed exactly, also where its files name them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import DECODER, VISION
from checkpoint.trainers import assert_equal, build
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_trainweights import QuantizedTensor, TrainWeightsCheckpointCallback, TrainWeightsConfig, quantize_
from hf_trainweights.checkpoint.directory import latest
from hf_trainweights.checkpoint.encoded.reader import load_file

pytestmark = pytest.mark.slow

IMAGE_TOKEN = 95


def make_llava() -> PreTrainedModel:
    vision = {"model_type": "clip_vision_model", **VISION, "projection_dim": 64}
    text = {"model_type": "llama", **DECODER}
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, image_seq_length=4)
    )


def make_gemma3() -> PreTrainedModel:
    torch.manual_seed(0)
    text = {**DECODER, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN)
    )


def make_mixtral() -> PreTrainedModel:
    return build("mixtral")


# How to make a model, and the end of the names of what trains in it.
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "mixtral": (make_mixtral, "mlp.gate.weight"),
    "mixtral in part": (make_mixtral, "experts.down_proj"),
    "llava": (make_llava, "projector.linear_1.weight"),
    "gemma3": (make_gemma3, "mm_input_projection_weight"),
}


class Seen(TrainerCallback):
    """Keeps the weights that train as they are when training begins, and at each save."""

    def __init__(self) -> None:
        self.at_begin: dict[str, Any] = {}
        self.at_save: dict[int, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.at_begin = trained(model)

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.at_save[state.global_step] = trained(model)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


def quantized(name: str, form: str, way: str, path: Path) -> PreTrainedModel:
    """Return a quantized model of which little trains; it is quantized in one of three ways."""
    make, trains = MODELS[name]
    config = TrainWeightsConfig(form, modules_to_not_convert=[f"re:.*{trains}"])
    model = make()
    if way == "in place":
        quantize_(model, config)
    else:
        model.save_pretrained(path / "float")
        model = type(model).from_pretrained(path / "float", quantization_config=config)
    if way == "saved before":
        model.save_pretrained(path / "quantized")
        model = type(model).from_pretrained(path / "quantized")
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter_name.endswith(trains):
            parameter.requires_grad_(False)
    assert any(isinstance(each, QuantizedTensor) for each in model.parameters())
    return model


def trainer_of(model: PreTrainedModel, out: Path, *callbacks: Any, **options: Any) -> tuple[Trainer, Seen]:
    ids = (torch.arange(8 * 12).reshape(8, 12) * 7) % 90 + 3
    data = [{"input_ids": row, "labels": row} for row in ids]
    if hasattr(model.config, "vision_config"):
        for row in data:
            row["input_ids"][2:6] = IMAGE_TOKEN
            row["pixel_values"] = torch.linspace(-1, 1, 3 * 16 * 16).view(3, 16, 16)
            if isinstance(model, Gemma3ForConditionalGeneration):
                row["token_type_ids"] = (row["input_ids"] == IMAGE_TOKEN).long()
    defaults = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.1, "per_device_train_batch_size": 4}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    seen = Seen()
    arguments = TrainingArguments(str(out), **{**defaults, **quiet, **options})
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[*callbacks, seen])
    return trainer, seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["lossless", None], ids=["small", "plain"])
@pytest.mark.parametrize("way", ["in place", "loading", "saved before"])
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_train_beside_quantized_ones_are_resumed(
    tmp_path: Path, name: str, form: str, way: str, mode: str | None
) -> None:
    callbacks = [] if mode is None else [TrainWeightsCheckpointCallback(mode)]
    first, _ = trainer_of(quantized(name, form, way, tmp_path), tmp_path / "run", *callbacks)
    first.train()
    again, seen = trainer_of(quantized(name, form, way, tmp_path), tmp_path / "run", max_steps=5)
    start = trained(again.model)
    again.train(resume_from_checkpoint=latest(tmp_path / "run"))
    expected = trained(first.model)
    assert not any(torch.equal(start[each], expected[each]) for each in expected)
    assert_equal(seen.at_begin, expected)


@pytest.mark.parametrize("small", [True, False])
def test_the_best_weights_are_loaded_beside_quantized_ones(tmp_path: Path, small: bool) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    callbacks = [TrainWeightsCheckpointCallback()] if small else []
    trainer, seen = trainer_of(
        quantized("mixtral", "int8", "loading", tmp_path), tmp_path / "run", *callbacks, **best, max_steps=6
    )
    trainer.train()
    step = int(str(trainer.state.best_model_checkpoint).rpartition("-")[2])
    assert step < 6
    assert_equal(trained(trainer.model), seen.at_save[step])


def test_checkpoints_of_quantized_models_have_the_names_that_rules_select_by(tmp_path: Path) -> None:
    model = quantized("llava", "int8", "loading", tmp_path)
    names = trained(model).keys()
    rules = {f"weight/{name}": "raw" for name in names}
    trainer_of(model, tmp_path / "run", TrainWeightsCheckpointCallback("compact", rules))[0].train()
    path = Path(str(latest(tmp_path / "run")))
    stored = load_file(path / "pytorch_model.bin")
    assert names <= stored.keys()
    assert_equal({name: stored[name] for name in names}, trained(model))
    loaded = type(model).from_pretrained(path)
    assert_equal({name: loaded.get_parameter(name).detach() for name in names}, trained(model))
