"""Writes the sources of torchao whose quantizers want a GPU: their tensor subclasses are made here on a CPU.

    pip install --no-deps --target /tmp/peers torchao==0.18.0
    PYTHONPATH=/tmp/peers python tests/imports/golden/write_torchao_int4.py

`Int4PlainInt32Tensor` has the codes, scales and zero points that torchao's `_from_hp_xpu` chooses, and the weights that
its `dequantize_affine` returns. `Int4Tensor` has symmetric codes, for which code times scale is exact but for one
rounding. torchao itself writes the tensors and the metadata.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int4PlainInt32Tensor, Int4Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZE = 32


def plain_int32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight with integer zero points, and its values."""
    block, kind, ends = (1, SIZE), torch.int32, (0, 15)
    scale, zero = choose_qparams_affine(
        weight, MappingType.ASYMMETRIC, block, kind, *ends, eps=1e-6, zero_point_dtype=kind
    )
    codes = quantize_affine(weight, block, scale, zero, kind, *ends)
    dense = dequantize_affine(codes, block, scale, zero, kind, *ends, output_dtype=weight.dtype)
    words = (codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8).view(torch.int32)
    scale, zero = (each.view(len(weight), -1).t().contiguous() for each in (scale, zero))
    return Int4PlainInt32Tensor(words, scale, zero.to(torch.int8), list(block), weight.shape), dense


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight whose zero points are all 0, as for float8 activations, and its values."""
    groups = weight.unflatten(1, (-1, SIZE))
    scale = (groups.float().abs().amax(-1) / 7).to(weight.dtype)
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).flatten(1).to(torch.int8)
    octets = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    scales = scale.t().contiguous()
    packed = Int4Tensor(
        octets, scales, torch.zeros_like(scales), [1, SIZE], weight.shape, activation_dtype=torch.float8_e4m3fn
    )
    return packed, codes.to(weight.dtype) * scale.repeat_interleave(SIZE, 1)


def main() -> None:
    """Write both sources."""
    for name, quantize in (("torchao-int4-plain", plain_int32), ("torchao-int4-symmetric", symmetric)):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **SIZES)).to(torch.bfloat16)
        folder, tensors, expected = FOLDER / name, {}, {}
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        for key, tensor in model.state_dict().items():
            tensors[key] = tensor.clone()
            if key.endswith("_proj.weight"):
                tensors[key], expected[key] = quantize(tensor)
        flat, metadata = flatten_tensor_state_dict(tensors)
        save_file(flat, folder / "model.safetensors", {"format": "pt", **metadata})
        save_file({key: tensor.contiguous() for key, tensor in expected.items()}, folder / "expected.safetensors")
        config = json.loads((folder / "config.json").read_text())
        description = {"quantization_config": {"quant_method": "torchao"}}
        (folder / "config.json").write_text(json.dumps({**config, **description}, indent=1))


if __name__ == "__main__":
    main()
