"""What is measured of each format, and when a reload counts as failed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_trainweights_cli.demo import measurement
from hf_trainweights_cli.demo.corpus import Corpus
from hf_trainweights_cli.demo.measurement import check_reload
from hf_trainweights_cli.demo.probe import make_probe
from hf_trainweights_cli.demo.run import Result


@pytest.mark.slow
def test_quantized_perplexity_is_near_the_baseline_and_the_files_are_smaller(result: Result) -> None:
    baseline, *rows = result.rows
    for row in rows:
        assert row.perplexity == pytest.approx(baseline.perplexity, rel=0.03), row.format
        assert row.perplexity != baseline.perplexity, row.format
        assert row.disk_bytes < baseline.disk_bytes / 2, row.format
        assert row.bits_per_weight < 9, row.format
        assert row.format in row.summary


@pytest.mark.slow
def test_baseline_counts_the_bits_of_its_own_dtype(result: Result) -> None:
    assert result.rows[0].bits_per_weight == 32


@pytest.mark.slow
def test_bits_per_weight_counts_the_scales(result: Result) -> None:
    # int4: a float32 scale for 128 weights.
    assert next(row for row in result.rows if row.format == "int4").bits_per_weight == 4 + 32 / 128


@pytest.mark.slow
def test_perplexity_is_the_exponential_of_the_models_own_loss(result: Result, out: Path, corpus: Corpus) -> None:
    probe = make_probe(str(out / "model"), corpus, max_windows=3, device_map="cpu")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    loss = model(input_ids=probe.windows, labels=probe.windows).loss.item()
    assert measurement._perplexity(model, probe.windows, lambda done: None) == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", measurement.SERIALIZATIONS)
def test_kept_files_are_a_model_with_its_tokenizer(result: Result, out: Path, way: str) -> None:
    directory = out / "int4" / way
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    tokens = model.generate(**tokenizer("import", return_tensors="pt", return_token_type_ids=False), max_new_tokens=2)
    assert tokenizer.decode(tokens[0]).startswith("import")


@pytest.mark.slow
def test_other_logits_are_a_failure(result: Result, out: Path, corpus: Corpus) -> None:
    probe = make_probe(str(out / "model"), corpus, max_windows=1, device_map="cpu")
    logits = measurement._logits(AutoModelForCausalLM.from_pretrained(out / "int8" / "safetensors"), probe)
    logits[0, 0, 0] = torch.nextafter(logits[0, 0, 0], torch.tensor(math.inf))
    failures = check_reload(out / "int8" / "safetensors", {}, probe, logits)
    # The others are the tokenizer's files, which the model does not save.
    assert failures[0] == "other logits after a reload"


@pytest.mark.slow
def test_other_bytes_are_a_failure(result: Result, out: Path, corpus: Corpus, tmp_path: Path) -> None:
    probe = make_probe(str(out / "model"), corpus, max_windows=1, device_map="cpu")
    directory = tmp_path / "copy"
    shutil.copytree(out / "int8" / "bin", directory, ignore=shutil.ignore_patterns("tokenizer*"))
    logits = measurement._logits(AutoModelForCausalLM.from_pretrained(directory), probe)
    assert check_reload(directory, {"safe_serialization": False}, probe, logits) == []
    with (directory / "config.json").open("a") as stream:
        stream.write(" ")
    (directory / "extra.bin").touch()
    assert check_reload(directory, {"safe_serialization": False}, probe, logits) == [
        "other bytes in config.json after a second save",
        "other bytes in extra.bin after a second save",
    ]
