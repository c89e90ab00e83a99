"""A real pretrained model keeps what it computes: MiniLM-L6-v2, measured as `benchmarks/quality.py` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from benchmarks import quality

# What is promised of each: mean cosine similarity of the embeddings, and decibels over all Linear weights.
PROMISES = [
    ({"format": "int8", "include_embeddings": True}, 0.9995, 40.0),
    ({"format": "int4", "group_size": 32}, 0.967, 21.0),
    ({"format": "int4", "group_size": 128}, 0.957, 19.4),
    ({"format": "float8_e4m3"}, 0.998, 31.5),
]
ABSMAX_INT4_G128_DB = 17.9
FIGURES = {"bits_per_weight", "snr_db", "mean_cosine"}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Where huggingface_hub is imported already, it has read its environment.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return quality.load()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return quality.sentences()


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, texts: list[str]) -> Tensor:
    return quality.embed(reference, texts)


@pytest.mark.exhaustive
def test_the_sentences_are_real_and_many(texts: list[str], expected: Tensor) -> None:
    assert len(set(texts)) == quality.SENTENCES == 200
    assert expected.shape == (200, 384)
    # If all embeddings were alike, being like the reference would say nothing.
    assert (expected @ expected.T).mean() < 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "least_cosine", "least_db"), PROMISES, ids=str)
def test_embeddings_and_weights_stay_near_the_float_model(
    config: dict[str, Any],
    least_cosine: float,
    least_db: float,
    reference: PreTrainedModel,
    texts: list[str],
    expected: Tensor,
) -> None:
    model = quality.load(config)
    measured = quality.measure(model, reference, texts, expected)
    assert measured["mean_cosine"] >= least_cosine
    assert measured["snr_db"] >= least_db
    written = next(row for row in results() if config.items() <= row.items() and row.keys() - config.keys() == FIGURES)
    # Another release of Python has some other docstrings, another processor sums in another order.
    assert measured["snr_db"] == pytest.approx(written["snr_db"], abs=0.02)
    assert 1 - measured["mean_cosine"] == pytest.approx(1 - written["mean_cosine"], rel=0.1)
    assert quality.bits_per_weight(model) == pytest.approx(written["bits_per_weight"], abs=1e-3)


def results() -> list[dict[str, Any]]:
    return json.loads(quality.RESULTS.read_text(encoding="utf-8"))["rows"]


@pytest.mark.slow
def test_plain_absmax_is_as_far_off_as_it_is_said_to_be(reference: PreTrainedModel) -> None:
    assert quality.linear_snr_db(quality.absmax_int4(128), reference) == pytest.approx(ABSMAX_INT4_G128_DB, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "safe_serialization", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["safetensors", "bin"]
)
def test_a_saved_model_computes_the_same(texts: list[str], safe_serialization: bool, tmp_path: Path) -> None:
    model = quality.load({"format": "int4", "group_size": 128, "include_embeddings": True})
    model.save_pretrained(tmp_path, safe_serialization=safe_serialization)
    reloaded = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(quality.embed(reloaded, texts[:20]), quality.embed(model, texts[:20]))
