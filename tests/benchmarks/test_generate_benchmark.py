"""The benchmark of language models times each method beside its float model, and goes on where it was interrupted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.speed.generate import PHASES, speed
from benchmarks.speed.methods import FLOATS, OURS

METHODS = [*FLOATS[:1], *OURS[:2]]


@pytest.mark.slow
def test_rows_come_as_they_are_measured_and_are_not_measured_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    failures: dict[str, str] = {}
    rows = speed(tmp_path, METHODS, [1], 1, failures, [])
    first = list(islice(rows, 2 * len(PHASES)))
    assert [(row["name"], row["phase"]) for row in first] == [
        (method.name, phase) for phase in PHASES for method in METHODS[:2]
    ]
    rest = list(speed(tmp_path, METHODS, [1], 1, failures, first))
    assert [(row["name"], row["phase"]) for row in rest] == [(METHODS[2].name, phase) for phase in PHASES]
    assert failures == {}
    assert all(row["seconds"] > 0 for row in (*first, *rest))
