"""The demo's own model, its measurements, and what it says about models it cannot measure."""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trainweights.demo import run as demo
from hf_trainweights.demo.run import Result, check_reload, run_demo
from hf_trainweights.demo.training import Corpus, Recipe, read_corpus, train_model
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.formats import FORMATS

TINY = Recipe(hidden_size=128, num_layers=1, vocab_size=320, steps=30, batch_size=8, window_tokens=32)


def no_report(line: str, stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, str, int, int]]:
    return []


@pytest.fixture(scope="module")
def result(out: Path, reports: list[tuple[str, str, int, int]]) -> Result:
    return run_demo(out, list(FORMATS), TINY, lambda *report: reports.append(report))


def tiny_llama(**changes: object) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaConfig(vocab_size=320, **(sizes | changes))


def test_every_format_comes_back_bit_equal_after_the_baseline(result: Result) -> None:
    assert [row.format for row in result.rows] == ["float32", *FORMATS]
    assert result.failures == ()


def test_training_learns(result: Result) -> None:
    assert len(result.losses) == TINY.steps
    assert result.losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.1)
    assert statistics.fmean(result.losses[-5:]) < result.losses[0] - 1
    assert result.rows[0].perplexity < TINY.vocab_size / 3


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_perplexity_is_near_the_baseline_and_the_files_are_smaller(result: Result, name: str) -> None:
    baseline, row = result.rows[0], next(row for row in result.rows if row.format == name)
    assert row.perplexity == pytest.approx(baseline.perplexity, rel=0.03)
    assert row.perplexity != baseline.perplexity
    assert row.disk_bytes < baseline.disk_bytes / 2
    assert row.bits_per_weight < 9
    assert name in row.summary


def test_baseline_counts_the_bits_of_its_own_dtype(result: Result) -> None:
    assert result.rows[0].bits_per_weight == 32


def test_bits_per_weight_counts_the_scales(result: Result) -> None:
    # int4: a float32 scale for 128 weights.
    assert next(row for row in result.rows if row.format == "int4").bits_per_weight == 4 + 32 / 128


def test_perplexity_is_the_exponential_of_the_models_own_loss(result: Result, out: Path, corpus: Corpus) -> None:
    probe = demo._make_probe(str(out / "model"), corpus, max_windows=3, device_map="cpu")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    loss = model(input_ids=probe.windows, labels=probe.windows).loss.item()
    assert demo._perplexity(model, probe.windows, lambda done: None) == pytest.approx(math.exp(loss), rel=1e-4)


def test_windows_start_with_the_begin_of_text_token_where_there_is_one(
    result: Result, out: Path, corpus: Corpus, tmp_path: Path
) -> None:
    plain = demo._make_probe(str(out / "model"), corpus, max_windows=3, device_map="cpu").windows
    AutoTokenizer.from_pretrained(out / "model", bos_token="<|endoftext|>").save_pretrained(tmp_path)
    with_bos = demo._make_probe(str(tmp_path), corpus, max_windows=3, device_map="cpu").windows
    assert with_bos[:, 0].tolist() == [0, 0, 0]
    assert torch.equal(with_bos[:, 1:], plain)


@pytest.mark.parametrize("way", demo.SERIALIZATIONS)
def test_kept_files_are_a_model_with_its_tokenizer(result: Result, out: Path, way: str) -> None:
    directory = out / "int4" / way
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    tokens = model.generate(**tokenizer("import", return_tensors="pt", return_token_type_ids=False), max_new_tokens=2)
    assert tokenizer.decode(tokens[0]).startswith("import")


def test_reports_end_complete_and_never_go_back(result: Result, reports: list[tuple[str, str, int, int]]) -> None:
    for name in ("training", "float32", *FORMATS):
        steps = [(done, total) for line, _, done, total in reports if line == name]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]
        assert len({total for _, total in steps}) == 1


def test_a_model_of_the_users_is_measured_and_its_copies_removed(result: Result, out: Path, tmp_path: Path) -> None:
    own = run_demo(tmp_path / "out", ["int8"], TINY, no_report, model=str(out / "model"), keep=False)
    assert own.losses == ()
    assert own.failures == ()
    assert [row.format for row in own.rows] == ["float32", "int8"]
    assert [row.disk_bytes for row in own.rows] == [row.disk_bytes for row in result.rows[:2]]
    assert list((tmp_path / "out").iterdir()) == []


def test_other_logits_are_a_failure(result: Result, out: Path, corpus: Corpus) -> None:
    probe = demo._make_probe(str(out / "model"), corpus, max_windows=1, device_map="cpu")
    logits = demo._logits(AutoModelForCausalLM.from_pretrained(out / "int8" / "safetensors"), probe)
    logits[0, 0, 0] = torch.nextafter(logits[0, 0, 0], torch.tensor(math.inf))
    failures = check_reload(out / "int8" / "safetensors", {}, probe, logits)
    # The others are the tokenizer's files, which the model does not save.
    assert failures[0] == "other logits after a reload"


def test_other_bytes_are_a_failure(result: Result, out: Path, corpus: Corpus, tmp_path: Path) -> None:
    probe = demo._make_probe(str(out / "model"), corpus, max_windows=1, device_map="cpu")
    directory = tmp_path / "copy"
    shutil.copytree(out / "int8" / "bin", directory, ignore=shutil.ignore_patterns("tokenizer*"))
    logits = demo._logits(AutoModelForCausalLM.from_pretrained(directory), probe)
    assert check_reload(directory, {"safe_serialization": False}, probe, logits) == []
    with (directory / "config.json").open("a") as stream:
        stream.write(" ")
    (directory / "extra.bin").touch()
    assert check_reload(directory, {"safe_serialization": False}, probe, logits) == [
        "other bytes in config.json after a second save",
        "other bytes in extra.bin after a second save",
    ]


def test_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path, corpus: Corpus) -> None:
    recipe = dataclasses.replace(TINY, steps=3)
    seeds = {"first": 0, "again": 0, "other": 1}
    losses = {
        name: train_model(tmp_path / name, corpus, dataclasses.replace(recipe, seed=seed), no_report)
        for name, seed in seeds.items()
    }
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in seeds}
    tokenizers = {name: (tmp_path / name / "tokenizer.json").read_bytes() for name in seeds}
    assert losses["first"] == losses["again"] != losses["other"]
    assert weights["first"] == weights["again"] != weights["other"]
    assert tokenizers["first"] == tokenizers["again"]


def test_training_leaves_the_global_random_state_alone(tmp_path: Path, corpus: Corpus) -> None:
    state = torch.get_rng_state()
    train_model(tmp_path, corpus, dataclasses.replace(TINY, steps=1), no_report)
    assert torch.equal(torch.get_rng_state(), state)


def test_corpus_is_in_the_order_of_names_with_every_20th_file_held_out(tmp_path: Path) -> None:
    for i in range(40):
        directory = tmp_path / f"{i // 10}"
        directory.mkdir(exist_ok=True)
        (directory / f"{i:02}.py").write_text(f"{i}")
    for other in ("site-packages", "test"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "a.py").write_text("not the library")
    corpus = read_corpus(tmp_path)
    assert corpus.held_out == ("0", "20")
    assert corpus.train == tuple(f"{i}" for i in range(40) if i not in (0, 20))


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"found 0 files\. Use a Python that has them, or .* --model"):
        read_corpus(tmp_path)


def test_a_directory_with_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="--out: expected a new or empty directory"):
        run_demo(tmp_path, ["int8"], TINY, no_report)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


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
    result: Result, out: Path, tmp_path: Path, save, match: str
) -> None:
    AutoTokenizer.from_pretrained(out / "model").save_pretrained(tmp_path / "model")
    save(tmp_path / "model")
    with pytest.raises(ConfigError, match=match) as error:
        run_demo(tmp_path / "out", ["int8"], TINY, no_report, model=str(tmp_path / "model"))
    assert "\n" not in str(error.value)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="expected a causal language model and its tokenizer"):
        run_demo(tmp_path / "out", ["int8"], TINY, no_report, model=str(tmp_path / "model"))
