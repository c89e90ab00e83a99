"""Writes the sources in this folder whose peers quantize single weights: each in the peer's names, by the peer's code.

    pip install --no-deps --target /tmp/peers bitsandbytes==0.50.2 mlx==0.32.4 mlx-cpu==0.32.4 hqq==0.2.8 \
        autoawq==0.2.9 termcolor==3.3.0
    PYTHONPATH=/tmp/peers python tests/imports/golden/write_by_hand.py

Each folder gets a Llama, and `expected.safetensors`: its weights as the peer itself dequantizes them. bitsandbytes
does so by its plain PyTorch ops, because its AVX512 code of 0.50.2 misreads rows that are no multiple of 64.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_blockwise, quantize_4bit
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
Written = tuple[dict[str, Tensor], Tensor]


def write(name: str, description: dict[str, Any], dtype: torch.dtype, quantize: Callable[[Tensor], Written]) -> None:
    """Write one model; `quantize` returns the tensors of a module, by leaf, and the dequantized weight."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **SIZES)).to(dtype)
    folder, tensors, expected = FOLDER / name, {}, {}
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for key, tensor in model.state_dict().items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor.clone()
            continue
        parts, expected[key] = quantize(tensor.float().to(dtype))
        module = key.removesuffix("weight")
        tensors |= {module + leaf: part.contiguous() for leaf, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, folder / "expected.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **description}, indent=1))


def four_bits(kind: str, nested: bool, storage: torch.dtype) -> Callable[[Tensor], Written]:
    """Return a function that quantizes with bitsandbytes."""

    def quantize(weight: Tensor) -> Written:
        codes, state = quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested, quant_storage=storage
        )
        parts = {f"weight.{leaf}": part for leaf, part in state.as_dict(packed=True).items()}
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        octets = codes.flatten().view(torch.uint8)
        dense = _dequantize_4bit_compute(octets, absmax, state.code, 64, tuple(weight.shape), weight.dtype)
        return {"weight": codes, **parts}, dense

    return quantize


def to_mlx(tensor: Tensor) -> mx.array:
    """Return a tensor as an array of MLX."""
    wide = mx.array(tensor.float().numpy())
    return wide.astype({torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}.get(tensor.dtype, mx.float32))


def to_torch(array: mx.array) -> Tensor:
    """Return an array of MLX as a tensor of the same bytes."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).astype(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def by_mlx(settings: Iterator[dict[str, Any]], used: list[dict[str, Any]]) -> Callable[[Tensor], Written]:
    """Return a function that quantizes with the next settings, and notes them."""

    def quantize(weight: Tensor) -> Written:
        own = next(settings)
        used.append(own)
        arrays = mx.quantize(to_mlx(weight), **own)
        parts = dict(zip(("weight", "scales", "biases"), map(to_torch, arrays), strict=False))
        return parts, to_torch(mx.dequantize(*arrays, **own, dtype=to_mlx(weight).dtype)).to(weight.dtype)

    return quantize


def by_hqq(bits: Iterator[int]) -> Callable[[Tensor], Written]:
    """Return a function that quantizes with HQQ, to the next number of bits."""

    def quantize(weight: Tensor) -> Written:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        config = BaseQuantizeConfig(nbits=next(bits), group_size=32, axis=1)
        layer = HQQLinear(linear, config, compute_dtype=weight.dtype, device="cpu", del_orig=False)
        return dict(layer.state_dict()), layer.dequantize()

    return quantize


def awq_function() -> Callable[..., Tensor]:
    """Return AutoAWQ's function alone, because its package does not import with Transformers 5."""
    files = (Path(entry, "awq/utils/packing_utils.py") for entry in sys.path)
    path = next(file for file in files if file.is_file())
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dequantize_gemm


def by_awq(weight: Tensor) -> Written:
    """Return random words, and the weight that AutoAWQ reads there."""
    N, K = weight.shape
    words = [torch.randint(-(2**31), 2**31 - 1, (rows, N // 8), dtype=torch.int32) for rows in (K, K // 32)]
    scales = (torch.rand(K // 32, N) * 0.01).half()
    dense = awq_function()(words[0], words[1], scales, 4, 32).t()
    return {"qweight": words[0], "qzeros": words[1], "scales": scales}, dense


def main() -> None:
    """Write all sources."""
    mx.set_default_device(mx.cpu)
    for kind, nested, storage in (("nf4", True, torch.uint8), ("fp4", False, torch.bfloat16)):
        description = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        name = f"bitsandbytes-{kind}-{'nested' if nested else str(storage)[6:]}"
        write(name, {"quantization_config": description}, torch.bfloat16, four_bits(kind, nested, storage))
    affine = [{"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8, 4)]
    modes = [
        {"group_size": size, "bits": bits, "mode": mode}
        for mode, size, bits in (("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8))
    ]
    for name, cases in (("mlx", affine), ("mlx-modes", modes)):
        used: list[dict[str, Any]] = []
        write(name, {}, torch.bfloat16, by_mlx(itertools.cycle(cases), used))
        names = [
            f"model.layers.0.{part}_proj"
            for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        ]
        config = json.loads((FOLDER / name / "config.json").read_text())
        described = {"group_size": 32, "bits": 4, **dict(zip(names, used, strict=True))}
        both = {"quantization": described, "quantization_config": described}
        (FOLDER / name / "config.json").write_text(json.dumps({**config, **both}, indent=1))
    description = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"axis": 1}}}
    write("hqq", {"quantization_config": description}, torch.float16, by_hqq(itertools.cycle((4, 3, 2, 8, 5, 6, 4))))
    description = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write("awq", {"quantization_config": description}, torch.float16, by_awq)


if __name__ == "__main__":
    main()
