"""A layout reads a weight only when every tensor that it needs is there, in the dtype and the shape that it has."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from imports.number_writers import LAYOUTS
from imports.writers import METADATA, Tensors, gptq
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.imports import layouts
from hf_trainweights.imports.layouts import layout_of
from hf_trainweights.imports.layouts.weights import float8_weight
from hf_trainweights.models.loading.saved_models import check_config

OPTIONAL = {
    *(("gptq", "g_idx"), ("gptq-3-bits-asymmetric", "g_idx"), ("bitsandbytes", "weight_format")),
    *(("gptq-planar-3-bits", "g_idx"), ("gptq-planar-5-bits", "g_idx")),
    # The load finds that the weight is missing: other modules have a `scale` too.
    *(("fp8-exponents", "weight"), ("fp8-experts", "weight")),
}
# Other tensors that errors name if one is missing, because they tell what is expected.
BESIDE = {
    "group_size": "scale",
    "weight.quant_state.bitsandbytes__fp4": "weight.quant_state.bitsandbytes__nf4",
    "weight_packed": "weight|weight_packed",
    "scale": "scale|weight_scale_inv",
    "weight_global_scale": "weight_global_scale|weight_scale",
}


SHAPES = {"m": (160, 64)}


def written(name: str) -> tuple[Tensors, Tensor]:
    weight = torch.randn(SHAPES["m"], generator=torch.Generator().manual_seed(0))
    tensors, expected = LAYOUTS[name].write(weight)
    return {leaf: tensor.contiguous() for leaf, tensor in tensors.items()}, expected


NEEDED = [(name, leaf) for name in LAYOUTS for leaf in written(name)[0]]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "half of the columns": lambda tensor: tensor[..., : tensor.shape[-1] // 2],
    "half of the rows": lambda tensor: tensor[: tensor.shape[0] // 2],
    "twice the rows": lambda tensor: torch.cat([tensor, tensor]),
    "one dimension more": lambda tensor: tensor.unsqueeze(0),
    "nothing": lambda tensor: tensor[:0],
    "bool": lambda tensor: tensor.float().bool(),
    "complex": lambda tensor: tensor.float().to(torch.complex64),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sound_weight_is_read(name: str) -> None:
    tensors, expected = written(name)
    weight = layout_of(LAYOUTS[name].config, METADATA, SHAPES).read("m", tensors)
    assert weight is not None
    assert torch.equal(weight.dequantize(expected.dtype), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "leaf"), NEEDED)
def test_no_tensor_of_a_weight_may_be_missing(name: str, leaf: str) -> None:
    tensors, _ = written(name)
    del tensors[leaf]
    layout = layout_of(LAYOUTS[name].config, METADATA, SHAPES)
    if (name, leaf) in OPTIONAL:
        layout.read("m", tensors)
        return
    with pytest.raises(CorruptFileError, match=rf"m\.({BESIDE.get(leaf, leaf)}): expected .*, found (none|.*shape)"):
        layout.read("m", tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_no_tensor_of_a_weight_may_have_another_shape_or_dtype(name: str, change: str) -> None:
    layout = layout_of(LAYOUTS[name].config, METADATA, SHAPES)
    for leaf, tensor in written(name)[0].items():
        # How many codes there should be only config.json knows, and the load compares; one number has no half.
        cuts_codes = leaf == "weight" and change in ("half of the columns", "half of the rows", "twice the rows")
        if cuts_codes or (tensor.dim() == 0 and change not in ("bool", "complex")):
            continue
        if tensor.shape[-1:] == (1,) and change == "half of the columns":
            continue
        # A number may be a tensor of one dimension or two.
        if tensor.shape == (1,) and change == "one dimension more":
            continue
        with pytest.raises((CorruptFileError, UnsupportedError), match=r"m\.[\w.]+: expected"):
            layout.read("m", {**written(name)[0], leaf: CHANGES[change](tensor)})


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_alone_are_no_float_weight(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(CorruptFileError, match=r"m\.[\w.]+: expected"):
        layout_of(LAYOUTS[name].config, METADATA, SHAPES).read("m", {"weight": torch.zeros(160, 64).to(dtype)})


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_float_weight_is_left_to_others(name: str) -> None:
    layout = layout_of(LAYOUTS[name].config, METADATA, SHAPES)
    assert layout.read("m", {"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}) is None


def test_a_weight_beside_its_codes_is_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"m\.weight: expected codes alone"):
        layout_of(gptq().config, {}, SHAPES).read("m", {**written("gptq")[0], "weight": torch.zeros(160, 64)})


def test_a_block_of_more_rows_than_there_are_is_the_whole_weight() -> None:
    codes = torch.ones(3, 64).to(torch.float8_e4m3fn)
    found = float8_weight("w", codes, torch.tensor([[0.5]]), block=(1 << 62, 64))
    assert torch.equal(found.dequantize(torch.float32), torch.full((3, 64), 0.5))


def test_sizes_of_experts_are_no_numbers_of_experts() -> None:
    check_config({"shared_expert_intermediate_size": 20480, "num_experts": 64}, 1500, 10**6, "config.json")
    with pytest.raises(CorruptFileError, match=r"config\.json: num_experts: expected .* 1500 tensors .* found 20480"):
        check_config({"num_experts": 20480}, 1500, 10**6, "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_number_beside_the_codes_may_be_nan(name: str) -> None:
    tensors, _ = written(name)
    config = LAYOUTS[name].config
    for leaf, tensor in tensors.items():
        if leaf == "weight" or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            continue
        damaged = tensor.clone()
        damaged.view(-1)[0] = torch.nan
        with pytest.raises(CorruptFileError, match=r"^m(\.weight)?: expected finite .*NaN"):
            layout_of(config, METADATA, SHAPES).read("m", {**tensors, leaf: damaged})


def test_scales_of_activations_in_old_models_of_awq_are_refused() -> None:
    layout = layout_of(LAYOUTS["awq"].config, {}, SHAPES)
    with pytest.raises(UnsupportedError, match=r"^m\.act\.scales: expected weights that are used as they are"):
        layout.read("m.act", {"scales": torch.ones(64)})


WORDS, UNEVEN = torch.zeros(4, 25, dtype=torch.int32), {"bits": 4, "group_size": 128}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
TORCHAO = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"block_size": [1, 128]}}


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({"quant_method": "gptq", **UNEVEN}, {"qweight": WORDS.t()}),
        ({"quant_method": "awq", **UNEVEN}, {"qweight": torch.zeros(200, 1, dtype=torch.int32)}),
        ({"quant_method": "torchao"}, {"_weight_qdata": torch.zeros(4, 200, dtype=torch.int8)}),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": GROUPS}}},
            {"weight_packed": WORDS, "weight_scale": torch.ones(4, 2), "weight_shape": torch.tensor([4, 200])},
        ),
    ],
    ids=["gptq", "awq", "torchao", "compressed-tensors"],
)
def test_a_last_group_of_fewer_columns_is_refused(config: dict[str, object], tensors: Tensors) -> None:
    layout = layout_of(config, {"m.weight": json.dumps(TORCHAO)}, SHAPES)
    with pytest.raises(UnsupportedError, match=r"^m\.weight: expected groups that divide 200 columns, found .* 128\."):
        layout.read("m", tensors)


def test_the_version_of_gptq_may_be_called_format() -> None:
    weight = torch.randn(SHAPES["m"], generator=torch.Generator().manual_seed(0))
    tensors, expected = gptq(version="gptq_v2").write(weight)
    read = layout_of({**gptq(version=None).config, "format": "gptq_v2"}, METADATA, SHAPES).read("m", tensors)
    assert read is not None
    torch.testing.assert_close(read.dequantize(torch.float32), expected.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dynamic", [None, {r"-:.*o_proj": {}}, {r".*o_proj": {"bits": 4, "damp_percent": 0.1}}])
def test_rules_that_change_neither_bits_nor_groups_are_read(dynamic: object) -> None:
    layout_of({**gptq().config, "dynamic": dynamic}, METADATA, SHAPES)


INT4 = {
    "_weight_qdata": torch.zeros(4, 64, dtype=torch.int8),
    "_weight_scale": torch.ones(4, 4),
    "_weight_zero_point": torch.ones(4, 4),
}
PLAIN_INT32 = {**INT4, "_weight_qdata": torch.zeros(4, 16, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        ("Int4TilePackedTo4dTensor", INT4, r"^m\.weight: expected .*Int4PlainInt32Tensor of torchao, found a Int4Tile"),
        ("Int4Tensor", INT4, r"^m\._weight_zero_point: expected integers, or zeros, found floats to add"),
        ("Int4PlainInt32Tensor", PLAIN_INT32, r"^m\._weight_zero_point: expected integers, or zeros, found floats"),
        (
            "Int4PlainInt32Tensor",
            {**PLAIN_INT32, "_weight_zero_point": torch.zeros(4, 4)},
            r"^m\._weight_zero_point: expected int8, as for XPU, found torch.float32",
        ),
        (
            "Int4Tensor",
            {**INT4, "_weight_scale": torch.ones(4, 8)},
            r"^m\._weight_scale: expected .* of shape \(4, 4\)",
        ),
        ("Int4Tensor", PLAIN_INT32, r"^m\._weight_qdata: expected int8"),
    ],
)
def test_packed_weights_of_torchao_that_no_format_holds_are_refused(kind: str, tensors: Tensors, message: str) -> None:
    described = {"_type": kind, "_data": {"block_size": [1, 32]}, "_tensor_data_names": ["qdata", "scale"]}
    layout = layout_of({"quant_method": "torchao"}, {"m.weight": json.dumps(described)}, SHAPES)
    with pytest.raises((UnsupportedError, CorruptFileError), match=message):
        layout.read("m", tensors)


def test_each_method_of_transformers_is_read_or_refused_with_a_reason() -> None:
    # Plugins, as this package is one, add methods of their own.
    known = {name for name, cls in AUTO_QUANTIZER_MAPPING.items() if cls.__module__.startswith("transformers.")}
    methods = {name.removesuffix("_4bit").removesuffix("_8bit") for name in known}
    assert methods <= layouts.LAYOUTS.keys() | layouts.REFUSED.keys()
    assert not layouts.LAYOUTS.keys() & layouts.REFUSED.keys()


@pytest.mark.parametrize("method", layouts.REFUSED)
def test_a_method_that_is_not_read_is_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedError, match=f"quant_method: expected .* found {method}: "):
        layout_of({"quant_method": method}, {}, SHAPES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_rms_norm": True}, "use_rms_norm: expected layers that are products alone"),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, "found 'online'"),
    ],
)
def test_layers_of_bitnet_that_compute_more_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layout_of({"quant_method": "bitnet", **settings}, {}, SHAPES)


def test_embeddings_of_gemma_are_read_with_scales_of_groups_and_without_those_of_activations() -> None:
    from transformers.integrations.gemma_quant import QuantizedEmbedding

    peer = QuantizedEmbedding(160, 64, torch.float32, num_bits=4)
    peer.embedding_quantized.data = torch.randint(256, (160, 32), dtype=torch.uint8)
    peer.embedding_scale.data = torch.rand(160, 2)
    tensors = {name: tensor.data for name, tensor in peer.named_parameters()}
    tensors["input_activation_scale"] = torch.tensor(0.5)
    weight = layout_of({"quant_method": "gemma"}, {}, SHAPES).read("m", tensors)
    assert weight is not None
    assert torch.equal(weight.dequantize(torch.float32), peer.weight)
