"""Every finite number that a file may hold has the value that the peer gives it: subnormal, negative and huge ones."""

from __future__ import annotations

import json

import pytest
import torch
from imports.number_writers import E2M1, LAYOUTS, NF4, rounded
from imports.writers import Tensors, words_along
from torch import Tensor

from hf_trainweights import QuantizedTensor
from hf_trainweights.imports.layouts import layout_of

GENERATOR = torch.Generator().manual_seed(0)
HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def all_finite(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return finite numbers of a dtype of 16 bits or fewer: each of them if there is room, in a random order."""
    numbers = HALVES.view(dtype) if dtype.itemsize == 2 else torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    count = torch.Size(shape).numel()
    order = torch.randperm(max(count, len(numbers)), generator=GENERATOR)[:count] % len(numbers)
    return numbers.view(torch.int16 if dtype.itemsize == 2 else torch.uint8)[order].view(dtype).view(shape)


def random(*shape: int, bits: int) -> Tensor:
    return torch.randint(2**bits, shape, generator=GENERATOR, dtype=torch.uint8)


def read(config: dict[str, object], tensors: Tensors) -> QuantizedTensor:
    """Return the weight that is read."""
    weight = layout_of(config, {}, {}).read("m", {leaf: tensor.contiguous() for leaf, tensor in tensors.items()})
    assert weight is not None
    return weight


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Check for equal numbers; where a product is too large for the dtype, both have the same infinity."""
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def by_group(scale: Tensor, size: int) -> Tensor:
    return scale.double().repeat_interleave(size, -1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_with_every_float16_scale(bits: int) -> None:
    N, K, size = 64, 1024, 16
    codes, zero = random(N, K, bits=bits), random(N, K // size, bits=bits)
    scale = all_finite(torch.float16, N, K // size)
    tensors = {
        "qweight": words_along(codes.t(), bits, 0),
        "qzeros": words_along(zero.t(), bits, 1),
        "scales": scale.t(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": "gptq_v2"}
    wanted = (codes.double() - by_group(zero, size)) * by_group(scale, size)
    assert_same(read(config, tensors).dequantize(torch.float16), wanted.half())
    assert_same(read(config, tensors).dequantize(torch.float32), wanted.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_with_every_scale_and_bias(bits: int, dtype: torch.dtype) -> None:
    N, K, size = 64, 2048, 32
    codes = random(N, K, bits=bits)
    # Half the exponents, so that a product is finite in the dtype: MLX has no rule for others.
    scale, bias = (all_finite(dtype, N, K // size).float().clamp(-200, 200).to(dtype) for _ in range(2))
    tensors = {"weight": words_along(codes, bits, 1).view(torch.uint32), "scales": scale, "biases": bias}
    product = rounded(codes.double() * by_group(scale, size), torch.float32, dtype)
    wanted = rounded(product.double() + by_group(bias, size), torch.float32, dtype)
    found = read({"quant_method": "mlx", "bits": bits, "group_size": size}, tensors)
    assert_same(found.dequantize(dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_with_every_scale(dtype: torch.dtype) -> None:
    N, K = 64, 1024
    codes, scale = random(N, K, bits=4), all_finite(torch.float8_e4m3fn, N, K // 16)
    octets = codes[:, 1::2] << 4 | codes[:, ::2]
    for over in (1e-30, 1 / 2688, 0.37, 3e7):
        factor = torch.tensor(over, dtype=torch.float32)
        tensors = {"weight": octets, "weight_scale": scale, "weight_scale_2": factor}
        product = (scale.double() * factor.double()).float()
        wanted = (E2M1[codes.long()].double() * by_group(product, 16)).float().to(dtype)
        assert_same(read({"quant_method": "modelopt"}, tensors).dequantize(dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_with_every_exponent(dtype: torch.dtype) -> None:
    codes = random(2, 64, 1024, bits=4)
    exponents = torch.arange(2 * 64 * 32).view(2, 64, 32).remainder(255).to(torch.uint8)
    blocks = (codes[..., 1::2] << 4 | codes[..., ::2]).unflatten(-1, (-1, 16))
    wanted = torch.ldexp(E2M1[codes.long()].double(), by_group(exponents, 32) - 127).float().to(dtype)
    assert_same(read({"quant_method": "mxfp4"}, {"blocks": blocks, "scales": exponents}).dequantize(dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_float8_with_every_code_and_scale(scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    N, K = 200, 1000
    codes = all_finite(torch.float8_e4m3fn, N, K)
    scale = all_finite(torch.bfloat16, 2, 8).to(scale_dtype)
    wide = by_group(scale, 128)[:, :K].repeat_interleave(128, 0)[:N]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values = read(config, {"weight": codes, "weight_scale_inv": scale}).dequantize(dtype)
    assert_same(values, (codes.double() * wide).float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_with_scales_of_all_sizes_and_signs(dtype: torch.dtype) -> None:

    N, K = 64, 1024
    codes, scale = random(N, K, bits=4), all_finite(torch.bfloat16, N * K // 64).float()
    state = json.dumps({"blocksize": 64, "shape": [N, K]}).encode()
    tensors = {
        "weight": (codes.flatten()[::2] << 4 | codes.flatten()[1::2]).unsqueeze(1),
        "weight.absmax": scale,
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    wanted = (NF4[codes.long()].double() * by_group(scale.view(N, -1), 64)).float().to(dtype)
    assert_same(read({"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors).dequantize(dtype), wanted)


@pytest.mark.parametrize(
    "name", ["mlx-8-bits", "bitsandbytes-nf4-nested", "ct-nvfp4", "ct-mxfp4", "modelopt-mxfp8", "hqq-8-bits", "ct-int8"]
)
def test_a_weight_of_one_row_is_read(name: str) -> None:
    tensors, wanted = LAYOUTS[name].write(torch.randn(1, 64, generator=GENERATOR))
    weight = read(LAYOUTS[name].config, tensors)
    assert_same(weight.dequantize(wanted.dtype), wanted)
    x = torch.eye(64, dtype=weight.dtype)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight).t(), weight.dequantize())


def test_hqq_with_scales_and_zero_points_of_all_sizes() -> None:
    N, K, size = 64, 1024, 16
    codes = random(N * K // size, size, bits=4)
    scale, zero = (all_finite(torch.float16, len(codes), 1).float().clamp(-200, 200).half() for _ in range(2))
    half = len(codes) // 2
    numbers = {"nbits": 4, "axis": 1, "group_size": size}
    tensors = {
        "W_q": codes[:half] << 4 | codes[half:],
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor([N, K]),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        **{key: torch.tensor(number) for key, number in numbers.items()},
    }
    difference = (codes.double() - zero.double()).half()
    wanted = (difference.double() * scale.double()).half().view(N, K)
    assert_same(read({"quant_method": "hqq"}, tensors).dequantize(torch.float16), wanted)
