"""The first values that Transformers writes after a load reach float weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from architectures import DECODER, TEXT, randomize
from covering import exhaustive
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.tensor.modules import is_quantized

SINUSOIDS = {"vocab_size": 96, "emb_dim": 64, "n_layers": 1, "n_heads": 4, "max_position_embeddings": 64}
WITH_EMBEDDINGS = TrainWeightsConfig("int8", include_embeddings=True)

# Classes that write to a weight which they have loaded: to the row of padding, or by a table that they make like it.
WRITING = {
    "Funnel": {"vocab_size": 96, "block_sizes": [1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
    | {"pad_token_id": 0},
    "DistilBert": {"vocab_size": 96, "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 4}
    | {"max_position_embeddings": 64, "sinusoidal_pos_embds": True},
}
MORE = {
    "XLM": {**SINUSOIDS, "sinusoidal_embeddings": True, "n_langs": 1},
    "Flaubert": {**SINUSOIDS, "sinusoidal_embeddings": True},
    "ChineseCLIP": {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 16, "patch_size": 8}},
    "Youtu": {**DECODER, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"qk_nope_head_dim": 8},
}


def make(name: str, values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**values))
    randomize(model)
    return model.eval()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = model.named_parameters()
    return {name: weight.dequantize() if is_quantized(weight) else weight.detach() for name, weight in weights}


@pytest.mark.parametrize(("name", "values"), [*WRITING.items(), *exhaustive(*MORE.items())])
def test_a_class_that_writes_to_loaded_weights_loads_quantized_ones_as_they_were_saved(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    model = make(name, values)
    model.save_pretrained(tmp_path / "float")
    quantize_(model, WITH_EMBEDDINGS)
    model.save_pretrained(tmp_path / "quantized")
    reloaded = type(model).from_pretrained(tmp_path / "quantized")
    on_the_fly = type(model).from_pretrained(tmp_path / "float", quantization_config=WITH_EMBEDDINGS)
    assert any(isinstance(module, nn.Embedding) and is_quantized(module.weight) for module in reloaded.modules())
    torch.testing.assert_close(values_of(reloaded), values_of(model), rtol=0, atol=0)
    torch.testing.assert_close(values_of(on_the_fly), values_of(model), rtol=0, atol=0)


def test_weights_that_came_without_transformers_keep_their_values_too() -> None:
    values: dict[str, Any] = {**TEXT, "num_hidden_layers": 1}
    source = make("Bert", values)
    quantize_(source, WITH_EMBEDDINGS)
    with init_empty_weights():
        model = BertModel(BertConfig(**values))
    model.load_state_dict(source.state_dict(), assign=True)
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    model.initialize_weights()
    quantized = {name for name, weight in source.named_parameters() if is_quantized(weight)}
    mine, expected = values_of(model), values_of(source)
    assert {name for name, weight in model.named_parameters() if is_quantized(weight)} == quantized
    assert all(torch.equal(mine[name], expected[name]) for name in quantized)
