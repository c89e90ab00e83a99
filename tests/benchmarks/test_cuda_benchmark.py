"""The benchmark for GPUs runs, tiny and on a CPU, where only the kernels themselves cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cuda import TINY, compared, measure


@pytest.mark.slow
def test_it_measures_each_product_and_phase() -> None:
    ours = [method for method in compared() if method.name in ("bf16", "int8", "int4 g128")]
    kept: list[int] = []
    report = measure("cpu", TINY, ours, lambda report: kept.append(len(report["products"]) + len(report["model"])))
    assert kept == sorted(set(kept))
    assert report["failures"] == {}
    assert {(row["phase"], row["name"]) for row in report["model"]} == {
        (phase, method.name) for phase in ("decode", "decode, batch 2", "prefill", "prefill 8") for method in ours[1:]
    }
    ways = {(row["M"], row["name"]) for row in report["products"]}
    assert {(1, "bf16"), (600, "bf16"), (1, "int4 g128, kernel"), (600, "int4 g128, dequantized")} <= ways
    assert all(row["seconds"] > 0 for row in report["products"] + report["model"])


@pytest.mark.slow
def test_what_is_not_measured_again_stays() -> None:
    float_model, int8 = [method for method in compared() if method.name in ("bf16", "int8")]
    product, peer = {"name": "bf16"}, {"name": "a peer"}
    known = {"products": [product], "model": [{"name": "int8", "phase": "earlier"}, peer], "machine": "a GPU"}
    report = measure("cpu", replace(TINY, shapes=()), [float_model, int8], lambda report: None, known)
    assert report["products"] == [product]
    assert report["machine"] == "a GPU"
    assert peer in report["model"]
    assert {row["phase"] for row in report["model"] if row["name"] == "int8"} >= {"decode", "prefill"}


def test_what_no_time_is_left_for_is_told() -> None:
    methods = [method for method in compared() if method.name in ("bf16", "int8")]
    report = measure("cpu", replace(TINY, shapes=(), seconds=0), methods, lambda report: None)
    assert report["model"] == []
    assert report["failures"]["int8, decode"] == "no time was left"
