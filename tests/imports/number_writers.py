"""Weights in layouts whose codes stand for other numbers than integers, or that have floats beside their scales.

Each writer takes a float weight `[N, K]`, uses its shape alone, and returns random codes and scales in the layout, and
the weight that they stand for, computed in float64 with the roundings of the peer.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from imports.writers import INTEGER_LAYOUTS, Layout, Tensors, awq, described, gptq, words_along
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.linspace(-1, 1, 16).pow(3).float()
MLX_BITS = (2, 3, 4, 5, 6, 8)


def random(*shape: int, bits: int) -> Tensor:
    """Return codes of so many bits, the same ones for the same shape."""
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


def floats(*shape: int, dtype: torch.dtype = torch.float32, size: float = 0.01) -> Tensor:
    """Return random numbers of both signs."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return (numbers * size).to(dtype)


def rounded(values: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Round float64 values to one dtype after the other."""
    for dtype in dtypes:
        values = values.to(dtype)
    return values


def nibbles(codes: Tensor, even_is_high: bool = False) -> Tensor:
    """Return codes `[*, K]` of four bits as bytes `[*, K / 2]`."""
    even, odd = codes[..., ::2], codes[..., 1::2]
    return even << 4 | odd if even_is_high else odd << 4 | even


def scaled(numbers: Tensor, scale: Tensor, *dtypes: torch.dtype) -> Tensor:
    """Multiply numbers `[*, K]` by the scales of groups `[*, G]`, and round as `rounded` does."""
    groups = numbers.double().unflatten(-1, (scale.shape[-1], -1)) * scale.double().unsqueeze(-1)
    return rounded(groups.flatten(-2), *dtypes)


def bitsandbytes(
    kind: str = "nf4", nested: bool = False, storage: torch.dtype = torch.uint8, block: int = 64
) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        (N, K), count = weight.shape, -(-weight.numel() // block)
        codes, absmax = random(N, K, bits=4), floats(count).abs() + 1e-3
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [N, K]}
        parts: Tensors = {"quant_map": NF4.clone(), "absmax": absmax}
        if nested:
            stored, table = random(count, bits=8), floats(256, size=1)
            outer, offset = floats(-(-count // 256)).abs() + 1e-3, 0.0123456789
            wide = outer.repeat_interleave(256)[:count]
            absmax = ((table[stored.long()] * wide).double() + torch.tensor(offset).double()).float()
            parts |= {"absmax": stored, "nested_absmax": outer, "nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        octets = nibbles(codes.flatten(), even_is_high=True).view(storage).unsqueeze(1)
        tensors = {"weight": octets, f"weight.quant_state.bitsandbytes__{kind}": text}
        every = absmax.repeat_interleave(block)[: N * K].view(N, K)
        dense = rounded(NF4[codes.long()].double() * every.double(), torch.float32)
        return tensors | {f"weight.{leaf}": part for leaf, part in parts.items()}, dense

    return Layout({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}, write)


def float4(preset: str, compressor: Any) -> Layout:
    """Return NVFP4 or MXFP4 of compressed-tensors, whose own code gives the same numbers, rounded to bfloat16."""
    scheme = preset_name_to_scheme(preset, ["Linear"])

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        N, K = weight.shape
        codes = random(N, K, bits=4)
        tensors: Tensors = {"weight_packed": nibbles(codes)}
        if preset.startswith("NV"):
            scale, over = (random(N, K // 16, bits=8) % 126 + 1).view(torch.float8_e4m3fn), torch.tensor([1234.567])
            tensors |= {"weight_scale": scale, "weight_global_scale": over}
            quotient = rounded(scale.double() / over.double(), torch.float32)
        else:
            tensors |= {"weight_scale": random(N, K // 32, bits=4) + 112}
            quotient = (tensors["weight_scale"].double() - 127).exp2()
        dense = scaled(E2M1[codes.long()], quotient, torch.float32)
        theirs = compressor.decompress(dict(tensors), QuantizationScheme(**dict(scheme)))["weight"]
        assert torch.equal(theirs, dense.to(theirs.dtype))
        return tensors, dense

    weights = json.loads(scheme.weights.model_dump_json())
    group = {"targets": ["Linear"], "weights": weights}
    return Layout({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, write)


def modelopt(kind: str) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        N, K = weight.shape
        codes = random(N, K, bits=4)
        if kind == "nvfp4":
            scale, over = (random(N, K // 16, bits=8) % 126 + 1).view(torch.float8_e4m3fn), torch.tensor(1 / 987.6)
            product = rounded(scale.double() * over.double(), torch.float32)
            tensors = {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": over}
            return tensors, scaled(E2M1[codes.long()], product, torch.float32)
        exponents = random(N, K // 32, bits=4) + 112
        scale = (exponents.double() - 127).exp2()
        if kind == "mxfp4":
            dense = scaled(E2M1[codes.long()], scale, torch.float32)
            return {"weight": nibbles(codes), "weight_scale": exponents}, dense
        wide = (random(N, K, bits=8) % 126).view(torch.float8_e4m3fn)
        return {"weight": wide, "weight_scale": exponents}, scaled(wide.float(), scale, torch.float32)

    return Layout({"quant_method": "modelopt", "quant_algo": kind.upper()}, write)


def fp8_exponents(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return the blocks of 128 rows and columns of DeepSeek, with scales that are powers of two."""
    N, K = weight.shape
    codes = (random(N, K, bits=8) % 126).view(torch.float8_e4m3fn)
    exponents = random(-(-N // 128), -(-K // 128), bits=4) + 112
    scale = (exponents.double() - 127).exp2().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return {"weight": codes, "scale": exponents.view(torch.float8_e8m0fnu)}, (codes.double() * scale).float()


def fp8_experts(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return the four bits in which DeepSeek V4 has its experts."""
    N, K = weight.shape
    codes, exponents = random(N, K, bits=4), random(N, K // 32, bits=4) + 112
    dense = scaled(E2M1[codes.long()], (exponents.double() - 127).exp2(), torch.float32)
    return {"weight": nibbles(codes).view(torch.int8), "scale": exponents.view(torch.float8_e8m0fnu)}, dense


def mlx(bits: int = 4, group_size: int = 32, dtype: torch.dtype = torch.bfloat16, method: str = "mlx") -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        N, K = weight.shape
        codes = random(N, K, bits=bits)
        scale, bias = floats(N, K // group_size, dtype=dtype), floats(N, K // group_size, dtype=dtype, size=0.1)
        words = words_along(codes, bits, 1).view(torch.uint32)
        once = torch.float32 if method == "metal" else dtype
        product = scaled(codes, scale, torch.float32, once).unflatten(-1, (scale.shape[1], -1))
        dense = rounded(product.double() + bias.double().unsqueeze(-1), torch.float32, dtype).flatten(1)
        return {"weight": words, "scales": scale, "qbiases" if method == "metal" else "biases": bias}, dense

    return Layout({"quant_method": method, "bits": bits, "group_size": group_size}, write)


def hqq(bits: int = 4, group_size: int = 32, dtype: torch.dtype = torch.float16) -> Layout:
    packing = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}[bits]
    parts = {8: 1, 4: 2, 3: 10, 2: 4}[bits]

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        (N, K), groups = weight.shape, weight.numel() // group_size
        codes = random(N, K, bits=bits)
        scale, zero = floats(groups, 1, dtype=dtype), floats(groups, 1, dtype=dtype, size=5)
        rows = torch.nn.functional.pad(codes.view(groups, group_size).int(), (0, 0, 0, -groups % parts))
        packed = torch.zeros(len(rows) // parts, group_size, dtype=torch.int32)
        for part, block in enumerate(rows.chunk(parts)):
            packed |= block << bits * (parts - 1 - part)
        tensors = {
            "W_q": packed if bits == 3 else packed.to(torch.uint8),
            "scale": scale,
            "zero": zero,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "axis": torch.tensor(1, dtype=torch.int32),
            "group_size": torch.tensor(group_size, dtype=torch.int32),
            "shape": torch.tensor([N, K]),
            "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        }
        difference = rounded(codes.view(groups, -1).double() - zero.double(), torch.float32, dtype)
        return tensors, rounded(difference.double() * scale.double(), torch.float32, dtype).view(N, K)

    return Layout({"quant_method": "hqq"}, write)


def quanto(kind: str, group_size: int = 32, shift_dtype: torch.dtype = torch.bfloat16) -> Layout:
    bits = int(kind[-1])

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        N, K = weight.shape
        codes = random(N, K, bits=bits)
        if bits == 8:
            codes, scale = codes.view(torch.int8), floats(N, 1, dtype=torch.bfloat16)
            return {"weight._data": codes, "weight._scale": scale}, scaled(codes, scale, torch.float32, scale.dtype)
        groups = N * K // group_size
        # Of the other sign, so that no difference is near 0, where roundings in another dtype would show.
        scale, shift = floats(groups, 1, dtype=torch.bfloat16), -floats(groups, 1, dtype=torch.bfloat16, size=0.1)
        rows = codes.view(groups, group_size)
        packed = sum(part << bits * number for number, part in enumerate(rows.chunk(8 // bits)))
        tensors = {"weight._data._data": packed, "weight._scale": scale, "weight._shift": shift}
        if shift_dtype is torch.uint8:
            tensors["weight._shift"] = zero = random(groups, 1, bits=bits)
            return tensors, scaled(rows.short() - zero.short(), scale, torch.float32, scale.dtype).view(N, K)
        difference = scaled(rows, scale, torch.float32, scale.dtype).double() - shift.double()
        return tensors, rounded(difference, torch.float32, scale.dtype).view(N, K)

    return Layout({"quant_method": "quanto", "m": {"weights": kind, "activations": "none"}}, write)


def auto_round(packing: str, inner: Layout) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, dense = inner.write(weight)
        tensors.pop("g_idx", None)
        return tensors, dense

    sizes = {key: inner.config[key] for key in ("bits", "group_size")}
    return Layout({"quant_method": "auto-round", "packing_format": packing, **sizes}, write)


def gpt_oss(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Return the weight of two experts."""
    N, K = weight.shape
    codes, exponents = random(2, N, K, bits=4), random(2, N, K // 32, bits=4) + 112
    dense = scaled(E2M1[codes.long()], (exponents.double() - 127).exp2(), torch.float32)
    return {"blocks": nibbles(codes).unflatten(-1, (-1, 16)), "scales": exponents}, dense


NUMBER_LAYOUTS = {
    "bitsandbytes-nf4": bitsandbytes(),
    "bitsandbytes-nf4-nested": bitsandbytes(nested=True),
    "bitsandbytes-fp4": bitsandbytes("fp4"),
    "ct-nvfp4": float4("NVFP4A16", NVFP4PackedCompressor),
    "ct-mxfp4": float4("MXFP4A16", MXFP4PackedCompressor),
    **{f"modelopt-{kind}": modelopt(kind) for kind in ("nvfp4", "mxfp4", "mxfp8")},
    "ct-mxfp8": described(modelopt("mxfp8").write, num_bits=8, type="float", strategy="group", group_size=32),
    "fp8-exponents": Layout({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_exponents),
    "fp8-experts": Layout({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_experts),
    **{f"mlx-{bits}-bits": mlx(bits) for bits in MLX_BITS},
    "mlx-float32": mlx(4, 64, torch.float32),
    "metal": mlx(4, 32, torch.bfloat16, "metal"),
    **{f"hqq-{bits}-bits": hqq(bits) for bits in (2, 3, 4, 8)},
    "auto-round-gptq": auto_round("auto_round:auto_gptq", gptq(symmetric=False)),
    "auto-round": auto_round("auto_round", gptq(bits=2, version="gptq_v2", symmetric=False)),
    "auto-round-awq": auto_round("auto_round:auto_awq", awq(symmetric=False)),
    "quanto-8-bits": quanto("qint8"),
    "quanto-4-bits": quanto("qint4"),
    "quanto-2-bits-zero-points": quanto("qint2", shift_dtype=torch.uint8),
    "gpt-oss": Layout({"quant_method": "mxfp4"}, gpt_oss),
}
# Every layout that is read.
LAYOUTS = {**INTEGER_LAYOUTS, **NUMBER_LAYOUTS}
