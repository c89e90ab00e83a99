"""Shards whose names hold their digests: other programs still take them for shards."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from transformers import PreTrainedModel

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.files.reading import file_sha256
from hf_trainweights.files.safetensors_file import name_shards
from hf_trainweights.files.weight_files import is_shard, is_weight_file

LLAMA = ARCHITECTURES["llama"]


def saved(directory: Path, seed: int, variant: str | None = None, **options) -> PreTrainedModel:
    model = LLAMA.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * seed)
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(directory, max_shard_size="32KB", variant=variant, **options)
    return model


def shards(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if is_shard(path.name))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_each_shard_is_named_by_its_own_digest(tmp_path, variant, options):
    saved(tmp_path, 0, variant, **options)
    names = shards(tmp_path)
    assert len(names) > 2
    for name in names:
        assert f"-{file_sha256(tmp_path / name)[:8]}-" in name
        assert is_weight_file(name, variant)
    index = next(tmp_path.glob("*.index*.json"))
    assert sorted(set(json.loads(index.read_text())["weight_map"].values())) == names


@pytest.mark.slow
def test_equal_models_have_shards_of_equal_names_and_others_share_none(tmp_path):
    for directory, seed in (("one", 0), ("same", 0), ("other", 1)):
        saved(tmp_path / directory, seed)
    assert shards(tmp_path / "one") == shards(tmp_path / "same")
    assert not set(shards(tmp_path / "one")) & set(shards(tmp_path / "other"))


def test_names_are_given_once(tmp_path):
    saved(tmp_path, 0)
    names = shards(tmp_path)
    digests = name_shards(tmp_path, {})
    assert shards(tmp_path) == names == sorted(digests)
    assert all(digests[name] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names)


def test_a_stock_save_over_them_removes_them(tmp_path):
    saved(tmp_path, 0)
    ours = shards(tmp_path)
    LLAMA.build().save_pretrained(tmp_path, max_shard_size="32KB")
    assert not set(ours) & set(shards(tmp_path))


def test_a_pattern_of_a_download_takes_them_and_transformers_loads_them(tmp_path):
    model = saved(tmp_path, 0)
    assert shards(tmp_path) == sorted(path.name for path in tmp_path.glob("model*-of-*.safetensors"))
    loaded = type(model).from_pretrained(tmp_path)
    inputs = LLAMA.make_inputs()
    assert all(map(torch.equal, outputs(loaded, inputs), outputs(model, inputs)))
