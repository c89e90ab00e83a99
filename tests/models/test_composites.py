"""Models composed of quantized parts: saved, loaded, saved again, made float again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, DECODER, TEXT, TOKENS, VISION, outputs, random_floats, random_ids, randomize
from covering import by_default
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SpeechEncoderDecoderModel,
    Trainer,
    TrainingArguments,
    VisionEncoderDecoderModel,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from hf_trainweights import (
    TrainWeightsConfig,
    dequantize_,
    dequantize_directory,
    get_model_size_in_bytes,
    quantize_,
    summary,
    verify_model,
)
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.choosing.description import is_described
from hf_trainweights.models.choosing.selection import NOT_IN_CHECKPOINT, SAVED_ELSEWHERE
from hf_trainweights.tensor.modules import is_quantized

BERT: dict[str, Any] = {**TEXT, "num_hidden_layers": 1, "pad_token_id": 0}
INT4 = TrainWeightsConfig("int4", group_size=32, include_embeddings=True)


def drawn(make: Callable[[], PreTrainedModel], config: TrainWeightsConfig | str | None) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    randomize(model)
    if config is not None:
        quantize_(model, config)
    return model


def bert(config: TrainWeightsConfig | str | None) -> Any:
    return drawn(lambda: BertModel(BertConfig(**BERT)), config)


def bert_decoder(config: TrainWeightsConfig | str | None) -> Any:
    values = BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    return drawn(lambda: BertLMHeadModel(values), config)


def gpt2_decoder(config: TrainWeightsConfig | str | None) -> Any:
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    values: dict[str, Any] = {**sizes, **TOKENS, "add_cross_attention": True}
    return drawn(lambda: GPT2LMHeadModel(GPT2Config(**values)), config)


def pair() -> PreTrainedModel:
    return EncoderDecoderModel(encoder=bert("int8"), decoder=bert_decoder("int8"))


def pair_in_two_formats() -> PreTrainedModel:
    return EncoderDecoderModel(encoder=bert("int8"), decoder=bert_decoder(INT4))


def pair_with_a_float_part() -> PreTrainedModel:
    return EncoderDecoderModel(encoder=bert(INT4), decoder=bert_decoder(None))


def vision_and_conv1d() -> PreTrainedModel:
    values: dict[str, Any] = {**VISION, "num_hidden_layers": 1}
    return VisionEncoderDecoderModel(
        encoder=drawn(lambda: ViTModel(ViTConfig(**values)), None), decoder=gpt2_decoder("int8")
    )


def speech() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    convolutions = {"conv_dim": (32,), "conv_stride": (4,), "conv_kernel": (8,), "num_feat_extract_layers": 1}
    values: dict[str, Any] = {**sizes, **convolutions, "num_conv_pos_embeddings": 16}
    encoder = drawn(lambda: Wav2Vec2Model(Wav2Vec2Config(**values, num_conv_pos_embedding_groups=4)), "int8")
    return SpeechEncoderDecoderModel(encoder=encoder, decoder=bert_decoder("int8"))


def dual() -> PreTrainedModel:
    values: dict[str, Any] = {**VISION, "num_hidden_layers": 1}
    vision = drawn(lambda: CLIPVisionModel(CLIPVisionConfig(**values)), "int8")
    return VisionTextDualEncoderModel(vision_model=vision, text_model=bert("int8"))


def llava() -> PreTrainedModel:
    decoder: dict[str, Any] = {**DECODER, "num_hidden_layers": 1}
    language = drawn(lambda: LlamaForCausalLM(LlamaConfig(**decoder)), "int8")
    sizes: dict[str, Any] = {**VISION, "num_hidden_layers": 1}
    vision = CLIPVisionConfig(**sizes)
    values = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**decoder))
    values.image_token_id = 95
    model: Any = drawn(lambda: LlavaForConditionalGeneration(values), None)
    model.model.language_model, model.lm_head = language.model, language.lm_head
    return model


def body_under_a_head() -> PreTrainedModel:
    model: Any = drawn(lambda: BertForSequenceClassification(BertConfig(**BERT)), None)
    model.bert = bert("int8")
    return model


def texts() -> dict[str, torch.Tensor]:
    return {"input_ids": random_ids().clamp(max=90)}


def two_texts() -> dict[str, torch.Tensor]:
    return {**texts(), "decoder_input_ids": random_ids(4)}


COMPOSITES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], dict[str, torch.Tensor]]]] = {
    "pair": (pair, two_texts),
    "pair in two formats": (pair_in_two_formats, two_texts),
    "pair with a float part": (pair_with_a_float_part, two_texts),
    "vision and Conv1D": (
        vision_and_conv1d,
        lambda: {"pixel_values": random_floats(2, 3, 16, 16), "decoder_input_ids": random_ids(4)},
    ),
    "speech": (speech, lambda: {"input_values": random_floats(2, 256), "decoder_input_ids": random_ids(4)}),
    "dual": (dual, lambda: {**texts(), "pixel_values": random_floats(2, 3, 16, 16)}),
    "llava": (llava, texts),
    "body under a head": (body_under_a_head, texts),
}
of_composites = pytest.mark.parametrize(
    "name", by_default({"pair in two formats", "vision and Conv1D", "llava"}, COMPOSITES)
)


def quantized(model: nn.Module) -> dict[str, str]:
    return {name: str(p.format) for name, p in model.named_parameters() if is_quantized(p)}  # type: ignore[attr-defined]


def files_in(directory: Path) -> dict[str, bytes]:
    """Return all files but config.json, into which a load of Transformers puts the dtype of each part."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "config.json"}


@of_composites
def test_a_composite_of_quantized_parts_is_saved_loaded_and_saved_again(name: str, tmp_path: Path) -> None:
    make, make_inputs = COMPOSITES[name]
    model, inputs = make().eval(), make_inputs()
    expected = outputs(model, inputs)
    model.save_pretrained(tmp_path / "first")
    assert verify_model(tmp_path / "first").ok
    cls: Any = type(model)
    reloaded, report = cls.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert not any(report.values())
    assert quantized(reloaded) == quantized(model)
    torch.testing.assert_close(outputs(reloaded, inputs), expected, rtol=0, atol=0)
    reloaded.save_pretrained(tmp_path / "second")
    assert files_in(tmp_path / "second") == files_in(tmp_path / "first")


@of_composites
def test_its_configuration_says_of_every_weight_what_it_is(name: str, tmp_path: Path) -> None:
    model = COMPOSITES[name][0]()
    model.save_pretrained(tmp_path)
    reloaded: Any = type(model).from_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert is_described(reloaded, TrainWeightsConfig.of(saved))
    assert len(saved["overrides"]) + len(saved["modules_to_not_convert"] or ()) < 5  # whole modules, not each weight
    assert NOT_IN_CHECKPOINT not in {choice.reason for choice in summary(reloaded)}


@of_composites
def test_a_composite_becomes_float_as_a_whole(name: str, tmp_path: Path) -> None:
    make, make_inputs = COMPOSITES[name]
    model, inputs = make().eval(), make_inputs()
    expected = outputs(model, inputs)
    model.dequantize()
    assert not quantized(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    reloaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(reloaded, inputs), expected)


def test_a_directory_of_a_composite_becomes_float_as_a_whole(tmp_path: Path) -> None:
    model = pair_in_two_formats()
    model.save_pretrained(tmp_path / "quantized")
    dequantize_directory(tmp_path / "quantized", tmp_path / "float")
    assert "quantization_config" not in (tmp_path / "float" / "config.json").read_text()
    reloaded = EncoderDecoderModel.from_pretrained(tmp_path / "float")
    torch.testing.assert_close(outputs(reloaded, two_texts()), outputs(model.eval(), two_texts()))


def test_a_part_of_a_quantized_model_is_a_model_that_saves_itself(tmp_path: Path) -> None:
    model: Any = drawn(lambda: EncoderDecoderModel(encoder=bert(None), decoder=bert_decoder(None)), "int8")
    model.save_pretrained(tmp_path / "whole")
    reloaded: Any = EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    reloaded.encoder.save_pretrained(tmp_path / "part")
    part = BertModel.from_pretrained(tmp_path / "part")
    assert quantized(part) == quantized(model.encoder)
    torch.testing.assert_close(outputs(part, texts()), outputs(model.encoder, texts()), rtol=0, atol=0)


def test_a_trainer_saves_a_composite_and_resumes_it(tmp_path: Path) -> None:
    row = {"input_ids": list(range(8)), "labels": 1}

    def run(steps: int, resume: bool) -> PreTrainedModel:
        model: Any = body_under_a_head()
        model.bert.embeddings.requires_grad_(False)  # so that nobody is told of a model that hardly trains
        options: dict[str, Any] = {"max_steps": steps, "save_steps": 1, "report_to": [], "use_cpu": True, "seed": 0}
        trainer = Trainer(
            model, TrainingArguments(str(tmp_path), disable_tqdm=True, **options), train_dataset=[row] * 8
        )
        trainer.train(resume_from_checkpoint=resume)
        return model

    run(1, resume=False)
    resumed = run(2, resume=True)
    reloaded = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    torch.testing.assert_close(outputs(reloaded, texts()), outputs(resumed.eval(), texts()), rtol=0, atol=0)


def test_the_other_methods_of_quantized_models_serve_a_composite() -> None:
    model = pair()
    assert model.get_memory_footprint() == get_model_size_in_bytes(model)
    model: Any = llava()
    quantize_(model.model.language_model, TrainWeightsConfig("int8", include_embeddings=True))
    model.resize_token_embeddings(100)
    assert model.get_input_embeddings().weight.shape == (100, 64)


@pytest.mark.parametrize("within", [False, True])
def test_a_model_of_float_weights_says_so_of_itself(within: bool, tmp_path: Path) -> None:
    model = bert("int8")
    expected = outputs(model, texts())
    dequantize_(nn.ModuleList([model]) if within else model)
    assert not model.is_quantized
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(outputs(BertModel.from_pretrained(tmp_path), texts()), expected)
    quantize_(model, INT4)
    assert model.config.quantization_config.format == "int4"


def test_a_model_made_float_piece_by_piece_is_saved_as_it_is_then(tmp_path: Path) -> None:
    model = bert("int8")
    dequantize_(model.encoder)
    model.save_pretrained(tmp_path / "partly")
    reloaded = BertModel.from_pretrained(tmp_path / "partly")
    assert quantized(reloaded) == quantized(model) != {}
    torch.testing.assert_close(outputs(reloaded, texts()), outputs(model, texts()), rtol=0, atol=0)
    dequantize_(model.pooler)
    model.save_pretrained(tmp_path / "float")
    assert "quantization_config" not in (tmp_path / "float" / "config.json").read_text()
    torch.testing.assert_close(outputs(BertModel.from_pretrained(tmp_path / "float"), texts()), outputs(model, texts()))


def test_a_float_part_of_a_quantized_model_is_saved_as_float(tmp_path: Path) -> None:
    whole: Any = pair()
    whole.save_pretrained(tmp_path / "whole")
    reloaded: Any = EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    dequantize_(reloaded.encoder)
    reloaded.encoder.save_pretrained(tmp_path / "part")
    assert not quantized(BertModel.from_pretrained(tmp_path / "part"))
    reloaded.save_pretrained(tmp_path / "rest")
    assert quantized(EncoderDecoderModel.from_pretrained(tmp_path / "rest")) == quantized(reloaded)


@pytest.mark.parametrize("config", [TrainWeightsConfig("int8"), INT4.but(overrides={"text_model": "int8"})])
@pytest.mark.parametrize("tower", [CLIPTextModel, CLIPVisionModelWithProjection])
def test_a_tower_of_a_quantized_composite_loads_alone(config: TrainWeightsConfig, tower: Any, tmp_path: Path) -> None:
    whole = ARCHITECTURES["clip"].build()
    quantize_(whole, config)
    whole.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole" / "config.json").read_text().count('"quantization_config"') == 1
    model, report = tower.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not report["missing_keys"]
    weights = dict(whole.named_parameters())
    for name, weight in model.named_parameters():
        expected: Any = next(
            weights[full] for full in (f"text_model.{name}", f"vision_model.{name}", name) if full in weights
        )
        assert is_quantized(weight) == is_quantized(expected), name
        assert torch.equal(weight.dequantize(), expected.dequantize()), name
    assert quantized(model)
    model.save_pretrained(tmp_path / "tower")
    assert quantized(tower.from_pretrained(tmp_path / "tower")) == quantized(model)
    assert quantized(CLIPModel.from_pretrained(tmp_path / "whole")) == quantized(whole)


def test_a_tower_that_no_file_of_the_whole_names_is_refused(tmp_path: Path) -> None:
    llava().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"quantized weights of LlamaForCausalLM.*Load the model as the class"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow  # importing sentence-transformers takes seconds
def test_a_sentence_transformer_keeps_in_float_what_it_saves_itself(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    bert(None).save_pretrained(tmp_path / "bert")
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(64), Dense(64, 32)]
    model: Any = SentenceTransformer(modules=modules, device="cpu")
    reasons = {choice.name: choice.reason for choice in quantize_(model, "int8")}
    assert reasons["2.linear.weight"] == SAVED_ELSEWHERE
    assert quantized(model)
    model.save_pretrained(str(tmp_path / "saved"))
    reloaded: Any = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert quantized(reloaded) == quantized(model)
    assert (reloaded.encode(["a b", "c"]) == model.encode(["a b", "c"])).all()
