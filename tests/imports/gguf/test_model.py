"""A GGUF file becomes a model with the weights that Transformers' own reader dequantizes, at the size of the file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from architectures import randomize
from covering import by_default
from exports.gguf_models import MIXED, quantized
from exports.gguf_models import MODELS as EXPORTED
from exports.gguf_models import build as build_exported
from gguf import GGMLQuantizationType as Kind
from imports.gguf.files import MODELS, Kinds, all_of, mixture, write_gguf
from oldest_transformers import not_by_5_17
from tiny_tokenizers import byte_level
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, export_gguf, import_directory, quantize_, verify_model
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.imports.gguf.blocks import ALTERNATIVES

pytestmark = pytest.mark.slow  # together they take long

# Transformers' reader has no such class, makes a dense Llama of Mixtral, or lacks a place for biases.
NOT_READ_BY_TRANSFORMERS = {"gemma", "olmo2", "falcon_split", "mixtral", "llama_bias", "phi3_longrope"}
# Transformers' reader has no such architecture, or leaves out factors and experts of it.
READ_BY_GGUF_ALONE = {name for name in MODELS if name.startswith("gemma4")}
# Transformers' reader rounds the scales of this one to bfloat16 too, before it multiplies.
ROUNDED_TWICE = {("lfm2", torch.bfloat16)}
CASES = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
CASES = [case for case in CASES if case not in ROUNDED_TWICE]
ENCODERS = {"bert", "distilbert", "roberta", "xlm_roberta"}


def read_by_transformers(
    source: Path, dtype: torch.dtype, file: str = "model.gguf", cls: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    return cls.from_pretrained(source, gguf_file=file, dtype=dtype, **options)


def assert_same_model(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Check that the weights, dequantized, and the logits are those of a float model, bit for bit."""
    ours.dequantize()
    wanted, values = theirs.state_dict(), ours.state_dict()
    assert values.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []
    tokens = torch.arange(12).view(2, 6)
    inputs = {"input_ids": tokens} | (
        {"decoder_input_ids": tokens} if "decoder.final_layer_norm.weight" in values else {}
    )
    with torch.no_grad():
        assert torch.equal(ours(**inputs)[0], theirs(**inputs)[0])


def formats_of(model: PreTrainedModel) -> dict[str, str]:
    return {name: str(each.format) for name, each in model.named_parameters() if isinstance(each, QuantizedTensor)}


@pytest.mark.parametrize(("name", "dtype"), by_default([CASES[1], ("qwen3_moe", torch.bfloat16)], CASES))
def test_a_mixture_has_the_weights_that_transformers_dequantizes(
    name: str, dtype: torch.dtype, source: Path, out: Path
) -> None:
    model = write_gguf(source / "model.gguf", name)
    byte_level().save_pretrained(source)
    import_directory(source, out)
    ours = type(model).from_pretrained(out, dtype=dtype)
    assert {"affine4 k4", "int8 g32"} <= {*formats_of(ours).values()}
    if name in READ_BY_GGUF_ALONE:
        model.save_pretrained(out / "float")
        assert_same_model(ours, type(model).from_pretrained(out / "float", dtype=dtype))
        return
    # Its configuration of T5 has ReLU where llama.cpp has GELU.
    options = {"config": model.config} if MODELS[name][1].startswith("t5") else {}
    assert_same_model(ours, read_by_transformers(source, dtype, cls=type(model), **options))


@pytest.mark.parametrize("kind", by_default(["Q4_K"], ALTERNATIVES))
def test_each_kind_has_the_weights_that_transformers_dequantizes(kind: str, source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", "llama", all_of(kind))
    import_directory(source, out)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert {*formats_of(ours).values()} == {str(ALTERNATIVES[kind][0].format)}
    assert_same_model(ours, read_by_transformers(source, torch.float32))


def test_the_imported_model_is_as_large_as_the_file(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", "llama")
    import_directory(source, out)
    file = gguf.GGUFReader(source / "model.gguf")
    in_file = sum(tensor.n_bytes for tensor in file.tensors)
    ours = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert ours < in_file + 20_000  # names, shapes and formats of tensors


@pytest.mark.parametrize("name", by_default(["gpt2", "qwen2_moe", "falcon_split"], EXPORTED))
def test_exported_models_come_back(name: str, source: Path, out: Path) -> None:
    model = quantized(name, torch.float16, **MIXED, include_embeddings=True)
    export_gguf(model, source / "model.gguf", byte_level())
    if name in NOT_READ_BY_TRANSFORMERS | ENCODERS:
        byte_level().save_pretrained(source)
    if name in ENCODERS:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
    import_directory(source, out)
    back = type(model).from_pretrained(out, dtype=torch.float16)
    assert any(isinstance(parameter, QuantizedTensor) for parameter in back.parameters())
    for each in (model, back):
        each.dequantize()
    for key in [key for key in model.state_dict() if key.startswith("pooler.")]:  # which llama.cpp does not store
        assert not back.get_parameter(key).any()
        model.get_parameter(key).data.zero_()
    if "roberta" in name:  # nor the positions up to that of a padding token
        model.get_parameter("embeddings.position_embeddings.weight").data[: model.config.pad_token_id + 1] = 0
    wanted, values = model.state_dict(), back.state_dict()
    assert [key for key in wanted if key not in values or not torch.equal(values[key], wanted[key])] == []
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(back.eval()(tokens)[0], model.eval()(tokens)[0])


def test_a_pooler_that_is_zero_is_named(source: Path, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("bert", torch.float16, **MIXED, include_embeddings=True)
    export_gguf(model, source / "model.gguf", byte_level())
    byte_level().save_pretrained(source)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(source)
    import_directory(source, out)
    assert "llama.cpp stores no pooler.dense.weight and pooler.dense.bias. These weights are zero" in caplog.text


@pytest.mark.parametrize(("name", "tokenizer"), [("bert", "bert"), ("distilbert", "bert"), ("roberta", "gpt2")])
def test_the_class_of_an_encoder_is_in_the_file(name: str, tokenizer: str, source: Path, out: Path) -> None:
    model = quantized(name, torch.float16, **MIXED, include_embeddings=True)
    export_gguf(model, source / "model.gguf", byte_level())
    file = source / "model.gguf"
    file.write_bytes(
        file.read_bytes().replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0" + tokenizer.encode(), 1)
    )
    byte_level().save_pretrained(source)
    import_directory(source, out)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert config["max_position_embeddings"] == model.config.max_position_embeddings


@pytest.mark.parametrize("kinds", [("Q4_K", "Q5_K"), ("Q3_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q5_0", "IQ4_NL")])
def test_parts_of_a_weight_in_two_kinds_get_one_format_that_holds_both(
    kinds: tuple[str, str], source: Path, out: Path
) -> None:
    write_gguf(source / "model.gguf", "qwen3_moe", parts(*kinds))
    import_directory(source, out)
    assert_same_model(
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), read_by_transformers(source, torch.float32)
    )


def parts(gate: str, up: str) -> Kinds:
    return lambda name: gate if "ffn_gate_exps" in name else up if "ffn_up_exps" in name else mixture(name)


def test_parts_of_a_weight_that_no_format_holds_are_refused_by_name(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", "qwen3_moe", parts("Q4_K", "Q6_K"))
    match = r"gate_up_proj: expected parts .* found blk\.0\.ffn_gate_exps\.weight in Q4_K, blk\.0\.ffn_up_exps.* Q6_K"
    with pytest.raises(UnsupportedError, match=match):
        import_directory(source, out)
    assert [path.name for path in out.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_XS"])
def test_kinds_that_no_format_holds_are_refused_by_name(kind: str, source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf")
    change_kind(source / "model.gguf", "blk.0.ffn_up.weight", kind)
    with pytest.raises(UnsupportedError, match=rf"ffn_up\.weight: expected one of .*Q4_K.*, found {kind}\."):
        import_directory(source, out)


def change_kind(file: Path, name: str, kind: str) -> None:
    """Give a tensor of a file another kind, of fewer bytes."""
    data = bytearray(file.read_bytes())
    start = data.index(name.encode()) + len(name)
    dimensions = int.from_bytes(data[start : start + 4], "little")
    start += 4 + 8 * dimensions
    data[start : start + 4] = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    file.write_bytes(data)


def test_experts_whose_gate_and_up_take_turns_come_back(source: Path, out: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 4, "head_dim": 64, "vocab_size": 408}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": 128}
    config = GptOssConfig(num_hidden_layers=2, max_position_embeddings=131072, pad_token_id=None, **sizes, **heads)
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).float().eval()
    randomize(model)
    source.mkdir()
    write_gpt_oss(source / "model.gguf", model)
    import_directory(source, out)
    ours = GptOssForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert formats_of(ours)["model.layers.0.mlp.experts.gate_up_proj"] == "table4 g32 e8m0"
    assert (ours.config.rope_parameters, ours.config.layer_types) == (config.rope_parameters, config.layer_types)
    assert_same_model(ours, model)


def write_gpt_oss(file: Path, model: GptOssForCausalLM) -> None:
    """Write a file as llama.cpp's converter does, with experts in MXFP4; the model gets the rounded experts."""
    config, writer = model.config, gguf.GGUFWriter(file, "gpt-oss")
    calls = {
        "block_count": 2,
        "context_length": 131072,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "head_count": 4,
        "head_count_kv": 2,
        "key_length": 64,
        "value_length": 64,
        "vocab_size": 408,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 150000.0,
        "sliding_window": 128,
        "expert_count": 4,
        "expert_used_count": 2,
        "rope_scaling_factor": 32.0,
        "rope_scaling_orig_ctx_len": 4096,
        "rope_scaling_type": gguf.RopeScalingType.YARN,
        "rope_dimension_count": 64,
    }
    for call, value in calls.items():
        getattr(writer, f"add_{call}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 2)
    for name, parameter in model.state_dict().items():
        prefix = name.partition("mlp.experts.")[0].replace("model.layers", "blk")
        if name.endswith("_proj_bias"):
            parts = {"gate": parameter[:, 0::2], "up": parameter[:, 1::2]} if "gate" in name else {"down": parameter}
            for part, values in parts.items():
                writer.add_tensor(f"{prefix}ffn_{part}_exps.bias", values.contiguous().numpy())
        elif ".experts." in name:
            rows = parameter.mT
            parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if "gate" in name else {"down": rows}
            for part, values in parts.items():
                data = gguf.quants.quantize(values.contiguous().numpy(), Kind.MXFP4)
                writer.add_tensor(f"{prefix}ffn_{part}_exps.weight", data, raw_dtype=Kind.MXFP4)
                values.copy_(torch.from_numpy(gguf.quants.dequantize(data, Kind.MXFP4)))
        else:
            name = f"{name}.weight" if name.endswith("sinks") else name
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), parameter.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_numbers_beside_an_nvfp4_weight_multiply_its_scales(source: Path, out: Path) -> None:
    extra = {"blk.0.ffn_up.scale": np.array([0.37], np.float32), "blk.0.ffn_up.input_scale": np.ones(1, np.float32)}
    write_gguf(source / "model.gguf", "llama", all_of("NVFP4"), extra=extra)
    import_directory(source, out)
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).dequantize()
    theirs = read_by_transformers(source, torch.float32)
    for name in ("gate_proj", "up_proj"):
        wanted = theirs.get_submodule(f"model.layers.0.mlp.{name}").weight
        factor = 0.37 if name == "up_proj" else 1
        torch.testing.assert_close(ours.get_submodule(f"model.layers.0.mlp.{name}").weight, wanted * factor)


def test_tokenizer_and_settings_come_from_the_file(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf")
    import_directory(source, out)
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["rms_norm_eps"]) == (["LlamaForCausalLM"], 1e-6)
    theirs = AutoTokenizer.from_pretrained(source, gguf_file="model.gguf")
    text = "The lazy dog's 1234567 days"
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == theirs(text).input_ids
    assert verify_model(out).ok
    assert not list(out.glob("*.gguf"))


@pytest.mark.parametrize("place", ["beside", "base_model"])
def test_a_configuration_and_a_tokenizer_beside_the_file_win(place: str, source: Path, out: Path) -> None:
    model = write_gguf(source / "model.gguf")
    folder = source if place == "beside" else source.with_name("base")
    model.config.architectures, model.config.attention_dropout = ["LlamaForCausalLM"], 0.25
    model.config.save_pretrained(folder)
    byte_level(size=300).save_pretrained(folder)
    import_directory(source, out, base_model=None if place == "beside" else folder)
    assert json.loads((out / "config.json").read_text())["attention_dropout"] == 0.25
    assert len(AutoTokenizer.from_pretrained(out)) == 300


@not_by_5_17("its tokenizer of a gemma3 file is one of SentencePiece alone")
def test_the_text_part_is_taken_of_a_configuration_of_several_parts(source: Path, out: Path) -> None:
    model = quantized("gemma3", torch.float16, **MIXED, include_embeddings=True)
    export_gguf(model, source / "model.gguf", byte_level())
    config = Gemma3Config(text_config=model.config.to_dict(), architectures=["Gemma3ForConditionalGeneration"])
    config.save_pretrained(source)
    import_directory(source, out)
    back = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16)
    assert (type(back), back.config.sliding_window) == (type(model), model.config.sliding_window)
    assert_same_model(back, model.dequantize())


def test_a_configuration_that_names_no_class_is_passed_over(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf")
    (source / "config.json").write_text('{"model_type": "llama"}')
    import_directory(source, out)
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 256


def test_a_configuration_of_another_architecture_is_refused(source: Path, out: Path) -> None:
    model = write_gguf(source / "model.gguf")
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(source)
    (source / "config.json").write_text((source / "config.json").read_text().replace('"llama"', '"qwen2"'))
    with pytest.raises(ConfigError, match=r"expected a class for llama: LlamaForCausalLM, .*, found Qwen2ForCausalLM"):
        import_directory(source, out)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf")
    data = (source / "model.gguf").read_bytes()
    (source / "model.gguf").write_bytes(data.replace(b"llama", b"lemma"))
    with pytest.raises(UnsupportedError, match=r"expected an architecture of llama, qwen2, .*, found 'lemma'"):
        import_directory(source, out)


def test_a_mamba_with_norms_of_its_steps_is_refused(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", "mamba", metadata={"ssm_dt_b_c_rms": True})
    with pytest.raises(UnsupportedError, match=r"expected an architecture of llama, .*, found 'mamba'"):
        import_directory(source, out)


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        ({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, UnsupportedError, r"found blk\.\*\.attn_sinks\.weight"),
        ({"rope_freqs.weight": np.full(32, 3, np.float32)}, UnsupportedError, "rope_freqs.weight: expected the divis"),
    ],
)
def test_tensors_that_change_what_is_computed_are_refused(
    extra: dict[str, np.ndarray], error: type[Exception], match: str, source: Path, out: Path
) -> None:
    write_gguf(source / "model.gguf", extra=extra)
    with pytest.raises(error, match=match):
        import_directory(source, out)


def test_tensors_that_change_nothing_are_left_out(source: Path, out: Path) -> None:
    layer_behind = {"blk.1.attn_norm.weight": np.ones(256, np.float32)}
    write_gguf(source / "model.gguf", extra={"blk.0.attn_q.bias": np.zeros(256, np.float32), **layer_behind})
    import_directory(source, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 1
    # A class that has this bias has three others, which the file lacks.
    assert not any(bool(each.any()) for name, each in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3_are_recognized(factor: float, source: Path, out: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = build_exported("llama", torch.float16, rope_parameters=rope, max_position_embeddings=131072)
    quantize_(model, TrainWeightsConfig(**MIXED))
    export_gguf(model, source / "model.gguf", byte_level())
    import_directory(source, out)
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == rope


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_model_gets_the_narrowest_dtype_that_holds_its_floats(dtype: torch.dtype, source: Path, out: Path) -> None:
    step = torch.tensor(1 + torch.finfo(dtype).eps, dtype=torch.float32)
    write_gguf(source / "model.gguf", "llama", change=lambda name, values: values * step if "norm" in name else values)
    import_directory(source, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert (model.dtype, model.config.dtype) == (dtype, dtype)
    assert torch.equal(model.model.norm.weight.float(), torch.full((256,), float(step)))


def test_a_missing_tensor_is_named(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", metadata={"block_count": 2})
    with pytest.raises(CorruptFileError, match=r"expected all tensors of llama with 2 layers, found no blk\.1\."):
        import_directory(source, out)


def test_a_file_of_floats_alone_is_no_quantized_model(source: Path, out: Path) -> None:
    write_gguf(source / "model.gguf", kinds=lambda _: None)
    with pytest.raises(ConfigError, match=r"model\.gguf: expected quantized weights, found float ones alone"):
        import_directory(source, out)


def test_one_file_of_several_is_chosen_by_a_pattern(source: Path, out: Path) -> None:
    write_gguf(source / "tiny-Q4_K_M.gguf")
    write_gguf(source / "tiny-Q8_0.gguf", kinds=all_of("Q8_0"))
    shutil.copy(source / "tiny-Q8_0.gguf", source / "mmproj-tiny.gguf")
    listed = re.escape("2: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf")
    with pytest.raises(ConfigError, match=f"expected one GGUF file, found {listed}"):
        import_directory(source, out)
    with pytest.raises(ConfigError, match=r"that '\*Q6\*' selects, found none among mmproj-tiny.gguf, tiny-Q4_K_M"):
        import_directory(source, out, file="*Q6*")
    summary = import_directory(source, out, file="*Q8_0*")
    assert {str(choice.format) for choice in summary.quantized} == {"int8 g32"}


def test_a_split_model_is_read_from_all_its_files(source: Path, out: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"split_max_tensors": 4}
    write_gguf(source / "model.gguf", **options)
    files = sorted(source.glob("*.gguf"))
    assert len(files) > 2
    write_gguf(tmp_path / "one" / "model.gguf")
    for each, target in ((source, out), (tmp_path / "one", tmp_path / "from-one")):
        import_directory(each, target)
    split, one = (AutoModelForCausalLM.from_pretrained(each) for each in (out, tmp_path / "from-one"))
    assert_same_model(split, one.dequantize())
    files[1].unlink()
    with pytest.raises(CorruptFileError, match=rf"{files[1].name}: expected a file of a split model, found no such"):
        import_directory(source, tmp_path / "none")
