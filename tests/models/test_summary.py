"""A summary tells in one line, and in bytes, what was quantized and what was left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_trainweights import TrainWeightsConfig
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.selection import choose
from hf_trainweights.models.summary import Summary, check_not_empty

INT4 = TrainWeightsConfig("int4", group_size=32)
NOT_A_WEIGHT = "not the weight of a linear, expert or embedding layer"


def test_the_numbers_are_bytes() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024, dtype=torch.bfloat16), nn.LayerNorm(1024, dtype=torch.bfloat16))
    summary = choose(module, TrainWeightsConfig("int4", group_size=128))
    assert summary.bytes_before == 2 * (1024 * 1024 + 3 * 1024)
    assert summary.bytes_after == 1024 * 1024 // 2 + 1024 * 8 * 2 + 2 * 3 * 1024
    assert [choice.numel for choice in summary.tensors] == [1024 * 1024, 1024, 1024, 1024]
    assert str(summary).endswith("; 2.1 MB -> 0.5 MB")


def test_nothing_found_is_told_in_words() -> None:
    summary = choose(nn.Sequential(nn.LayerNorm(8)), INT4)
    assert summary.quantized == ()
    assert str(summary) == f"quantized: none; left alone: 2 {NOT_A_WEIGHT}; 0.0 MB -> 0.0 MB"
    assert str(Summary(())) == "quantized: none; left alone: none; 0.0 MB -> 0.0 MB"


def test_a_summary_without_a_quantized_weight_is_refused() -> None:
    check_not_empty(choose(nn.Linear(64, 8), INT4), INT4)
    with pytest.raises(ConfigError, match="at least one weight to quantize to int4 g32, found quantized: none"):
        check_not_empty(choose(nn.LayerNorm(8), INT4), INT4)
