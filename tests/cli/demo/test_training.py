"""The demo's own model learns, and depends on nothing but its seed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path

import pytest
import torch

from hf_trainweights_cli.demo.corpus import Corpus
from hf_trainweights_cli.demo.run import Result
from hf_trainweights_cli.demo.training import Recipe, train_model


def no_report(line: str, stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.slow
def test_training_learns(result: Result, tiny: Recipe) -> None:
    assert len(result.losses) == tiny.steps
    assert result.losses[0] == pytest.approx(math.log(tiny.vocab_size), rel=0.1)
    assert statistics.fmean(result.losses[-5:]) < result.losses[0] - 1
    assert result.rows[0].perplexity < tiny.vocab_size / 3


@pytest.mark.slow
def test_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path, corpus: Corpus, tiny: Recipe) -> None:
    recipe = dataclasses.replace(tiny, steps=2)
    seeds = {"first": 0, "again": 0, "other": 1}
    losses = {
        name: train_model(
            tmp_path / name, tmp_path / f"{name}-run", corpus, dataclasses.replace(recipe, seed=seed), no_report
        ).losses
        for name, seed in seeds.items()
    }
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in seeds}
    tokenizers = {name: (tmp_path / name / "tokenizer.json").read_bytes() for name in seeds}
    assert losses["first"] == losses["again"] != losses["other"]
    assert weights["first"] == weights["again"] != weights["other"]
    assert tokenizers["first"] == tokenizers["again"]


def test_training_leaves_the_global_random_state_alone(tmp_path: Path, corpus: Corpus, tiny: Recipe) -> None:
    state = torch.get_rng_state()
    train_model(tmp_path / "model", tmp_path / "run", corpus, dataclasses.replace(tiny, steps=1), no_report)
    assert torch.equal(torch.get_rng_state(), state)
