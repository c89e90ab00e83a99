"""Models that the demo cannot measure are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel, ViTConfig, ViTForImageClassification

from hf_trainweights.errors import ConfigError
from hf_trainweights_cli.demo.run import Result, run_demo
from hf_trainweights_cli.demo.training import Recipe


def no_report(line: str, stage: str, done: int, total: int) -> None:
    pass


def tiny_llama(**changes: object) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaConfig(vocab_size=320, **(sizes | changes))


def save_vision_model(directory: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    ViTForImageClassification(ViTConfig(image_size=32, **sizes)).save_pretrained(directory)


def save_without_head(directory: Path) -> None:
    LlamaModel(tiny_llama()).save_pretrained(directory)


def save_head_missing(directory: Path) -> None:
    """Save a model whose config.json promises a head that the weights do not have."""
    save_without_head(directory)
    config = tiny_llama()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def save_quantized(directory: Path) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(directory)
    config = tiny_llama()
    config.quantization_config = {"quant_method": "trainweights", "format": "int8"}
    config.save_pretrained(directory)


def save_nothing(directory: Path) -> None:
    directory.mkdir(exist_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "match"),
    [
        (
            save_vision_model,
            "expected a causal language model, .* found ViTForImageClassification.* language-model head",
        ),
        (save_without_head, "expected a causal language model, .* found LlamaModel.* language-model head"),
        (save_head_missing, r"expected weights for all of LlamaForCausalLM, found none for lm_head\.weight"),
        (save_quantized, "expected a float model, found one that is quantized already"),
        (save_nothing, "expected a causal language model and its tokenizer, found"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_by_name(
    result: Result, out: Path, tmp_path: Path, tiny: Recipe, save, match: str
) -> None:
    AutoTokenizer.from_pretrained(out / "model").save_pretrained(tmp_path / "model")
    save(tmp_path / "model")
    with pytest.raises(ConfigError, match=match) as error:
        run_demo(tmp_path / "out", ["int8"], tiny, no_report, model=str(tmp_path / "model"))
    assert "\n" not in str(error.value)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, tiny: Recipe) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="expected a causal language model and its tokenizer"):
        run_demo(tmp_path / "out", ["int8"], tiny, no_report, model=str(tmp_path / "model"))
