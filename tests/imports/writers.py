"""Models as other quantizers write them: compressed-tensors by its own code, GPTQ, AWQ and float8 by their layouts.

Each writer takes a float weight `[N, K]` and returns the tensors of its module, and the weight that they stand for by
the peer's own arithmetic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Write = Callable[[Tensor], tuple[Tensors, Tensor]]

_QUANTIZED = re.compile(r"(.*(?:_proj|c_attn|c_fc|c_proj|w1|w2|w3))\.weight")


@dataclass(frozen=True)
class Layout:
    """A way in which a peer writes a model.

    Args:
        config: Its `quantization_config`.
        write: Writes one weight.
    """

    config: dict[str, Any]
    write: Write


def groups_of(weight: Tensor, group_size: int | None) -> Tensor:
    """Return a weight `[N, K]` as `[N, G, K / G]`."""
    return weight.unflatten(-1, (-1, group_size or weight.shape[1]))


def codes_and_scale(weight: Tensor, bits: int, group_size: int | None) -> tuple[Tensor, Tensor]:
    """Return int8 codes `[N, K]` and scales `[N, G]` in the weight's dtype."""
    groups, largest = groups_of(weight, group_size), 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(-1) / largest).to(weight.dtype)
    codes = (groups.float() / scale.float().unsqueeze(-1)).round().clamp(-largest - 1, largest)
    return codes.flatten(1).to(torch.int8), scale


def asymmetric(weight: Tensor, bits: int, group_size: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes `[N, K]`, scales `[N, G]` in the weight's dtype, and zero points `[N, G]`, both int32."""
    groups = groups_of(weight, group_size).float()
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / (2**bits - 1)).to(weight.dtype)
    # As GPTQ and AWQ in version 1 write them: 1 at least.
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scale.float().unsqueeze(-1)).round() + zero.unsqueeze(-1)
    return codes.clamp(0, 2**bits - 1).flatten(1).int(), scale, zero.int()


def compressed_tensors(kind: str, bits: int, strategy: str, group_size: int | None = None, **others: Any) -> Layout:
    packed = others.pop("packed", kind == "int")
    layout = "pack-quantized" if packed else f"{kind}-quantized"
    compressor = PackedQuantizationCompressor if packed else NaiveQuantizationCompressor
    symmetric = others.pop("symmetric", True)
    described = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    args = QuantizationArgs(**described, **others)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = 448 if kind == "float" else 2 ** (bits - 1) - 1
        scale = groups_of(weight, group_size).abs().amax(-1) / largest
        if strategy == "tensor":
            scale = scale.amax().view(1)
        whole = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        if not symmetric:
            _, whole["weight_scale"], zero = asymmetric(weight, bits, group_size)
            whole["weight_zero_point"] = (zero - 2 ** (bits - 1)).to(torch.int8)
        tensors = compressor.compress(whole, scheme)
        return dict(tensors), compressor.decompress(dict(tensors), scheme)["weight"]

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "format": layout}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return Layout({**config, "quantization_status": "compressed", "ignore": ["lm_head"]}, write)


def words_along(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Return unsigned codes as one stream of bits along a dimension, in int32 words, the first in the lowest bits."""
    fields = (codes.movedim(dim, -1).to(torch.int64).unsqueeze(-1) >> torch.arange(bits)) & 1
    words = (fields.flatten(-2).unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32).movedim(-1, dim).contiguous()


def planes_along(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Return unsigned codes in planes along a dimension, 32 codes in `bits` int32 words, the lowest bits first."""
    blocks, planes, start = codes.movedim(dim, -1).unflatten(-1, (-1, 32)).int(), [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            planes.append(words_along(blocks >> start & (2**width - 1), width, -1))
            start += width
    return torch.cat(planes, dim=-1).flatten(-2).movedim(-1, dim).contiguous()


def by_activations(K: int, group_size: int) -> Tensor:
    """Return the group of each column, as desc_act scatters them."""
    return torch.randperm(K, generator=torch.Generator().manual_seed(1)) // group_size


def gptq(
    bits: int = 4,
    group_size: int = 32,
    version: str | None = "gptq",
    order: Callable[[int, int], Tensor] | None = None,
    symmetric: bool = True,
) -> Layout:

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        K = weight.shape[1]
        size = K if group_size == -1 else group_size
        codes, scale = codes_and_scale(weight.half(), bits, size)
        codes, zero = codes.int() + 2 ** (bits - 1), torch.full_like(scale, 2 ** (bits - 1)).int()
        if not symmetric:
            codes, scale, zero = asymmetric(weight.half(), bits, size)
        unsigned, scales, zero = codes.t(), scale.t().contiguous(), zero.t()
        g_idx = (torch.arange(K) // size if order is None else order(K, size)).int()
        zeros = zero if version in ("gptq_v2", "gptq_p") else zero - 1
        pack = planes_along if version == "gptq_p" else words_along
        tensors = {
            "qweight": pack(unsigned, bits, 0),
            "qzeros": pack(zeros, bits, 1),
            "scales": scales,
            "g_idx": g_idx,
        }
        # As GPTQModel's torch kernel has it: scales[g_idx] * (codes - zeros[g_idx]).
        return tensors, (scales[g_idx.long()] * (unsigned - zero[g_idx.long()])).t()

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": order is not None,
    }
    return Layout(config if version is None else {**config, "checkpoint_format": version}, write)


def awq(group_size: int = 32, symmetric: bool = True) -> Layout:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(unsigned: Tensor) -> Tensor:
        return words_along(unsigned.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4, 1)

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale = codes_and_scale(weight.half(), 4, group_size)
        codes, zero = codes.int() + 8, torch.full_like(scale, 8).int()
        if not symmetric:
            codes, scale, zero = asymmetric(weight.half(), 4, group_size)
        unsigned, scales, zeros = codes.t(), scale.t().contiguous(), zero.t()
        tensors = {"qweight": pack(unsigned), "qzeros": pack(zeros), "scales": scales}
        whole = [each.repeat_interleave(group_size, 0) for each in (zeros, scales)]
        return tensors, ((unsigned - whole[0]) * whole[1]).t()

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Layout(config, write)


def float8(method: str, scale_name: str, per: str, block: int = 128) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        amax = weight.float().abs()
        N, K = weight.shape
        if per == "row":
            scale = amax.amax(1, keepdim=True) / 448
            expanded = scale
        elif per == "tensor":
            scale = amax.amax() / 448
            expanded = scale
        else:
            padded = torch.nn.functional.pad(amax, (0, -K % block, 0, -N % block))
            scale = padded.unflatten(1, (-1, block)).amax(-1).unflatten(0, (-1, block)).amax(1) / 448
            expanded = scale.repeat_interleave(block, 0)[:N].repeat_interleave(block, 1)[:, :K]
        codes = (weight.float() / expanded).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, scale_name: scale}, (codes.float() * expanded).to(weight.dtype)

    sizes = {"weight_block_size": [block, block]} if per == "block" else {}
    return Layout({"quant_method": method, **sizes}, write)


def _bitsandbytes(weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() / largest[:, None] * 127).round().to(torch.int8)
    order = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes, "SCB": largest, "weight_format": order}, codes * (largest / 127)[:, None]


def bitnet(**settings: Any) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        from transformers.integrations.bitnet import pack_weights

        scale = (1 / weight.float().abs().mean()).to(weight.dtype).view(1)
        codes = (weight.float() * scale.float()).round().clamp(-1, 1)
        tensors = {"weight": pack_weights(codes.clone()), "weight_scale": scale}
        multiplies = settings.get("linear_class") == "autobitlinear"
        return tensors, codes * (scale.float() if multiplies else 1 / scale.float())

    return Layout({"quant_method": "bitnet", **settings}, write)


def gemma(bits: int) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        from transformers.integrations.gemma_quant import QuantizedLinear

        codes, scale = codes_and_scale(weight.float(), bits, None)
        unsigned, fields = codes.int() + 2 ** (bits - 1), 8 // bits
        shifted = unsigned.unflatten(1, (-1, fields)) << torch.arange(0, 8, bits)
        peer = QuantizedLinear(weight.shape[1], weight.shape[0], num_bits=bits)
        peer.weight.data = codes if bits == 8 else shifted.sum(-1).to(torch.uint8)
        peer.weight_scale.data = scale
        return {"weight": peer.weight.data, "weight_scale": scale}, peer._dequantize_weights()

    return Layout({"quant_method": "gemma", "num_bits": bits}, write)


def _torchao(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale = codes_and_scale(weight, 8, 32)
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": torch.zeros_like(codes[:, :2])}
    return tensors, codes * scale.repeat_interleave(32, 1)


def described(write: Write, **weights: Any) -> Layout:
    """Return compressed-tensors' description of weights that are written by other code."""
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    return Layout(config, write)


def _ordered(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return int4 codes of compressed-tensors with zero points, and the groups of columns by activation order."""
    N, K = weight.shape
    codes, scale, zero = asymmetric(weight, 4, 32)
    order = by_activations(K, 32)
    tensors = {
        "weight_packed": words_along(codes, 4, 1),
        "weight_scale": scale,
        "weight_zero_point": words_along(zero, 4, 0),
        "weight_shape": torch.tensor([N, K]),
        "weight_g_idx": order.int(),
    }
    return tensors, (codes - zero[:, order]).to(scale.dtype) * scale[:, order]


# Layouts of integers and float8; those of other numbers are in `number_writers`.
INTEGER_LAYOUTS = {
    "gptq": gptq(),
    "gptq-activation-order": gptq(order=by_activations),
    "gptq-3-bits-asymmetric": gptq(bits=3, symmetric=False),
    "gptq-planar-3-bits": gptq(bits=3, version="gptq_p", symmetric=False),
    "gptq-planar-5-bits": gptq(bits=5, version="gptq_p"),
    "gptq-planar-7-bits": gptq(bits=7, version="gptq_p", symmetric=False, order=by_activations),
    "awq-asymmetric": awq(symmetric=False),
    "awq": awq(),
    "ct-int4": compressed_tensors("int", 4, "group", 32),
    "ct-int4-asymmetric": compressed_tensors("int", 4, "group", 32, symmetric=False),
    "ct-int4-channel-asymmetric": compressed_tensors("int", 4, "channel", symmetric=False),
    "ct-int8": compressed_tensors("int", 8, "channel", packed=False),
    "ct-float8": compressed_tensors("float", 8, "channel"),
    "ct-activation-order": described(
        _ordered, num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group"
    ),
    "ct-float8-blocks": described(
        float8("", "weight_scale", "block", 32).write,
        num_bits=8,
        type="float",
        strategy="block",
        block_structure="32x32",
    ),
    "fp8": float8("fp8", "weight_scale_inv", "tensor"),
    "fp8-blocks": float8("fp8", "weight_scale_inv", "block"),
    "fbgemm": float8("fbgemm_fp8", "weight_scale", "row"),
    "bitsandbytes": Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bitsandbytes),
    "torchao": Layout({"quant_method": "torchao"}, _torchao),
    "bitnet": bitnet(),
    "bitnet-multiplied": bitnet(linear_class="autobitlinear"),
    **{f"gemma-{bits}-bits": gemma(bits) for bits in (2, 4, 8)},
}
_TORCHAO = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}, "_tensor_data_names": ["qdata", "zero_point"]}
# What the header of a torchao file says of the module `m`.
METADATA = {"m.weight": json.dumps(_TORCHAO)}


def write_model(
    directory: Path, layout: Layout, architecture: str = "llama", dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """Write a tiny model in a layout.

    Returns:
        The float weights of the checkpoint, by name: those of the quantized ones as the peer dequantizes them.
    """
    ARCHITECTURES[architecture].build(dtype).save_pretrained(directory)
    tensors, expected = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        quantized = _QUANTIZED.fullmatch(name)
        if quantized is None or tensor.dim() != 2:
            tensors[name] = expected[name] = tensor
            continue
        transposed = architecture == "gpt2"
        parts, dense = layout.write(tensor.t() if transposed else tensor)
        tensors |= {f"{quantized[1]}.{leaf}": part.contiguous() for leaf, part in parts.items()}
        expected[name] = dense.t() if transposed else dense
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": layout.config}))
    return expected
