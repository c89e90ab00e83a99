"""What the peers' own packages wrote is read: torchao 0.18, bitsandbytes 0.50. `golden/write.py` says how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_trainweights import QuantizedTensor, import_directory
from hf_trainweights.errors import UnsupportedError

GOLDEN = Path(__file__).parent / "golden"
FORMATS = {
    "bitsandbytes-int8": "int8",
    "torchao-float8": "float8_e4m3",
    "torchao-int3": "int4 g32",
    "torchao-int4": "int4 g32",
    "torchao-int8": "int8",
    "torchao-int8-activations": "int8",
    "torchao-int8-groups": "int8 g32",
}


def test_every_source_is_tried() -> None:
    folders = {path.name for path in GOLDEN.iterdir() if (path / "config.json").exists()}
    assert folders == {*FORMATS, "bitsandbytes-nf4"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_the_peer_dequantizes(name: str, tmp_path: Path) -> None:
    import_directory(GOLDEN / name, tmp_path / "out")
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").named_parameters())
    expected = load_file(GOLDEN / name / "expected.safetensors")
    for weight_name, tensor in expected.items():
        weight = weights[weight_name]
        if isinstance(weight, QuantizedTensor):
            assert str(weight.format) == FORMATS[name]
            # bitsandbytes multiplies by the largest magnitude first, then by 1/127; here that is one float32 scale.
            tolerance = 2**-7 if name.startswith("bitsandbytes") else 0
            torch.testing.assert_close(weight.dequantize(), tensor, rtol=tolerance, atol=0)
        else:
            assert torch.equal(weight, tensor)
    assert sum(isinstance(weight, QuantizedTensor) for weight in weights.values()) == 7


@pytest.mark.slow
def test_scales_of_bitsandbytes_are_absmax_over_127(tmp_path: Path) -> None:
    import_directory(GOLDEN / "bitsandbytes-int8", tmp_path / "out")
    source = load_file(GOLDEN / "bitsandbytes-int8" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    weight, name = model.model.layers[0].mlp.up_proj.weight, "model.layers.0.mlp.up_proj"
    assert torch.equal(weight.qdata, source[f"{name}.weight"])
    assert torch.equal(weight.scale[:, 0], source[f"{name}.SCB"] / 127)
    # Two roundings of float32 apart from bitsandbytes' own product; few of those change the bfloat16 number.
    theirs = load_file(GOLDEN / "bitsandbytes-int8" / "expected.safetensors")[f"{name}.weight"]
    assert (weight.dequantize() != theirs).double().mean() < 0.001


def test_nf4_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="nf4"):
        import_directory(GOLDEN / "bitsandbytes-nf4", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
