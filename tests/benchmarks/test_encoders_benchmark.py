"""The benchmark of encoders times what it says, on a tiny model, and goes on where it was interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from benchmarks.speed.encoder_methods import EncoderMethod, MakeEncode, encoder_methods
from benchmarks.speed.encoder_models import Encoder, Inputs, pooled
from benchmarks.speed.encoders import speed

NAMES = ("int8", "int8, 8-bit activations", "torch quantize_dynamic")


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    return BertModel(BertConfig(vocab_size=32, **sizes), add_pooling_layer=False).eval()


def inputs(B: int, T: int) -> Inputs:
    ids = torch.arange(B * T).view(B, T) % 32
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


TINY = Encoder("tiny", build, lambda: {"1x4": inputs(1, 4), "2x8": inputs(2, 8)}, lambda: inputs(3, 8))


def measure(methods: list[EncoderMethod], known: Any = ()) -> tuple[list[dict[str, Any]], dict[str, str]]:
    failures: dict[str, str] = {}
    return list(speed([TINY], methods, [1], 2, 0.0, failures, known)), failures


@pytest.mark.slow
def test_each_method_is_timed_beside_the_float_model_and_compared_with_it() -> None:
    methods = [method for method in encoder_methods(peers=True) if method.name in NAMES]
    rows, failures = measure(methods)
    assert failures == {}
    assert [(row["name"], row["shape"]) for row in rows] == [
        (name, shape) for name in NAMES for shape in ("1x4", "2x8")
    ]
    assert all(row["seconds"] > 0 and row["float_seconds"] > 0 for row in rows)
    cosines = {row["name"]: row["cosine"] for row in rows}
    assert all(0.99 < cosine <= 1 for cosine in cosines.values())
    assert cosines["int8"] >= cosines["int8, 8-bit activations"]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx.export itself
@pytest.mark.slow  # exporting imports for seconds
@pytest.mark.exhaustive
def test_onnx_runtime_computes_what_the_float_model_does() -> None:
    rows, failures = measure(
        [method for method in encoder_methods(peers=True) if method.name.startswith("ONNX Runtime")]
    )
    assert failures == {}
    cosines = {row["name"]: row["cosine"] for row in rows}
    assert cosines["ONNX Runtime fp32"] == 1
    assert 0.99 < cosines["ONNX Runtime dynamic int8"] <= 1


@pytest.mark.slow
def test_what_an_interrupted_run_measured_is_not_measured_again() -> None:
    first, second = (method for method in encoder_methods(peers=False) if method.name in NAMES)
    before, _ = measure([first])
    after, _ = measure([first, second], before)
    assert {row["name"] for row in after} == {second.name}


def test_a_method_that_fails_is_a_result_and_stops_no_other() -> None:
    def prepare(*_: Any) -> MakeEncode:
        raise RuntimeError("no such instruction")

    rows, failures = measure([EncoderMethod("broken", prepare), encoder_methods(peers=False)[0]])
    assert failures == {"tiny, broken": "RuntimeError: no such instruction"}
    assert {row["name"] for row in rows} == {"int8"}


def test_padding_does_not_count_in_an_embedding() -> None:
    hidden, mask = torch.randn(1, 4, 8), torch.tensor([[1, 1, 0, 0]])
    torch.testing.assert_close(
        pooled(hidden, {"attention_mask": mask}), pooled(hidden[:, :2], {"attention_mask": mask[:, :2]})
    )
