from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive
from safetensors.torch import save_file

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.inspection import difference
from hf_trainweights.inspection.difference import compare_checkpoints, compare_models
from hf_trainweights.models.directory import quantize_directory


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def test_figures_are_those_of_the_definition(tmp_path):
    a = torch.tensor([1.0, 2.0, 5.0])
    b = torch.tensor([1.0, 1.5, 5.25])
    (row,) = compare_checkpoints(
        saved(tmp_path / "a.safetensors", {"w": a}), saved(tmp_path / "b.safetensors", {"w": b})
    ).tensors
    assert row.relative_l2 == pytest.approx(math.sqrt(0.25 + 0.0625) / math.sqrt(30))
    assert row.snr_db == pytest.approx(10 * math.log10(30 / (0.25 + 0.0625)))
    assert row.largest == 0.5
    assert (row.bytes_a, row.bytes_b) == (12, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_file_does_not_differ_from_itself(tmp_path, dtype):
    tensors = {
        "w": torch.randn(70, generator=torch.Generator().manual_seed(0)).to(dtype),
        "e": torch.zeros(0, 3).to(dtype),
    }
    path = saved(tmp_path / "a.safetensors", tensors)
    comparison = compare_checkpoints(path, path)
    assert [(row.relative_l2, row.snr_db, row.largest) for row in comparison.tensors] == [(0.0, math.inf, 0.0)] * 2
    assert all(row.is_equal for row in comparison.tensors)
    assert comparison.problems == ()


def test_nan_and_infinity_in_the_same_places_are_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(difference, "_PIECE_ELEMENTS", 3)
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    other = values.clone()
    other[3] = 1.5
    a, b = saved(tmp_path / "a.safetensors", {"w": values}), saved(tmp_path / "b.safetensors", {"w": other})
    assert compare_checkpoints(a, b).tensors[0].largest == 0.5
    other[0] = 0.0
    saved(a, {"w": values, "x": torch.ones(2)})
    saved(b, {"w": other, "x": torch.ones(2)})
    assert math.isnan(compare_checkpoints(a, b).tensors[0].largest)
    assert math.isnan(compare_checkpoints(a, b).totals[0].largest)


def test_other_shapes_dtypes_and_names_are_problems_and_values_of_other_dtypes_are_compared(tmp_path):
    of_a = {"s": torch.zeros(2), "d": torch.ones(2), "k": torch.zeros(2), "c": torch.zeros(2)}
    of_b = {"s": torch.zeros(3), "d": torch.full((2,), 1.5).half(), "l": torch.zeros(2), "c": torch.zeros(2) * 1j}
    a, b = saved(tmp_path / "a.safetensors", of_a), saved(tmp_path / "b.safetensors", of_b)
    comparison = compare_checkpoints(a, b)
    assert comparison.problems == (
        f"k is only in {a}",
        f"l is only in {b}",
        "c has another dtype",
        "d has another dtype",
        "s has another shape",
    )
    largest = {row["name"]: row["largest"] for row in comparison.to_dict()["tensors"]}
    assert largest == {"c": None, "d": 0.5, "s": None}
    assert [row.is_equal for row in comparison.tensors] == [False] * 3


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_tensors_and_float4_are_compared_by_their_values(tmp_path):
    whole, octets = torch.tensor([[0.0, 0.5, 1.0, -6.0]]), torch.tensor([[0x10, 0xF2]], dtype=torch.uint8)
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"sparse": whole.to_sparse(), "rows": whole.to_sparse_csr(), "whole": whole}, a)
    torch.save({"sparse": whole.to_sparse(), "rows": whole, "whole": (whole + 1).to_sparse()}, b)
    largest = {row.name: row.largest for row in compare_checkpoints(a, b).tensors}
    assert largest == {"sparse": 0.0, "rows": 0.0, "whole": 1.0}
    torch.save({"w": octets.view(torch.float4_e2m1fn_x2), "x": octets.view(torch.float4_e2m1fn_x2)}, a)
    torch.save({"w": whole, "x": torch.zeros(1, 2)}, b)
    same, other_shape = compare_checkpoints(a, b).tensors
    assert (same.largest, other_shape.comparable) == (0.0, False)


def test_shards_are_one_set_of_weights(tmp_path):
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    saved(whole / "model.safetensors", tensors)
    weight_map = {name: saved(sharded / f"{name}.safetensors", {name: tensors[name]}).name for name in tensors}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    comparison = compare_checkpoints(whole, sharded)
    assert [row.name for row in comparison.tensors] == ["a", "b"]
    assert comparison.problems == ()


def test_bytes_of_an_encoded_file_without_manifest_are_unknown(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        encode_file({"w": torch.zeros(64)}, {}, file)
    comparison = compare_checkpoints(path, saved(tmp_path / "b.safetensors", {"w": torch.zeros(64)}))
    assert (comparison.tensors[0].bytes_a, comparison.tensors[0].bytes_b) == (None, 256)
    assert comparison.totals[0].bytes_a is None


def test_a_directory_with_nothing_to_compare_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="expected a checkpoint with weights or an optimizer"):
        compare_checkpoints(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt"]
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CorruptFileError, match=name):
        compare_checkpoints(tmp_path, tmp_path)


def test_a_notebook_shows_totals_first_and_escapes_names(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.5)):
        save_file({"<script>": torch.full((2,), value), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    html = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")._repr_html_()
    assert html.startswith("<p>1 totals</p>")
    assert "<script>" not in html
    assert "<td>&lt;script&gt;</td><td>0.5</td><td>0.5</td><td>8</td><td>8</td>" in html
    assert "a is only in" in html.partition("<p>problems</p>")[2]


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
