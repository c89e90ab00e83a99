"""A summary tells in one line, and in bytes, what was quantized and what was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_llama
from torch import nn

from hf_trainweights import TrainWeightsConfig, quantize_, summary
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.digests import write_digests
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.choosing.summary import Calibrated, Summary, check_not_empty

INT4 = TrainWeightsConfig("int4", group_size=32)
NOT_A_WEIGHT = "not the weight of a linear, expert or embedding layer"


def test_the_numbers_are_bytes() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024, dtype=torch.bfloat16), nn.LayerNorm(1024, dtype=torch.bfloat16))
    summary = choose(module, TrainWeightsConfig("int4", group_size=128)).summary
    assert summary.bytes_before == 2 * (1024 * 1024 + 3 * 1024)
    assert summary.bytes_after == 1024 * 1024 // 2 + 1024 * 8 * 2 + 2 * 3 * 1024
    assert [choice.numel for choice in summary.tensors] == [1024 * 1024, 1024, 1024, 1024]
    assert str(summary).endswith("; 2.1 MB -> 0.5 MB")


def test_nothing_found_is_told_in_words() -> None:
    summary = choose(nn.Sequential(nn.LayerNorm(8)), INT4).summary
    assert summary.quantized == ()
    assert str(summary) == f"quantized: none; left alone: 2 {NOT_A_WEIGHT}; 0.0 MB -> 0.0 MB"
    assert str(Summary(())) == "quantized: none; left alone: none; 0.0 MB -> 0.0 MB"


def test_a_summary_without_a_quantized_weight_is_refused() -> None:
    check_not_empty(choose(nn.Linear(64, 8), INT4).summary, INT4)
    with pytest.raises(ConfigError, match="at least one weight to quantize to int4 g32, found quantized: none"):
        check_not_empty(choose(nn.LayerNorm(8), INT4).summary, INT4)


def test_a_transformers_model_shows_the_summary_of_its_quantizer() -> None:
    model = make_llama()
    quantize_(model, INT4)
    assert summary(model) is model.hf_quantizer.summary()


def test_any_module_shows_what_its_parameters_are() -> None:
    module = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8))
    assert [choice.reason for choice in summary(module)] == ["float32"] * 4
    quantize_(module, INT4)
    found = summary(module)
    assert [(choice.name, str(choice.format)) for choice in found.quantized] == [("0.weight", "int4 g32")]
    assert (len(found), found.bytes_before) == (4, 4 * (64 * 8 + 3 * 8))
    assert found.bytes_after == sum(choice.bytes_after for choice in found)
    assert found.bits_per_weight == 8 * found.bytes_after / (64 * 8 + 3 * 8)


def test_the_text_of_a_large_model_is_short_and_its_table_has_every_parameter() -> None:
    layers = nn.ModuleDict({f"layer{i}": nn.Linear(64, 64) for i in range(200)})
    found = choose(layers, INT4).summary
    for text in (str(found), repr(found)):
        assert len(text) < 1000
    assert "400 parameters, 3.3 MB -> " in repr(found)
    assert "200  int4 g32" in repr(found)
    table = found.table().splitlines()
    assert len(table) == 401
    assert table[1].split()[:3] == ["layer0.weight", "int4", "g32"]
    assert repr(found.tensors[0]).startswith("Choice(name='layer0.weight', format=")


def test_a_notebook_shows_totals_and_folds_the_parameters() -> None:
    hostile = nn.ModuleDict({"<script>": nn.Linear(64, 8)})
    html = choose(hostile, INT4).summary._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;.weight" in html.partition("<details>")[2]
    assert "int4 g32" in html.partition("<details>")[0]


@pytest.mark.parametrize(
    "kept", [5, [], {"tokens": 5}, {"tokens": 5, "error_before": 1, "error_after": 1, "blocks": 3}]
)
def test_what_another_program_says_of_calibration_is_nothing(kept: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    write_digests(tmp_path, ["model.safetensors"], calibration=kept)
    assert Calibrated.beside(tmp_path) is None
