"""An imported model stands for the very weights of its source, and whatever cannot be held exactly is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from covering import by_default
from helpers import default_dtype
from imports.number_writers import auto_round, bitsandbytes, float4, hqq, mlx, modelopt
from imports.writers import Layout, awq, by_activations, compressed_tensors, float8, gptq, write_model
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import hf_trainweights
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, import_directory, quantize_, verify_model
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

# Each with the format that its weights get.
EXACT = {
    "ct-int4-group": (compressed_tensors("int", 4, "group", 32), "int4 g32"),
    "ct-int4-channel": (compressed_tensors("int", 4, "channel"), "int4 g64"),
    "ct-int4-group-of-16": (compressed_tensors("int", 4, "group", 16), "affine4 g16 none"),
    "ct-int8-channel": (compressed_tensors("int", 8, "channel"), "int8"),
    "ct-int8-group": (compressed_tensors("int", 8, "group", 32), "int8 g32"),
    "ct-int8-tensor": (compressed_tensors("int", 8, "tensor"), "int8"),
    "ct-int8-plain": (compressed_tensors("int", 8, "channel", packed=False), "int8"),
    "ct-int4-asymmetric": (compressed_tensors("int", 4, "group", 32, symmetric=False), "affine4 g32"),
    "ct-int4-channel-asymmetric": (compressed_tensors("int", 4, "channel", symmetric=False), "affine4"),
    "ct-int8-channel-asymmetric": (compressed_tensors("int", 8, "channel", symmetric=False), "affine8"),
    "ct-int3": (compressed_tensors("int", 3, "group", 32), "affine3 g32 none"),
    "ct-float8-channel": (compressed_tensors("float", 8, "channel"), "float8_e4m3"),
    "ct-float8-tensor": (compressed_tensors("float", 8, "tensor"), "float8_e4m3"),
    "fp8-tensor": (float8("fp8", "weight_scale_inv", "tensor"), "float8_e4m3"),
    "fp8-one-block-a-row": (float8("fp8", "weight_scale_inv", "block"), "float8_e4m3"),
    "fbgemm-fp8": (float8("fbgemm_fp8", "weight_scale", "row"), "float8_e4m3"),
    "fp8-blocks": (float8("fp8", "weight_scale_inv", "block", 32), "float8_e4m3 g32"),
    "fp8-blocks-of-partial-columns": (float8("fp8", "weight_scale_inv", "block", 40), "float8_e4m3 g40"),
    "mxfp8": (modelopt("mxfp8"), "float8_e4m3 g32 e8m0"),
    "nf4": (bitsandbytes(), "table4 g64 plain"),
    "nf4-nested": (bitsandbytes(nested=True), "table4 g64 nested"),
    "nf4-of-blocks-over-rows": (bitsandbytes(nested=True, block=128), "table4 g64 plain"),
    "fp4-in-bfloat16-storage": (bitsandbytes("fp4", storage=torch.bfloat16), "table4 g64 plain"),
    "ct-nvfp4": (float4("NVFP4A16", NVFP4PackedCompressor), "table4 g16 e4m3_divided"),
    "ct-mxfp4": (float4("MXFP4A16", MXFP4PackedCompressor), "table4 g32 e8m0"),
    "modelopt-nvfp4": (modelopt("nvfp4"), "table4 g16 e4m3"),
    "modelopt-mxfp4": (modelopt("mxfp4"), "table4 g32 e8m0"),
}
# Their scales are float16, whatever the dtype of the model.
EXACT_IN_FLOAT16 = {
    "gptq": (gptq(), "int4 g32"),
    "gptq-v2": (gptq(version="gptq_v2"), "int4 g32"),
    "gptq-unversioned": (gptq(version=None, group_size=64), "int4 g64"),
    "gptq-8-bits": (gptq(bits=8), "int8 g32"),
    "gptq-one-group": (gptq(group_size=-1), "int4 g64"),
    "awq": (awq(), "int4 g32"),
    "gptq-asymmetric": (gptq(symmetric=False), "affine4 g32"),
    "gptq-v2-asymmetric": (gptq(version="gptq_v2", symmetric=False), "affine4 g32"),
    "gptq-one-group-asymmetric": (gptq(group_size=-1, symmetric=False), "affine4"),
    "awq-asymmetric": (awq(symmetric=False), "affine4 g32"),
    "gptq-2-bits": (gptq(bits=2), "affine2 g32 none"),
    "gptq-3-bits-asymmetric": (gptq(bits=3, symmetric=False), "affine3 g32"),
    "gptq-8-bits-asymmetric": (gptq(bits=8, symmetric=False), "affine8 g32"),
    "gptq-activation-order": (gptq(order=by_activations), "int4 g32 with ordered columns"),
    "gptq-activation-order-asymmetric": (
        gptq(3, order=by_activations, symmetric=False),
        "affine3 g32 with ordered columns",
    ),
    "hqq": (hqq(), "affine4 g32 float_zero_point rounded each"),
    "mlx-float16": (mlx(3, dtype=torch.float16), "affine3 g32 bias rounded each"),
    "auto-round": (auto_round("auto_round:auto_gptq", gptq(symmetric=False)), "affine4 g32"),
}
FEW_IN_FLOAT16 = ("gptq-8-bits", "gptq-v2-asymmetric", "gptq-activation-order-asymmetric", "awq", "hqq", "mlx-float16")


def load(directory: Path) -> PreTrainedModel:
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(directory, dtype="auto")


def assert_stands_for(out: Path, expected: dict[str, Tensor]) -> None:
    """Check that an imported model has the weights of a float checkpoint, bit for bit."""
    model = load(out)
    folder = out.with_name("float")
    folder.mkdir()
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "model.safetensors")
    wanted = load(folder).state_dict()
    model.dequantize()
    assert model.state_dict().keys() == wanted.keys()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, wanted[name])] == []


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(("layout", "form"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_those_that_the_peer_dequantizes(
    layout: Layout, form: str, dtype: torch.dtype, source: Path, out: Path
) -> None:
    expected = write_model(source, layout, dtype=dtype)
    with default_dtype(torch.float16):  # of the program that imports
        import_directory(source, out)
    assert str(load(out).model.layers[0].self_attn.q_proj.weight.format) == form
    assert_stands_for(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "form"),
    by_default([EXACT_IN_FLOAT16[name] for name in FEW_IN_FLOAT16], EXACT_IN_FLOAT16.values()),
    ids=EXACT_IN_FLOAT16,
)
def test_weights_with_float16_scales_are_those_that_the_peer_dequantizes(
    layout: Layout, form: str, source: Path, out: Path
) -> None:
    expected = write_model(source, layout, dtype=torch.float16)
    import_directory(source, out)
    weight = load(out).model.layers[0].self_attn.q_proj.weight
    assert (str(weight.format), weight.scale_dtype) == (form, torch.float16)
    assert_stands_for(out, expected)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt2", "llama_tied"])
@pytest.mark.parametrize("layout", [compressed_tensors("int", 4, "group", 32), gptq()], ids=["ct", "gptq"])
def test_experts_are_merged_and_transposed_weights_stay_so(
    architecture: str, layout: Layout, source: Path, out: Path
) -> None:
    expected = write_model(source, layout, architecture, torch.float16)
    import_directory(source, out)
    assert_stands_for(out, expected)
    quantized = [parameter for parameter in load(out).parameters() if isinstance(parameter, QuantizedTensor)]
    assert any(weight.dim() == 3 for weight in quantized) == (architecture in ("qwen3_moe", "mixtral"))
    assert any(weight.transposed for weight in quantized) == (architecture == "gpt2")


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config", [{"format": "int4", "group_size": 32}, {"format": "int8"}, {"format": "float8_e4m3"}]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_what_this_package_exports_it_imports(
    architecture: str, config: dict[str, Any], source: Path, out: Path, tmp_path: Path
) -> None:
    model = ARCHITECTURES[architecture].build(torch.bfloat16)
    quantize_(model, TrainWeightsConfig(**config))
    model.save_pretrained(tmp_path / "ours")
    hf_trainweights.export_compressed_tensors(model, source)
    import_directory(source, out)
    imported, ours = (load_file(each / "model.safetensors") for each in (out, tmp_path / "ours"))
    assert imported.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(imported[name], ours[name])] == []


def move_description(source: Path, name: str, renamed: dict[str, str]) -> None:
    """Describe the weights in a file of their own, with other names of settings, and not in config.json."""
    config = json.loads((source / "config.json").read_text())
    described = config.pop("quantization_config")
    del described["quant_method"]
    (source / "config.json").write_text(json.dumps(config))
    (source / name).write_text(json.dumps({renamed.get(key, key): value for key, value in described.items()}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "renamed", "file"),
    [
        (gptq(version=None), "quantize_config.json", {}, "gptq_model-4bit-32g.safetensors"),
        (awq(), "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}, "model.safetensors"),
    ],
)
def test_a_model_that_older_programs_wrote_is_read(
    layout: Layout, name: str, renamed: dict[str, str], file: str, source: Path, out: Path
) -> None:
    expected = write_model(source, layout, dtype=torch.float16)
    move_description(source, name, renamed)
    (source / "model.safetensors").rename(source / file)
    import_directory(source, out)
    assert not (out / name).exists()
    assert_stands_for(out, expected)


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("hf_quant_config.json", "{}", ConfigError, "found none: its weights are float, or lie under names"),
        ("quanto_qmap.json", "{}", ConfigError, "found none: its weights are float, or lie under names"),
        ("quantize_config.json", "[]", CorruptFileError, "quantize_config.json: expected a JSON object"),
        ("other.json", "{}", ConfigError, "expected a quantization_config, or quantize_config.json or "),
    ],
)
def test_a_description_that_nobody_can_read_is_named(
    name: str, text: str, error: type[Exception], match: str, source: Path, out: Path
) -> None:
    write_model(source, gptq(), dtype=torch.float16)
    move_description(source, name, {})
    (source / name).write_text(text)
    with pytest.raises(error, match=match):
        import_directory(source, out)
    assert not out.exists()


def add_tensor(source: Path, name: str, value: float) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[name] = torch.full((64,), value, dtype=torch.float16)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.7.mlp.up_proj.bias"),
        ("llama", "classifier.bias"),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.up_proj.bias"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1.bias"),
    ],
)
def test_a_tensor_that_the_class_has_no_place_for_is_refused_unless_it_is_zero(
    architecture: str, name: str, source: Path, out: Path
) -> None:
    write_model(source, gptq(), architecture, torch.float16)
    add_tensor(source, name, 0.5)
    with pytest.raises(UnsupportedError, match=re.escape(name)):
        import_directory(source, out)
    assert [path.name for path in out.parent.iterdir()] == ["source"]
    add_tensor(source, name, 0)
    import_directory(source, out)
    assert name not in load_file(out / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.q_proj.output_scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_what_says_nothing_of_weights_is_left_out(name: str, source: Path, out: Path) -> None:
    write_model(source, gptq(), dtype=torch.float16)
    add_tensor(source, name, 0.5)
    import_directory(source, out)
    assert name not in load_file(out / "model.safetensors")


@pytest.mark.slow
def test_the_imported_model_is_a_whole_directory_of_this_package(source: Path, out: Path) -> None:
    write_model(source, gptq(), dtype=torch.float16)
    byte_level().save_pretrained(source)
    (source / "quantize_config.json").write_text("{}")
    summary = import_directory(source, out)
    assert (summary.quantized[0].format, len(summary.quantized)) == (
        load(out).hf_quantizer.summary().quantized[0].format,
        14,
    )
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"], config["group_size"]) == ("trainweights", "int4", 32)
    assert verify_model(out).ok
    assert AutoTokenizer.from_pretrained(out)("a b").input_ids == AutoTokenizer.from_pretrained(source)("a b").input_ids
    assert not (out / "quantize_config.json").exists()
    assert [path.name for path in out.parent.iterdir() if path not in (source, out)] == []


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_are_read_without_running_them(shards: int, source: Path, out: Path) -> None:
    expected = write_model(source, gptq(), dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        names = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(tensors)}
        for file in set(names.values()):
            torch.save({name: tensors[name] for name in tensors if names[name] == file}, source / file)
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    import_directory(source, out)
    assert_stands_for(out, expected)


@pytest.mark.slow
def test_what_is_known_of_activations_is_left_out(source: Path, out: Path) -> None:
    expected = write_model(source, compressed_tensors("float", 8, "tensor"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    import_directory(source, out)
    assert_stands_for(out, expected)
    assert not any("input_scale" in name for name in load_file(out / "model.safetensors"))


REFUSED: dict[str, tuple[Layout, str]] = {
    "groups-of-different-sizes": (
        gptq(order=lambda K, size: (torch.arange(K) + 1).clamp(max=K - 1) // size),
        r"_proj\.weight: expected groups of 32 columns each, found groups of different sizes in g_idx",
    ),
    "five-bits": (
        Layout({**gptq().config, "bits": 5}, gptq().write),
        "bits: expected one of 2, 3, 4, 8 for gptq, found 5",
    ),
    "unknown-version": (
        Layout({**gptq().config, "checkpoint_format": "gptq_q"}, gptq().write),
        "checkpoint_format: expected one of gptq, gptq_v2, gptq_p, found 'gptq_q'",
    ),
    "rotated-by-gptqmodel": (
        Layout({**gptq().config, "rotation": "hadamard"}, gptq().write),
        "rotation: expected weights that are used as they are, found 'hadamard'",
    ),
    "awq-of-eight-bits": (
        Layout({**awq().config, "dynamic": {".*down_proj": {"bits": 8}}}, awq().write),
        r"bits: expected 4, found 4, 8",
    ),
    "gemv": (Layout({**awq().config, "version": "gemv"}, awq().write), "version: expected gemm, found 'gemv'"),
    "rotated": (
        Layout({**compressed_tensors("int", 8, "channel").config, "transform_config": {"a": {}}}, gptq().write),
        "transform_config: expected weights that are used as they are",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_format_holds_exactly_is_refused(layout: Layout, message: str, source: Path, out: Path) -> None:
    write_model(source, layout)
    with pytest.raises(UnsupportedError, match=message):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


@pytest.mark.slow
@pytest.mark.parametrize("described", [None, "gptq", {}, {"quant_method": "other"}, {"quant_method": ["gptq"]}])
def test_other_descriptions_are_refused(described: object, source: Path, out: Path) -> None:
    write_model(source, Layout({}, gptq().write))
    file = source / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": described}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantization_config|quant_method"):
        import_directory(source, out)
    assert not out.exists()


TYPELESS = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": []}}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (gptq(), {"bits": "4"}),
        (gptq(), {"bits": True}),
        (gptq(), {"group_size": None}),
        (gptq(), {"checkpoint_format": ["gptq"]}),
        (awq(), {"bits": None}),
        (awq(), {"version": ["gemm"]}),
        (compressed_tensors("int", 4, "channel"), {"config_groups": None}),
        (compressed_tensors("int", 4, "channel"), {"config_groups": [1]}),
        (compressed_tensors("int", 4, "channel"), {"config_groups": {"group_0": None}}),
        (compressed_tensors("int", 4, "channel"), TYPELESS),
        (compressed_tensors("int", 4, "channel"), {"sparsity_config": [1]}),
    ],
    ids=lambda value: value.config["quant_method"] if isinstance(value, Layout) else str(value),
)
def test_values_that_no_description_has_are_refused(
    layout: Layout, change: dict[str, Any], source: Path, out: Path
) -> None:
    write_model(source, Layout({**layout.config, **change}, layout.write))
    with pytest.raises((ConfigError, UnsupportedError), match="quantization_config"):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


def test_a_target_that_holds_something_is_left_alone(source: Path, out: Path) -> None:
    write_model(source, gptq())
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="new or empty directory"):
        import_directory(source, out)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("source", ["nowhere", "/no/where", "./nowhere", "no/where/at_all"])
def test_a_missing_source_is_named(source: str, out: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{source}: expected a quantized model, found nothing there"):
        import_directory(source, out)


Q_PROJ = "model.layers.0.self_attn.q_proj"


def _cut(leaf: str) -> Callable[[dict[str, Tensor]], None]:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.{leaf}"] = tensors[f"{Q_PROJ}.{leaf}"][:-1].clone()

    return damage


def _set(leaf: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.{leaf}"] = value(tensors[f"{Q_PROJ}.{leaf}"])

    return damage


INT4, INT8, FLOAT8 = (
    compressed_tensors("int", 4, "group", 32),
    compressed_tensors("int", 8, "channel", packed=False),
    compressed_tensors("float", 8, "channel"),
)
ASYMMETRIC = compressed_tensors("int", 4, "group", 32, symmetric=False)
DAMAGES: dict[str, tuple[Layout, Callable[[dict[str, Tensor]], object]]] = {
    "rows-missing": (INT4, _cut("weight_packed")),
    "scales-missing": (INT4, _cut("weight_scale")),
    "no-scale": (INT4, lambda tensors: tensors.pop(f"{Q_PROJ}.weight_scale")),
    "no-shape": (INT4, lambda tensors: tensors.pop(f"{Q_PROJ}.weight_shape")),
    "huge-shape": (INT4, _set("weight_shape", lambda _: torch.tensor([2**62, 2**62]))),
    "negative-shape": (INT4, _set("weight_shape", lambda shape: -shape)),
    "float-shape": (INT4, _set("weight_shape", lambda shape: shape.float())),
    "nan-scale": (INT4, _set("weight_scale", lambda scale: scale * float("nan"))),
    "integer-scale": (INT4, _set("weight_scale", lambda scale: scale.to(torch.int32))),
    "scale-of-a-column-too-many": (INT4, _set("weight_scale", lambda scale: torch.cat([scale, scale[:, :1]], 1))),
    "packed-as-bytes": (INT4, _set("weight_packed", lambda packed: packed.view(torch.uint8))),
    "empty": (INT8, _set("weight", lambda weight: weight[:0].clone())),
    "wrong-columns": (INT8, _set("weight", lambda weight: weight[:, :-1].contiguous())),
    "vector": (INT8, _set("weight", lambda weight: weight[0].clone())),
    "nan-code": (FLOAT8, _set("weight", lambda weight: torch.full_like(weight, float("nan")))),
    "fewer-groups": (INT4, _set("weight_scale", lambda scale: scale[:, :1].contiguous())),
    "gptq-fewer-groups": (gptq(), _cut("scales")),
    "gptq-vector": (gptq(), _set("qweight", lambda words: words[0].clone())),
    "gptq-empty": (gptq(), _set("qweight", lambda words: words[:, :0].clone())),
    "complex-shape": (INT4, _set("weight_shape", lambda shape: shape.to(torch.complex64))),
    "cubic-scale": (INT4, _set("weight_scale", lambda scale: scale.unsqueeze(0))),
    "float8-scale": (INT4, _set("weight_scale", lambda scale: scale.to(torch.float8_e4m3fn))),
    "gptq-cubic-scale": (gptq(), _set("scales", lambda scale: scale.unsqueeze(0))),
    "awq-cubic-scale": (awq(), _set("scales", lambda scale: scale.unsqueeze(0))),
    "gptq-no-zeros": (gptq(), lambda tensors: tensors.pop(f"{Q_PROJ}.qzeros")),
    "gptq-few-zeros": (gptq(), _set("qzeros", lambda zeros: zeros[:, :0].clone())),
    "awq-vector": (awq(), _set("qweight", lambda words: words[0].clone())),
    "awq-cut": (awq(), _cut("scales")),
    "fewer-zeros": (ASYMMETRIC, _set("weight_zero_point", lambda zeros: zeros[:-1].clone())),
    "other-groups-of-zeros": (ASYMMETRIC, _set("weight_zero_point", lambda zeros: zeros[:, :1].repeat(1, 3))),
    "float-zeros": (ASYMMETRIC, _set("weight_zero_point", lambda zeros: zeros.double())),
    "cubic-zeros": (ASYMMETRIC, _set("weight_zero_point", lambda zeros: zeros.unsqueeze(0))),
}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_tensors_that_do_not_fit_are_damage(
    layout: Layout, damage: Callable[[dict[str, Tensor]], object], source: Path, out: Path
) -> None:
    write_model(source, layout)
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptFileError, match="q_proj"):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _claim_a_huge_header(file: Path) -> None:
    file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])


def _link_to_a_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_truncate, _claim_a_huge_header, _link_to_a_device, _link_to_nothing])
def test_files_that_are_none_are_refused(damage: Callable[[Path], None], source: Path, out: Path) -> None:
    write_model(source, gptq())
    damage(source / "model.safetensors")
    with pytest.raises((CorruptFileError, ConfigError), match=r"model\.safetensors"):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


def test_weights_of_another_model_are_refused(source: Path, out: Path) -> None:
    write_model(source, gptq())
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 256}))
    with pytest.raises(CorruptFileError, match="shape") as caught:
        import_directory(source, out)
    # Not in the directory of the conversion, which is gone by then.
    assert caught.value.where == f"{source}: model.layers.0.mlp.down_proj.weight"
    assert list(out.parent.iterdir()) == [source]


def test_a_checkpoint_that_lacks_a_weight_is_refused(source: Path, out: Path) -> None:
    write_model(source, gptq())
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(Q_PROJ)}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    with pytest.raises((ConfigError, CorruptFileError), match="q_proj"):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


def test_an_expert_that_is_missing_is_named(source: Path, out: Path) -> None:
    write_model(source, gptq(), "qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    expert = "model.layers.1.mlp.experts.2.up_proj"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(expert)}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptFileError, match=expert.replace(".", r"\.")):
        import_directory(source, out)
    shutil.rmtree(source)
    assert list(out.parent.iterdir()) == []


def _as_bin(source: Path, change: Callable[[dict[Any, Any]], object]) -> None:
    tensors: dict[Any, Any] = load_file(source / "model.safetensors")
    change(tensors)
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")


ODD_TENSORS: dict[str, Callable[[dict[Any, Any]], object]] = {
    "integer keys": lambda tensors: tensors.update({0: torch.ones(2)}),
    "sparse": lambda tensors: tensors.update({f"{Q_PROJ}.qweight": tensors[f"{Q_PROJ}.qweight"].to_sparse()}),
    "meta": lambda tensors: tensors.update({f"{Q_PROJ}.scales": tensors[f"{Q_PROJ}.scales"].to("meta")}),
    "zero-dimensional": lambda tensors: tensors.update({f"{Q_PROJ}.qweight": torch.tensor(1, dtype=torch.int32)}),
    "complex": lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.complex128)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", ODD_TENSORS)
def test_tensors_that_no_checkpoint_has_are_refused(change: str, source: Path, out: Path) -> None:
    write_model(source, gptq())
    _as_bin(source, ODD_TENSORS[change])
    with pytest.raises((CorruptFileError, UnsupportedError), match=r"pytorch_model\.bin|q_proj|model\.norm"):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


@pytest.mark.slow
def test_one_tensor_under_two_names_is_written_twice(source: Path, out: Path) -> None:
    expected = write_model(source, gptq(), dtype=torch.float16)
    norms = ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
    _as_bin(source, lambda tensors: tensors.update({norms[1]: tensors[norms[0]]}))
    import_directory(source, out)
    assert_stands_for(out, {**expected, norms[1]: expected[norms[0]].clone()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers: expected a number of modules that \d+ tensors can fill"),
        (
            {"hidden_size": 10**10},
            r"config\.json: hidden_size: expected a size that \d+ bytes of weights can fill, found 10{10}",
        ),
        (
            {"text_config": {"vocab_size": 10**12}},
            r"text_config: vocab_size: expected a size that \d+ bytes of weights",
        ),
        (
            {"intermediate_size": 10**7},
            r"config\.json: expected a model whose weights \d+ bytes can hold, found \d+ weights, most of them in .*",
        ),
        ({"rope_parameters": {"rope_type": "x"}}, r"config\.json: expected what LlamaForCausalLM can be built of"),
    ],
)
def test_a_model_that_cannot_be_built_or_filled_is_refused(
    change: dict[str, Any], message: str, source: Path, out: Path
) -> None:
    write_model(source, gptq())
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((CorruptFileError, UnsupportedError), match=message):
        import_directory(source, out)
    assert list(out.parent.iterdir()) == [source]


@pytest.mark.slow
def test_torchao_describes_weights_by_the_names_of_the_model(source: Path, out: Path) -> None:
    model = ARCHITECTURES["vit"].build(torch.bfloat16)
    model.save_pretrained(source)
    saved, metadata = load_file(source / "model.safetensors"), {"format": "pt"}
    expected, tensors = dict(saved), dict(saved)
    for name, weight in model.state_dict().items():
        if ".layer" not in name or weight.dim() != 2:
            continue
        saved_name = next(each for each in saved if torch.equal(saved[each], weight))
        del tensors[saved_name]
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(weight.dtype)
        codes = (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)
        attributes = {"_type": "Int8Tensor", "_data": {"block_size": [1, weight.shape[1]]}}
        metadata[name] = json.dumps({**attributes, "_tensor_data_names": ["qdata", "scale"]})
        stem = saved_name.removesuffix("weight")
        tensors |= {f"{stem}_weight_qdata": codes, f"{stem}_weight_scale": scale}
        expected[saved_name] = (codes.float() * scale.float()).to(weight.dtype)
    assert not {name for name in metadata if name in saved}
    save_file(tensors, source / "model.safetensors", metadata)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "torchao"}}))
    import_directory(source, out)
    assert_stands_for(out, expected)
