"""The speed of a larger model: each format in turns with the float model."""

from __future__ import annotations

import pytest
import torch

from hf_trainweights_cli.demo import speed
from hf_trainweights_cli.demo.page import demo_page
from hf_trainweights_cli.demo.run import Result
from hf_trainweights_cli.demo.speed import fast_dtype, measure_speed

pytestmark = pytest.mark.slow  # a fixture of most of them trains a model


@pytest.mark.slow
def test_the_float_model_comes_first_and_formats_are_smaller(formats: list[str], result: Result) -> None:
    baseline, *rows = result.speeds
    assert baseline.format in ("bfloat16", "float32")
    assert (baseline.times_smaller, baseline.times_faster) == (1.0, 1.0)
    assert [row.format for row in rows] == formats
    for row in rows:
        assert row.times_smaller == pytest.approx(baseline.memory_bytes / row.memory_bytes)
        assert row.times_smaller > 1.2
        assert row.times_faster > 0


def test_a_ratio_is_that_of_two_times_of_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both models warm up, then float and quantized in turns: 2, 1, then 6, 2, then 9, 9.
    seconds = iter([7.0, 7.0, 2.0, 1.0, 6.0, 2.0, 9.0, 9.0])
    monkeypatch.setattr(speed, "_SECONDS_PER_FORMAT", 0.0)
    monkeypatch.setattr(speed, "_token_seconds", lambda model: next(seconds))
    baseline, row = measure_speed(["int8"], speed.Shape(128, 1, 64), lambda *report: None)
    assert (row.float_token_seconds, row.token_seconds, row.times_faster) == (6.0, 2.0, 3.0)
    assert baseline.token_seconds == 6.0


@pytest.mark.parametrize(
    ("found", "dtype"),
    [
        ({}, torch.float32),
        ({"avx512_vnni": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_the_dtype_is_one_that_the_cpu_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(speed, "capabilities", lambda: found)
    assert fast_dtype() == dtype


@pytest.mark.slow
def test_the_page_shows_sizes_speeds_checkpoints_and_losses(formats: list[str], result: Result) -> None:
    html = demo_page(result).html()
    for part in ("On disk", "Speed of decoding", "x smaller", "Bytes of each checkpoint", "resumed from step 20"):
        assert part in html
    assert all(name in html for name in formats)
