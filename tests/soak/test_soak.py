"""A short soak: work that is killed a few times comes to the end that it was to reach."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from covering import exhaustive
from soak.harness import SCENARIOS, Soak
from soak.kills import Kill, run_in_child
from soak.scenario import Scenario, require
from soak.training import ManagerNearLossless

pytestmark = pytest.mark.slow  # each kills processes

# Tests of the checkpoints, of the callback and of saved models kill at every call.
BY_DEFAULT = [ManagerNearLossless.kind]


@pytest.mark.parametrize("kind", [*BY_DEFAULT, *exhaustive(*(kind for kind in SCENARIOS if kind not in BY_DEFAULT))])
def test_killed_work_leaves_what_was_promised_and_comes_to_its_end(tmp_path: Path, kind: str) -> None:
    soak = Soak(SCENARIOS[kind], tmp_path, "suite", timed=False)
    soak.run_once(kills=2)
    assert soak.row.findings == []
    assert soak.row.kills > 0
    assert soak.row.runs == 1


class Careless(Scenario):
    """Writes a file in place, so that a kill leaves half of it."""

    kind = "careless"

    def work(self, rng: random.Random) -> None:
        from hf_trainweights.files import disk

        for half in (b"old and ", b"new"):
            descriptor = os.open(self.run / "file", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            disk.file_system.write(descriptor, memoryview(half))
            os.close(descriptor)

    def check_kill(self) -> None:
        content = (self.run / "file").read_bytes()
        require(content in (b"", b"old and new"), f"half a file: {content}")

    def check_end(self) -> None:
        require((self.run / "file").exists(), "no file")


def test_a_finding_says_how_to_repeat_it_and_keeps_what_was_left(tmp_path: Path) -> None:
    soak = Soak(Careless, tmp_path, "suite", timed=False)
    for _ in range(8):
        soak.run_once(kills=1)
    assert soak.row.findings
    finding = soak.row.findings[0]
    assert "seed 'suite', run " in finding
    assert "killed at call 2 to the file system" in finding
    assert "Finding: half a file: b'old and '" in finding
    assert (tmp_path / "finding-1" / "file").read_bytes() == b"old and "


def test_a_child_is_killed_after_a_time(tmp_path: Path) -> None:
    reader, _ = os.pipe()
    outcome = run_in_child(lambda: print(os.read(reader, 1)), tmp_path / "log.txt", Kill(seconds=0.05))
    assert outcome.killed
    assert outcome.seconds >= 0.05


def test_work_that_fails_is_a_finding_with_its_traceback(tmp_path: Path) -> None:
    class Failing(Careless):
        def work(self, rng: random.Random) -> None:
            raise ValueError("no such luck")

    with pytest.raises(RuntimeError, match=r"careless fails undisturbed: (.|\n)*ValueError: no such luck"):
        Soak(Failing, tmp_path, "suite")
