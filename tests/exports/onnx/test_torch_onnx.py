"""`torch.onnx.export` of a quantized module, called by users who do not know `export_onnx`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from covering import by_default
from torch import nn
from weights import random_codes

from hf_trainweights import quantize_
from hf_trainweights.formats import FORMATS, get_format

pytestmark = pytest.mark.slow  # torch's exporter takes seconds


@pytest.mark.filterwarnings("ignore")  # torch's exporter uses what torch deprecates
@pytest.mark.parametrize("name", by_default(("int8", "coded"), FORMATS))
def test_torchs_own_exporter_says_which_function_keeps_the_codes(name: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(128, 64), nn.ReLU())
    with random_codes(get_format({"format": name})):
        quantize_(module, name)
    with pytest.raises(Exception, match=r"expected float weights, found a weight in .*hf_trainweights\.export_onnx"):
        torch.onnx.export(module, (torch.ones(4, 128),), tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert not (tmp_path / "model.onnx").exists()
