"""The command: a table, a record, an exit code, and findings that can be tried again."""

from __future__ import annotations

import json
import sys

import pytest

from hf_trainweights.files.reading import sign_json
from tests.fuzz.__main__ import main, sanitized
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import Outcome, Target

pytestmark = pytest.mark.slow  # each fuzzes for a second


class Sound(Target):
    name = "sound"

    def mutate(self, rng):
        return rng.random()

    def run(self, given):
        return Outcome.ACCEPTED


class Unsound(Sound):
    name = "unsound"

    def run(self, given):
        sign_json(None)


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fuzz", "--jobs", "1", "--corpus", str(tmp_path / "corpus"), *arguments])
        return main()

    for target in (Sound, Unsound):
        monkeypatch.setitem(TARGETS, target.name, target)
    return run


def test_a_run_without_findings_is_recorded_and_ends_with_0(run, tmp_path, capsys):
    record = tmp_path / "fuzz.json"
    assert run("--seconds", "0.5", "--targets", "sound", "--seed", "3", "--record", str(record)) == 0
    recorded = json.loads(record.read_text())
    assert set(recorded) == {"date", "commit", "machine", "seconds", "seed", "sanitized", "rows"}
    (row,) = recorded["rows"]
    assert (row["target"], row["findings"], recorded["seed"]) == ("sound", 0, 3)
    assert recorded["sanitized"] is sanitized()
    assert row["inputs"] == row["accepted"] > 0
    assert f"{row['inputs']:,}" in capsys.readouterr().out


def test_a_finding_ends_a_run_with_1_and_can_be_tried_again(run, tmp_path, capsys):
    assert run("--seconds", "2", "--targets", "sound", "unsound") == 1
    (kept,) = (tmp_path / "corpus").iterdir()
    assert f"FINDING {kept}" in capsys.readouterr().out
    assert run("--repeat", str(kept)) == 1
    assert "TypeError in reading.py:sign_json" in capsys.readouterr().out


def test_a_finding_that_was_mended_ends_with_0(run, tmp_path, monkeypatch):
    assert run("--seconds", "2", "--targets", "unsound") == 1
    (kept,) = (tmp_path / "corpus").iterdir()
    monkeypatch.setattr(Unsound, "run", Sound.run)
    assert run("--repeat", str(kept)) == 0
