"""The fuzzer notices what it is there for: each defect, planted in a target, becomes a finding of its kind."""

from __future__ import annotations

import io
import os
import random
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import exhaustive

from hf_trainweights.checkpoint.encoded.tree import corrupt
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.files.reading import sign_json
from tests.fuzz.finding import load_finding
from tests.fuzz.harness import run_count, run_seconds
from tests.fuzz.mutate_json import change_json
from tests.fuzz.target import CANARY, BrokenPromiseError, Outcome, Target
from tests.fuzz.targets.pickled_weights import PickledFiles

pytestmark = pytest.mark.slow  # each starts processes

ADVICE = "you can re-run it with `weights_only` set to `False`, do it only if you got the file from a trusted source"


class Planted(Target):
    """Every third input does what it should not."""

    name = "planted"

    def __init__(self, defect=lambda target: None):
        self.defect = defect
        self.limit_seconds = 0.2 if defect in (sleep, be_stuck) else 20.0

    def mutate(self, rng):
        return rng.random()

    def run(self, given):
        if given < 1 / 3:
            self.defect(self)
        if given > 2 / 3:
            raise corrupt("the input", "a small number", given)
        return Outcome.ACCEPTED


def raise_untyped(target):
    sign_json(None)


def differ(target):
    raise BrokenPromiseError("3 instead of 4")


def sleep(target):
    time.sleep(60)


def be_stuck(target):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)


def allocate(target):
    np.ones(2 << 30, np.uint8)


def die(target):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(target):
    os._exit(3)


def run_code(target):
    Path(target.directory / CANARY).write_text("code of the input ran here")


def advise(target):
    warnings.warn(ADVICE, stacklevel=1)


def hand_on_advice(target):
    Policy(ADVICE)


DEFECTS = {
    raise_untyped: "untyped error",
    differ: "broken promise",
    sleep: "hang",
    be_stuck: "hang",
    allocate: "memory",
    die: "crash",
    leave: "crash",
    run_code: "code run",
    advise: "unsafe advice",
}


# These wait for a limit, or fill the memory.
SLOW_DEFECTS = (be_stuck, allocate, sleep)


@pytest.mark.parametrize(
    "defect",
    [*(each for each in DEFECTS if each not in SLOW_DEFECTS), *exhaustive(*SLOW_DEFECTS)],
    ids=lambda defect: defect.__name__,
)
def test_a_planted_defect_is_a_finding_and_the_run_goes_on(defect, tmp_path):
    tally = run_count(Planted(defect), tmp_path, range(8), seed=3)
    broken = [index for index in range(8) if random.Random(f"planted 3 {index}").random() < 1 / 3]
    assert [finding.kind for finding in tally.findings.values()] == [DEFECTS[defect]]
    (finding,) = tally.findings.values()
    assert (tally.broken, finding.index, tally.next_index) == (len(broken), broken[0], 8)
    assert tally.inputs == 8
    assert finding.given == random.Random(f"planted 3 {broken[0]}").random()


def test_a_sound_target_gives_no_findings(tmp_path):
    tally = run_count(Planted(), tmp_path, range(300), seed=1)
    assert (tally.broken, tally.findings) == (0, {})
    assert tally.inputs == 300
    assert min(tally.accepted, tally.refused) > 50


def test_an_error_of_other_code_is_a_refusal_and_one_that_passed_through_ours_is_a_finding(tmp_path):
    assert run_count(Planted(lambda target: [][1]), tmp_path, range(9), seed=1).broken == 0
    assert run_count(Planted(raise_untyped), tmp_path, range(9), seed=1).broken > 0


def test_a_typed_error_that_hands_on_advice_to_trust_the_file_is_a_finding(tmp_path):
    tally = run_count(Planted(hand_on_advice), tmp_path, range(9), seed=1)
    assert {finding.kind for finding in tally.findings.values()} == {"unsafe advice"}


def test_a_dead_worker_tells_what_it_was_doing(tmp_path):
    tally = run_count(Planted(die), tmp_path, range(8), seed=3)
    (finding,) = tally.findings.values()
    assert "Segmentation fault" in finding.details
    assert "test_harness.py" in finding.details


def test_hostile_pickles_are_hostile(tmp_path):
    class Trusting(PickledFiles):
        name = "trusting"

        def run(self, given):
            torch.load(io.BytesIO(given[1]), weights_only=False)
            return Outcome.ACCEPTED

    target = Trusting()
    target.prepare(tmp_path)
    tally = run_count(target, tmp_path / "work", range(100), seed=0)
    assert "code run" in {finding.kind for finding in tally.findings.values()}


def test_a_finding_is_kept_with_its_input(tmp_path):
    tally = run_count(Planted(raise_untyped), tmp_path / "work", range(8), seed=3)
    (finding,) = tally.findings.values()
    again = load_finding(finding.save(tmp_path))
    assert again == finding
    assert "TypeError in reading.py:sign_json" in str(again)


def test_time_is_shared_among_targets_and_every_worker_tells_its_findings(tmp_path):
    class Slow(Planted):
        name = "slow"
        share = 3.0

    told = []
    totals = run_seconds([Planted(), Slow(raise_untyped)], tmp_path, 1.5, 2, 0, lambda *each: told.append(each))
    assert all(tally.accepted for tally in totals.values())
    assert totals["slow"].broken > 0
    assert totals["planted"].broken == 0
    assert len(told) >= 2


def test_the_same_seed_gives_the_same_inputs(tmp_path):
    first, second = (run_count(Planted(raise_untyped), tmp_path, range(50), seed=4) for _ in range(2))
    assert (first.accepted, first.refused, first.broken) == (second.accepted, second.refused, second.broken)


def test_a_fault_of_the_fuzzer_itself_is_told(tmp_path):
    class Broken(Planted):
        def mutate(self, rng):
            raise RuntimeError("no input" if rng else "")

    with pytest.raises(RuntimeError, match="no input"):
        run_count(Broken(), tmp_path, range(1), seed=0)


def test_changed_json_is_another_value_most_of_the_time():
    value = {"a": [1, 2.5, "text", None], "b": {"c": True}}
    changed = [change_json(random.Random(seed), {"a": [1, 2.5, "text", None], "b": {"c": True}}) for seed in range(200)]
    assert sum(repr(each) != repr(value) for each in changed) > 180
