"""Writes the sources in this folder, with packages that the suite does not install.

    pip install --no-deps --target /tmp/peers torchao==0.18.0 bitsandbytes==0.50.2 optimum-quanto==0.2.7
    PYTHONPATH=/tmp/peers python tests/imports/golden/write.py

Each folder gets a model as the peer's quantizer in Transformers 5.23 saves it, and `expected.safetensors`: its weights
as the peer itself dequantizes them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import int8_vectorwise_dequant
from optimum.quanto import QuantizedModelForCausalLM, freeze, quantize
from safetensors.torch import save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

FOLDER = Path(__file__).parent
CONFIGS = {
    "bitsandbytes-int8": BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao-int8": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao-int8-groups": TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(32))),
    "torchao-int8-activations": TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "torchao-int4": TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
    "torchao-int3": TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(32))),
    "torchao-float8": TorchAoConfig(Float8WeightOnlyConfig()),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
# To the names of Quanto's modules, their types.
QUANTO = {
    "q_proj": "qint8",
    "k_proj": "qfloat8",
    "v_proj": "qint4",
    "o_proj": "qint2",
    "gate_proj": "qint4",
    "up_proj": "qint2",
    "down_proj": "qint4",
}


def dequantized(module: torch.nn.Linear) -> torch.Tensor:
    """Return a weight as its peer dequantizes it."""
    weight = module.weight
    if hasattr(weight, "SCB") and weight.SCB is not None:
        return int8_vectorwise_dequant(weight.data, weight.SCB).to(torch.bfloat16)
    if getattr(weight, "quant_state", None) is not None:
        state, codes = weight.quant_state, weight.data.flatten()
        # Its own plain ops: the AVX512 code of 0.50.2 misreads rows that are no multiple of 64.
        return _dequantize_4bit_compute(codes, state.absmax, state.code, 64, tuple(state.shape), torch.bfloat16)
    return weight.dequantize() if hasattr(weight, "dequantize") and type(weight) is not torch.nn.Parameter else weight


def expect(model: torch.nn.Module, folder: Path) -> None:
    """Write the weights of a model as its peer dequantizes them."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {f"{name}.weight": dequantized(module).detach().contiguous() for name, module in linears.items()}
    save_file(expected, folder / "expected.safetensors")


def write_quanto() -> None:
    """Write a model of all types, in groups where the columns are more than 128."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, **{**SIZES, "intermediate_size": 160})
    model, folder = LlamaForCausalLM(config).to(torch.bfloat16), FOLDER / "quanto"
    for name, kind in QUANTO.items():
        quantize(model, weights=kind, include=f"*.{name}")
    freeze(model)
    QuantizedModelForCausalLM(model).save_pretrained(folder)
    for name in ("generation_config.json", "README.md"):
        (folder / name).unlink(missing_ok=True)
    expect(model, folder)


def main() -> None:
    """Write all sources."""
    write_quanto()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **SIZES)).to(torch.bfloat16)
    with TemporaryDirectory() as base:
        model.save_pretrained(base)
        for name, config in CONFIGS.items():
            quantized = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)
            quantized.save_pretrained(FOLDER / name)
            (FOLDER / name / "generation_config.json").unlink()
            expect(quantized, FOLDER / name)


if __name__ == "__main__":
    main()
