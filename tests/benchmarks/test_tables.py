"""Each table takes the newest result that is meant for it, and says what that holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import every_architecture, tables
from benchmarks.speed import tables as speed_tables

Write = Callable[..., None]
WITH_AMX, WITHOUT = ["amx_bf16", "amx_int8", "avx512f"], ["avx2", "avx512f"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes a result into a folder of no other results."""
    monkeypatch.setattr(speed_tables, "_RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(name: str, date: str, **parts: Any) -> None:
        report = {"machine": name, "date": date, "limit": None, "flags": WITHOUT, **parts}
        (tmp_path / f"{name}-{date}.json").write_text(json.dumps(report))

    return write


def row(ratio: float, lowest: float, highest: float, **where: Any) -> dict[str, Any]:
    return {**where, "seconds": 1e-6, "ratio": ratio, "ratio_range": [lowest, highest]}


def test_a_cpu_with_amx_has_tables_of_its_own(write: Write) -> None:
    write("speed-b", "2026-01-01", linear=[])
    write("speed-a", "2026-01-02", linear=[], flags=WITH_AMX)
    write("speed-a", "2026-01-01", linear=[], flags=WITH_AMX)
    assert speed_tables.newest("linear")["machine"] == "speed-b"
    newest = speed_tables.newest("linear", amx=True)
    assert (newest["machine"], newest["date"]) == ("speed-a", "2026-01-02")


def test_a_limit_excludes_amx(write: Write) -> None:
    write("limited-a", "2026-01-01", linear=[], flags=WITH_AMX, limit="AVX2")
    assert speed_tables.newest("linear", "AVX2")["machine"] == "limited-a"
    with pytest.raises(ValueError, match="empty"):
        speed_tables.newest("linear", "AVX2", amx=True)


def test_of_one_day_the_first_name_counts(write: Write) -> None:
    for name in ("speed-c", "speed-a", "speed-b"):
        write(name, "2026-01-01", linear=[])
    assert speed_tables.newest("linear")["machine"] == "speed-a"
    for name in ("cuda-c", "cuda-a", "cuda-b"):
        write(name, "2026-01-01", products=[1])
    assert tables.newest_gpu("products")["machine"] == "cuda-a"


def test_products_and_models_may_come_from_two_gpus(write: Write) -> None:
    write("cuda-a", "2026-01-01", products=[1], model=[1])
    write("cuda-b", "2026-01-02", products=[2], model=[])
    write("cuda-c", "2026-01-02", products=[], model=[3])
    assert tables.newest_gpu("products")["machine"] == "cuda-b"
    assert tables.newest_gpu("model")["machine"] == "cuda-c"


def test_a_whole_model_on_a_gpu_shows_its_rounds_and_where(write: Write) -> None:
    versions = {"torch": "2", "triton": "3", "transformers": "5"}
    phases = [row(0.5, 0.25, 1.0, name="int8", phase=phase) for phase in ("decode", "prefill")]
    write("cuda-a", "2026-01-01", products=[], model=phases, versions=versions)
    lines = tables.cuda_model().splitlines()
    assert lines[2] == "| int8 |  | 0.50 (0.25 to 1.00) | 0.50 (0.25 to 1.00) |"
    assert lines[-1] == "cuda-a, 2026-01-01; torch 2, triton 3, transformers 5."


def test_the_encoders_of_amx_are_those_of_one_thread(write: Write) -> None:
    def encoder(name: str, threads: int, method: str, ratio: float) -> dict[str, Any]:
        where = {"encoder": name, "threads": threads, "shape": "1x16", "name": method, "cosine": 0.5}
        return row(ratio, ratio * 0.9, ratio * 1.05, **where)

    rows = [
        encoder("MiniLM-L6", 1, "int8", 1.5),
        encoder("MiniLM-L6", 1, "float8", 1.75),
        encoder("MiniLM-L6", 2, "int8", 9.0),
        encoder("ViT, 2 layers", 1, "int8", 2.5),
    ]
    write("speed-a", "2026-01-01", encoders=rows, flags=WITH_AMX, versions={"torch": "2"})
    header, _, *lines = tables.TABLES["speed-amx-encoders"]().splitlines()
    assert header == "| method | MiniLM-L6, cosine | MiniLM-L6, 1x16 | ViT, 1x16 |"
    assert lines[:2] == ["| int8 | 0.5000 | 1.50 | 2.50 |", "| float8 | 0.5000 | 1.75 |  |"]
    assert lines[-1].endswith("2026-01-01; torch 2. In half of the cells the rounds lie within 10 % of the figure.")


def test_the_bound_of_casting_is_that_of_one_round(write: Write) -> None:
    shape = {"N": 8, "K": 4}
    ratios = {"linear": 1.0, "cast": 4.0, "right": 1.0, "left": 2.0}
    rows = [
        row(ratio, ratio, ratio * (1.0 if name == "linear" else 1.5), name=name, **shape)
        for name, ratio in ratios.items()
    ]
    write("speed-a", "2026-01-01", casting=rows, flags=WITH_AMX, versions={"torch": "2"})
    lines = tables.TABLES["speed-casting"]().splitlines()
    assert lines[2] == "| 8x4 | 1 | 0.25 | 0.50 | 1.33 |"
    # The row of the baseline, which is 1 in each round, says nothing about the others.
    assert lines[-1].endswith("the rounds lie within 50 % of the figure.")


@pytest.mark.parametrize("name", ["speed-amx-linear", "speed-amx-bandwidth"])
def test_the_figures_of_amx_say_where_they_were_taken(write: Write, name: str) -> None:
    rows = [row(1.0, 1.0, 1.0, N=8, K=4, M=1, name="read", share=1.0)]
    rows += [row(0.5, 0.5, 0.75, N=8, K=4, M=1, name="int8", share=0.25)]
    write("speed-a", "2026-01-01", linear=rows, bandwidth=rows, flags=WITH_AMX, versions={"torch": "2"})
    lines = tables.TABLES[name]().splitlines()
    figure = "0.50" if name == "speed-amx-linear" else "0.25"
    assert f"| int8 | {figure} |" in lines
    assert lines[-1].startswith("speed-a (amx_bf16, amx_int8, avx512f), 2026-01-01;")
    assert lines[-1].endswith("the rounds lie within 50 % of the figure.")


def test_classes_of_one_reason_share_a_row() -> None:
    found = "expected blocks without a cache, found a DynamicCache among the arguments of {}DecoderLayer. Pass another."
    rows = {f"{name.lower()} {name}": {"built": True, "cells": {}} for name in ("Aria", "Blip", "Clip")}
    for (name, row), layer in zip(rows.items(), ("AriaText", "BlipText", "Clip2"), strict=True):
        row["cells"] = {"calibration": f"refused: ConfigError: {found.format(layer)}", "load, int8": "right"}
        row["not run"] = f"RuntimeError: {len(name)} is not {len(layer)}"
    rows["none None"] = {"built": "ImportError: no timm", "cells": {}}
    report = {"rows": rows, "date": "2026-01-01", "commit": "a" * 40, "versions": {"transformers": "5", "torch": "2"}}
    reason = "ConfigError: expected blocks without a cache, found a DynamicCache among the arguments of …"
    assert every_architecture.refused(report).splitlines()[2:] == [f"| {reason} | calibration | aria, blip, clip |"]
    assert every_architecture.wrong(report) == "Nothing."
    assert every_architecture.left_out(report).splitlines()[2:] == [
        "| not built | ImportError: no timm | none |",
        "| not run | RuntimeError: N is not N | aria, blip, clip |",
    ]
    lines = every_architecture.outcomes(report).splitlines()
    assert lines[2:4] == ["| calibration | 0 | 3 | 0 | 0 |", "| load, int8 | 3 | 0 | 0 | 0 |"]
    assert lines[-1].startswith("4 model types: 3 classes were built, and for 0 of them inputs are known.")
