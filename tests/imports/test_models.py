"""Whole models of other quantizers: they compute as the peer's dequantized model, train adapters, and save again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from covering import exhaustive
from imports.number_writers import bitsandbytes, float4, floats, hqq, mlx, modelopt, random
from imports.test_directory import assert_stands_for, load
from imports.writers import Layout, Tensors, awq, by_activations, float8, gptq, words_along, write_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import QuantizedTensor, import_directory
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.imports.layouts import layout_of

IDS = torch.arange(1, 15).view(2, 7)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def quantized_weights(model: PreTrainedModel) -> dict[str, QuantizedTensor]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, QuantizedTensor)}


def change(directory: Path, tensors: Callable[[Tensors], Tensors], config: dict[str, Any]) -> None:
    """Replace the tensors of a model, and keys of its config.json."""
    changed = tensors(load_file(directory / "model.safetensors"))
    changed = {name: tensor.contiguous() for name, tensor in changed.items()}
    save_file(changed, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def assert_computes_as(out: Path, theirs: PreTrainedModel) -> None:
    """Check that a model has the weights and, dequantized, the very logits of a float model, and saves to the same."""
    ours = load(out).eval()
    quantized = logits(ours)
    torch.testing.assert_close(quantized.float(), logits(theirs).float(), rtol=0.05, atol=0.05)
    ours.save_pretrained(out.with_name("again"))
    again = load(out.with_name("again")).eval()
    assert torch.equal(logits(again), quantized)
    ours.dequantize()
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.slow
def test_gpt_oss_computes_as_the_model_that_transformers_dequantizes(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = ARCHITECTURES["gpt_oss"].build(torch.bfloat16)
    model.save_pretrained(source)

    def pack(tensors: Tensors) -> Tensors:
        packed = {}
        for name, tensor in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                packed[name] = tensor
                continue
            E, K, N = tensor.shape
            packed[f"{name}_blocks"] = random(E, N, K // 32, 16, bits=8)
            packed[f"{name}_scales"] = random(E, N, K // 32, bits=3) + 117
        return packed

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    change(source, pack, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}})
    import_directory(source, out)
    weights = quantized_weights(load(out))
    assert {(str(weight.format), weight.transposed) for weight in weights.values()} == {("table4 g32 e8m0", True)}
    assert_computes_as(out, AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval())


@pytest.mark.slow
def test_blocks_of_float8_compute_as_the_model_that_transformers_dequantizes(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_model(source, float8("fp8", "weight_scale_inv", "block", 32))
    import_directory(source, out)
    assert_computes_as(out, AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval())


@pytest.mark.slow
@pytest.mark.parametrize("exponents", [False, *exhaustive(True)], ids=["floats", "exponents"])
def test_blocks_of_experts_in_one_tensor_are_read(exponents: bool, tmp_path: Path) -> None:
    source, out, block = tmp_path / "source", tmp_path / "out", 32
    expected: Tensors = {}
    ARCHITECTURES["qwen3_moe"].build(torch.bfloat16).save_pretrained(source)

    def merge(tensors: Tensors) -> Tensors:
        merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in {name.partition(".experts.")[0] for name in tensors.keys() - merged.keys()}:
            for weight, matrices in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
                rows = [
                    torch.cat([tensors[f"{layer}.experts.{expert}.{matrix}.weight"] for matrix in matrices])
                    for expert in range(4)
                ]
                codes = torch.stack(rows).float().mul(100).to(torch.float8_e4m3fn)
                scale = random(*(-(-size // block) if i else size for i, size in enumerate(codes.shape)), bits=4) + 1.0
                scale = torch.exp2(scale - 12) if exponents else scale / 777
                merged |= {f"{layer}.experts.{weight}": codes, f"{layer}.experts.{weight}_scale_inv": scale}
                wide = scale.repeat_interleave(block, 1)[:, : codes.shape[1]].repeat_interleave(block, 2)
                expected[f"{layer}.experts.{weight}"] = codes.float() * wide[..., : codes.shape[2]]
        return merged

    change(source, merge, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}})
    import_directory(source, out)
    weights = quantized_weights(load(out))
    assert {str(weight.format) for weight in weights.values()} == {f"float8_e4m3 g{block}"}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight.dequantize(torch.float32), expected[name]) for name, weight in weights.items())


LAYOUTS = {
    "awq": awq(symmetric=False),
    "gptq-activation-order": gptq(order=by_activations, symmetric=False),
    "nf4": bitsandbytes(nested=True),
    "nvfp4": float4("NVFP4A16", NVFP4PackedCompressor),
    "mlx": mlx(6),
    "hqq": hqq(),
    "mxfp8": modelopt("mxfp8"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_adapter_trains_on_an_imported_model(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source", LAYOUTS[name], dtype=torch.bfloat16)
    import_directory(tmp_path / "source", tmp_path / "out")
    model = load(tmp_path / "out")
    before = {name: weight.dequantize() for name, weight in quantized_weights(model).items()}
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(6):
        loss = tuned(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = quantized_weights(model).values()
    assert all(torch.equal(weight.dequantize(), own) for own, weight in zip(before.values(), after, strict=True))


EXPERTS = {
    "nf4": bitsandbytes(nested=True),
    "nvfp4": float4("NVFP4A16", NVFP4PackedCompressor),
    "awq": awq(symmetric=False),
    "gptq-activation-order": gptq(order=by_activations),
    "hqq": hqq(),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_every_kind_are_merged(name: str, architecture: str, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "source", EXPERTS[name], architecture, torch.float16)
    import_directory(tmp_path / "source", tmp_path / "out")
    assert any(weight.dim() == 3 for weight in quantized_weights(load(tmp_path / "out")).values())
    assert_stands_for(tmp_path / "out", expected)


@pytest.mark.slow
def test_matrices_of_an_expert_may_have_other_global_scales(tmp_path: Path) -> None:
    layout, scales = modelopt("nvfp4"), iter(range(1, 1000))

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, dense = layout.write(weight)
        power = 2.0 ** -(next(scales) % 4)
        return {**tensors, "weight_scale_2": tensors["weight_scale_2"] * power}, dense * power

    expected = write_model(tmp_path / "source", Layout(layout.config, write), "qwen3_moe", torch.float32)
    import_directory(tmp_path / "source", tmp_path / "out")
    assert_stands_for(tmp_path / "out", expected)


def stacked(tensors: Tensors, block: str, matrices: dict[str, str]) -> Tensors:
    """Return the tensors with the experts of a block stacked, as MLX has them."""
    left: Tensors = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        head, marker, tail = name.partition(f"{block}.experts.")
        if not marker:
            left[name] = tensor
            continue
        expert, matrix, leaf = tail.split(".")
        stack = f"{head}{block}.switch_mlp.{matrices.get(matrix, matrix)}.{leaf}"
        stacks.setdefault(stack, {})[int(expert)] = tensor
    return left | {name: torch.stack([stack[expert] for expert in sorted(stack)]) for name, stack in stacks.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "block", "matrices"),
    [
        ("qwen3_moe", "mlp", {}),
        ("mixtral", "block_sparse_moe", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}),
    ],
)
def test_experts_that_mlx_stacks_are_read(
    architecture: str, block: str, matrices: dict[str, str], tmp_path: Path
) -> None:
    expected = write_model(tmp_path / "source", mlx(5, 64), architecture, torch.bfloat16)
    described = {"group_size": 64, "bits": 4, "model.layers.0.mlp.gate": False}
    own = json.loads((tmp_path / "source" / "config.json").read_text())["num_hidden_layers"]
    modules = {name.removesuffix(".weight") for name in expected}
    for module in modules:
        described[module] = {"group_size": 64, "bits": 5}
    for layer in range(own):
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            described[f"model.layers.{layer}.{block}.switch_mlp.{matrix}"] = {"group_size": 64, "bits": 5}
    config = {"quantization": described, "quantization_config": described}
    change(tmp_path / "source", lambda tensors: stacked(tensors, block, matrices), config)
    import_directory(tmp_path / "source", tmp_path / "out")
    assert any(weight.dim() == 3 for weight in quantized_weights(load(tmp_path / "out")).values())
    assert_stands_for(tmp_path / "out", expected)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_embeddings_that_mlx_quantizes_stay_quantized(architecture: str, tmp_path: Path) -> None:
    layout = mlx(4, 64)
    expected = write_model(tmp_path / "source", layout, architecture, torch.bfloat16)

    def pack(tensors: Tensors) -> Tensors:
        packed = dict(tensors)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in packed:
                parts, expected[name] = layout.write(packed.pop(name))
                packed |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
        return packed

    change(tmp_path / "source", pack, {"quantization_config": None, "quantization": {"group_size": 64, "bits": 4}})
    import_directory(tmp_path / "source", tmp_path / "out")
    assert "model.embed_tokens.weight" in quantized_weights(load(tmp_path / "out"))
    assert_stands_for(tmp_path / "out", expected)


def test_norms_that_mlx_changes_beyond_repair_are_refused() -> None:
    layout = layout_of({**mlx().config, "model_type": "qwen3_5"}, {}, {})
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight: expected a norm from which 1 can be subtracted"):
        layout.float_tensor("model.norm.weight", torch.tensor([1.0, 0.001], dtype=torch.bfloat16))


MOE_SETTINGS = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")
QWEN3_NEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


QWEN3_5 = {name: value for name, value in QWEN3_NEXT.items() if name not in MOE_SETTINGS}
QWEN3_5_MOE = {name: value for name, value in QWEN3_NEXT.items() if name != "intermediate_size"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Qwen3NextForCausalLM", QWEN3_NEXT),
        ("Qwen3_5ForCausalLM", QWEN3_5),
        ("Qwen3_5MoeForCausalLM", QWEN3_5_MOE),
    ],
)
def test_norms_and_convolutions_that_mlx_changes_are_changed_back(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    source, layout, expected = tmp_path / "source", mlx(4, 32), {}
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**settings)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(-0.3, 0.2, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(source)
    # mlx-lm calls the text model of Qwen3.5 so, which has other parts too.
    prefix = "" if class_name == "Qwen3NextForCausalLM" else "language_model."

    def convert(tensors: Tensors) -> Tensors:
        converted = {}
        for name, tensor in one_by_one(tensors).items():
            module = name.rpartition(".")[0]
            expected[name] = tensor
            if module.endswith(("_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z")):
                parts, expected[name] = layout.write(tensor)
                converted |= {f"{module}.{part}": stored for part, stored in parts.items()}
            elif module.endswith(("layernorm", "q_norm", "k_norm", "model.norm")):
                converted[name] = tensor + 1.0
                expected[name] = (converted[name].float() - 1).to(tensor.dtype)
            else:
                converted[name] = tensor.movedim(2, 1) if module.endswith("conv1d") else tensor
        return {f"{prefix}{name}": tensor for name, tensor in stacked(converted, "mlp", {}).items()}

    change(source, convert, {"quantization": {key: layout.config[key] for key in ("bits", "group_size")}})
    if prefix:
        config = json.loads((source / "config.json").read_text())
        text = {key: config.pop(key) for key in list(config) if key not in ("quantization", "architectures")}
        whole = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text}
        (source / "config.json").write_text(json.dumps({**config, **whole}))
    import_directory(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [class_name]
    assert_stands_for(tmp_path / "out", expected)


def one_by_one(tensors: Tensors) -> Tensors:
    """Return tensors with those of merged experts replaced by one for each expert, as older checkpoints have them."""
    split = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        parts = {leaf: tensor}
        if leaf == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        if owner.endswith(".experts"):
            each = {f"{owner}.{n}.{part}.weight": rows for part, e in parts.items() for n, rows in enumerate(e)}
            split |= {key: rows.contiguous() for key, rows in each.items()}
        else:
            split[name] = tensor
    return split


@pytest.mark.slow
def test_weights_of_gptq_may_have_other_bits_and_groups(tmp_path: Path) -> None:
    eight, four = gptq(bits=8, group_size=64, symmetric=False), gptq()

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        return (eight if weight.shape[1] == 128 else four).write(weight)

    config = {**four.config, "dynamic": {r".*\.down_proj": {"bits": 8, "group_size": 64}, "-:lm_head": {}}}
    expected = write_model(tmp_path / "source", Layout(config, write), dtype=torch.float16)
    import_directory(tmp_path / "source", tmp_path / "out")
    assert str(load(tmp_path / "out").model.layers[0].mlp.down_proj.weight.format) == "affine8 g64"
    assert_stands_for(tmp_path / "out", expected)


def read_gptq(config: dict[str, Any], tensors: Tensors) -> QuantizedTensor:
    weight = layout_of(config, {}, {}).read("m", {leaf: tensor.contiguous() for leaf, tensor in tensors.items()})
    assert weight is not None
    return weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_largest_zero_point_of_version_1_is_one_more_than_a_code(bits: int) -> None:
    layout = gptq(bits)
    tensors, _ = layout.write(floats(32, 64, size=1))
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    codes, scale = random(32, 64, bits=bits), tensors["scales"].t().double().repeat_interleave(32, 1)
    weight = read_gptq(layout.config, {**tensors, "qweight": words_along(codes.t(), bits, 0)})
    assert torch.equal(weight.dequantize(torch.float64), (codes.double() - 2**bits) * scale)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_0_are_read_as_gptqmodel_writes_them(bits: int) -> None:
    layout = gptq(bits)
    tensors, _ = layout.write(floats(32, 64, size=1))
    codes, zero = random(32, 64, bits=bits), random(2, 32, bits=bits)
    zero[0, 5] = 0
    words = words_along(zero, bits, 1)
    # GPTQModel subtracts 1 from each zero point, of 3 bits by itself, else by one subtraction from the word.
    ones = words_along(torch.ones_like(zero), bits, 1)
    tensors["qzeros"] = words_along((zero.int() - 1) % 8, 3, 1) if bits == 3 else words - ones
    config = {**layout.config, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    weight = read_gptq(config, {**tensors, "qweight": words_along(codes.t(), bits, 0)})
    scale = tensors["scales"].t().double().repeat_interleave(32, 1)
    wanted = (codes.double() - zero.t().double().repeat_interleave(32, 1)) * scale
    assert torch.equal(weight.dequantize(torch.float64), wanted)
