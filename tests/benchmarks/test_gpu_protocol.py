"""What one GPU is asked in eight minutes runs, tiny and on a CPU; and what tuning measured becomes rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import attention, protocol, tune
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.kernels import gpu_tables
from hf_trainweights.kernels.gpu_tables import Rule

FEW = dict(tune.CANDIDATES[0].tile)
DEQUANTIZE: dict[str, int] = {}


def test_all_steps_take_eight_minutes_at_most(tmp_path: Path) -> None:
    steps = protocol.steps(tmp_path, dry=False)
    assert sum(step.seconds for step in steps) <= 480
    names = [step.name for step in steps]
    assert names == ["compile", "check", "tune", "attention", "tests", "ours", "peers"]


@pytest.mark.slow
def test_tuning_writes_rows_and_rules_that_are_read(tmp_path: Path) -> None:
    grown: list[int] = []
    rows = tune.measure("cpu", tune.DRY, 60, lambda rows: grown.append(len(rows)))
    assert grown == list(range(1, len(rows) + 1))
    assert len(rows) == len(tune.FORMS) * len(tune.DRY.shapes) * len(tune.DRY.rows)
    assert all("seconds" in way for row in rows for way in row["ways"])
    path = tmp_path / "90.json"
    path.write_text(tune.table_of({"gpu": "none"}, tune.rules_of(rows)), encoding="utf-8")
    assert list(gpu_tables.read(path)) == tune.rules_of(rows)


def test_nothing_is_measured_once_the_time_is_up() -> None:
    assert tune.measure("cpu", tune.DRY, 0, lambda rows: None) == []


@pytest.mark.slow
def test_attention_to_codes_is_timed_beside_floats_where_there_are_kernels() -> None:
    rows = list(attention.measure("cpu", [(1, 2, 32)], [70], 0))
    assert [(row["bits"], row["name"]) for row in rows] == [
        (bits, name) for bits in attention.BITS for name in ("bf16", "dequantized")
    ]


def row(N: int, M: int, *seconds: float, form: str = str(Int4(128))) -> dict[str, Any]:
    tiles = [("few_rows", FEW), ("dequantize", DEQUANTIZE)]
    ways = [
        {"way": way, "tile": tile, "seconds": took, "error": 0.001}
        for (way, tile), took in zip(tiles, seconds, strict=True)
    ]
    return {"form": form, "N": N, "K": 4096, "M": M, "bf16_seconds": 1.0, "ways": ways}


def test_the_fastest_way_becomes_a_rule_up_to_where_another_is() -> None:
    rows = [
        row(64, 1, 0.5, 0.7),
        row(64, 8, 0.6, 0.7),
        row(64, 512, 2, 0.7),
        row(128, 1, 0.5, 0.7),
        row(128, 8, 2, 0.7),
    ]
    assert tune.rules_of(rows) == [
        Rule("few_rows", FEW, 4, True, rows=8, N=64),
        Rule("dequantize", DEQUANTIZE, 4, True, N=64),
        Rule("few_rows", FEW, 4, True, rows=1),
        Rule("dequantize", DEQUANTIZE, 4, True),
    ]


def test_a_wrong_result_is_no_candidate() -> None:
    wrong = row(64, 1, 0.5, 0.7)
    wrong["ways"][0]["error"] = 0.5
    failed = row(64, 8, 0.5, 0.7)
    failed["ways"][0] = {"way": "few_rows", "tile": FEW, "failed": "RuntimeError"}
    assert tune.rules_of([wrong, failed]) == [Rule("dequantize", DEQUANTIZE, 4, True)]


def test_a_step_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path: Path) -> None:
    programs = [["-c", "print('done')"], ["-c", "raise SystemExit(3)"], ["-c", "import time; time.sleep(60)"]]
    report = protocol.run(protocol.Step("some", 2, programs), tmp_path)
    assert report["ended"] == [0, 3, "out of time"]
    assert (tmp_path / "some-0.txt").read_text(encoding="utf-8") == "done\n"


@pytest.mark.exhaustive
def test_the_whole_protocol_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "TEST_PROCESSES", "1")
    monkeypatch.setattr(sys, "argv", ["protocol", str(tmp_path), "--dry"])
    protocol.main()
    report = json.loads((tmp_path / "protocol.json").read_text(encoding="utf-8"))
    ended = {step["name"]: step["ended"] for step in report["steps"]}
    assert ended == {"compile": [0, 0], **{name: [0] for name in ("check", "tune", "tests", "ours", "peers")}}
    assert {"00.json", "tuned.json"} <= {path.name for path in tmp_path.iterdir()}
