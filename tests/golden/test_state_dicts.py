"""A quantized state dict that torch.save wrote, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden.files import called_by, golden_directory, integers, recorded, torch_members
from golden.reader import AFresh, load
from torch import nn
from transformers.pytorch_utils import Conv1D
from weights import random_codes

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.formats import FORMATS, get_format

FILE = "state_dict.pt"


class Experts(nn.Module):
    """Holds the merged weights of several experts, as Transformers does."""

    num_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, 3, 128))


class Layers(nn.Module):
    """Has a weight of each kind that is quantized, one of each dtype, and one that stays in float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 4)
        self.embedding = nn.Embedding(5, 128, dtype=torch.bfloat16)
        self.transposed = Conv1D(4, 128).half()
        self.experts = Experts()


def write(directory: Path, name: str) -> None:
    layers = Layers()
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            # int4 holds these sixteen numbers exactly. Otherwise a sum of errors, whose last bit depends on the CPU,
            # might decide between two scales.
            parameter.copy_(integers(*parameter.shape, seed=seed) * 2.0**-6)
    with random_codes(get_format({"format": name})):
        quantize_(layers, TrainWeightsConfig(name, include_embeddings=True))
    with (directory / FILE).open("wb") as stream:
        torch.save({"model": layers.state_dict(), "parameter": layers.linear.weight}, stream)


def golden(name: str) -> Path:
    return golden_directory(
        f"state_dicts/{name}", lambda directory: write(directory, name), lambda directory: load(directory / FILE)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_fresh_process_loads_what_is_recorded(name: str, afresh: AFresh) -> None:
    directory = golden(name)
    assert afresh(load, directory / FILE) == recorded(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_state_dict_is_written_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    directory = golden(name)
    write(tmp_path, name)
    assert torch_members(tmp_path / FILE) == torch_members(directory / FILE)


@pytest.mark.parametrize("name", FORMATS)
def test_the_pickle_calls_one_function_of_the_package_by_a_name_without_a_module(name: str) -> None:
    assert called_by(golden(name) / FILE) == {"hf_trainweights rebuild_quantized_tensor"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_file_has_quantized_weights_of_every_kind(name: str) -> None:
    content = recorded(golden(name))
    weights = {key: each for key, each in content["'model'"].items() if "format" in each}
    names = ("linear.weight", "embedding.weight", "transposed.weight", "experts.down_proj")
    assert weights.keys() == {f"'{each}'" for each in names}
    assert {key for key, weight in weights.items() if weight["transposed"]} == {"'transposed.weight'"}
    assert {weight["format"]["format"] for weight in weights.values()} == {name}
    assert content["'parameter'"] == {**weights["'linear.weight'"], "type": "Parameter"}
