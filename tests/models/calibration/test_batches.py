"""What a model is calibrated with, and what it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import TEXT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.calibration.batches import batches_of_texts, written_by

CONFIG = TrainWeightsConfig("int4", group_size=32)


@pytest.mark.parametrize("calibration", ["self", ["text"], {"x": torch.ones(1)}, [(torch.ones(1),)]])
def test_batches_that_are_no_arguments_of_a_model_are_refused(calibration: Any) -> None:
    expected = "calibration: expected batches that are dicts of arguments or tensors, found a batch of type (str|tuple)"
    with pytest.raises(ConfigError, match=expected):
        quantize_(nn.Linear(64, 64), CONFIG, calibration=calibration)


def test_a_mask_may_be_none() -> None:
    model = transformers.GPT2Model(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=8, n_positions=8))
    batch: Any = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": None}
    summary = quantize_(model, CONFIG, calibration=[batch])
    assert summary.calibrated is not None
    assert summary.calibrated.tokens == 16


@pytest.mark.parametrize("texts", [[1, 2], [["a", "b"]], ["", " "]])
def test_what_is_no_text_is_refused(texts: Any) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=2, n_layer=0, n_head=1, vocab_size=2))
    with pytest.raises(ConfigError, match="calibration: expected texts, found"):
        batches_of_texts(model, None, texts)  # type: ignore[arg-type]


def test_texts_are_cut_at_the_positions_of_the_part_that_reads_them() -> None:
    parts = [transformers.BertConfig(**{**TEXT, "max_position_embeddings": 8}) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    with torch.device("meta"):
        model = transformers.EncoderDecoderModel(config)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    batches = batches_of_texts(model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a"), ["a b " * 20])
    assert {tuple(tensor.shape) for tensor in batches[0].values()} == {(1, 8)}


MODELS = {
    "no cache": lambda: transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(n_embd=2, n_layer=1, n_head=1, vocab_size=8)
    ),
    "few positions": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=2, n_layer=1, n_head=1, vocab_size=8, n_positions=4)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_write_a_window_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a causal language model, which can write, found .*Error.* texts"):
        written_by(MODELS[name]())
