"""Two saved models compared weight by weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import ConfigError
from hf_trainweights.inspection.model_difference import compare_models
from hf_trainweights.models.directory import quantize_directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt2", *exhaustive("llama", "qwen3_moe", "gpt_oss")])
def test_the_differences_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    model.save_pretrained(tmp_path / "float")
    config = TrainWeightsConfig("int4", group_size=32)
    summary = quantize_directory(tmp_path / "float", tmp_path / "int4", config)
    comparison = compare_models(tmp_path / "float", tmp_path / "int4")
    assert comparison.problems == ()
    loaded = ARCHITECTURES[name].auto_class.from_pretrained(tmp_path / "int4")
    loaded.dequantize()
    floats, dense = (dict(each.named_parameters()) for each in (model, loaded))
    rows = {row.name: row for row in comparison.tensors}
    assert floats.keys() <= rows.keys()
    for key in floats:
        a, b = floats[key].detach().double(), dense[key].detach().double()
        assert rows[key].largest == (a - b).abs().max()
        assert rows[key].relative_l2 == pytest.approx(((a - b).norm() / a.norm()).item() if a.norm() else 0)
    changed = {row.name for row in comparison.tensors if row.largest}
    assert changed == {choice.name for choice in summary.quantized}
    (total,) = comparison.totals
    assert total.bytes_a == sum(row.bytes_a or 0 for row in comparison.tensors)
    assert sum(rows[choice.name].bytes_b or 0 for choice in summary.quantized) == sum(
        choice.bytes_after for choice in summary.quantized
    )


@pytest.mark.slow
def test_two_models_of_other_shapes_are_problems(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "a")
    ARCHITECTURES["llama"].build(torch.bfloat16).save_pretrained(tmp_path / "b")
    problems = compare_models(tmp_path / "a", tmp_path / "b").problems
    assert "model.norm.weight has another dtype" in problems
    ARCHITECTURES["llama_tied"].build().save_pretrained(tmp_path / "c")
    assert compare_models(tmp_path / "a", tmp_path / "c").problems == (f"lm_head.weight is only in {tmp_path / 'a'}",)


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model that Transformers loads"):
        compare_models(tmp_path, tmp_path)
