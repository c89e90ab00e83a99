"""A quantized model that save_pretrained wrote, in every format and both serializations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from golden.files import called_by, golden_directory, integers, recorded, torch_members
from golden.reader import AFresh, load, load_model
from transformers import PreTrainedModel
from weights import random_codes

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.formats import FORMATS, get_format

MODEL_CLASS = "Qwen3MoeForCausalLM"
# Models with guards, as a save writes them, and models without.
WRITTEN, WRITTEN_EARLIER = "guarded_models", "models"
SERIALIZATIONS = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}


def float_model() -> PreTrainedModel:
    """Return a model with linear layers, experts and embeddings, all of which int4 holds exactly; see `integers`."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    model = getattr(transformers, MODEL_CLASS)(config).to(torch.bfloat16)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed) * 2.0**-6)
    return model.eval()


def config_of(name: str) -> TrainWeightsConfig:
    """Return one that leaves one layer in another format, and one in float."""
    other = "int4" if name == "int8" else "int8"
    overrides = {"re:.*q_proj": {"format": other, **group_size(other)}, "re:.*v_proj": None}
    return TrainWeightsConfig(name, **group_size(name), overrides=overrides, include_embeddings=True)


def group_size(name: str) -> dict[str, int]:
    """Return the parameter that makes groups fit rows of 32, if the format has it."""
    return {"group_size": 32} if "group_size" in get_format({"format": name}).get_config() else {}


def write(directory: Path, name: str) -> None:
    model = float_model()
    with random_codes(get_format({"format": name})):
        quantize_(model, config_of(name))
    for kind in SERIALIZATIONS:
        model.save_pretrained(directory / kind, safe_serialization=kind == "safetensors")


def golden(name: str, generation: str = WRITTEN) -> Path:
    return golden_directory(
        f"{generation}/{name}",
        lambda directory: write(directory, name),
        lambda directory: load_model(directory / "safetensors", MODEL_CLASS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("generation", [WRITTEN, WRITTEN_EARLIER])
@pytest.mark.parametrize("kind", SERIALIZATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_fresh_process_loads_what_is_recorded(name: str, kind: str, generation: str, afresh: AFresh) -> None:
    directory = golden(name, generation)
    assert afresh(load_model, directory / kind, MODEL_CLASS) == recorded(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_guards_change_nothing_but_the_files(name: str) -> None:
    assert recorded(golden(name)) == recorded(golden(name, WRITTEN_EARLIER))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_bin_file_holds_plain_tensors_and_calls_nothing(name: str) -> None:
    file = golden(name) / "bin" / SERIALIZATIONS["bin"]
    assert {each["type"] for each in load(file).values()} == {"Tensor"}
    assert called_by(file) == set()


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_has_weights_in_its_format_in_another_and_in_float(name: str) -> None:
    weights = recorded(golden(name))["state_dict"]
    formats = {key: weight.get("format", {}).get("format") for key, weight in weights.items()}
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    chosen = [f"{attention}.k_proj.weight", f"{experts}.gate_up_proj", f"{experts}.down_proj", "lm_head.weight"]
    assert [formats[f"'{key}'"] for key in chosen] == [name] * 4
    assert formats[f"'{attention}.q_proj.weight'"] == ("int4" if name == "int8" else "int8")
    assert formats[f"'{attention}.v_proj.weight'"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_model_is_written_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    directory = golden(name)
    write(tmp_path, name)
    for kind, file in SERIALIZATIONS.items():
        old, new = directory / kind, tmp_path / kind
        assert [path.name for path in sorted(new.iterdir())] == [path.name for path in sorted(old.iterdir())]
        if kind == "bin":
            assert torch_members(new / file) == torch_members(old / file)
        else:
            assert (new / file).read_bytes() == (old / file).read_bytes()
        assert quantization_config(new) == quantization_config(old)


def quantization_config(directory: Path) -> dict[str, Any]:
    """Return the part of config.json that is not Transformers' own."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
