"""Weights of other programs keep their values: compared with their own code, or with their formulas in numpy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights import stored_tensors

from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.affine import BITS, Affine
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.scale_codings import E4M3, outer_count
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.testing.format_tensors import WRITE_GOLDEN
from hf_trainweights.testing.values import stored_bits

GOLDEN = Path(__file__).parent / "golden"
N, K = 5, 512
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
each_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)

Pack = Callable[[np.ndarray], np.ndarray]


def nibbles(size: int) -> Pack:
    """Return a function that packs codes: `size` columns in the low bits of bytes, the next in their high bits."""
    return lambda codes: np.bitwise_or.reduce(
        (codes.reshape(N, -1, 2, size) & 15) << np.array([[0], [4]], dtype=np.uint8), axis=2
    ).astype(np.uint8)


def bits(start: int, width: int, size: int) -> Pack:
    """Return a function that packs `width` bits of codes from bit `start` on: each byte holds columns `size` apart."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]

    def pack(codes: np.ndarray) -> np.ndarray:
        fields = (codes.reshape(N, -1, 8 // width, size) >> start) & ((1 << width) - 1)
        return np.bitwise_or.reduce(fields << shifts, axis=2).astype(np.uint8)

    return pack


@dataclass(frozen=True)
class Layout:
    """A block of GGUF: a format of this package, and the parts of the block in their order."""

    form: Format
    parts: tuple[str | Pack, ...]
    table: tuple[float, ...] = ()


BIAS = {"group_size": 32, "offset": "bias"}
LAYOUTS = {
    Kind.Q4_1: Layout(Affine(4, **BIAS), ("scale", "bias", nibbles(16))),
    Kind.Q5_0: Layout(Affine(5, 32, offset="none"), ("scale", bits(4, 1, 1), nibbles(16))),
    Kind.Q5_1: Layout(Affine(5, **BIAS), ("scale", "bias", bits(4, 1, 1), nibbles(16))),
    Kind.Q4_K: Layout(Affine(4, 32, "k4", "none"), ("scale", "group_scale", nibbles(32))),
    Kind.Q5_K: Layout(Affine(5, 32, "k4", "none"), ("scale", "group_scale", bits(4, 1, 32), nibbles(32))),
    Kind.Q6_K: Layout(Affine(6, 16, "k6", "none"), (nibbles(64), bits(4, 2, 32), "group_scale", "scale")),
    Kind.Q3_K: Layout(Affine(3, 16, "k3", "none"), (bits(2, 1, 32), bits(0, 2, 32), "group_scale", "scale")),
    Kind.Q2_K: Layout(Affine(2, 16, "k2", "none"), ("group_scale", bits(0, 2, 32), "scale")),
    Kind.TQ2_0: Layout(Affine(2, 256, offset="bias"), (bits(0, 2, 32), "scale")),
    Kind.IQ4_NL: Layout(Table4(32), ("scale", nibbles(16)), IQ4),
    Kind.IQ4_XS: Layout(Table4(32, "iq4_xs"), ("scale", "group_scale", nibbles(16)), IQ4),
    Kind.MXFP4: Layout(Table4(32, "e8m0"), ("scale", nibbles(16)), MXFP4_VALUES),
}


def codes_of(form: Format, qdata: Tensor) -> np.ndarray:
    """Return the codes of 2 to 6 bits that int32 words hold, by the arithmetic of docs/format.md."""
    code_bits = form.bits if isinstance(form, Affine) else 4
    if code_bits == 8:
        return qdata.numpy()
    octets = qdata.numpy().view(np.uint8)
    if code_bits == 4:
        return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
    groups = octets.reshape(*octets.shape[:-1], -1, 4 * code_bits)
    codes = np.zeros((*groups.shape[:-1], 32), dtype=np.uint8)
    for column in range(32):
        start = 0
        for plane in (4, 2, 1):
            if code_bits & plane:
                index, byte = divmod(column, 4 * plane)
                code = (groups[..., 4 * start + byte] >> plane * index) & (2**plane - 1)
                codes[..., column] |= code << start
                start += plane
    return codes.reshape(*octets.shape[:-1], -1)


def random_stored(form: Format, seed: int, wild: bool) -> dict[str, Tensor]:
    """Return stored tensors with float16 scales: usual ones, or of all bits that are finite."""
    tensors = stored_tensors(form, (N, K), torch.float16, seed)
    generator = torch.Generator().manual_seed(seed)
    if wild:
        for name in {"scale", "bias"} & tensors.keys():
            if tensors[name].dtype == torch.float16:
                words = torch.randint(-(2**15), 2**15, tensors[name].shape, generator=generator, dtype=torch.int16)
                halves = words.view(torch.float16)
                tensors[name] = torch.where(halves.isfinite(), halves, torch.tensor(6e-8, dtype=torch.float16))
            elif tensors[name].dtype == torch.uint8:
                # 255 would be NaN.
                tensors[name].random_(0, 255, generator=generator)
    return tensors


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether all numbers are equal; zeros of either sign are one number, as programs do not keep the sign."""
    return left.dtype == right.dtype and bool(((left == right) | (left.isnan() & right.isnan())).all())


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_blocks_of_gguf_have_the_values_that_gguf_reads(kind: Kind, wild: bool, dtype: torch.dtype) -> None:
    layout, (size, _) = LAYOUTS[kind], gguf.GGML_QUANT_SIZES[kind]
    tensors = random_stored(layout.form, kind, wild)
    if layout.table:
        tensors["table"] = torch.tensor([layout.table], dtype=torch.float32)
    if kind == Kind.TQ2_0:
        tensors["bias"] = -tensors["scale"]
    codes = codes_of(layout.form, tensors["qdata"])
    parts = [
        (tensors[part].numpy().view(np.uint8) if isinstance(part, str) else part(codes)).reshape(N, K // size, -1)
        for part in layout.parts
    ]
    with np.errstate(all="ignore"):
        read = gguf.quants.dequantize(np.concatenate(parts, axis=-1).reshape(N, -1), kind).astype(np.float32)
    assert same(layout.form.dequantize(tensors, (N, K), dtype), torch.from_numpy(read).view(N, K).to(dtype))


def test_nvfp4_has_the_values_that_compressed_tensors_reads() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    form = Table4(16, "e4m3_divided")
    tensors = random_stored(form, 0, wild=False) | {"table": torch.tensor([MXFP4_VALUES])}
    tensors["global_scale"] = torch.full((N, 1), 1234.567)
    stored = {
        "weight_packed": tensors["qdata"].view(torch.uint8),
        "weight_scale": tensors["scale"],
        "weight_global_scale": torch.tensor([1234.567]),
    }
    read = NVFP4PackedCompressor.decompress(stored, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
    assert same(form.dequantize(tensors, (N, K), read.dtype), read)


# Formulas, one operation after the other


def of_columns(values: Tensor | np.ndarray, size: int) -> np.ndarray:
    return np.repeat(np.asarray(values), size, axis=-1)[..., :K]


@each_dtype
@pytest.mark.parametrize("scales", ["plain", "e8m0", "e4m3", "e4m3_divided", "nested"])
def test_a_value_of_the_table_is_multiplied_once(scales: str, dtype: torch.dtype) -> None:
    form = Table4(64, scales)
    tensors = stored_tensors(form, (N, K), torch.float32, seed=1)
    stored = {name: tensor.float().numpy() for name, tensor in tensors.items() if name != "qdata"}
    scale = stored["scale"]
    if scales == "e8m0":
        scale = np.ldexp(np.float32(1), stored["scale"].astype(np.int32) - 127)
    elif scales == "e4m3":
        scale = scale * stored["global_scale"]
    elif scales == "e4m3_divided":
        scale = scale / stored["global_scale"]
    elif scales == "nested":
        places = (stored["phase"].astype(int) + np.arange(K // 64)) // 256
        outer = np.take_along_axis(stored["outer_scale"], np.minimum(places, outer_count(K // 64) - 1), axis=-1)
        scale = stored["nested_values"][0][stored["scale"].astype(int)] * outer + stored["nested_offset"]
    values = stored["table"][0][codes_of(form, tensors["qdata"])] * of_columns(scale.astype(np.float32), 64)
    assert same(form.dequantize(tensors, (N, K), dtype), torch.from_numpy(values.astype(np.float32)).to(dtype))


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("rounding", ["once", "each"])
@pytest.mark.parametrize("offset", ["none", "zero_point", "zero_point_minus_1", "float_zero_point", "bias"])
@pytest.mark.parametrize("size", [32, 128, None])
@pytest.mark.parametrize("code_bits", BITS)
def test_affine_rounds_each_operation_as_it_says(
    code_bits: int, size: int | None, offset: str, rounding: str, dtype: torch.dtype
) -> None:
    form = Affine(code_bits, size, offset=offset, rounding=rounding)
    for scale_dtype in FLOAT_DTYPES:
        tensors = stored_tensors(form, (N, K), scale_dtype, seed=code_bits)

        def rounded(values: Tensor) -> Tensor:
            return values.to(dtype).float() if rounding == "each" else values

        G = K // (size or K)
        values = torch.from_numpy(codes_of(form, tensors["qdata"])).float().view(N, G, -1)
        scale = tensors["scale"].float().unsqueeze(-1)
        if offset == "bias":
            values = rounded(values * scale) + tensors["bias"].float().unsqueeze(-1)
        else:
            zeros = torch.full((N, G), 2.0 ** (code_bits - 1))
            if offset == "float_zero_point":
                zeros = tensors["zero_point"].float()
            elif offset != "none":
                zeros = integers_of(tensors["zero_point"], code_bits, G) + (offset == "zero_point_minus_1")
            values = rounded(values - zeros.unsqueeze(-1)) * scale
        assert same(form.dequantize(tensors, (N, K), dtype), values.flatten(-2).to(dtype)), scale_dtype


def integers_of(packed: Tensor, code_bits: int, count: int) -> Tensor:
    """Return the integers of each row of bytes, the first in the lowest bits."""
    if packed.shape[-1] == count:
        return packed.float()
    numbers = (int.from_bytes(bytes(row), "little") for row in packed.tolist())
    mask = (1 << code_bits) - 1
    return torch.tensor([[number >> code_bits * place & mask for place in range(count)] for number in numbers]).float()


@each_dtype
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("scales", ["plain", "e8m0"])
def test_float8_in_groups_is_multiplied_once_even_in_a_shorter_last_group(
    scales: str, size: int, dtype: torch.dtype
) -> None:
    for columns in (256, 200):
        form, shape = Float8E4M3(size, scales), (2, N, columns)
        tensors = stored_tensors(form, shape, torch.float32)
        scale = tensors["scale"]
        if scales == "e8m0":
            scale = torch.exp2(scale.float() - 127)
        wide = scale.repeat_interleave(size, dim=-1)[..., :columns]
        wanted = tensors["qdata"].float() * wide
        assert same(form.dequantize(tensors, shape, dtype), wanted.to(dtype))
        assert same(form.dequantize(tensors, shape, torch.float64).float(), wanted)
        assert same(form.unpack(tensors).weight(), wanted)


# What all codings promise


CODED: list[Format] = [
    *(layout.form for layout in LAYOUTS.values()),
    *(Table4(64, scales) for scales in ("plain", "e4m3", "e4m3_divided", "nested")),
    *(Affine(code_bits, offset=offset) for code_bits in BITS for offset in ("zero_point", "float_zero_point", "bias")),
    Float8E4M3(128),
    Float8E4M3(32, "e8m0"),
]
each_coded = pytest.mark.parametrize("form", dict.fromkeys(CODED), ids=str)


@each_coded
def test_plain_ops_give_the_same_values_from_bytes(form: Format) -> None:
    for shape in ((N, K), (2, N, K)):
        tensors = stored_tensors(form, shape, torch.float32, seed=2)
        wanted = form.dequantize(tensors, shape, torch.float32)
        if getattr(form, "rounding", "once") == "once":
            octets = {name: t.view(torch.uint8) if name == "qdata" else t for name, t in tensors.items()}
            for stored in (tensors, octets):
                found = form.unpack(stored)
                assert found is not None
                assert same(found.weight(), wanted)


@each_coded
def test_stored_tensors_are_those_of_the_specification_and_of_the_file(form: Format) -> None:
    for shape in ((N, K), (2, N, K), (1, K)):
        tensors = stored_tensors(form, shape, torch.bfloat16)
        assert tuple(tensors) == form.tensor_names
        assert set(form.tensor_names) <= set(type(form).tensor_names)
        assert form.shape_of(tensors["qdata"]) == shape
        assert form.dequantize(tensors, shape, torch.bfloat16).shape == shape
        assert form.stored_bytes(shape, torch.bfloat16) == sum(tensor.nbytes for tensor in tensors.values())
    assert form.fallback((N, K)) == form
    assert form.fallback((N, K + 4)) == (form if isinstance(form, Float8E4M3) else Int8())
    copied = get_format(json.loads(json.dumps(form.get_config())))
    assert (copied, str(copied), hash(copied)) == (form, str(form), hash(form))


def test_no_two_formats_look_the_same() -> None:
    assert len({str(form) for form in CODED}) == len(set(CODED)) == len(CODED)


@each_coded
def test_damaged_tensors_are_refused_by_name(form: Format) -> None:
    whole = stored_tensors(form, (N, K), torch.float32)
    for key, tensor in whole.items():
        for damaged in (tensor[..., :-1], tensor[:-1], tensor.to(torch.float64), None):
            tensors = {name: stored for name, stored in (whole | {key: damaged}).items() if stored is not None}
            with pytest.raises(CorruptFileError, match=rf"weight: expected {key} to be .*'format': '{form.name}'"):
                form.dequantize(tensors, (N, K), torch.float32)


@pytest.mark.parametrize("form", [form for form in dict.fromkeys(CODED) if form.is_import_only], ids=str)
def test_floats_are_not_quantized_to_a_format_of_files_alone(form: Format) -> None:
    with pytest.raises(QuantizationError, match=rf"head: expected .* found {form}, .*{form.for_new_values().name}"):
        form.quantize(torch.zeros(N, K), "head")
    assert form.columns(torch.zeros(N, K), torch.ones(K)) is None
    assert not form.for_new_values().is_import_only
    assert form.for_new_values().fallback((N, K)) == form.for_new_values()


# What was written once is read for ever


@pytest.mark.parametrize(
    "form",
    [
        *(form for form in dict.fromkeys(CODED) if form.is_import_only),
        Affine(4, 128, offset="zero_point_minus_1"),
        Affine(4, 64, offset="bias", rounding="each"),
        Affine(8, None, offset="none"),
        get_format({"format": "affine", "column_order": True}),
    ],
    ids=str,
)
def test_golden_bytes_are_read_as_ever(form: Format) -> None:
    file, shape = GOLDEN / f"{str(form).replace(' ', '_')}.safetensors", (3, 256)
    if os.environ.get(WRITE_GOLDEN) == "1" and not file.exists():
        tensors = stored_tensors(form, shape, torch.float16)
        values = {f"values.{dtype}": form.dequantize(tensors, shape, dtype) for dtype in FLOAT_DTYPES}
        save_file(tensors | values, file)
    golden = load_file(file)
    tensors = {name: golden[name] for name in form.tensor_names}
    for dtype in FLOAT_DTYPES:
        assert stored_bits(form.dequantize(tensors, shape, dtype)) == stored_bits(golden[f"values.{dtype}"])


@each_coded
def test_rows_and_experts_stand_alone(form: Format) -> None:
    shape = (3, N, K)
    tensors = stored_tensors(form, shape, torch.bfloat16, seed=3)
    whole = form.dequantize(tensors, shape, torch.bfloat16)
    for expert in range(3):
        alone = {name: tensor[expert] for name, tensor in tensors.items()}
        rows = {name: t if name in form.shared_names else t[1:3] for name, t in alone.items()}
        assert same(form.dequantize(alone, (N, K), torch.bfloat16), whole[expert])
        assert same(form.dequantize(rows, (2, K), torch.bfloat16), whole[expert, 1:3])


def test_the_values_of_float8_are_those_of_the_dtype() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert same(E4M3, every.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "affine", "scales": "k4", "offset": "none"}, r"group_size: expected 32 .*k4 scales, found 128"),
        ({"format": "affine", "scales": "k6", "group_size": 16}, r"offset: expected \"none\" for scales 'k6'"),
        ({"format": "affine", "bits": 7}, r"bits: expected one of 2, 3, 4, 5, 6, 8"),
        ({"format": "affine", "bits": True}, r"bits: expected one of 2, 3, 4, 5, 6, 8"),
        ({"format": "affine", "group_size": 12}, r"group_size: expected a multiple of 8 or None"),
        ({"format": "affine", "group_size": 0}, r"group_size: expected a multiple of 8 or None"),
        ({"format": "affine", "offset": "zero"}, r"offset: expected one of none, zero_point"),
        ({"format": "affine", "rounding": "twice"}, r"rounding: expected one of once, each"),
        ({"format": "affine", "scales": ["plain"]}, r"scales: expected one of plain"),
        ({"format": "table4", "group_size": None}, r"group_size: expected a multiple of 8 for"),
        ({"format": "table4", "scales": "k4"}, r"scales: expected one of plain, e8m0"),
        ({"format": "table4", "scales": "iq4_xs", "group_size": 16}, r"group_size: expected 32 "),
        ({"format": "float8_e4m3", "scales": "e4m3"}, r"scales: expected one of plain, e8m0"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_format(config)
