"""A minute of what `make fuzz` does for as long as one likes: the same inputs each time, and none breaks a promise."""

from __future__ import annotations

import pytest

from tests.fuzz.finding import CORPUS
from tests.fuzz.harness import memory_directory, run_count
from tests.fuzz.registry import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_no_mutated_input_breaks_a_promise(name):
    target = TARGETS[name]()
    with memory_directory() as directory:
        target.prepare(directory / "corpus")
        tally = run_count(target, directory / "work", range(target.inputs_in_suite), seed=0)
    told = [f"{finding.save(CORPUS)}: {finding}" for finding in tally.findings.values()]
    assert told == [], "\n".join(told)
    assert tally.inputs == target.inputs_in_suite
    assert min(tally.accepted, tally.refused) > 0.03 * tally.inputs  # the inputs reach what lies behind the first check
