"""What lies in weight files is listed, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch import nn

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.checkpoint.directory.rewriter import compress_directory
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.inspection.listing import Entry, inspect_weights, total_bytes
from hf_trainweights.models.directory import load_saved, quantize_directory
from hf_trainweights.tensor.guards import is_guard


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    ARCHITECTURES["gpt2"].build(torch.bfloat16).save_pretrained(tmp_path / "float")
    config = TrainWeightsConfig("int4", group_size=32, overrides={"re:.*mlp.c_proj": "int8"})
    quantize_directory(tmp_path / "float", tmp_path / "int4", config)
    return tmp_path / "int4"


@pytest.mark.parametrize("arguments", [{}, {"max_shard_size": "30KB"}, {"safe_serialization": False}])
def test_a_quantized_weight_is_one_entry(arguments: dict[str, object], quantized: Path, tmp_path: Path) -> None:
    model = load_saved(quantized)
    model.save_pretrained(tmp_path / "saved", **arguments)
    inspection = inspect_weights(tmp_path / "saved")
    entries = {entry.name: entry for entry in inspection.entries}
    stored = load_file(quantized / "model.safetensors")
    weight = entries["transformer.h.0.attn.c_attn.weight"]
    assert (weight.format, weight.shape) == ("int4 g32", (64, 192))
    assert weight.stored_bytes == sum(
        tensor.nbytes for name, tensor in stored.items() if name.startswith("transformer.h.0.attn.c_attn._weight_")
    )
    assert entries["transformer.h.1.mlp.c_proj.weight"].format == "int8"
    assert entries["transformer.ln_f.weight"].format == "bfloat16"
    stored_bytes = sum(tensor.nbytes for tensor in stored.values() if not is_guard(tensor))
    assert total_bytes(entry.stored_bytes for entry in inspection.entries) == stored_bytes
    assert inspection.unsafe == {}
    if "max_shard_size" in arguments:
        assert len({entry.file for entry in inspection.entries}) > 1


def test_without_a_configuration_stored_tensors_are_listed_as_they_are(quantized: Path, tmp_path: Path) -> None:
    alone = (quantized / "model.safetensors").rename(tmp_path / "alone.safetensors")
    entries = {entry.name: entry for entry in inspect_weights(alone).entries}
    assert entries["transformer.h.0.attn.c_attn._weight_qdata"].format == "int32"
    assert entries["transformer.h.0.attn.c_attn._weight_scale"].format == "bfloat16"


def test_nested_state_is_listed_by_key_path(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2, 3)}, "steps": [torch.ones(1)]}, tmp_path / "state.pt")
    assert [(entry.name, entry.shape) for entry in inspect_weights(tmp_path / "state.pt").entries] == [
        ("model.w", (2, 3)),
        ("steps.0", (1,)),
    ]


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert inspect_weights(tmp_path / "old.bin").entries == (Entry("w", "float32", (2,), 8, "old.bin"),)


def test_a_small_checkpoint_is_listed_without_decoding_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(64, 64).state_dict(), tmp_path / "pytorch_model.bin")
    (plain,) = [entry for entry in inspect_weights(tmp_path).entries if entry.name == "weight"]
    compress_directory(tmp_path)
    (small,) = [entry for entry in inspect_weights(tmp_path).entries if entry.name == "weight"]
    assert (small.format, small.shape) == (plain.format, plain.shape)
    assert small.stored_bytes is not None
    assert plain.stored_bytes is not None
    assert small.stored_bytes < plain.stored_bytes


def test_quantized_weights_in_a_small_checkpoint_are_entries_too(quantized: Path) -> None:
    load_saved(quantized).save_pretrained(quantized, safe_serialization=False)
    before = [(entry.name, entry.format, entry.shape) for entry in inspect_weights(quantized).entries]
    compress_directory(quantized)
    after = [(entry.name, entry.format, entry.shape) for entry in inspect_weights(quantized).entries]
    assert after == before
    assert "int4 g32" in {shown for _, shown, _ in after}


def test_of_a_file_that_would_run_code_the_members_are_listed(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(5), "x": Bomb(tmp_path / "touched")}, tmp_path / "bomb.pt")
    inspection = inspect_weights(tmp_path / "bomb.pt")
    entries = {entry.name: entry for entry in inspection.entries}
    assert entries["data/0"] == Entry("data/0", "zip member", None, 20, "bomb.pt")
    assert "builtins.getattr" in inspection.unsafe["bomb.pt"]
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["bomb.bin", "bomb.pt"])
def test_a_pickle_that_would_run_code_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "touched")))
    with pytest.raises(CorruptFileError, match=r"expected a file that torch\.load reads"):
        inspect_weights(tmp_path / name)
    assert not (tmp_path / "touched").exists()


NO_WEIGHTS = {
    "text.txt": b"hello world\n",
    "empty.bin": b"",
    "archive.pt": b"PK\x05\x06" + bytes(18),
    "objects.pt": pickle.dumps(slice(1)),
    "cut.pt": b"PK\x03\x04\x00\x00",
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_a_file_without_weights_is_said_to_be_none_and_nobody_is_told_to_load_it_all_the_same(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(NO_WEIGHTS[name])
    with pytest.raises(CorruptFileError, match=rf"{name}: expected a file that torch\.load reads") as caught:
        inspect_weights(tmp_path / name)
    assert "weights_only" not in str(caught.value)
    assert "arbitrary code" not in str(caught.value)


def test_a_fifo_is_no_weight_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match="expected a regular file, found a FIFO"):
        inspect_weights(tmp_path / "model.safetensors")


def test_a_fifo_in_place_of_the_configuration_is_not_waited_for(quantized: Path) -> None:
    (quantized / "config.json").unlink()
    os.mkfifo(quantized / "config.json")
    with pytest.raises(CorruptFileError, match=r"config\.json.*found a FIFO"):
        inspect_weights(quantized)


def test_a_missing_scale_is_an_error(quantized: Path) -> None:
    tensors = load_file(quantized / "model.safetensors")
    del tensors["transformer.h.0.attn.c_attn._weight_scale"]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CorruptFileError, match=r"transformer\.h\.0\.attn\.c_attn\.weight: expected scale"):
        inspect_weights(quantized)


@pytest.mark.parametrize("quantization", [None, {}, {"quant_method": "another"}])
def test_a_configuration_without_our_method_leaves_stored_tensors_as_they_are(
    quantization: dict[str, str] | None, quantized: Path
) -> None:
    (quantized / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert {entry.format for entry in inspect_weights(quantized).entries} == {"bfloat16", "int32", "int8", "uint8"}


def test_a_configuration_of_a_newer_version_is_refused(quantized: Path) -> None:
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"version: expected 1, found 2"):
        inspect_weights(quantized)


def test_activations_are_no_part_of_what_is_stored(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "int8", TrainWeightsConfig("int8", activations="int8"))
    assert {entry.format for entry in inspect_weights(tmp_path / "int8").entries} == {"int8", "float32"}


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"quantization_config": {"quant_method": "trainweights", "format": "int3"}}']
)
def test_a_damaged_configuration_is_an_error(text: str, quantized: Path) -> None:
    (quantized / "config.json").write_text(text)
    with pytest.raises(CorruptFileError, match="expected a model's configuration"):
        inspect_weights(quantized)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a checkpoint with weights"):
        inspect_weights(tmp_path)


def test_a_sum_with_an_unknown_size_is_unknown() -> None:
    assert (total_bytes([1, 2]), total_bytes([1, None]), total_bytes([])) == (3, None, 0)


def test_a_notebook_shows_a_listing_folded_and_escaped(tmp_path: Path) -> None:
    save_file({"<script>": torch.zeros(2)}, tmp_path / "model.safetensors")
    html = inspect_weights(tmp_path)._repr_html_()
    assert html.startswith("<details><summary>1 tensors</summary><table>")
    assert "<td>&lt;script&gt;</td><td>float32</td><td>(2,)</td><td>8</td>" in html
