"""A few architectures by default and all of them at length; and each cell finds a fault that was put in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_default
from every_architecture import cells, worker
from every_architecture.__main__ import changes
from every_architecture.cells import Subject
from every_architecture.configurations import WIDTH, small_config
from every_architecture.models import Architecture, architectures, one_of_each_type
from every_architecture.worker import RED, RIGHT, Answer, answers, ask
from oldest_transformers import not_by_5_17
from transformers import Trainer

from hf_trainweights import QuantizedTensor, TrainWeightsCheckpointCallback

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "every_architecture.json"
# Of different kinds: an encoder, transposed weights, two towers, an encoder with a decoder for sounds.
SAMPLE = ["bert BertForMaskedLM", "gpt2 GPT2LMHeadModel", "clip CLIPModel", "whisper WhisperForConditionalGeneration"]
BERT = Architecture("bert", "BertForMaskedLM")


@not_by_5_17("the record is that of a newer Transformers, which reads other names")
@pytest.mark.parametrize("name", by_default(SAMPLE, list(map(str, one_of_each_type()))))
def test_an_architecture_has_no_cell_that_is_newly_wrong(name: str) -> None:
    model_type, class_name = name.split()
    answer = ask(Architecture(model_type, class_name))
    recorded = json.loads(RECORDED.read_bytes())["rows"].get(name, {})
    assert {cell: text for cell, text in changes(answer, recorded).items() if text.startswith(RED)} == {}


def test_every_model_type_with_a_class_is_asked() -> None:
    chosen = one_of_each_type()
    assert len({each.model_type for each in chosen}) == len(chosen) > 400
    assert {each.model_type for each in architectures()} == {each.model_type for each in chosen}


def test_a_small_configuration_is_small_in_all_its_parts() -> None:
    config = small_config("qwen3_vl_moe")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == config.vision_config.out_hidden_size
    assert config.text_config.hidden_size == WIDTH
    assert config.text_config.num_attention_heads % config.text_config.num_key_value_heads == 0
    assert max(config.image_token_id, config.video_token_id) < config.text_config.vocab_size
    assert config.image_token_id != config.video_token_id


def test_building_twice_gives_the_same_weights() -> None:
    first, second = BERT.build().state_dict(), BERT.build().state_dict()
    assert all(torch.equal(first[name], value) for name, value in second.items())


# ---- each cell can fail


def outcomes_of(*names: str, folder: Path) -> dict[str, str]:
    *_, answer = answers(BERT, names, folder)
    return answer["cells"]


def change_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each model that is loaded differ from the one that was saved."""
    load = Subject.load

    def change(subject: Subject, *args: Any, **options: Any) -> Any:
        model = load(subject, *args, **options)
        with torch.no_grad():
            model.cls.predictions.bias[0] += 1e-6
        return model

    monkeypatch.setattr(Subject, "load", change)
    monkeypatch.setattr(Subject, "not_read", property(lambda subject: subject.float_directory and set()))


def change_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a quantized model give other outputs each time."""
    run, calls = cells.run, iter(range(1, 100))

    def change(model: Any, inputs: Any) -> list[torch.Tensor]:
        is_quantized = any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
        return [value + 0.01 * next(calls) * is_quantized for value in run(model, inputs)]

    monkeypatch.setattr(cells, "run", change)


def resume_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Trainer with the callback of this package resume no weights."""
    load = Trainer._load_from_checkpoint

    def change(trainer: Trainer, *args: Any, **options: Any) -> None:
        if not any(
            isinstance(callback, TrainWeightsCheckpointCallback) for callback in trainer.callback_handler.callbacks
        ):
            load(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "_load_from_checkpoint", change)


def write_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    write = cells.quantize_directory

    def change(source: Path, out: Path, config: Any) -> None:
        write(source, out, config)
        (out / "another").touch()

    monkeypatch.setattr(cells, "quantize_directory", change)


def change_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = cells.quantize_

    def change(model: Any, config: Any, calibration: Any = None) -> Any:
        if calibration:
            calibration[0]["input_ids"][0, 0] = 7
        return quantize(model, config, calibration=calibration)

    monkeypatch.setattr(cells, "quantize_", change)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], list[str]] = {
    change_a_weight: ["load, int8", "safetensors, int8", "bin, int8", "directory, int8", "checkpoint", "calibration"],
    change_the_outputs: ["forward, int8", "load, int8"],
    resume_nothing: ["LoRA", "float parts"],
    write_other_files: ["directory, int8"],
    change_the_batches: ["calibration"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_cell_finds_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = outcomes_of(*FAULTS[fault], folder=tmp_path)
    assert {cell: text for cell, text in found.items() if not text.startswith(RED)} == {}


def test_a_fault_in_the_export_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_a_weight(monkeypatch)
    assert outcomes_of("compressed-tensors, int8", folder=tmp_path)["compressed-tensors, int8"].startswith(RED)


# ---- no class ends the run


def ask_bert(monkeypatch: pytest.MonkeyPatch, check: Callable[..., None], seconds: float = 60) -> Answer:
    """Return what a class answers whose first cell does something else."""
    monkeypatch.setitem(worker.CELLS, "load, int8", (check, {}))
    return ask(BERT, ["load, int8"], seconds)


def test_a_crash_is_the_outcome_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask_bert(monkeypatch, lambda *_: os._exit(3))
    assert answer["cells"] == {"load, int8": f"{RED}: the process ended with 3"}


def test_a_hang_is_the_outcome_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask_bert(monkeypatch, lambda *_: time.sleep(60), seconds=5)
    assert answer["cells"] == {"load, int8": f"{RED}: it did not end in time"}


def test_an_untyped_error_is_red_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ask_bert(monkeypatch, lambda *_: torch.zeros(1)[2])["cells"]["load, int8"]
    assert text.startswith(f"{RED}: IndexError: index 2 is out of bounds")
    assert f"/{Path(__file__).name}:" in text


def test_a_class_that_cannot_be_built_says_why() -> None:
    answer = ask(Architecture("bert", "BertForNothing"))
    assert answer["built"].startswith("AttributeError: ")
    assert answer["cells"] == {}


def test_a_class_without_known_inputs_is_asked_what_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "find_inputs", lambda _: (None, "unknown"))
    *_, answer = answers(BERT, ["load, int8", "forward, int8"], tmp_path)
    assert answer["not run"] == "unknown"
    assert answer["cells"] == {"load, int8": RIGHT, "forward, int8": "not asked: no inputs are known"}


def test_only_what_became_worse_or_better_is_new() -> None:
    before = {"cells": {"a": RIGHT, "b": f"{RED}: x", "c": "refused: x"}}
    answer = {"cells": {"a": f"{RED}: y", "b": f"{RED}: y", "c": "refused: y", "d": RIGHT}}
    assert changes(answer, before) == {"a": f"{RED}: y"}
    assert changes(answer, {}) == {"a": f"{RED}: y", "b": f"{RED}: y"}
