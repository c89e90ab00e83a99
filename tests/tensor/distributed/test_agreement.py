"""Quantized weights in PyTorch's distributed data-parallel wrapper, in two processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import UnsupportedError

# Each test starts processes that import PyTorch and Transformers.
pytestmark = pytest.mark.slow

PROCESSES = 2


def module(form: str) -> nn.Sequential:
    """Return a frozen quantized layer and a trainable one."""
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4))
    quantize_(layers, TrainWeightsConfig(form, group_size=32 if form == "int4" else None, modules_to_not_convert=["1"]))
    return layers


def trains(rank: int, directory: Path, form: str) -> None:
    torch.manual_seed(0)
    layers = module(form)
    before = layers[0].weight.dequantize()
    wrapped = DistributedDataParallel(layers)
    wrapped(torch.full((3, 64), rank + 1.0)).square().sum().backward()
    assert torch.equal(layers[0].weight.dequantize(), before)
    torch.save(layers[1].weight.grad, directory / f"{rank}.pt")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_data_parallel_training_averages_gradients_over_quantized_weights(form: str, tmp_path: Path) -> None:
    run_ranks(PROCESSES, trains, tmp_path, form)
    gradients = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)]
    assert torch.equal(*gradients)
    assert gradients[0].any()


def differs(rank: int, directory: Path) -> None:
    torch.manual_seed(rank)
    layers = module("int8")
    try:
        DistributedDataParallel(layers)
    except UnsupportedError as error:
        (directory / str(rank)).write_text(str(error))


def test_processes_with_different_quantized_weights_are_told_what_to_do(tmp_path: Path) -> None:
    run_ranks(PROCESSES, differs, tmp_path)
    texts = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert list(texts) == ["1"]
    assert "give all processes the same quantized weights first: load one checkpoint, or set one seed" in texts["1"]
