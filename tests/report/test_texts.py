"""A report with texts: the same figures as the models' own losses, layer by layer what layers get, typed refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from architectures import DECODER, TEXT, make_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

from hf_trainweights import quantize_directory, write_report
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.calibration.blocks import without_padding
from hf_trainweights.report import texts
from hf_trainweights.report.measurements import measure_error
from hf_trainweights.report.texts import measure_with_texts

TEXTS = ["a b c d e f", "f e d c b a g h", "b", "c c d d e e f f g g"]


def save(model: transformers.PreTrainedModel, path: Path) -> Path:
    words = {word: number for number, word in enumerate(["<pad>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = save(make_llama(), tmp_path_factory.mktemp("llama") / "float")
    quantize_directory(path, path.with_name("small"), "uint2")
    return path


@pytest.mark.slow
def test_figures_of_a_language_model_are_its_own_losses(llama: Path) -> None:
    found = measure_with_texts(llama.with_name("small"), llama, TEXTS)
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.with_name("small"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    losses, count, divergence, tokens = [0.0, 0.0], 0, 0.0, 0
    with torch.no_grad():
        for text in TEXTS:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            logits = [each(input_ids=ids).logits for each in (reference, model)]
            p, q = (logit.log_softmax(-1) for logit in logits)
            divergence += F.kl_div(q, p, reduction="sum", log_target=True).item()
            tokens += ids.numel()
            if ids.numel() > 1:
                each_loss = [F.cross_entropy(logit[0, :-1], ids[0, 1:], reduction="sum").item() for logit in logits]
                losses = [a + b for a, b in zip(losses, each_loss, strict=True)]
                count += ids.numel() - 1
    assert found.tokens == tokens
    assert found.divergence == pytest.approx(1000 * divergence / tokens, rel=1e-3)
    assert found.perplexities == pytest.approx([math.exp(loss / count) for loss in losses], rel=1e-4)
    assert found.cosine is None
    assert found.divergence > 0


def test_a_model_is_at_no_distance_from_itself(llama: Path) -> None:
    found = measure_with_texts(llama, llama, TEXTS)
    assert found.divergence == pytest.approx(0, abs=1e-9)
    assert found.perplexities is not None
    assert found.perplexities[0] == found.perplexities[1]


@pytest.mark.slow
def test_an_encoder_has_a_cosine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = save(transformers.BertModel(transformers.BertConfig(**TEXT)), tmp_path / "float")
    quantize_directory(path, tmp_path / "small", "uint2")
    found = measure_with_texts(tmp_path / "small", path, TEXTS)
    assert found.divergence is found.perplexities is None
    assert found.cosine is not None
    assert 0.3 < found.cosine < 1
    assert measure_with_texts(path, path, TEXTS).cosine == pytest.approx(1)


@pytest.mark.slow
def test_padding_does_not_count(llama: Path) -> None:
    apart = [measure_with_texts(llama.with_name("small"), llama, [text]) for text in TEXTS]
    together = measure_with_texts(llama.with_name("small"), llama, TEXTS)
    total = sum(each.tokens for each in apart)
    assert together.tokens == total
    assert together.divergence == pytest.approx(sum(each.divergence * each.tokens / total for each in apart), rel=1e-3)


@pytest.mark.slow
def test_errors_of_layers_are_of_what_they_get(llama: Path) -> None:
    found = measure_with_texts(llama.with_name("small"), llama, TEXTS)
    name = "model.layers.1.mlp.down_proj.weight"
    assert found.inputs[name].shape == (found.tokens, DECODER["intermediate_size"])
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama).get_parameter(name)
    weight = transformers.AutoModelForCausalLM.from_pretrained(llama.with_name("small")).get_parameter(name)
    error = measure_error(weight, reference, found.inputs[name])
    x, difference = found.inputs[name], weight.dequantize() - reference
    assert error is not None
    assert error.output_error == pytest.approx(((x @ difference.T).norm() / (x @ reference.T).norm()).item(), rel=1e-4)


@pytest.mark.slow
def test_the_report_says_what_texts_have_shown(llama: Path, tmp_path: Path) -> None:
    report = write_report(llama.with_name("small"), tmp_path / "report.html", llama, texts=TEXTS)
    assert report.lines[0].startswith("divergence on ")
    assert report.lines[1].startswith("perplexity ")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "With texts" in page
    assert report.lines[0] in page
    assert "Gaussian" not in page


def test_texts_need_two_saved_models_and_a_tokenizer(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="texts: expected two saved models"):
        write_report(llama, tmp_path / "report.html", texts=TEXTS)
    make_llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="texts: expected a tokenizer in"):
        write_report(llama.with_name("small"), tmp_path / "report.html", tmp_path / "plain", texts=TEXTS)
    assert not (tmp_path / "report.html").exists()


def test_no_more_is_held_than_is_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, scored, log_softmax = [], [], F.log_softmax
    monkeypatch.setattr(texts, "_MOST_ROWS", 8)
    monkeypatch.setattr(texts, "without_padding", lambda x, batch: kept.append(x) or without_padding(x, batch))
    monkeypatch.setattr(F, "log_softmax", lambda x, dim: scored.append(x.dim()) or log_softmax(x, dim))
    found = measure_with_texts(llama, llama, TEXTS * 5)
    # One batch of two is enough.
    assert len(kept) == len(found.inputs)
    assert {len(rows) for rows in found.inputs.values()} == {8}
    assert scored == [2] * 2 * len(TEXTS * 5)
