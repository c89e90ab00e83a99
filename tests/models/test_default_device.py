"""A default device decides where new tensors are made, never what becomes of weights that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weights import same_stored

from hf_trainweights import TrainWeightsConfig, dequantize_, load_file, quantize_, save_file

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4": {"format": "int4", "group_size": 32},
    "uint3": {"format": "uint3"},
    "uint4 g32": {"format": "uint4", "group_size": 32},
    "float8": {"format": "float8_e4m3"},
    "codebook4": {"format": "codebook4"},
    "coded": {"format": "coded", "bits": 4},
    "column scales": {"format": "int4", "group_size": 32, "column_scale": True},
}


def net(name: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64)).to(dtype)
    quantize_(module, TrainWeightsConfig(**FORMATS[name]))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_dequantized_multiplied_and_differentiated(name: str, dtype: torch.dtype) -> None:
    module = net(name, dtype)
    for rows in (1, 40):
        x = torch.randn(rows, 128, dtype=dtype)
        expected, gradient = module(x).detach(), torch.autograd.grad(module(y := x.clone().requires_grad_()).sum(), y)
        with torch.device("meta"):
            with torch.no_grad():
                assert torch.allclose(module(x), expected, atol=0.02)
            assert torch.allclose(torch.autograd.grad(module(y).sum(), y)[0], gradient[0], atol=0.02)
    expected = module[0].weight.dequantize()
    with torch.device("meta"):
        actual = module[0].weight.dequantize()
        dequantize_(module)
    assert torch.equal(actual, expected)
    assert torch.equal(module[0].weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_quantized_saved_and_loaded_where_they_are(name: str, tmp_path: Path) -> None:
    expected = net(name, torch.float32)[0].weight
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64))
    with torch.device("meta"):
        quantize_(module, TrainWeightsConfig(**FORMATS[name]))
        save_file(module, tmp_path / "model.safetensors")
        loaded = load_file(tmp_path / "model.safetensors")
    assert same_stored(module[0].weight, expected)
    assert same_stored(loaded["0.weight"], expected)
    assert loaded["0.bias"].device.type == "cpu"
