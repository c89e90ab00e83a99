"""A GGUF file holds the same codes and scales, and its readers compute with the same weights."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from architectures import DECODER, randomize
from gguf import GGMLQuantizationType as Kind
from simulated_disk import FailingDisk, replay
from tiny_tokenizers import byte_level
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, export_gguf, quantize_
from hf_trainweights.errors import ConfigError, SaveError, UnsupportedError
from hf_trainweights.exports.gguf.architectures import ARCHITECTURES
from hf_trainweights.files import disk
from hf_trainweights.files.temporary import TEMPORARY_PREFIX
from hf_trainweights.tensor.dispatch import FALLBACKS

SIZE = 408
# More than the tokenizer's 400 tokens, as where a model is padded.
SMALL = {**DECODER, "vocab_size": SIZE, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 128}
TIED = {**SMALL, "tie_word_embeddings": True}
# What Transformers takes for sizes that its reader does not look for in a file.
QWEN3 = {**SMALL, "head_dim": 128}
EXPERTS = {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
QWEN3_MOE = {**SMALL, **EXPERTS, "head_dim": 32, "moe_intermediate_size": 768, "num_experts": 4, "norm_topk_prob": True}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama_tied": ("Llama", TIED),
    "llama_bias": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen2_tied": ("Qwen2", TIED),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "mixtral": ("Mixtral", {**SMALL, **EXPERTS, "num_local_experts": 4}),
}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32},
    "int8_g64": {"format": "int8", "group_size": 64},
    "int4_g32": {"format": "int4", "group_size": 32},
    "int4_g128": {"format": "int4", "group_size": 128},
    "mixed": {"format": "int4", "group_size": 32, "overrides": {"re:.*(q_proj|down_proj|gate_up_proj)": "int8"}},
    "embeddings": {"format": "int8", "include_embeddings": True},
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Its reader makes a dense Llama of Mixtral, and has no place for its biases.
NOT_READ_BY_TRANSFORMERS = {"mixtral", "llama_bias"}


def build(name: str, dtype: torch.dtype = torch.float16, **changes: Any) -> PreTrainedModel:
    family, config = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**config | changes)
        )
        randomize(model)
    buffers = dict(model.named_buffers())
    model = model.to(dtype).eval()
    # As after a load: `to` casts the frequencies of the rotary embedding too.
    for buffer_name, buffer in buffers.items():
        owner, _, attribute = buffer_name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


def quantized(name: str = "llama", dtype: torch.dtype = torch.float16, **config: Any) -> PreTrainedModel:
    model = build(name, dtype)
    quantize_(model, TrainWeightsConfig(**config or FORMATS["int8"]))
    return model


def read(file: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def expected_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a file is to hold, float32, as llama.cpp's own converter reorders and names them."""
    rename = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.": "attn_"}
    rename |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk"}
    rename |= {"attn_q_proj": "attn_q", "attn_k_proj": "attn_k", "attn_v_proj": "attn_v", "attn_o_proj": "attn_output"}
    rename |= {"mlp.experts.down_proj": "ffn_down_exps.weight", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    rename |= {"mlp.down_proj": "ffn_down", "mlp.gate.": "ffn_gate_inp.", "model.token_embd": "token_embd"}
    found = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float()
        if isinstance(tensor, QuantizedTensor):
            values = tensor.format.dequantize(tensor.tensors, tensor.stored_shape, torch.float32)
        if type(model).__name__ in ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"):
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            if heads:
                shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
                values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for old, new in rename.items():
            name = name.replace(old, new)
        if name.endswith("gate_up_proj"):
            gate, up = values.chunk(2, dim=1)
            prefix = name.removesuffix("mlp.experts.gate_up_proj")
            found |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
        else:
            found[name] = values
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", MODELS)
def test_each_tensor_is_the_dequantized_weight(tmp_path: Path, architecture: str, name: str, dtype: str) -> None:
    model = quantized(architecture, DTYPES[dtype], **FORMATS[name])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    found, expected = read(tmp_path / "model.gguf"), expected_tensors(model)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(gguf.dequantize(found[key].data, found[key].tensor_type), values.numpy()), key


@pytest.mark.parametrize("architecture", MODELS)
def test_a_quantized_weight_lies_in_blocks_alone(tmp_path: Path, architecture: str) -> None:
    model = quantized(architecture, **FORMATS["mixed"])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    bits = {Kind.Q8_0: 8.5, Kind.Q4_0: 4.5, Kind.F16: 16, Kind.F32: 32}
    sizes = {tensor.name: tensor.n_elements * bits[tensor.tensor_type] / 8 for tensor in tensors}
    assert {tensor.name: tensor.n_bytes for tensor in tensors} == sizes
    quantized_elements = sum(w.numel() for w in model.parameters() if isinstance(w, QuantizedTensor))
    in_blocks = [tensor for tensor in tensors if tensor.tensor_type in (Kind.Q8_0, Kind.Q4_0)]
    assert sum(tensor.n_elements for tensor in in_blocks) == quantized_elements
    padding = gguf.GGUF_DEFAULT_ALIGNMENT * len(tensors)
    end = min(tensor.data_offset for tensor in tensors) + sum(sizes.values())
    assert end <= (tmp_path / "model.gguf").stat().st_size <= end + padding


@pytest.mark.parametrize("name", ["int8", "int8_g32", "int4_g32", "int4_g128"])
def test_codes_and_scales_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    model = quantized("qwen2", torch.bfloat16, **FORMATS[name])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    weight: Any = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    data = read(tmp_path / "model.gguf")["blk.1.ffn_up.weight"].data.reshape(128, 4, -1)
    scales = data[..., :2].copy().view(np.float16)[..., 0]
    repeated = weight.scale.repeat_interleave(4 // weight.scale.shape[-1], dim=-1)
    assert np.array_equal(scales.astype(np.float32), repeated.float().numpy())
    if name.startswith("int8"):
        assert np.array_equal(data[..., 2:].reshape(128, 128).view(np.int8), weight.qdata.numpy())
    else:
        nibbles = np.concatenate([data[..., 2:] & 15, data[..., 2:] >> 4], axis=-1).reshape(128, 128)
        words = weight.qdata.numpy()
        assert np.array_equal(nibbles, np.stack([words >> 4 * i & 15 for i in range(8)], axis=-1).reshape(128, 128))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in NOT_READ_BY_TRANSFORMERS])
def test_transformers_computes_the_same(tmp_path: Path, architecture: str, name: str, dtype: str) -> None:
    model = quantized(architecture, DTYPES[dtype], **FORMATS[name])
    export_gguf(model, tmp_path / "model.gguf", byte_level())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=DTYPES[dtype])
    model.dequantize()
    state_dict = loaded.state_dict()
    assert state_dict.keys() == model.state_dict().keys()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state_dict[name])] == []
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "found dynamic"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "found default with partial_rotary_factor",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = build("llama", **changes)
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(UnsupportedError, match=message):
        export_gguf(model, tmp_path / "model.gguf", byte_level())


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
